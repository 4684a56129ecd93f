# SPDX-License-Identifier: Apache-2.0
"""What every tensor argument may be: one table for functions, operators and libkda.arrays; and words for refusals."""
from __future__ import annotations

import math
import re
from typing import NamedTuple

ROWS = ("float32", "bfloat16", "float16")
FLOATS = (*ROWS, "float64")  # torch's functions compute fp64 in fp32, but where q is fp64 on the CPU
STATES = ("float32", "bfloat16")
PARAMETERS = ("float32",)
LENGTHS = ("int32", "int64")
INTEGERS = ("int32", "int64", "int16", "int8", "uint8")
MASKS = ("bool", "uint8")
GATES = ("g", "tail.g")  # where a rule has two forms, the second is one gate a head
# On pools of states, never in float64.
IN_PLACE = ("update", "update_with_tail", "update_with_ring", "fused_recurrent_kda_fwd", "prefill", "decode", "verify",
            "verify, with drafts", "verify, with a tail", "decode_with_ring", "settle")

MOST_FP32 = 3.4028234663852886e38
MOST_A_LOG = 88.72283  # of the numbers whose exp is finite in fp32
MOST_CHANNELS = 256  # of q and k (K) and of v (V)
LAST_SLOT = 2**31 - 1
FIRST_SLOT = 1  # in an engine's pools: slot 0 is the one of padded rows, which no sequence gets
ENGINE_SLOTS = {"first_slot": FIRST_SLOT}
TAIL_BOUNDARY, MOST_TAIL_ROWS = 16, 256  # tokens that a fold takes, which a tail has at least; rows of a tail


class Rule(NamedTuple):
    types: tuple[str, ...]
    shape: str  # names of sizes: one that is known must be met. "*": as many elements, in any shape. "..": any before.
    # In "HV K|HV" of dt_bias the second form is that beside one gate a head.
    where: str = "q"  # device: that of q, "host", or "either"
    written: bool = False
    required: bool = False


class FlaError(ValueError, AssertionError):
    """What FLA asserts, for callers that catch either."""


def _inputs(types, gates="B T HV K|B T HV"):
    shapes = dict(q="B T H K", k="B T H K", v="B T HV V", g=gates, beta="B T HV")
    return {name: Rule(types, shape, required=True) for name, shape in shapes.items()}


def _output(types, shape="B T HV V"):
    return Rule(types, shape, written=True)


_SEQUENCES = dict(cu_seqlens=Rule(LENGTHS, "N+1", "either"), cu_seqlens_cpu=Rule(LENGTHS, "N+1", "host"))
_GATE = dict(A_log=Rule(FLOATS, "*HV"), dt_bias=Rule(FLOATS, "*HV K|HV"))
_MASK = dict(has_state=Rule(MASKS, "N"))
_INPUTS = _inputs(FLOATS)
_PLAIN = dict(_inputs(FLOATS, "B T HV K"), initial_state=Rule(FLOATS, "B HV K V"))
_KERNEL = dict(_inputs(ROWS), o=_output(ROWS), A_log=Rule(PARAMETERS, "*HV"), dt_bias=Rule(PARAMETERS, "*HV K|HV"),
               cu_seqlens=Rule(LENGTHS, "N+1"), cu_seqlens_cpu=_SEQUENCES["cu_seqlens_cpu"], **_MASK)
_KERNEL_FORWARD = dict(_KERNEL, initial_state=Rule(STATES, "N HV K V"))
_POOL = dict(_INPUTS, **_SEQUENCES, **_GATE,
             pool=Rule(STATES, "slots HV K V", written=True, required=True), out=_output(FLOATS), **_MASK)
_OWN_TAIL = {f"tail.{name}": Rule(types, shape, written=True, required=True) for name, types, shape in (
    ("k", ROWS, "slots H R K"), ("g", ROWS, "slots HV R K|slots HV R"), ("v_new", ("float32",), "slots HV R V"),
    ("folded", ("int32",), "slots HV"))}
