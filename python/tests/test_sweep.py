# SPDX-License-Identifier: Apache-2.0
"""Every tensor argument of every public function, given as it is not meant to be.

A call then equals the call on a plain tensor of the same values to the bit, or raises TypeError, ValueError or
NotImplementedError whose text has the argument's name; it writes nothing on stderr, and where it raises nothing that
was given has changed. `--device cuda` puts the tensors on a GPU, `--sweep-json FILE` writes a summary.
"""
import datetime
import os
import re
import warnings

import pytest
import torch

import libkda
import libkda.ops as ops
from libkda import arrays
from libkda.compat import flash_kda

np = pytest.importorskip("numpy")

B, T, H, HV, K, V, SLOTS = 2, 6, 1, 2, 16, 8, 5
MODES = dict(gate_mode=ops.GATE_SOFTPLUS, beta_mode=ops.BETA_SIGMOID, lower_bound=-5.0, scale=0.25, l2norm=True,
             state_v_first=False)
GATE = dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True)


# ---- calls that are good ---------------------------------------------------------------------------------------------

def data(device):
    """Tensors by name, of sizes that all functions share."""
    normal = lambda *shape: torch.randn(*shape, device=device)
    return dict(q=normal(B, T, H, K), k=normal(B, T, H, K), v=normal(B, T, HV, V), g=normal(B, T, HV, K),
                beta=normal(B, T, HV), A_log=normal(HV) * 0.3, dt_bias=normal(HV * K) * 0.3,
                state=normal(B, HV, K, V), pool=normal(SLOTS, HV, K, V), has_state=torch.tensor([True, False]))


def rows(x, packed=False, names=("q", "k", "v", "g", "beta")):
    return {n: (x[n].flatten(0, 1)[None] if packed else x[n]).clone() for n in names}


def gate(x):
    return dict(A_log=x["A_log"], dt_bias=x["dt_bias"])


def lengths(x):
    return torch.tensor([0, T - 2, 2 * T], device=x["q"].device)


def mask(x):
    return x["has_state"].to(x["q"].device)


def nan_like(x):
    return torch.full_like(x, float("nan"))


class Target:
    """A function, its good arguments, which of them it writes, and which may be left out."""

    def __init__(self, function, arguments, written=(), optional=(), raises=()):
        self.function, self.arguments, self.written, self.optional = function, arguments, written, optional
        self.raises = raises  # beside TypeError, ValueError and NotImplementedError


def operator_of(name):
    return getattr(torch.ops.libkda, name).default


def chunk(x):
    return dict(rows(x), **gate(x), **GATE, initial_state=x["state"], output_final_state=True, has_state=mask(x))


def chunk_packed(x):
    cu = lengths(x)
    return dict(rows(x, True), **GATE, **gate(x), initial_state=x["state"], output_final_state=True, cu_seqlens=cu,
                cu_seqlens_cpu=cu.cpu())


def recurrent_packed(x):
    arguments = dict(chunk_packed(x), has_state=mask(x))
    del arguments["cu_seqlens_cpu"]
    return arguments


def pool_in_place(x):
    indices = torch.tensor([3, 1], dtype=torch.int32, device=x["q"].device)
    return dict(rows(x), **GATE, **gate(x), initial_state=x["pool"].clone(), ssm_state_indices=indices,
                out=nan_like(x["v"]), has_state=mask(x))


def prefill_in_place(x):
    indices = torch.tensor([3, 1], dtype=torch.int32, device=x["q"].device)
    return dict(rows(x, True), **GATE, **gate(x), initial_state=x["pool"].clone(), ssm_state_indices=indices,
                cu_seqlens=lengths(x), first_slot=1)


def serving(x, **more):
    return dict(rows(x), **GATE, **gate(x), pool=x["pool"].clone(), out=nan_like(x["v"]), has_state=mask(x), **more)


def serve_prefill(x):
    arguments = serving(x, slots=torch.tensor([3, 1], device=x["q"].device), cu_seqlens=lengths(x)) | rows(x, True)
    return dict(arguments, out=nan_like(arguments["v"]))


