# SPDX-License-Identifier: Apache-2.0
"""Random inputs, references and the distance between results."""
import torch

from libkda import naive

# Relative L2 over the whole output, by the type of q: fp32 arithmetic; one rounding on the CPU; 16-bit operands on the
# GPU, as in src/check/tolerances.hpp.
TOLERANCE = {("cpu", torch.float32): 2e-6, ("cpu", torch.float16): 4e-4, ("cpu", torch.bfloat16): 2.5e-3,
             ("cuda", torch.float32): 2e-6, ("cuda", torch.float16): 1e-3, ("cuda", torch.bfloat16): 8e-3}


def make(B=2, T=131, H=2, HV=4, K=64, V=32, dtype=torch.float32, device="cpu", gates="log", N=None):
    normal = lambda *shape: torch.randn(*shape, device=device)
    x = dict(q=normal(B, T, H, K), k=normal(B, T, H, K), v=normal(B, T, HV, V), beta=normal(B, T, HV))
    x["g"] = -torch.rand(B, T, HV, K, device=device) if gates == "log" else normal(B, T, HV, K)
    x = {name: t.to(dtype) for name, t in x.items()}
    return x, dict(A_log=normal(HV) * 0.3, dt_bias=normal(HV * K) * 0.3), normal(N or B, HV, K, V)


def reference(x, parameters, state, gates="log", lower_bound=None, scale=None, double=False):
    """The recurrence in fp64 on raw inputs, all transforms applied."""
    x = {name: t.double() for name, t in x.items()}
    if gates == "softplus":
        x["g"] = naive.naive_kda_gate(x["g"], parameters["A_log"], parameters["dt_bias"], torch.float64)
    if gates == "bounded":
        x["g"] = naive.naive_kda_lowerbound_gate(x["g"], parameters["A_log"], parameters["dt_bias"], lower_bound,
                                                 torch.float64)
    unit = lambda t: t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    beta = x["beta"].sigmoid() * (2 if double else 1)
    return naive.naive_recurrent_kda(unit(x["q"]), unit(x["k"]), x["v"], x["g"], beta, scale, state.double(), True)


def distance(a, b):
    assert not a.isnan().any()
    return ((a.double() - b).norm() / b.norm()).item()


FLAGS = dict(use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, output_final_state=True)


def gate_flags(gates, parameters, lower_bound=None):
    return {} if gates == "log" else dict(use_gate_in_kernel=True, lower_bound=lower_bound, **parameters)