# With split states the tail has these too (torch_ops.cpp asks for all of them, or none).
_OWN_TAIL |= {f"tail.{name}": Rule(types, shape, written=True) for name, types, shape in (
    ("rest", ("int16",), "slots HV K V"), ("v", ROWS, "slots HV R V"), ("beta", ROWS, "slots HV R"))}
_OWN_RING = {f"ring.{name}": Rule(types, shape, written=True, required=True) for name, types, shape in (
    ("k", ROWS, "slots H R K"), ("g", ("float32",), "slots HV R K"), ("v_new", ROWS, "slots HV R V"))}
_TAIL = dict(_OWN_TAIL, positions=Rule(INTEGERS, "N"), sources=Rule(INTEGERS, "N"))
_DECODE_TAIL = dict(_TAIL, accepted_rows=Rule(INTEGERS, "N columns"))
_CONV = dict(x=Rule(ROWS, "B T D", required=True), weight=Rule(ROWS, "D W", required=True), bias=Rule(ROWS, "D"),
             cu_seqlens=Rule(LENGTHS, "N+1"))
_NORM = dict(x=Rule(ROWS, ".. D", required=True), gate=Rule(ROWS, ".. D"), weight=Rule(ROWS, "D"))
# In libkda.jax.
_JAX = dict(_inputs(ROWS), A_log=Rule(PARAMETERS, "HV"), dt_bias=Rule(PARAMETERS, "HV K|HV"),
            cu_seqlens=Rule(LENGTHS, "N+1"))
# In libkda.arrays: two come in, the others go out.
_GRADIENTS = dict(
    d_o=Rule(ROWS, "B T HV V"), d_final_state=Rule(STATES, "N HV K V"),
    **{f"d{name}": _output(ROWS, rule.shape) for name, rule in _inputs(ROWS, "B T HV K").items()},
    dA_log=_output(PARAMETERS, "HV"), ddt_bias=_output(PARAMETERS, "HV K|HV"),
    d_initial_state=_output(STATES, "N HV K V"))