def serve_checkpoints(x):
    on = dict(device=x["q"].device)
    return dict(serve_prefill(x), checkpoints=x["pool"].clone(), checkpoint_offsets=torch.tensor([0, 0], **on),
                checkpoint_slots=torch.tensor([0, 2], **on))


def serve_decode(x):
    return serving(x, slots=torch.tensor([3, 1], device=x["q"].device), first_slot=1)


def serve_verify(x):
    some = {n: t[:, :2].contiguous() for n, t in rows(x).items()}
    return dict(serving(x) | some, slots=torch.tensor([[0, 1], [2, 3]], device=x["q"].device),
                num_accepted_tokens=torch.tensor([1, 2], device=x["q"].device), out=nan_like(some["v"]))


def serve_tree(x):
    arguments, on = serve_verify(x), dict(device=x["q"].device)
    return dict(arguments, num_accepted_tokens=None, slots=torch.tensor([3, 1], **on), drafts=x["pool"].clone(),
                draft_slots=torch.tensor([[0, 1], [2, 3]], **on), parents=torch.tensor([[0, 0], [0, 0]], **on))


def speculative(x):
    indices = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=x["q"].device)
    some = {n: t[:, :2].contiguous() for n, t in rows(x).items()}
    return dict(some, **GATE, **gate(x), initial_state=x["pool"].clone(), ssm_state_indices=indices,
                num_accepted_tokens=torch.tensor([1, 2], dtype=torch.int32, device=x["q"].device))


def with_out(x):
    return dict(rows(x), **GATE, **gate(x), initial_state=x["state"], output_final_state=True,
                inplace_final_state=False, out=nan_like(x["v"]))


def raw_gate(x):
    return dict(g=x["g"], **gate(x))


def bounded_gate(x):
    return dict(raw_gate(x), lower_bound=-5.0)


def naive(x):
    return dict(rows(x), g=-x["g"].abs(), initial_state=x["state"], output_final_state=True)


def flash(x):
    final = nan_like(x["state"].mT.contiguous())
    return dict(rows(x, True), scale=0.25, out=nan_like(rows(x, True)["v"]), **gate(x), lower_bound=-5.0,
                initial_state=x["state"].mT.contiguous(), final_state=final, cu_seqlens=lengths(x),
                cu_seqlens_cpu=lengths(x).cpu())


def flash_checkpoints(x):
    return flash(x) | dict(checkpoint_state=nan_like(x["state"].mT.contiguous()),
                           checkpoint_offsets=torch.tensor([2, 0], device=x["state"].device))


def forward(x):
    cu = lengths(x)
    return dict(rows(x, True), **gate(x), initial_state=x["state"], cu_seqlens=cu, cu_seqlens_cpu=cu.cpu(), **MODES,
                output_final_state=True, has_state=mask(x))


def forward_kept(x):
    return dict(forward(x), keep=0 if x["q"].is_cuda else 64)  # a GPU keeps nothing


def backward(x):
    inputs = forward_kept(x)
    with torch.no_grad():
        saved = operator_of("forward_kept")(**inputs)[2]
    del inputs["output_final_state"]
    return dict(inputs, d_o=torch.ones_like(inputs["v"]), d_final_state=torch.ones_like(x["state"]),
                saved=saved if inputs["keep"] else None, wanted=255)


def forward_into(x):
    checkpoints = nan_like(x["state"])  # one a sequence
    long = {n: torch.cat([t] * 3, 1) for n, t in rows(x).items()}
    return dict(long, o=nan_like(long["v"]), final_state=nan_like(x["state"]), checkpoints=checkpoints, **gate(x),
                initial_state=x["state"], cu_seqlens=None, cu_seqlens_cpu=None, **MODES, checkpoint_every=16,
                has_state=mask(x))


def update(x):
    indices = torch.tensor([3, 1], dtype=torch.int32, device=x["q"].device)
    return dict(rows(x), o=nan_like(x["v"]), states=x["pool"].clone(), indices=indices, num_accepted_tokens=None,
                **gate(x), cu_seqlens=None, cu_seqlens_cpu=None, decode=True, **MODES, has_state=mask(x))


