# SPDX-License-Identifier: Apache-2.0
"""What plugins for other libraries have in common: a switch, and a note of who served the last call."""
from __future__ import annotations

from collections.abc import Iterable

import torch

PARTS = ("kda", "conv", "norm", "rms_norm")


class Plugin:
    """The switch and the note of one plugin: libkda.fla or libkda.transformers. `host` is the library it serves."""

    def __init__(self, host: str):
        self.host = host
        self.enabled = True
        self.train_on_gpu = False  # libkda's backward there is exact for every gate, but not yet fast
        self.paths: dict[str, str] = {}  # by part of a model

    def serves(self, name: str, part: str = "kda") -> None:
        """Notes that libkda's function `name` serves a call."""
        self.paths[part] = f"libkda: {name}"

    def leaves(self, name: str, reason: str, part: str = "kda") -> None:
        """Notes that the host's own function `name` serves a call, and why."""
        self.paths[part] = f"{self.host}: {name}: {reason}"

    def last_path(self, part: str) -> str | None:
        """The last note about a part of a model, one of PARTS."""
        if part not in PARTS:
            raise ValueError(f"part must be one of {', '.join(map(repr, PARTS))}, got {part!r}")
        return self.paths.get(part)

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
