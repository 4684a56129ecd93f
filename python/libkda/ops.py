# SPDX-License-Identifier: Apache-2.0
"""torch.ops.libkda.forward, .forward_into and .update: loading, fake kernels, and what autograd answers.

They are declared in python/csrc/torch_ops.cpp. `forward` returns (o, final_state), the latter without slots unless it
is asked for; `forward_into` writes o, final_state and checkpoints (or None) of the caller, any strides with a
contiguous last dimension; `update` writes o and the pool of states in place.
"""
import torch
from torch import is_grad_enabled, is_inference_mode_enabled
from torch.compiler import is_compiling

from libkda._library import FOLDER

_PATH = FOLDER / "libkda_torch.so"
if not _PATH.exists():
    raise ImportError("libkda: this build has no torch operators (it was built without torch); "
                      "build it with torch 2.10 or later installed, or use libkda.arrays")
if tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2]) < (2, 10):
    raise ImportError(f"libkda needs torch 2.10 or later, found {torch.__version__}; libkda.arrays works without torch")
torch.ops.load_library(str(_PATH))

GATE_LOG, GATE_SOFTPLUS, GATE_BOUNDED = 0, 1, 2
BETA_PLAIN, BETA_SIGMOID, BETA_SIGMOID2 = 0, 1, 2

NO_BACKWARD = ("libkda has no backward pass yet: call it under torch.no_grad() or torch.inference_mode(), "
               "or train with fla.ops.kda")


@torch.library.register_fake("libkda::forward")
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, gate_mode, beta_mode, lower_bound,
      scale, l2norm, state_v_first, output_final_state, decode=False):
    K, (HV, V) = q.shape[-1], v.shape[2:]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    matrix = (V, K) if state_v_first else (K, V)
    return v.new_empty(v.shape), q.new_empty((N if output_final_state else 0, HV, *matrix), dtype=torch.float32)


@torch.library.register_fake("libkda::forward_into")
@torch.library.register_fake("libkda::update")
def _(*arguments):
    return None


def _backward(ctx, *grads):
    raise NotImplementedError(NO_BACKWARD)


torch.library.register_autograd("libkda::forward", _backward)

_forward = torch.ops.libkda.forward.default
forward_into = torch.ops.libkda.forward_into.default
update = torch.ops.libkda.update.default


def forward(*args):
    """torch.ops.libkda.forward, without autograd's part where no gradient is asked for: it is slow."""
    if is_compiling() or is_inference_mode_enabled() or is_grad_enabled():  # dynamo traces the first only
        return _forward(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return _forward(*args)
