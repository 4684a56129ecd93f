#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The steps of an engine on one pool of states: prompts packed after each other, tokens, drafts, a checkpoint."""
# [readme]
import torch
import libkda

device = "cuda" if torch.cuda.is_available() else "cpu"
H, D = 4, 128
pool = torch.zeros(8, H, D, D, device=device)  # slot 0 is nobody's: the slot of padded rows
gate = dict(A_log=torch.zeros(H, device=device), lower_bound=-5.0, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, first_slot=1)
on = lambda *values: torch.tensor(values, device=device)


def tokens(batch, count):  # q, k, v, g, beta of a layer
    rows = [torch.randn(batch, count, H, D, device=device, dtype=torch.bfloat16) for _ in range(4)]
    return *rows, torch.randn(batch, count, H, device=device, dtype=torch.bfloat16)


with torch.inference_mode():
    # Two new requests of 700 and 300 tokens, in slots that may hold old states.
    o = libkda.prefill(*tokens(1, 1000), pool, on(3, 5), cu_seqlens=on(0, 700, 1000), has_state=on(0, 0).bool(), **gate)
    o = libkda.decode(*tokens(3, 1), pool, on(3, 5, 0), **gate)  # a token of each; the third row is padding
    o = libkda.verify(*tokens(2, 3), pool, torch.stack([on(3, 1, 2), on(5, 4, 6)]), **gate)  # a slot a draft
    # A tree of drafts behind a sure token, with states in rows of their own: the pool keeps what it has.
    drafts, rows = torch.zeros(7, H, D, D, device=device), torch.stack([on(1, 2, 3), on(4, 5, 6)])
    tree = torch.stack([on(-1, 0, 0), on(-1, 0, 1)])  # the token that each one follows: two branches; a chain
    o = libkda.verify(*tokens(2, 3), pool, on(3, 5), drafts=drafts, draft_slots=rows, parents=tree, **gate)
    # The next piece of a prompt, and for a prefix cache its state behind 512 tokens, in slot 7.
    o = libkda.prefill(*tokens(1, 600), pool, on(3), checkpoints=pool, checkpoint_offsets=on(512),
                       checkpoint_slots=on(7), checkpoint_every=64, **gate)
# [readme]

    # A token of each through a whole layer: short convolution, KDA and gated norm, one kernel on a GPU.
    half = lambda *shape: torch.randn(*shape, device=device, dtype=torch.bfloat16)
    conv_pool = torch.zeros(8, 3 * H * D, 3, device=device, dtype=torch.bfloat16)
    o = libkda.fused_decode(half(2, 3 * H * D), half(3 * H * D, 4), None, conv_pool, half(1, 2, H, D), half(1, 2, H),
                            gate["A_log"], None, on(3, 5).int(), pool, lower_bound=-5.0, output_gate=half(2, H, D),
                            norm_weight=torch.ones(D, device=device), state_v_first=False)
print("o", tuple(o.shape), "states in slots", pool.flatten(1).any(1).nonzero().flatten().tolist())
