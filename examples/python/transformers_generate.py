#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A model of Hugging Face transformers, its KDA served by libkda: one import more."""
# [readme]
import torch
import libkda.transformers  # disable() and enable() switch it
from transformers import KimiLinearConfig, KimiLinearForCausalLM

torch.manual_seed(0)
config = KimiLinearConfig(  # tiny, with random weights; trained ones come by from_pretrained, as ever
    vocab_size=100, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"], linear_num_heads=2, linear_head_dim=32, num_attention_heads=2,
    num_key_value_heads=2, kv_lora_rank=16, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
    num_local_experts=4, num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
model = KimiLinearForCausalLM(config).eval()
tokens = model.generate(torch.randint(3, 100, (1, 50)), max_new_tokens=5, do_sample=False)
print(libkda.transformers.last_path())  # libkda: fused_recurrent_kda_fwd
# [readme]
assert libkda.transformers.last_path() == "libkda: fused_recurrent_kda_fwd" and tokens.shape[1] > 50