# By function; the order is that of the checks. K and V of a state change places with the v-first layout.
RULES = {
    "chunk_kda": dict(_INPUTS, **_SEQUENCES, **_GATE, initial_state=Rule(("float32",), "N HV K V"), **_MASK,
                      out=_output(FLOATS)),
    "fused_recurrent_kda": dict(_INPUTS, **_SEQUENCES, **_GATE, initial_state=Rule(FLOATS, "N HV K V"), **_MASK,
                                out=_output(FLOATS)),
    **dict.fromkeys(("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"), dict(
        _inputs(FLOATS, "B T HV"), **_SEQUENCES, A_log=_GATE["A_log"], dt_bias=Rule(FLOATS, "*HV"),
        initial_state=Rule(FLOATS, "N HV K V"), **_MASK, out=_output(FLOATS))),
    "fused_recurrent_kda_fwd": dict(
        _INPUTS, **_SEQUENCES, **_GATE, initial_state=Rule(STATES, "slots HV K V", written=True),
        ssm_state_indices=Rule(INTEGERS, "N|N S"), num_accepted_tokens=Rule(INTEGERS, "N"), out=_output(FLOATS),
        **_MASK),
    "fused_recurrent_kda_fwd, not in place": dict(
        _INPUTS, **_SEQUENCES, **_GATE, initial_state=Rule(FLOATS, "N HV K V"), out=_output(FLOATS), **_MASK),
    "prefill": dict(_POOL, slots=Rule(INTEGERS, "N", required=True),
                    checkpoints=Rule(STATES, "rows HV K V", written=True), checkpoint_offsets=Rule(INTEGERS, "N"),
                    checkpoint_slots=Rule(INTEGERS, "N"), **_TAIL),
    "decode": dict(_POOL, slots=Rule(INTEGERS, "N", required=True), **_DECODE_TAIL),
    "verify": dict(_POOL, slots=Rule(INTEGERS, "N S", required=True), num_accepted_tokens=Rule(INTEGERS, "N"),
                   parents=Rule(INTEGERS, "N S")),
    "verify, with drafts": dict(
        _POOL, slots=Rule(INTEGERS, "N", required=True), drafts=Rule(STATES, "rows HV K V", written=True),
        draft_slots=Rule(INTEGERS, "N S"), parents=Rule(INTEGERS, "N S")),
    "verify, with a tail": dict(_POOL, slots=Rule(INTEGERS, "N", required=True), **_DECODE_TAIL,
                                parents=Rule(INTEGERS, "N S")),
    "decode_with_ring": dict(
        _POOL, slots=Rule(INTEGERS, "N", required=True), **_OWN_RING, counts=Rule(INTEGERS, "N", required=True),
        flush=Rule(INTEGERS, "N")),
    "settle": dict(pool=Rule(STATES, "slots HV K V", written=True, required=True),
                   slots=Rule(INTEGERS, "N", required=True), **_DECODE_TAIL, **_GATE),
    **dict.fromkeys(("fwd", "fwd_cp"), dict(
        _INPUTS, **_SEQUENCES, **_GATE, out=_output(FLOATS)._replace(required=True),
        initial_state=Rule(FLOATS, "N HV V K"), final_state=_output(FLOATS, "N HV V K"),
        checkpoint_state=_output(FLOATS, "N HV V K"), checkpoint_offsets=Rule(INTEGERS, "N", "either"))),
    "fused_kda_gate": dict(g=Rule(FLOATS, ".. HV K", required=True), **_GATE),
    "naive_kda_gate": dict(g=Rule(FLOATS, ".. HV K", required=True), A_log=Rule(FLOATS, "*HV", required=True),
                           dt_bias=_GATE["dt_bias"]),
    "naive_kda_lowerbound_gate": dict(g=Rule(FLOATS, ".. HV K", required=True), **_GATE),
    "naive_recurrent_kda": _PLAIN,
    "naive_chunk_kda": _PLAIN,
    "forward": _KERNEL_FORWARD,
    "forward_kept": _KERNEL_FORWARD,
    "backward": dict(_KERNEL_FORWARD, d_o=Rule(ROWS, "B T HV V"), d_final_state=Rule(STATES, "N HV K V"),
                     saved=Rule(("uint8",), "bytes")),
    "forward_into": dict(_KERNEL_FORWARD, final_state=_output(STATES, "N HV K V"),
                         checkpoints=_output(STATES, "slots HV K V")),
    "update": dict(_KERNEL, states=Rule(STATES, "slots HV K V", written=True, required=True),
                   indices=Rule(("int32",), "N|N S"), num_accepted_tokens=Rule(("int32",), "N"),
                   drafts=Rule(STATES, "rows HV K V", written=True), draft_indices=Rule(("int32",), "N S"),
                   parents=Rule(("int32",), "N S"), checkpoints=Rule(STATES, "rows HV K V", written=True),
                   checkpoint_offsets=Rule(("int32",), "N"), checkpoint_indices=Rule(("int32",), "N")),
    "update_with_tail": dict(
        _KERNEL, states=Rule(STATES, "slots HV K V", written=True, required=True),
        indices=Rule(("int32",), "N", required=True),
        **{name.replace(".", "_"): rule for name, rule in _OWN_TAIL.items()},
        positions=Rule(("int32",), "N", required=True), sources=Rule(("int32",), "N"),
        parents=Rule(("int32",), "N S"), accepted_rows=Rule(("int32",), "N columns")),
    "update_with_ring": dict(
        _KERNEL, states=Rule(STATES, "slots HV K V", written=True, required=True),
        indices=Rule(("int32",), "N", required=True),
        **{name.replace(".", "_"): rule for name, rule in _OWN_RING.items()},
        counts=Rule(("int32",), "N", required=True), flush=Rule(("int32",), "N")),
    **dict.fromkeys(("short_conv", "short_conv_into"), dict(
        _CONV, initial_state=Rule(ROWS, "N D S"), out=_output(ROWS, "B T D"))),
    **dict.fromkeys(("short_conv_update", "short_conv_update_into"), dict(
        _CONV, states=Rule(ROWS, "slots D S", written=True, required=True), indices=Rule(INTEGERS, "N"),
        has_state=Rule(MASKS, "N"), out=_output(ROWS, "B T D"))),
    "short_conv_backward": dict(_CONV, initial_state=Rule(ROWS, "N D S"), d_y=Rule(ROWS, "B T D"),
                                d_final_state=Rule(ROWS, "N D S")),
    **dict.fromkeys(("gated_rms_norm", "gated_rms_norm_into"), dict(_NORM, out=_output(ROWS, ".. D"))),
    "gated_rms_norm_backward": dict(_NORM, d_y=Rule(ROWS, ".. D", required=True)),
    "fused_decode": dict(
        x=Rule(ROWS, "N C|N T C", required=True), weight=Rule(ROWS, "C W|3 W E", required=True), bias=Rule(ROWS, "C"),
        conv_state=Rule(ROWS, "slots C S", written=True, required=True),
        raw_g=Rule(ROWS, "N T H D|1 N H D", required=True), raw_beta=Rule(ROWS, "N T H|1 N H", required=True),
        A_log=Rule(PARAMETERS, "*H"), dt_bias=Rule(PARAMETERS, "*H D"), state_indices=Rule(INTEGERS, "N"),
        state=Rule(STATES, "slots H D D", written=True, required=True), out=_output(ROWS, "N T H D|1 N H D"),
        output_gate=Rule(ROWS, "N H D|N T H D|1 N H D"), norm_weight=Rule(ROWS, "D"), **_MASK),
    "jax.forward": dict(_JAX, initial_state=Rule(STATES, "N HV K V"), has_state=Rule(("bool",), "N")),
    "jax.decode": dict(_JAX, state=Rule(STATES, "N HV K V", required=True), has_state=Rule(("bool",), "N")),
    "jax.pool": dict(_JAX, state=Rule(STATES, "slots HV K V", required=True), has_state=Rule(("bool",), "N"),
                     indices=Rule(("int32",), "N", required=True)),
    "arrays": dict(_inputs(ROWS, "B T HV K"), A_log=Rule(PARAMETERS, "HV"), dt_bias=Rule(PARAMETERS, "HV K|HV"),
                   initial_state=Rule(STATES, "N HV K V"), final_state=_output(STATES, "N HV K V"),
                   state=Rule(STATES, "slots HV K V", written=True), indices=Rule(("int32",), "N"), o=_output(ROWS),
                   **_MASK, **_GRADIENTS),
}