def update_speculative(x):
    arguments = speculative(x)
    indices, accepted = arguments["ssm_state_indices"], arguments["num_accepted_tokens"]
    some = {n: arguments[n] for n in ("q", "k", "v", "g", "beta")}
    return dict(some, o=nan_like(some["v"]), states=arguments["initial_state"], indices=indices,
                num_accepted_tokens=accepted, **gate(x), cu_seqlens=None, cu_seqlens_cpu=None, decode=True, **MODES)


def as_arrays(x, arguments, workspace):
    if x["q"].is_cuda:
        return dict(arguments, workspace=torch.empty(workspace, dtype=torch.uint8, device=x["q"].device),
                    stream=torch.cuda.current_stream().cuda_stream)
    return {n: t.numpy() if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}


def array_modes(x):
    return dict(gate_mode="softplus", beta_mode="sigmoid", qk_l2norm=True, A_log=x["A_log"],
                dt_bias=x["dt_bias"].view(HV, K))


def array_forward(x):
    return as_arrays(x, dict(rows(x), **array_modes(x), initial_state=x["state"], o=nan_like(x["v"]),
                             final_state=nan_like(x["state"]), output_final_state=True,
                             has_state=mask(x)), 1 << 22)


def array_decode(x):
    indices = torch.tensor([3, 1], dtype=torch.int32, device=x["q"].device)
    return as_arrays(x, dict(rows(x), **array_modes(x), state=x["pool"].clone(), indices=indices, o=nan_like(x["v"]),
                             has_state=mask(x)), 1 << 22)


def array_bytes(x):
    arguments = dict(rows(x), **array_modes(x), initial_state=x["state"], has_state=mask(x))
    return arguments if x["q"].is_cuda else as_arrays(x, arguments, 0)


def array_backward(x):
    """On the CPU, where there is a backward pass."""
    x = {n: t.cpu() for n, t in x.items()}
    inputs = dict(rows(x), A_log=x["A_log"], dt_bias=x["dt_bias"].view(HV, K))
    gradients = {f"d{n}": nan_like(t) for n, t in inputs.items()}
    return as_arrays(x, dict(inputs, gate_mode="softplus", beta_mode="sigmoid", qk_l2norm=True, has_state=mask(x),
                             initial_state=x["state"], d_o=x["v"] + 1, d_final_state=x["state"] + 1, **gradients,
                             d_initial_state=nan_like(x["state"])), 0)


def backward_into(**arguments):
    """arrays.backward with the arrays of `out` as arguments."""
    out = {n: arguments.pop(n) for n in arrays.Gradients._fields}
    return arrays.backward(**arguments, out=out)


def layer(x):
    """Random tensors on the CPU for the operations around KDA, the same ones for the same q."""
    generator = torch.Generator().manual_seed(int(x["q"].flatten()[0].abs() * 1e6))
    return lambda *shape: torch.randn(*shape, generator=generator)


def conv(x):
    normal = layer(x)
    return dict(x=normal(1, 2 * T, K), weight=normal(K, 4), bias=normal(K), activation="silu",
                initial_state=normal(2, K, 3), output_final_state=True, cu_seqlens=torch.tensor([0, T - 2, 2 * T]))


def conv_update(x):
    normal = layer(x)
    return dict(x=normal(2, T, K), states=normal(SLOTS, K, 3), weight=normal(K, 4), bias=normal(K),
                indices=torch.tensor([3, 1], dtype=torch.int32), has_state=torch.tensor([True, False]))


def norm(x):
    normal = layer(x)
    return dict(x=normal(B, T, HV, K), gate=normal(B, T, HV, K), weight=normal(K), activation="silu")


def conv_operator(x):
    arguments = conv(x)
    del arguments["activation"], arguments["output_final_state"]
    return dict(arguments, silu=True, state_width=3)


def conv_update_operator(x):
    return dict(conv_update(x), cu_seqlens=None, silu=True, first_slot=0)


def conv_backward_operator(x):
    arguments, normal = conv_operator(x), layer(x)
    del arguments["state_width"]
    return dict(arguments, d_y=normal(1, 2 * T, K), d_final_state=normal(2, K, 3), wanted=15)


def norm_operator(x):
    return dict(norm(x), eps=1e-5, activation=1)


