#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every family that libkda.transformers serves; as a command, what a prefill gains.

    python transformers_models.py [--heads 4 32] [--tokens 1000] [--runs 3]

Prints, for a Kimi-Linear model of four layers, the processor time of a prefill and of a decoded token, on one thread,
by the model's own torch functions and by libkda, and their ratio.
"""
import argparse
import contextlib
import importlib
import inspect
import time

import torch
import transformers

import libkda.transformers

FUNCTIONS = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
GATED_DELTA_FUNCTIONS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")
VOCABULARY = 97
_SIZES = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
              num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=16, qk_nope_head_dim=32, v_head_dim=32,
              num_experts_per_tok=2, n_group=1, topk_group=1, num_hidden_layers=3, pad_token_id=0, bos_token_id=1,
              eos_token_id=None)
_KDA = dict(linear_head_dim=32, linear_num_heads=2, layer_types=["linear_attention", "full_attention",
                                                                 "linear_attention"])


@contextlib.contextmanager
def served_where_asked():
    """Every test says itself who serves, and these models are too small for more than one thread; afterwards it is as
    after the import."""
    libkda.transformers.disable()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    libkda.transformers.enable()


def _kimi_linear(**changes):
    from transformers import KimiLinearConfig, KimiLinearForCausalLM
    return KimiLinearForCausalLM(KimiLinearConfig(**{**_SIZES, **_KDA, **dict(qk_rope_head_dim=16, num_local_experts=4),
                                                     **changes}))


def _bailing_hybrid():
    from transformers import BailingHybridConfig, BailingHybridForCausalLM
    return BailingHybridForCausalLM(BailingHybridConfig(
        **_SIZES, layer_group_size=2, head_dim=32, qk_rope_head_dim=16, num_local_experts=4, first_k_dense_replace=1,
        num_mtp_layers=0))


def _glm5_next():
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration
    text = dict(_SIZES, **_KDA, mlp_layer_types=["dense", "sparse", "sparse"], q_lora_rank=16, n_routed_experts=4,
                index_topk=32, index_head_dim=16, index_n_heads=2, index_kpool=16)
    vision = dict(depth=1, hidden_size=32, num_heads=2, image_size=28, out_hidden_size=64, intermediate_size=64,
                  projection_intermediate_size=64)
    return Glm5NextForConditionalGeneration(Glm5NextConfig(text_config=text, vision_config=vision))


_GATED = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
              shared_expert_intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
              head_dim=32, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
              linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32, num_experts=4,
              num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=None)
_INDEXED = dict(hc_count=2, hc_lowrank=8, output_gate_type="sigmoid", indexer_n_heads=2, indexer_kv_heads=1,
                indexer_head_dim=32, indexer_budget=32, indexer_compress_ratio=4)
_WIDE_VALUES = dict(linear_num_value_heads=2, linear_key_head_dim=24, linear_value_head_dim=48)


def _gated(name, config="Config", **changes):
    """A model of Gated DeltaNet, which has several value heads a q/k head unless `changes` say otherwise."""
    def make(**more):
        config_class = getattr(transformers, f"{name}{config}")
        return getattr(transformers, f"{name}ForCausalLM")(config_class(**{**_GATED, **changes, **more}))
    return make


FAMILIES = dict(kimi_linear=_kimi_linear, bailing_hybrid=_bailing_hybrid, glm5_next=_glm5_next)
GATED_DELTA_FAMILIES = dict(
    qwen3_next=_gated("Qwen3Next"), qwen3_5=_gated("Qwen3_5", "TextConfig"),
    qwen3_5_moe=_gated("Qwen3_5Moe", "TextConfig"), qwen4_exp=_gated("Qwen4Exp", "TextConfig", **_INDEXED),
    olmo_hybrid=_gated("OlmoHybrid", **_WIDE_VALUES), lara_mini=_gated("LaraMini"))  # OLMo's beta is twice a sigmoid


def functions_of(family):
    """The names of the two functions in the model file of a family."""
    return FUNCTIONS if family in FAMILIES else GATED_DELTA_FUNCTIONS


def file_of(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def build(family, **changes):
    torch.manual_seed(0)
    return (FAMILIES | GATED_DELTA_FAMILIES)[family](**changes).eval()


def in_torch(function):
    """A function of a model file as that file writes it: FLA's replace it where FLA is installed, and the package
    kernels makes a module of it."""
    if isinstance(function, torch.nn.Module):
        function = inspect.getclosurevars(type(function).forward).nonlocals["func"]
    return inspect.unwrap(function)


@contextlib.contextmanager
def torch_functions(family):
    """The model file with its own functions in torch; libkda is switched off before and after."""
    file = file_of(family)
    libkda.transformers.disable()
    installed = {name: getattr(file, name) for name in (*functions_of(family), *CONVOLUTIONS)}
    for name, function in installed.items():
        setattr(file, name, in_torch(function))
    try:
        yield file
    finally:
        libkda.transformers.disable()
        for name, function in installed.items():
            setattr(file, name, function)


@contextlib.contextmanager
def served():
    libkda.transformers.enable()
    try:
        yield
    finally:
        libkda.transformers.disable()


def prompt(batch, length, device="cpu"):
    return torch.randint(2, VOCABULARY, (batch, length), device=device)


def both(call):
    """What `call` returns by the model's own functions and by libkda."""
    expected = call()
    with served():
        return expected, call()