# Keywords that change a result: where one function has them, another that has not refuses them (checks.py).
MEANT = frozenset(name for rules in RULES.values() for name in rules if name != "cu_seqlens_cpu") | {
    "head_map", "first_slot", "inplace_final_state", "return_intermediate_states", "cp_context", "checkpoint_every",
    "plan_options", "tail", "ring"}

# What the C ABI and the operators say, and what a caller wrote.
_SIZES = dict(batch="q", num_tokens="q", num_heads="q", key_dim="q", value_dim="v", num_value_heads="v",
              initial_state_mask="has_state")
_POOL_WORDS = dict(
    _SIZES, states="pool", initial_state="pool", final_state="pool", indices="slots", draft_indices="draft_slots",
    checkpoint_indices="checkpoint_slots", initial_state_indices="slots", final_state_indices="slots",
    state_index_columns="slots", o="out",
    **{name.replace(".", "_"): name for name in (*_OWN_TAIL, *_OWN_RING)})
WORDS = {
    "fused_recurrent_kda_fwd": dict(
        _SIZES, states="initial_state", indices="ssm_state_indices", initial_state_indices="ssm_state_indices",
        final_state_indices="ssm_state_indices", final_state="initial_state", state_index_columns="ssm_state_indices",
        o="out"),
    **dict.fromkeys(("fwd", "fwd_cp"), dict(_SIZES, o="out")),
    **dict.fromkeys(("prefill", "decode", "verify"), _POOL_WORDS),
    "decode_with_ring": dict(_POOL_WORDS, positions="counts", **{
        f"tail.{name}": f"ring.{name}" for name in ("k", "g", "v_new")}),
    "settle": dict(_POOL_WORDS, num_heads="tail.k", key_dim="tail.k", num_value_heads="tail.v_new",
                   value_dim="tail.v_new"),
    "verify, with drafts": dict(_POOL_WORDS, final_state="drafts", state_index_columns="draft_slots"),
    "short_conv": dict(channels="x", num_tokens="x"),
    "short_conv_update": dict(channels="x", num_tokens="x", initial_state="states", final_state="states",
                              initial_state_indices="indices", final_state_indices="indices"),
    "gated_rms_norm": dict(channels="x", rows="x"),
    "fused_decode": dict(
        num_sequences="sequences of x", num_tokens="tokens of x", num_heads="heads of raw_g",
        head_dim="channels of raw_g", width="taps of weight", state_width="inputs of conv_state",
        num_slots="slots of state", slots="state_indices", g="raw_g", beta="raw_beta", y="out", states="state",
        initial_state="state", **{f"{part}.{field}": name for part in "qkv" for field, name in (
            ("x", "x"), ("weight", "weight"), ("bias", "bias"), ("state", "conv_state"))}),
    "arrays.decode": dict(_SIZES, initial_state="state", initial_state_indices="indices"),
    "arrays.backward": dict(_SIZES, saved="kept"),
}


