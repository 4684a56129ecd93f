# SPDX-License-Identifier: Apache-2.0
"""FLA's KDA model on the CPU, once with FLA's own kernels in Triton's interpreter and once with libkda.

    python fla_on_cpu.py '{"num_v_heads": 4}'

Prints JSON: the relative distance of all logits, whether the greedy tokens are the same, who served the calls.
FLA's fused_recurrent_kda is what the interpreter can run; libkda answers with chunk_kda, then fused_recurrent_kda.
"""
import json
import os
import sys

os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")  # before triton is imported

import torch  # noqa: E402
from fla.models import KDAConfig, KDAForCausalLM  # noqa: E402  (before the driver below: it asks what GPU there is)
import triton_on_cpu  # noqa: E402

import libkda.fla  # noqa: E402


def logits_of(model, prompt, on_libkda, new_tokens=3):
    (libkda.fla.enable if on_libkda else libkda.fla.disable)()
    for layer in model.model.layers:
        layer.attn.mode = "chunk" if on_libkda else "fused_recurrent"
    paths, logits, cache, new = [], [], None, prompt
    with torch.inference_mode():
        for _ in range(1 + new_tokens):
            result = model(new, past_key_values=cache, use_cache=True)
            paths.append(libkda.fla.last_path())
            cache, new = result.past_key_values, result.logits[:, -1:].argmax(-1)
            logits.append(result.logits)
    return torch.cat(logits, 1), paths


def main():
    triton_on_cpu.prepare()
    torch.manual_seed(0)
    config = KDAConfig(hidden_size=64, num_hidden_layers=2, num_heads=2, head_dim=32, vocab_size=64,
                       **json.loads(sys.argv[1]))
    model, prompt = KDAForCausalLM(config).eval(), torch.randint(64, (2, 70))
    expected, by_fla = logits_of(model, prompt, on_libkda=False)
    found, by_libkda = logits_of(model, prompt, on_libkda=True)
    print(json.dumps(dict(distance=((found - expected).norm() / expected.norm()).item(), by_fla=by_fla,
                          by_libkda=by_libkda, same=torch.equal(found.argmax(-1), expected.argmax(-1)))))


if __name__ == "__main__":
    main()
