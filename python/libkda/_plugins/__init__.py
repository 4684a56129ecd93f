# SPDX-License-Identifier: Apache-2.0
"""Common parts of the plugins for other libraries and engines."""
