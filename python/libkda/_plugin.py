# SPDX-License-Identifier: Apache-2.0
"""What plugins for other libraries have in common: a switch, and a note of who served the last call."""
from __future__ import annotations


class Plugin:
    """The switch and the note of one plugin: libkda.fla or libkda.transformers. `host` is the library it serves."""

    def __init__(self, host: str):
        self.host = host
        self.enabled = True
        self.path: str | None = None

    def serves(self, name: str) -> None:
        """Notes that libkda's function `name` serves a call."""
        self.path = f"libkda: {name}"

    def leaves(self, name: str, reason: str) -> None:
        """Notes that the host's own function `name` serves a call, and why."""
        self.path = f"{self.host}: {name}: {reason}"

    @property
    def disabled(self) -> str | None:
        """The reason why a plugin that is switched off serves nothing; None if it is on."""
        return None if self.enabled else f"libkda.{self.host}.disable() was called"
