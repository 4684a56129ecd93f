# SPDX-License-Identifier: Apache-2.0
"""What type checkers know of the package; read by mypy alone (.ci/python)."""
from typing import Any

import torch
from typing_extensions import assert_type

import libkda.fla
import libkda.sglang
import libkda.transformers
import libkda.vllm
from libkda import (arrays, chunk_kda, fused_kda_gate, fused_recurrent_kda, fused_recurrent_kda_fwd, gated_rms_norm,
                    naive_recurrent_kda, short_conv, short_conv_update)
from libkda.compat import flash_kda

x = torch.zeros(1, 1, 1, 16)
beta = x[..., 0]
State = torch.Tensor | None

assert_type(chunk_kda(x, x, x, x, beta, A_log=beta), tuple[torch.Tensor, State])
assert_type(chunk_kda(x, x, x, x, beta, return_intermediate_states=True), tuple[torch.Tensor, State, torch.Tensor])
assert_type(fused_recurrent_kda(x, x, x, x, beta), tuple[torch.Tensor, State])
assert_type(fused_recurrent_kda_fwd(x, x, x, x, beta, initial_state=x), tuple[torch.Tensor, State])
assert_type(naive_recurrent_kda(x, x, x, x, beta), tuple[torch.Tensor, State])
assert_type(fused_kda_gate(x, lower_bound=-5.0), torch.Tensor)
assert_type(short_conv(x[0], x[0, 0], activation="silu"), tuple[torch.Tensor, State])
assert_type(short_conv_update(x[0], x[0], x[0, 0]), torch.Tensor)
assert_type(gated_rms_norm(x, x, eps=1e-6), torch.Tensor)
assert_type(libkda.fla.last_path(), str | None)
assert_type(libkda.transformers.last_path(), str | None)
assert_type(libkda.vllm.places(), list[str])
assert_type(libkda.sglang.last_path(), str | None)
assert_type(libkda.__version__, str)
assert_type(libkda.Options(context_parallel=3).context_parallel, str | int)
with libkda.options(backend="oracle") as in_force:
    assert_type(in_force, libkda.Options)
libkda.Options(batch_invariant="yes")  # type: ignore[arg-type]
libkda.decode(x, x, x, x, beta, x, beta, plan_options="oracle")  # type: ignore[arg-type]
assert_type(flash_kda.fwd(x, x, x, x, beta, 1.0, x, beta, beta, -5.0), None)
assert_type(arrays.forward(x, x, x, x, beta, gate_mode="bounded"), tuple[Any, Any])
assert_type(arrays.backward(x, x, x, x, beta, d_o=x, kept=arrays.Kept()), arrays.Gradients)
assert_type(arrays.workspace_bytes(x, x, x, x, beta), int)
arrays.forward(x, x, x, x, beta, gate_mode="fast")  # type: ignore[arg-type]
chunk_kda(x, x, x, x, beta, scale="1")  # type: ignore[call-overload]
arrays.backward(x, x, x, x, beta, d_o=3)  # type: ignore[arg-type]
arrays.decode(x, x, x, x, 3, x)  # type: ignore[arg-type]