def norm_backward_operator(x):
    return dict(norm_operator(x), d_y=layer(x)(B, T, HV, K), wanted=7)


GATE_NAMES, STATE_NAMES = ("A_log", "dt_bias"), ("initial_state", "has_state")
LENGTH_NAMES = ("cu_seqlens", "cu_seqlens_cpu")
TARGETS = {
    "chunk_kda": Target(libkda.chunk_kda, chunk, optional=("dt_bias", *STATE_NAMES)),
    "chunk_kda, packed": Target(libkda.chunk_kda, chunk_packed, optional=("dt_bias", "initial_state", *LENGTH_NAMES)),
    "fused_recurrent_kda": Target(libkda.fused_recurrent_kda, chunk, optional=("dt_bias", *STATE_NAMES)),
    "fused_recurrent_kda, packed": Target(libkda.fused_recurrent_kda, recurrent_packed,
                                          optional=("dt_bias", *STATE_NAMES, "cu_seqlens")),
    "fused_recurrent_kda_fwd, pool": Target(libkda.fused_recurrent_kda_fwd, pool_in_place, ("initial_state", "out"),
                                            ("dt_bias", "ssm_state_indices", "out", "has_state")),
    "fused_recurrent_kda_fwd, prefill": Target(libkda.fused_recurrent_kda_fwd, prefill_in_place, ("initial_state",),
                                               ("dt_bias", "ssm_state_indices", "cu_seqlens")),
    "fused_recurrent_kda_fwd, speculative": Target(libkda.fused_recurrent_kda_fwd, speculative, ("initial_state",),
                                                   ("dt_bias", "ssm_state_indices", "num_accepted_tokens")),
    "fused_recurrent_kda_fwd, out": Target(libkda.fused_recurrent_kda_fwd, with_out, ("out",),
                                           ("dt_bias", "initial_state", "out")),
    "prefill": Target(libkda.prefill, serve_prefill, ("pool", "out"), ("dt_bias", "out", "has_state", "cu_seqlens")),
    "prefill, checkpoints": Target(libkda.prefill, serve_checkpoints, ("pool", "out", "checkpoints"),
                                   ("dt_bias", "out", "has_state", "cu_seqlens")),
    "decode": Target(libkda.decode, serve_decode, ("pool", "out"), ("dt_bias", "out", "has_state")),
    "verify": Target(libkda.verify, serve_verify, ("pool", "out"),
                     ("dt_bias", "num_accepted_tokens", "out", "has_state")),
    "verify, a tree": Target(libkda.verify, serve_tree, ("drafts", "out"),
                             ("dt_bias", "num_accepted_tokens", "out", "has_state", "parents")),
    "fused_kda_gate": Target(libkda.fused_kda_gate, raw_gate, optional=("dt_bias",)),
    "fused_kda_gate, bounded": Target(libkda.fused_kda_gate, bounded_gate, optional=GATE_NAMES),
    "naive_kda_gate": Target(libkda.naive_kda_gate, raw_gate, optional=("dt_bias",)),
    "naive_kda_lowerbound_gate": Target(libkda.naive_kda_lowerbound_gate, bounded_gate, optional=GATE_NAMES),
    "naive_recurrent_kda": Target(libkda.naive_recurrent_kda, naive, optional=("initial_state",)),
    "naive_chunk_kda": Target(libkda.naive_chunk_kda, naive, optional=("initial_state",)),
    "flash_kda.fwd": Target(flash_kda.fwd, flash, ("out", "final_state"),
                            (*GATE_NAMES, "initial_state", "final_state", *LENGTH_NAMES)),
    "flash_kda.fwd_cp": Target(flash_kda.fwd_cp, flash, ("out", "final_state"),
                               (*GATE_NAMES, "initial_state", "final_state", *LENGTH_NAMES)),
    "flash_kda.fwd, checkpoints": Target(flash_kda.fwd, flash_checkpoints, ("out", "final_state", "checkpoint_state"),
                                         (*GATE_NAMES, "initial_state", "final_state", *LENGTH_NAMES)),
    # What is no tensor the dispatcher of torch refuses itself, by a RuntimeError.
    "torch.ops.libkda.forward": Target(operator_of("forward"), forward, (),
                                       ("dt_bias", *STATE_NAMES, *LENGTH_NAMES), RuntimeError),
    "torch.ops.libkda.forward_kept": Target(operator_of("forward_kept"), forward_kept, (),
                                            ("dt_bias", *STATE_NAMES, *LENGTH_NAMES), RuntimeError),
    "torch.ops.libkda.backward": Target(operator_of("backward"), backward, (),
                                        ("d_o", "d_final_state", "cu_seqlens_cpu", "has_state"), RuntimeError),
    "torch.ops.libkda.forward_into": Target(operator_of("forward_into"), forward_into,
                                            ("o", "final_state", "checkpoints"),
                                            ("dt_bias", *STATE_NAMES, "final_state", "checkpoints"), RuntimeError),
    "torch.ops.libkda.update": Target(operator_of("update"), update, ("o", "states"),
                                      ("dt_bias", "indices", "has_state"), RuntimeError),
    "torch.ops.libkda.update, speculative": Target(operator_of("update"), update_speculative, ("o", "states"),
                                                   ("dt_bias", "indices", "num_accepted_tokens"), RuntimeError),
    "short_conv": Target(libkda.short_conv, conv, (), ("bias", "initial_state", "cu_seqlens")),
    "short_conv_update": Target(libkda.short_conv_update, conv_update, ("states",), ("bias", "indices", "has_state")),
    "gated_rms_norm": Target(libkda.gated_rms_norm, norm, (), ("gate", "weight")),
    "torch.ops.libkda.short_conv": Target(operator_of("short_conv"), conv_operator, (), ("bias", "initial_state"),
                                          RuntimeError),
    "torch.ops.libkda.short_conv_update": Target(operator_of("short_conv_update"), conv_update_operator, ("states",),
                                                 ("bias", "indices", "has_state"), RuntimeError),
    "torch.ops.libkda.short_conv_backward": Target(operator_of("short_conv_backward"), conv_backward_operator, (),
                                                   ("d_y", "d_final_state"), RuntimeError),
    "torch.ops.libkda.gated_rms_norm": Target(operator_of("gated_rms_norm"), norm_operator, (), ("gate", "weight"),
                                              RuntimeError),
    "torch.ops.libkda.gated_rms_norm_backward": Target(operator_of("gated_rms_norm_backward"), norm_backward_operator,
                                                       (), (), RuntimeError),
    "arrays.forward": Target(arrays.forward, array_forward, ("o", "final_state"),
                             ("dt_bias", *STATE_NAMES, "o", "final_state")),
    "arrays.decode": Target(arrays.decode, array_decode, ("o", "state"), ("dt_bias", "indices", "o", "has_state")),
    "arrays.backward": Target(backward_into, array_backward, arrays.Gradients._fields,
                              ("d_o", "d_final_state", "has_state")),
    "arrays.workspace_bytes": Target(arrays.workspace_bytes, array_bytes, (), ("dt_bias", *STATE_NAMES)),
}