def in_words_of(function, text, with_out=False):
    """The text of a refusal with its arguments as the caller wrote them: its first word, that behind "overlaps", and
    wherever they stand the names that are no words of English. `with_out`: the outputs are an argument."""
    words = WORDS.get(function, _SIZES)
    if with_out:
        words = words | dict(o="out", y="out")
    head, separator, rest = text.removeprefix("libkda: ").partition(" overlaps ")
    first = re.match(r"[\w.]*", head)[0]
    other = re.match(r"[\w.]*", rest)[0]
    text = words.get(first, first) + head[len(first):] + separator + words.get(other, other) + rest[len(other):]
    text = re.sub(r"\b[a-z]+(?:_[a-z]+)+\b", lambda name: words.get(name[0], name[0]), text)
    text = text.replace("(columns of indices)", f"(columns of {words.get('indices', 'indices')})")
    return text.replace("decode takes", f"{function.partition(',')[0].removeprefix('arrays.')} takes")


def listed(names):
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def refuse_type(name, types, found):
    return TypeError(f"{name} must be {listed(types)}, got {found}")


class Sizes(dict):
    """Sizes that the arguments seen so far agree on, and which argument was the first to have each."""

    def __init__(self):
        super().__init__()
        self.sources, self._name, self._one_gate = {}, "", False

    def default_n(self):
        """Without cu_seqlens every row of the batch is a sequence."""
        if "N" not in self and "B" in self:
            self["N"], self.sources["N"] = self["B"], self.sources["B"]

    def expect(self, name, rule, shape, expanded=False):
        """`expanded`: the channels of these gates are one in memory, one gate a head."""
        if name == "k":
            expected = [self[size] for size in rule.shape.split()]
            if list(shape) != expected:
                raise FlaError(f"q and k must have the same shape, got q={expected} vs k={list(shape)}")
        self._name = name
        if rule.shape.startswith("*"):
            forms = rule.shape[1:].split("|")
            return self._expect_elements(name, forms[-1 if self._one_gate else 0].split(), shape, forms[0].split())
        forms = [form.split() for form in rule.shape.split("|")]
        for form in forms:
            if form[0] == ".." and len(shape) >= len(form) - 1:
                form, shape = form[1:], shape[len(shape) - len(form) + 1:]
            if len(form) == len(shape) and all(self._meet(size, n) for size, n in zip(form, shape)):
                self._one_gate |= name in GATES and len(forms) == 2 and (expanded or form is forms[1])
                return None
        if name == "initial_state" and forms[0][0] == "N" and len(shape) == len(forms[0]) == 4:
            if list(shape[1:]) == [self[size] for size in forms[0][1:]]:
                raise FlaError(f"The number of initial states is expected to be equal to the number of input "
                               f"sequences, i.e., {self['N']} rather than {shape[0]} "
                               f"(initial_state,{self._sources('N')}).")
        texts = [f"[{', '.join(form)}]{self._known(form)}" for form in forms]
        raise FlaError(f"{name} must have shape {' or '.join(texts)}, got {list(shape)}"
                       f"{self._said_by(*forms[0])}")

    def _said_by(self, *sizes):
        sources = self._sources(*sizes)
        return f" (sizes of{sources})" if sources.strip() else ""

    def _sources(self, *sizes):
        """Where they come from."""
        names = {self.sources.get(size.removesuffix("+1")): None for size in sizes}
        return " " + ", ".join(name for name in names if name not in (None, self._name))

    def _meet(self, size, n):
        if size.isdigit():
            return n == int(size)
        if size == "N+1":
            size, n = "N", n - 1
            if n < 0:
                return False
        if size not in self:
            self[size], self.sources[size] = n, self._name
        return self[size] == n

    def _known(self, form):
        values = [self.get(size, size) if size != "N+1" else self["N"] + 1 if "N" in self else size for size in form]
        return "" if values == form else f"=[{', '.join(map(str, values))}]"

    def _expect_elements(self, name, form, shape, other):
        """Those of `form`, or of the `other` one."""
        given = 1
        for size in shape:
            given *= size
        count = self._elements(form)
        if given not in (count, self._elements(other)):
            raise FlaError(f"{name} must have {' * '.join(form)} = {count} elements, "
                           f"got {list(shape)}{self._said_by(*form)}")

    def _elements(self, form):
        count = 1  # torch.compile traces no generator here
        for size in form:
            count *= self[size]
        return count


