# SPDX-License-Identifier: Apache-2.0
"""Modules with the functions of other libraries."""
