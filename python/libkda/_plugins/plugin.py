# SPDX-License-Identifier: Apache-2.0
"""What plugins for other libraries have in common: a switch, and a note of who served the last call."""
from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from .._binding.kernels import has_tensor_cores, trains_fp16
from . import measured
from .switches import switch

PARTS = ("kda", "conv", "norm", "rms_norm", "step", "states", "records", "commit")


class Plugin:
    """The switch and the note of one plugin, as libkda.fla. `host` is the library it serves, `variable` an environment
    variable that switches it off too, whenever a call comes."""

    def __init__(self, host: str, variable: str | None = None):
        self.host, self.variable = host, variable
        self.enabled = True
        self.train_on_gpu = False  # all calls, also those whose backward there is exact and slow
        self.paths: dict[str, str] = {}  # by part of a model

    def serves(self, name: str, part: str = "kda") -> None:
        """Notes that libkda's function `name` serves a call."""
        self.paths[part] = f"libkda: {name}"

    def leaves(self, name: str, reason: str, part: str = "kda") -> None:
        """Notes that the host's own function `name` serves a call, and why."""
        self.paths[part] = f"{self.host}: {name}: {reason}"

    def attempt(self, host_name: str, part: str, function: Callable, *args: object, **modes: object):
        """function(*args, **modes), or None where libkda refuses the call, which is then that of the host's function
        `host_name`; nothing has been written then."""
        reason = self.disabled
        if reason is None:
            try:
                result = function(*args, **modes)
                self.serves(function.__name__, part)
                return result
            except (NotImplementedError, TypeError, ValueError) as refusal:
                reason = str(refusal).partition("\n")[0]
            except RuntimeError as failure:
                reason = str(failure)
                if "this build has no" not in reason:  # CUDA, or kernels for this card
                    raise
        self.leaves(host_name, reason, part)
        return None

    def last_path(self, part: str) -> str | None:
        """The last note about a part of a model, one of PARTS."""
        if part not in PARTS:
            raise ValueError(f"part must be one of {', '.join(map(repr, PARTS))}, got {part!r}")
        return self.paths.get(part)

    def asks_for_decode(self) -> bool | None:
        """Whether LIBKDA_<ENGINE>_DECODE is on; None where it is not set. Refuses where it is off."""
        asked = switch(f"LIBKDA_{self.host.upper()}_DECODE", None)
        if asked is False:
            raise NotImplementedError(f"LIBKDA_{self.host.upper()}_DECODE is off")
        return asked

    def leave_slower(self, kind: str, step: str, rows: torch.Tensor) -> None:
        """Refuses a "decode", "verify" or "ring", a token beside one, of a "kda" or "gdn" layer on a GPU where the
        engine's own kernels are faster; LIBKDA_<ENGINE>_DECODE in the environment, on or off, decides for all sizes.
        rows: v [B, T, HV, V]."""
        if not rows.is_cuda:
            return
        tokens, heads = rows.shape[0] * rows.shape[1], rows.shape[2]
        if self.asks_for_decode() or measured.serves(self.host, kind, step, tokens, heads):
            return
        raise NotImplementedError(f"on a GPU its {step} of {tokens} x {heads} tokens and value heads is faster; "
                                  f"LIBKDA_{self.host.upper()}_DECODE=1 asks for libkda's")

    def leaves_gradients(self, tensors: Iterable[object], rows: tuple[object, ...] = (),
                         modes: dict[str, object] | None = None) -> str | None:
        """The reason why a call with gradients of tensors on a GPU stays with the host; None if it does not. `rows`:
        q, k and v of a call of KDA; modes: its other arguments, by chunk_kda's names."""
        if self.train_on_gpu or not torch.is_grad_enabled() or rows and has_tensor_cores(*rows):
            return None
        if rows and modes and trains_fp16(*rows, modes):
            return None
        if any(isinstance(x, torch.Tensor) and x.is_cuda and x.requires_grad for x in tensors):
            return ("a gradient is asked for on a GPU, where libkda's backward is fast for q, k, v in bf16 with K up "
                    "to 128, K and V multiples of 8, or on Hopper in fp16 with K = V = 128 as a layer has them; "
                    "see enable()")
        return None

    @property
    def disabled(self) -> str | None:
        """The reason why a plugin that is switched off serves nothing; None if it is on."""
        if not self.enabled:
            return f"libkda.{self.host}.disable() was called"
        return f"{self.variable} is off" if self.variable and not switch(self.variable, True) else None
