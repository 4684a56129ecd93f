# SPDX-License-Identifier: Apache-2.0
"""What plugins for other libraries have in common: a switch, and a note of who served the last call."""
from __future__ import annotations

from collections.abc import Iterable

import torch


class Plugin:
    """The switch and the note of one plugin: libkda.fla or libkda.transformers. `host` is the library it serves."""

    def __init__(self, host: str):
        self.host = host
        self.enabled = True
        self.train_on_gpu = False  # libkda's backward there is exact for every gate, but not yet fast
        self.path: str | None = None

    def serves(self, name: str) -> None:
        """Notes that libkda's function `name` serves a call."""
        self.path = f"libkda: {name}"

    def leaves(self, name: str, reason: str) -> None:
        """Notes that the host's own function `name` serves a call, and why."""
        self.path = f"{self.host}: {name}: {reason}"

    def leaves_gradients(self, tensors: Iterable[object]) -> str | None:
        """The reason why a call with gradients of tensors on a GPU stays with the host; None if it does not."""
        if self.train_on_gpu or not torch.is_grad_enabled():
            return None
        if any(isinstance(x, torch.Tensor) and x.is_cuda and x.requires_grad for x in tensors):
            return "a gradient is asked for on a GPU, where libkda's backward is not yet fast; see enable()"
        return None

    @property
    def disabled(self) -> str | None:
        """The reason why a plugin that is switched off serves nothing; None if it is on."""
        return None if self.enabled else f"libkda.{self.host}.disable() was called"