def paths():
    return [libkda.transformers.last_path(part) for part in ("kda", "conv", "norm", "rms_norm")]


# ---- what it gains ---------------------------------------------------------------------------------------------------

def best_seconds(call, runs):
    """The least processor time of some runs of one thread, after one that is not counted: other processes, which take
    the machine in turns with this one, change little in it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    times = []
    try:
        for _ in range(1 + runs):
            start = time.process_time()
            call()
            times.append(time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    return min(times[1:])


def kimi_of(heads):
    """Kimi-Linear with layers of the true head size: three of KDA, one of full attention."""
    kda, full = "linear_attention", "full_attention"
    return build("kimi_linear", hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=4,
                 layer_types=[kda, full, kda, kda], linear_head_dim=128, linear_num_heads=heads, num_attention_heads=4,
                 num_key_value_heads=4, kv_lora_rank=64, qk_nope_head_dim=64, v_head_dim=64, num_local_experts=8)


def qwen_of(heads):
    """Qwen3-Next with layers of the true head size, two value heads a q/k head: three of Gated DeltaNet, one of full
    attention."""
    gated, full = "linear_attention", "full_attention"
    return build("qwen3_next", hidden_size=512, moe_intermediate_size=256, shared_expert_intermediate_size=256,
                 num_hidden_layers=4, layer_types=[gated, full, gated, gated], linear_num_key_heads=heads // 2,
                 linear_num_value_heads=heads, linear_key_head_dim=128, linear_value_head_dim=128, head_dim=128,
                 num_attention_heads=4, num_key_value_heads=4, num_experts=8)


def prefill_seconds(model, tokens, runs):
    """Seconds of a prefill (by torch, by libkda)."""
    ids = torch.randint(2, VOCABULARY, (1, tokens))
    call = lambda: model(ids, use_cache=True)
    with torch.inference_mode(), torch_functions("kimi_linear"):
        by_torch = best_seconds(call, runs)
        with served():
            return by_torch, best_seconds(call, runs)


def decode_seconds(model, tokens, runs):
    """Seconds of a token after a prompt of `tokens` (by torch, by libkda)."""
    ids, found = torch.randint(2, VOCABULARY, (1, tokens)), []
    with torch.inference_mode(), torch_functions("kimi_linear"):
        for switch in (contextlib.nullcontext, served):
            with switch():
                cache = model(ids, use_cache=True)[1]
                found.append(best_seconds(lambda: model(ids[:, :1], use_cache=True, past_key_values=cache), runs))
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    for heads in options.heads:
        model = kimi_of(heads)
        for what, seconds in (("prefill", prefill_seconds(model, options.tokens, options.runs)),
                              ("a token", decode_seconds(model, options.tokens, 20 * options.runs))):
            by_torch, by_libkda = seconds
            print(f"{heads} heads, {what}: torch {1e3 * by_torch:.1f} ms, libkda {1e3 * by_libkda:.1f} ms, "
                  f"{by_torch / by_libkda:.2f}x", flush=True)


if __name__ == "__main__":
    main()
