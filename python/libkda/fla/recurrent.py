# SPDX-License-Identifier: Apache-2.0
"""FLA's fused_recurrent_gated_delta_rule on libkda's kernels. FLA asks its registry for KDA's recurrent forward, and
not for this one. So the forward is replaced where FLA's function looks it up: all layers that call FLA's are served."""
from __future__ import annotations

import importlib

from .. import gated_delta
from .._plugins.places import Places
from .._plugins.plugin import Plugin

_MODULE = "fla.ops.gated_delta_rule.fused_recurrent"


def fused_recurrent_gated_delta_rule_fwd(q, k, v, g=None, gk=None, gv=None, beta=None, A_log=None, dt_bias=None,
                                         scale=None, initial_state=None, output_final_state=False,
                                         use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False,
                                         allow_neg_eigval=False, state_v_first=False, cu_seqlens=None):
    """With FLA 0.6's signature, in which gates with an A_log are raw."""
    return gated_delta.fused_recurrent_gated_delta_rule(
        q, k, v, g, gk, gv, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, A_log is not None,
        A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens)


def serve(plugin: Plugin) -> None:
    """Puts the forward into FLA's module, once. What libkda refuses is still FLA's."""
    function = fused_recurrent_gated_delta_rule_fwd
    Places(plugin, {_MODULE: {function.__name__: ("kda", function)}}).replace(importlib.import_module(_MODULE))
