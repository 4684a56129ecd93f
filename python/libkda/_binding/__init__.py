# SPDX-License-Identifier: Apache-2.0
"""Between the public functions and the C ABI: arguments, their checks, and the operators of layers."""
