# SPDX-License-Identifier: Apache-2.0
from libkda import arrays as arrays
from libkda import compat as compat
from libkda import context_parallel as context_parallel
from libkda import fla as fla
from libkda import gate as gate
from libkda import gated_delta as gated_delta
from libkda import jax as jax
from libkda import kda as kda
from libkda import layer as layer
from libkda import naive as naive
from libkda import ops as ops
from libkda import rings as rings
from libkda import rollout as rollout
from libkda import serving as serving
from libkda import sglang as sglang
from libkda import tails as tails
from libkda import transformers as transformers
from libkda import vllm as vllm
from libkda._binding.options import Options as Options
from libkda._binding.options import options as options
from libkda.gate import fused_kda_gate as fused_kda_gate
from libkda.gated_delta import chunk_gated_delta_rule as chunk_gated_delta_rule
from libkda.gated_delta import fused_recurrent_gated_delta_rule as fused_recurrent_gated_delta_rule
from libkda.kda import chunk_kda as chunk_kda
from libkda.kda import fused_recurrent_kda as fused_recurrent_kda
from libkda.kda import fused_recurrent_kda_fwd as fused_recurrent_kda_fwd
from libkda.layer import gated_rms_norm as gated_rms_norm
from libkda.layer import short_conv as short_conv
from libkda.layer import short_conv_update as short_conv_update
from libkda.naive import naive_chunk_kda as naive_chunk_kda
from libkda.naive import naive_kda_gate as naive_kda_gate
from libkda.naive import naive_kda_lowerbound_gate as naive_kda_lowerbound_gate
from libkda.naive import naive_recurrent_kda as naive_recurrent_kda
from libkda.rings import Ring as Ring
from libkda.rings import decode_with_ring as decode_with_ring
from libkda.serving import decode as decode
from libkda.serving import fused_decode as fused_decode
from libkda.serving import prefill as prefill
from libkda.serving import verify as verify
from libkda.tails import Tail as Tail
from libkda.tails import join_states as join_states
from libkda.tails import settle as settle
from libkda.tails import split_states as split_states
from libkda.tails import tail as tail

__version__: str

def get_include() -> str: ...
