#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning whose rollouts have the bits of training: a policy of one KDA layer learns to count. After
each rollout the training forward computes the log-probabilities of the tokens again: they differ by exactly 0, so the
ratio of the two policies is 1. All but the layer's kernels is computed a token of all sequences at a time, in rollout
and training alike: a product of other sizes may sum in another order. Arguments: the number of updates, of which 200
are enough to learn it, and "cpu" or "cuda", a Hopper GPU."""
import sys

import torch
from torch.nn.functional import log_softmax

import libkda
from libkda import rollout

UPDATES = int(sys.argv[1]) if len(sys.argv) > 1 else 5
hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
device = sys.argv[2] if len(sys.argv) > 2 else "cuda" if hopper else "cpu"
N, T, H, D, WORDS = 8, 24, 1, 64, 16
torch.manual_seed(0)
normal = lambda *shape: torch.nn.Parameter(torch.randn(*shape, device=device) * shape[-1] ** -0.5)  # noqa: E731
words, into, conv, out = normal(WORDS, 64), normal(5 * H * D + H, 64), normal(3 * H * D, 4), normal(WORDS, H * D)
A_log, dt_bias = (torch.nn.Parameter(torch.zeros(n, device=device)) for n in (H, H * D))
optimizer = torch.optim.AdamW([words, into, conv, out, A_log, dt_bias], lr=1e-2)
flags = dict(use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True)


def before(token):  # [N] words of one place: q, k and v before their convolution, gate, output gate, beta
    qkv, g, gate, beta = (words[token] @ into.T).split([3 * H * D, H * D, H * D, H], dim=-1)
    return qkv.bfloat16(), g.unflatten(-1, (H, D)), gate.unflatten(-1, (H, D)), beta.bfloat16()


def behind(o, gate):  # [N, H, D] of one place
    y = libkda.gated_rms_norm(o, gate).float()
    return log_softmax(y.flatten(1) @ out.T, dim=-1)


def heads(qkv):  # [N, places, 3 H D]
    return (x.unflatten(-1, (H, D)) for x in qkv.chunk(3, dim=-1))


@torch.no_grad()
def play():
    """Words [N, T + 1] and the log-probabilities of all but the first."""
    slots, positions = torch.arange(N, device=device), torch.zeros(N, dtype=torch.int64, device=device)
    conv_pool = torch.zeros(N, 3 * H * D, 4, device=device, dtype=torch.bfloat16)
    seen, log_p = [torch.zeros(N, dtype=torch.int64, device=device)], []
    for _ in range(T):
        qkv, g, gate, beta = before(seen[-1])
        y = libkda.short_conv_update(qkv[:, None], conv_pool, conv, activation="silu")
        o = states.decode(*heads(y), g[:, None], beta[:, None], slots, positions, A_log=A_log, dt_bias=dt_bias, **flags)
        all_log_p = behind(o[:, 0], gate)
        seen.append(torch.multinomial(all_log_p.exp(), 1)[:, 0])
        log_p.append(all_log_p.gather(1, seen[-1][:, None])[:, 0])
        positions += 1
    return torch.stack(seen, dim=1), torch.stack(log_p, dim=1)


def train(seen):
    """The log-probabilities, with gradients."""
    qkv, g, gate, beta = (torch.stack(x, dim=1) for x in zip(*(before(seen[:, t]) for t in range(T))))
    y, _ = libkda.short_conv(qkv, conv, activation="silu")
    o, _ = libkda.chunk_kda(*heads(y), g, beta, A_log=A_log, dt_bias=dt_bias, plan_options=rollout.options(device),
                            **flags)
    all_log_p = torch.stack([behind(o[:, t], gate[:, t]) for t in range(T)], dim=1)
    return all_log_p.gather(2, seen[:, 1:, None])[..., 0]


states = rollout.States(N, H, H, D, D, device=device)
most = 0.0
for update in range(UPDATES):
    seen, played = play()
    log_p = train(seen)
    most = max(most, (log_p.detach() - played).abs().max().item())
    reward = (seen[:, 1:] == (seen[:, :-1] + 1) % WORDS).float()
    loss = -((reward - reward.mean()) * log_p).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if update % 50 == 0 or update == UPDATES - 1:
        print(f"update {update}: {reward.mean():.0%} of words follow their predecessor")
print(f"largest difference of log-probabilities on {states.pool.device.type}: {most}")
assert most == 0