def check_heads(sizes):
    """The limits that FLA has too, in its words."""
    if sizes["K"] > MOST_CHANNELS:
        raise FlaError(f"Currently we only support key headdim <={MOST_CHANNELS} for KDA, got {sizes['K']} (q).")
    if sizes["V"] > MOST_CHANNELS:
        raise FlaError(f"libkda supports value head dimensions of v up to {MOST_CHANNELS}, got {sizes['V']}.")
    for name, size, what in (("q", "H", "heads"), ("q", "K", "channels"), ("v", "HV", "heads"), ("v", "V", "channels")):
        if sizes[size] == 0:
            raise FlaError(f"{name} must have at least one of its {what}, got {size} = 0")
    if sizes["HV"] % sizes["H"] != 0:
        raise FlaError(f"For GVA, num_v_heads (HV={sizes['HV']}) must be evenly divisible by num_qk_heads "
                       f"(H={sizes['H']}), but got HV % H = {sizes['HV'] % sizes['H']} (q, v)")


def number(name, value):
    """A float that stays finite in fp32, in which kernels have it."""
    found = None
    if not isinstance(value, (str, bytes)):
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        except (TypeError, ValueError, RuntimeError):
            pass
    if found is None:
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not abs(found) <= MOST_FP32:
        raise ValueError(f"{name} must be finite in fp32, got {value!r}")
    return found


def integer(name, value, low, high):
    try:
        found = value.__index__()
    except (AttributeError, TypeError):
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if not low <= found <= high:
        raise ValueError(f"{name} must be {low} to {high}, got {found}")
    return found
