# SPDX-License-Identifier: Apache-2.0
"""Switches in the environment."""
from __future__ import annotations

import os
import warnings

_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def text_of(name: str) -> str:
    """The environment variable `name`; empty where it is not set."""
    return os.environ.get(name, "").strip()


_warned: set[tuple[str, str]] = set()


def switch(name: str, default: bool | None) -> bool | None:
    """Whether the environment variable `name` is on; `default` where it is not set or empty, and with a warning where
    it is neither on nor off. A default of None says that the caller decides then."""
    text = os.environ.get(name, "")
    if text == "":
        return default
    value = _WORDS.get(text.strip().lower())
    if value is not None:
        return value
    if (name, text) not in _warned:
        _warned.add((name, text))
        taken = {True: "1", False: "0", None: "not set"}[default]
        warnings.warn(f"{name} must be 0, false, no or off, or 1, true, yes or on, got {text!r}: it is taken as "
                      f"{taken}", stacklevel=2)
    return default