# ---- what is done to an argument: (what is given, the plain tensor of its values) ------------------------------------
# No plain tensor: the call must raise. NotImplemented: there is no such thing of this argument.

def cast(dtype):
    return lambda x: (y := x.to(dtype), y.clone())


def spread(x):
    """The same values with every other element of memory unused."""
    wide = torch.stack([x, x], -1)
    return wide[..., 0], x.clone()


def overlapping(x):
    """Rows that share memory; of a scalar row there are none."""
    if x.dim() < 2 or x.shape[0] < 2 and x.shape[1] < 2:
        return NotImplemented
    dim = 0 if x.shape[0] > 1 else 1
    strides = list(x.contiguous().stride())
    strides[dim] = max(strides[dim] // 2, 1)
    y = torch.empty(x.numel() * 2, dtype=x.dtype, device=x.device)
    y.copy_(x.flatten().repeat(2)[:y.numel()])
    y = y.as_strided(x.shape, strides)
    return y, y.contiguous().clone()


def expanded(x):
    y = x.flatten()[0].expand(x.shape) if x.numel() > 1 else x
    return y, y.contiguous().clone()


def negative(x):
    if x.dtype is torch.bool:
        return NotImplemented
    return torch._neg_view(-x), x.clone()


def imaginary(x):
    """A view that autograd calls negative: the imaginary part of a conjugate."""
    if not x.is_floating_point():
        return NotImplemented
    return torch.complex(x, -x).conj().imag, x.clone()


def conjugate(x):
    return torch.complex(x.float(), x.float()).conj(), None


def sparse(x):
    return x.to_sparse(), x.clone()


def csr(x):
    return x.flatten(1).to_sparse_csr() if x.dim() > 1 else x[None].to_sparse_csr(), None


def mkldnn(x):
    if x.is_cuda or not x.is_floating_point():
        return NotImplemented
    return x.to_mkldnn(), x.clone()


def quantised(x):
    return torch.quantize_per_tensor(x.float().cpu(), 0.1, 0, torch.qint8).to(x.device), None


def emptied(x):
    """Its storage was freed, as sharded training does with parameters that are elsewhere."""
    y = x.clone()
    y.untyped_storage().resize_(0)
    return y, None


def other_device(x):
    if x.is_cuda:
        return x.cpu(), x.clone()
    return (x.cuda(), x.clone()) if torch.cuda.is_available() else NotImplemented


def differentiated(x):
    return (x.clone().requires_grad_(), x.clone()) if x.is_floating_point() else NotImplemented


def large(x):
    """Integers that are good if all but 32 bits of them are left out."""
    if x.dtype not in (torch.int32, torch.int64):
        return NotImplemented
    return x.long() + 2**32, x.long() + 2**32


TENSOR_KINDS = {
    "meta": lambda x: (x.to("meta"), None),
    "other device": other_device,
    "float64": cast(torch.float64),
    "float16": cast(torch.float16),
    "int64": cast(torch.int64),
    "bool": cast(torch.bool),
    "complex": cast(torch.complex64),
    "rank + 1": lambda x: (x[None], x[None].clone()),
    "rank - 1": lambda x: (x[0], x[0].clone()),
    "zero first size": lambda x: (x[:0], x[:0].clone()),
    "zero last size": lambda x: (x[..., :0], x[..., :0].clone()),
    "one more": lambda x: (torch.cat([x, x[..., :1]], -1), torch.cat([x, x[..., :1]], -1)),
    "spread": spread,
    "overlapping": overlapping,
    "expanded": expanded,
    "negative view": negative,
    "imaginary part": imaginary,
    "conjugate": conjugate,
    "sparse": sparse,
    "csr": csr,
    "mkldnn": mkldnn,
    "quantised": quantised,
    "nested": lambda x: (torch.nested.nested_tensor(list(x.float())), None),
    "zero tensor": lambda x: (torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device), torch.zeros_like(x)),
    "emptied storage": emptied,
    "large integers": large,
    "differentiated": differentiated,
    "NumPy": lambda x: (x.cpu().numpy(), None),
    "list": lambda x: (x.tolist(), None),
    "text": lambda x: ("x", None),
    "None": lambda x: (None, NotImplemented),
}


