# SPDX-License-Identifier: Apache-2.0
"""Which steps of an engine's layers are faster by libkda's kernels on a GPU, as bench/engine_layers.py has measured:
the plugins serve these where nobody says otherwise. It imports nothing: the table of docs/engines.md reads it too."""

NEVER = float("inf")

# {(engine, layer, step): least tokens x value heads from which libkda is faster than the engine's own, in CUDA graphs
# on an H200}. A step that is not here is served: it was faster at every size, or has not been compared.
LEAST = {
    ("vllm", "kda", "decode"): 2048,
    ("vllm", "kda", "verify"): NEVER,
    ("vllm", "gdn", "decode"): NEVER,
    ("vllm", "gdn", "verify"): NEVER,
    ("sglang", "kda", "decode"): 512,
    ("sglang", "kda", "verify"): 8192,
    ("sglang", "gdn", "decode"): NEVER,
    ("sglang", "gdn", "verify"): NEVER,
    # FlashInfer's prefill, which the engines take on Hopper by default, has not been compared.
    ("vllm", "gdn", "prefill"): NEVER,
    ("sglang", "gdn", "prefill"): NEVER,
}


def serves(engine: str, layer: str, step: str, tokens: int, value_heads: int) -> bool:
    """Whether libkda serves a step of so many tokens by default. Shapes alone decide: a graph is captured and replayed
    with the same kernels."""
    return tokens * value_heads >= LEAST.get((engine, layer, step), 0)