def read_only(x):
    y = x.copy()
    y.flags.writeable = False
    return y, x.copy()


def unaligned(x):
    y = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    y[...] = x
    return y, x.copy()


def overlapping_array(x):
    if x.ndim < 2:
        return NotImplemented
    y = np.lib.stride_tricks.as_strided(np.concatenate([x, x]), x.shape, (x.strides[0] // 2, *x.strides[1:]))
    return y, y.copy()


def expanded_array(x):
    y = np.lib.stride_tricks.as_strided(x.copy(), x.shape, (0,) * x.ndim)
    return y, y.copy()


def as_torch(kind):
    def given(x):
        pair = TENSOR_KINDS[kind](torch.from_numpy(x.copy()))
        if pair is NotImplemented:
            return pair
        plain = pair[1]
        return pair[0], plain.numpy() if isinstance(plain, torch.Tensor) else plain
    return given


ARRAY_KINDS = {
    "float64": lambda x: (x.astype(np.float64),) * 2,
    "float16": lambda x: (x.astype(np.float16),) * 2,
    "int64": lambda x: (x.astype(np.int64),) * 2,
    "bool": lambda x: (x.astype(bool),) * 2,
    "complex": lambda x: (x.astype(np.complex64),) * 2,
    "object": lambda x: (x.astype(object), None),
    "big endian": lambda x: (x.astype(">f4"), None),
    "rank + 1": lambda x: (x[None], x[None].copy()),
    "rank - 1": lambda x: (x[0], x[0].copy()) if x.ndim > 1 else (np.array(x[0]), None),
    "zero first size": lambda x: (x[:0], x[:0].copy()),
    "zero last size": lambda x: (x[..., :0], x[..., :0].copy()),
    "read-only": read_only,
    "unaligned": unaligned,
    "overlapping": overlapping_array,
    "expanded": expanded_array,
    "backwards": lambda x: (x[..., ::-1].copy()[..., ::-1], x.copy()),
    "spread": lambda x: (np.stack([x, x], -1)[..., 0], x.copy()),
    "list": lambda x: (x.tolist(), None),
    "text": lambda x: ("x", None),
    "None": lambda x: (None, NotImplemented),
    "large integers": as_torch("large integers"),
    **{f"torch, {kind}": as_torch(kind) for kind in (
        "meta", "other device", "negative view", "imaginary part", "conjugate", "sparse", "mkldnn", "quantised",
        "zero tensor", "emptied storage", "differentiated", "overlapping", "expanded")},
}


def is_array(x):
    return isinstance(x, (torch.Tensor, np.ndarray))


def kinds_of(argument):
    return ARRAY_KINDS if isinstance(argument, np.ndarray) else TENSOR_KINDS


def arrays_given(device):
    """(function, argument, its good value)"""
    x = data(device)
    for name, target in TARGETS.items():
        for argument, value in target.arguments(x).items():
            if is_array(value) and argument != "workspace":
                yield name, argument, value


def device_of(config):
    return config.getoption("--device")


def pytest_generate_tests(metafunc):
    if "argument" in metafunc.fixturenames:
        found = [given[:2] for given in arrays_given(device_of(metafunc.config))]
        metafunc.parametrize("name, argument", found, ids=[" / ".join(given) for given in found])


# On a GPU nobody waits for a look at what lengths and slots hold. Lengths that leave tokens out leave their outputs
# unwritten, and sequences that share a slot race for it (docs/operation.md).
UNSEEN_ON_A_GPU = {("cu_seqlens", kind) for kind in ("expanded", "zero tensor", "large integers")} | {
    (name, kind) for name in ("ssm_state_indices", "indices", "slots")
    for kind in ("expanded", "zero tensor", "overlapping")}


# ---- one call --------------------------------------------------------------------------------------------------------

def bits(x):
    """What can be compared: NaN counts as itself, and -0 is not 0."""
    if isinstance(x, torch.Tensor):
        if x.is_meta or x.layout is not torch.strided or x.is_nested or x.is_quantized:
            return str(x.layout)
        if x.numel() > 0 and x.untyped_storage().nbytes() == 0:
            return "no storage"
        x = x.detach().clone().resolve_conj().resolve_neg().cpu()
        return str(x.dtype), tuple(x.shape), x.contiguous().view(torch.uint8 if x.dim() else x.dtype).numpy().tobytes()
    if isinstance(x, np.ndarray):
        return str(x.dtype), x.shape, x.tobytes() if x.dtype != object else str(x)
    if isinstance(x, (tuple, list)):
        return [bits(y) for y in x]
    return x


def copy_of(x):
    if isinstance(x, torch.Tensor):
        return x.clone()
    return x.copy() if isinstance(x, np.ndarray) else x


def call(target, arguments, change):
    """(results and what was written, error, warnings) of a call on copies of `arguments`, but for `change`."""
    given = {n: copy_of(x) for n, x in arguments.items()} | change
    compared = [n for n in given if n != "workspace"]
    before = {n: bits(given[n]) for n in compared}
    error = results = None
    with warnings.catch_warnings(record=True) as warned, torch.set_grad_enabled(is_differentiated(change)):
        warnings.simplefilter("always")
        try:
            results = target.function(**given)
        except Exception as refusal:
            error = refusal
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    after = {n: bits(given[n]) for n in compared}
    if error is not None:
        assert after == before, "an argument changed though the call raised"
        return None, error, warned
    read = [n for n in compared if n not in target.written]
    assert all(after[n] == before[n] for n in read), "an argument that is only read changed"
    return [bits(results), [after[n] for n in target.written]], None, warned


def is_differentiated(change):
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in change.values())


def expect_refusal(target, argument, error):
    allowed = (TypeError, ValueError, NotImplementedError) + ((target.raises,) if target.raises else ())
    assert isinstance(error, allowed), f"{type(error).__name__}: {error}"
    if isinstance(error, NotImplementedError) and "backward" in str(error):
        return  # a gradient is of the call, not of an argument
    if "saved: was not written by a run of the forward that this plan is for" in str(error):
        return  # another forward would have kept other states
    if argument == "cu_seqlens" and str(error).endswith("(sizes of x)"):
        return  # lengths that nobody gave are not named
    assert re.search(rf"\b{argument}\b", str(error)), f"the text has no {argument}: {error}"
    for path in (".cpp", ".hpp", os.sep + "csrc"):
        assert path not in str(error), error


def changed(argument, kind, value):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of making a sparse or nested tensor
        return kinds_of(value)[kind](value)


def check(target, argument, pair, arguments, capfd):
    """What became of a call with `argument` given as `pair` has it: "raised" or "equal"."""
    given, plain = pair
    capfd.readouterr()
    results, error, warned = call(target, arguments, {argument: given})
    output = capfd.readouterr()
    assert output.err == "" and not warned, (output.err, [str(w.message) for w in warned])
    if error is not None:
        expect_refusal(target, argument, error)
        return "raised"
    expected, plain_error, _ = call(target, arguments, {argument: plain}) if is_array(plain) else (None, None, None)
    assert expected is not None, f"no error, though a plain tensor gives {plain_error!r}"
    assert results == expected, "not the result of a plain tensor"
    return "equal"


def pair_of(kind, argument, arguments, optional):
    """(what is given, the plain tensor of the same values), or None where there is no such case."""
    try:
        pair = changed(argument, kind, arguments[argument])
    except (RuntimeError, NotImplementedError, IndexError):
        return None  # torch has no such tensor
    if pair is NotImplemented:
        return None
    return None if pair[1] is NotImplemented and argument in optional else pair  # None is the call without it


# One test has all kinds of one argument: ten thousand tests would take longer to report than to run.
def test_argument(name, argument, capfd, request):
    target = TARGETS[name]
    device = device_of(request.config)
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    found, failures = request.config.sweep, []
    for kind in kinds_of(target.arguments(data(device))[argument]):
        if device == "cuda" and (argument, kind) in UNSEEN_ON_A_GPU:
            continue  # the kernels look at these values, not the call
        torch.manual_seed(7)
        arguments = target.arguments(data(device))
        pair = pair_of(kind, argument, arguments, target.optional)
        if pair is None:
            continue
        found["cases"] += 1
        try:
            found[check(target, argument, pair, arguments, capfd)] += 1
            found["passed"] += 1
        except Exception as failure:
            failures.append(f"{kind}: {type(failure).__name__}: {failure}")
    if failures:
        pytest.fail("\n".join(failures))


@pytest.fixture(autouse=True)
def summary(request):
    if not hasattr(request.config, "sweep"):
        device = device_of(request.config)
        name = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else "cpu"
        request.config.sweep = dict(device=name, torch=torch.__version__, cuda=torch.version.cuda,
                                    libkda=libkda.__version__, date=f"{datetime.date.today()}",
                                    functions=len(TARGETS), cases=0, passed=0, equal=0, raised=0)


def test_size(request):
    """That the table is not cut short, and that good calls are good."""
    cases = sum(len(kinds_of(value)) for _, _, value in arrays_given(device_of(request.config)))
    print(f"{cases} cases")
    # On a GPU libkda.arrays is given tensors, which have fewer kinds than arrays of NumPy.
    assert cases >= (10900 if device_of(request.config) == "cpu" else 10800)
    device = device_of(request.config)
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    for target in TARGETS.values():
        results, error, warned = call(target, target.arguments(data(device)), {})
        assert error is None and not warned and results is not None
