# SPDX-License-Identifier: Apache-2.0
"""chunk_kda over several ranks, forward and backward."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import ops
from .._binding.checks import check, computes_in_float64
from .._binding.operands import NO_A_LOG, Modes, as_type, dense, parameter_of, rows_of
from . import maps
from .contexts import runs_of
from .exchange import Agreed, AllGather, agree, check_place


class Options(NamedTuple):
    """What a call asks for beside its rows, as it was given."""
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None
    modes: Modes
    output_final_state: bool
    more: tuple[tuple[str, Any], ...] = ()  # names and values of a function's own, the same on all ranks


def chunk_kda(context: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
              read: Callable[[], Options]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """libkda.chunk_kda with cp_context. `read` looks at the options of this rank: what it raises is known to all ranks,
    as other errors of arguments are."""
    rows = dict(q=q, k=k, v=v, g=g, beta=beta)
    options: Any = None

    def look():
        nonlocal options
        check("chunk_kda", rows)
        check_place(context, "q", q)
        options = _with_gate(read())
        return _look(context, rows, options)

    agreed = agree(context, "HV, K, V", look, lambda known: _row(context._forward, known))
    o, final_state = _ChunkKda.apply(context, agreed, options.modes, q, k, v, g, beta, options.A_log, options.dt_bias,
                                     options.initial_state)
    return as_type(o, q.dtype), final_state if options.output_final_state else None


def _with_gate(options):
    """Without parameters where the gate is none that has them."""
    gate = options.modes.gate_mode
    if gate == ops.GATE_LOG:
        return options._replace(A_log=None, dt_bias=None)
    if gate == ops.GATE_SOFTPLUS and options.A_log is None:
        raise ValueError(NO_A_LOG)
    return options


def _look(context, rows, options):
    """Agreed of arguments that fit."""
    q, v = rows["q"], rows["v"]
    values = dict(rows, A_log=options.A_log, dt_bias=options.dt_bias)
    gradients = ops.differentiates(*values.values(), options.initial_state)
    alike = (*map(_alike, values.values()), options.modes, options.output_final_state, gradients, options.more)
    if alike not in context._seen:  # looking costs more than launching
        check("chunk_kda", values)
        if computes_in_float64(q):
            raise TypeError("q must be float32, bfloat16 or float16 with cp_context, got float64")
        sizes = v.shape[2], q.shape[3], v.shape[3]
        _try_values(context, values, options.modes, sizes)
        context._seen[alike] = Agreed.of(context, sizes, _named(values, options, gradients), q.device)
    elif q.device.type == "cpu":  # A_log may have changed
        _try_values(context, values, options.modes, context._seen[alike].sizes)
    agreed = context._seen[alike]
    HV, K, V = agreed.sizes
    _check_initial_state(context, q, options.initial_state, (HV, V, K) if options.modes.state_v_first else (HV, K, V))
    return agreed


def _named(values, options, gradients):
    """Options by the names of the caller's arguments."""
    modes = options.modes
    return {
        "function": "chunk_kda", "use_gate_in_kernel": modes.gate_mode != ops.GATE_LOG,
        "lower_bound": modes.lower_bound if modes.gate_mode == ops.GATE_BOUNDED else None, "scale": modes.scale,
        "use_beta_sigmoid_in_kernel": modes.beta_mode != ops.BETA_PLAIN,
        "allow_neg_eigval": modes.beta_mode == ops.BETA_SIGMOID2,
        "use_qk_l2norm_in_kernel": modes.l2norm, "state_v_first": modes.state_v_first,
        "output_final_state": options.output_final_state, "the number of heads of q": values["q"].shape[2],
        **{f"the type of {name}": None if x is None else x.dtype for name, x in values.items()},
        "gradients asked for": gradients, **dict(options.more)}


def _try_values(context, values, modes, sizes):
    """The forward of no tokens, which refuses values of options that no forward takes, before anything is sent."""
    rows = tuple(rows_of(values[name][:, :0]) for name in ("q", "k", "v", "g", "beta"))
    spans = maps.Spans(rows, (parameter_of(values["A_log"]), parameter_of(values["dt_bias"])),
                       context._no_tokens(rows[0].device), modes, sizes)
    with torch.no_grad():
        maps.run_forward(spans, rows[2].new_empty(rows[2].shape), spans.new(*sizes[1:]), None)


def _alike(x):
    """What the checks of an argument look at."""
    return (x.shape, x.dtype, x.device, x.layout) if isinstance(x, torch.Tensor) else type(x)


def _check_initial_state(context, q, state, shape):
    if state is None:
        return
    if not isinstance(state, torch.Tensor) or state.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"initial_state must be a float32 or bfloat16 tensor, got "
                        f"{getattr(state, 'dtype', type(state).__name__)}")
    if state.device != q.device:
        raise ValueError(f"initial_state must be on the device of q, {q.device}, got {state.device}")
    counts = {len(context.begins)} if context._of_fla else {context.num_sequences, len(context.begins)}
    if tuple(state.shape[1:]) != shape or state.dim() != 4 or state.shape[0] not in counts:
        count = " or ".join(str(n) for n in sorted(counts, reverse=True))
        raise ValueError(f"initial_state must have shape [{count}, {', '.join(map(str, shape))}] (all sequences, or "
                         f"those that begin on this rank), got {list(state.shape)}")


def _row(direction, agreed):
    return AllGather(agreed, direction.row_floats(*agreed.sizes), direction.exchanges, own=direction.own_rows)


class _Call:
    """One direction of one call on this rank: its maps, and the states that it gives and gets. States are fp32, in the
    kv layout. Nothing here waits for a GPU, so that a CUDA graph can hold a call; the first call of a context makes
    what would be waited for."""

    def __init__(self, direction, agreed, modes, rows, parameters, from_zero=False):
        """from_zero: a forward without initial states."""
        self.direction, self.context, self.sizes = direction, direction.context, agreed.sizes
        self.modes, self.rows, self.parameters = modes, rows, parameters
        self.device = rows[0].device
        self.by = maps.of_device(self.device)
        self.gather = _row(direction, agreed)
        HV, K, V = self.sizes
        self.M_floats, self.map_floats = HV * K * K, HV * K * (K + V)
        self.aligned = self.M_floats % 4 == self.map_floats % 4 == 0  # kernels write 16 bytes at a time
        count = len(self.context.spans)
        if direction.all and direction.forward:
            count += self.context.num_sequences
        #: before each span of this rank (of a backward: behind it), and with "all" behind each sequence
        made = torch.empty if len(direction.stored) == count else torch.zeros
        self.states = made(count, HV, K, V, dtype=torch.float32, device=self.device)
        self.early, self.at_once, self.after = direction.early, direction.at_once, direction.after
        if direction.forward and not (from_zero or self.by.states_alone):
            self._run_at_once(self.early)
        self.begun: dict[tuple[int, int], Any] = {}  # by run of neighbours
        self.in_place: set[int] = set()  # spans whose maps kernels write where they are sent from
        self.to_keep: list[tuple[int, torch.Tensor]] = []  # M by span, for the backward

    def _run_at_once(self, early):
        """With their outputs, since no kernels make their states alone."""
        self.at_once = sorted([*self.at_once, *early])
        self.early, self.after = ([i for i in indices if i not in early] for indices in (self.early, self.after))

    def _place(self, index):
        """Where the map of a span goes; None if nobody needs it."""
        direction = self.direction
        if index in direction.private_slots:
            row, slot = divmod(direction.private_slots[index], direction.maps_per_row)
            row = self.gather.rows[row]
        elif index in direction.shared_slots:
            row, slot = self.gather.mine, direction.shared_slots[index]
        else:
            return None
        return row[slot * self.map_floats:(slot + 1) * self.map_floats]

    def _halves(self, index):
        """Where M of a span goes, and what it adds."""
        HV, K, V = self.sizes
        place = self._place(index)
        return place[:self.M_floats].view(1, HV, K, K), place[self.M_floats:].view(1, HV, K, V)

    def _maps(self, spans, first, last):
        """What kernels write M and the rest of spans `first` to `last` to: the places of a single span, if they fit."""
        if last - first == 1 and self.aligned:
            self.in_place.add(first)
            return self._halves(first)
        _, K, V = self.sizes
        return spans.new(K, K), spans.new(K, V)

    def _give_maps(self, M, A, first, mapped, known=None):
        """Those of spans `mapped` among neighbours from `first` on, if they are not in their places. `known`: M by
        span, of the forward."""
        for i in mapped:
            if i not in self.in_place:
                for place, given in zip(self._halves(i), (known[i] if known else M[i - first], A[i - first])):
                    place[0].copy_(given)
            elif known:
                M[0].copy_(known[i])

    def give_state(self, index, state):
        """The state that leaves a span whose start is known: a map that is constant."""
        place = self._place(index)
        if place is not None:
            place[:self.M_floats].zero_()
            place[self.M_floats:].copy_(state.flatten())

    def _give_states(self, states, first, last):
        for i in range(first, last):
            self.give_state(i, states[i - first])

    def give_extra(self, states):
        """States that travel beside the maps, with final_states = "all"."""
        if self.direction.extra_states:
            begin = self.direction.rows * self.map_floats
            self.gather.mine[begin:begin + states.numel()] = states.flatten()

    def extra_of(self, gathered):
        """Their sums over the ranks, in the order of these."""
        HV, K, V = self.sizes
        begin = self.direction.rows * self.map_floats
        rows = gathered[:, begin:begin + self.direction.extra_states * HV * K * V]
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        return total.view(-1, HV, K, V)

    def tokens(self, x, first, last):
        """Those of spans in a tensor of all tokens of this rank."""
        begin, end = self.context.offsets[first], self.context.offsets[last]
        return x if end - begin == self.context.num_tokens else x[:, begin:end]

    def spans(self, first, last):
        return maps.Spans(tuple(self.tokens(x, first, last) for x in self.rows), self.parameters,
                          self.context._lengths(first, last, self.device), self.modes, self.sizes)

    def _waiting(self):
        """Runs of spans that wait for the exchange: those that give their state early, and the others."""
        return runs_of(self.early) + runs_of([i for i in self.after if i not in self.early])

    def _mapped(self, first, last):
        return [i for i in self.direction.mapped if first <= i < last]

    def begin(self, o, behind):
        """Starts the forward of spans that wait for their states, where it can be started."""
        for first, last in self._waiting():
            mapped, spans, early = self._mapped(first, last), self.spans(first, last), first in self.early
            M, B = self._maps(spans, first, last) if mapped else (None, spans.new(*self.sizes[1:]) if early else None)
            begun = self.by.begin(spans, self.tokens(o, first, last), behind[first:last], M, B)
            if begun is None:
                if early and not self.by.states_alone:
                    self._run_at_once(range(first, last))
                continue
            self.begun[first, last] = begun
            if mapped:
                self._give_maps(M, B, first, mapped)
                self._keep(M, first, mapped)
            elif early:
                self._give_states(B, first, last)

    def begin_backward(self, d_o, before, kept, wanted):
        """The same of a backward. `before`: the states before all spans."""
        for first, last in self._waiting():
            mapped, spans, early = self._mapped(first, last), self.spans(first, last), first in self.early
            M, D = self._maps(spans, first, last) if mapped else (None, spans.new(*self.sizes[1:]) if early else None)
            begun = self.by.begin_backward(spans, dense(self.tokens(d_o, first, last)), self.states[first:last],
                                           before[first:last], wanted, D, early)
            if begun is None:
                continue
            self.begun[first, last] = begun
            if mapped:
                known = self._known(kept, mapped)
                if known is None:
                    self.by.transitions(spans, M)
                self._give_maps(M, D, first, mapped, known)
            elif early:
                self._give_states(D, first, last)

    @staticmethod
    def _known(kept, mapped):
        """M of the forward by span; None if one is missing."""
        return {i: kept[i] for i in mapped} if all(i in kept for i in mapped) else None

    def finish(self, run, done):
        """Ends what waited: done(first, last, begun) where it was begun, else run(spans)."""
        for first, last in self._waiting():
            begun = self.begun.pop((first, last), None)
            if begun is None:
                run(range(first, last))
            else:
                done(first, last, begun)

    def _keep(self, M, first, mapped):
        self.to_keep += ((i, M[i - first]) for i in mapped)

    def _kept(self, kept):
        """M for the backward; a copy, where it is in a row of the exchange."""
        if kept is not None:
            kept.update((i, M.clone() if i in self.in_place else M) for i, M in self.to_keep)

    def give_maps(self, kept, d_o=None):
        """M and what it adds, B or D. `kept`: the M of spans by index, of a forward for its backward, or None."""
        mapped = [i for i in self.direction.mapped if not any(first <= i < last for first, last in self.begun)]
        for first, last in runs_of(mapped):
            spans = self.spans(first, last)
            M, A = self._maps(spans, first, last)
            known = None
            if d_o is None:
                self.by.forward_maps(spans, M, A)
                self._keep(M, first, range(first, last))
            else:
                known = self._known(kept, range(first, last))
                self.by.backward_maps(spans, dense(self.tokens(d_o, first, last)), None if known else M, A)
            self._give_maps(M, A, first, range(first, last), known)

    def give_early(self, before, d_o=None):
        """The states that leave spans at the near end, without their outputs. `before`: of a backward, the states
        before all spans."""
        for first, last in runs_of(self.early):
            if (first, last) in self.begun:
                continue
            spans, known = self.spans(first, last), self.states[first:last]
            if d_o is None:
                states = self.by.states_behind(spans, known)
            else:
                d_o_here = dense(self.tokens(d_o, first, last))
                states = self.by.gradients_before(spans, d_o_here, known, before[first:last])
            self._give_states(states, first, last)

    def exchange(self, run, begin, leaving, kept, before=None, *d_o):
        """Starts the all-gather, and runs what does not wait for it. run(indices) computes spans, and fills `leaving`:
        by span the state that leaves it."""
        begin()
        run(self.at_once)
        for index in self.at_once:
            self.give_state(index, leaving[index])
        self.give_early(before, *d_o)
        self.give_maps(kept, *d_o)
        self.gather.start()
        self._kept(kept)
        run(self.direction.meanwhile)

    def fold(self, starts):
        """Fills the states of spans that were not known before the exchange."""
        direction = self.direction
        if len(direction.steps):
            maps.fold_states(self.gather.rows, direction.maps_per_row, starts, self.states, direction.steps,
                             direction.steps_on(self.device), not direction.forward)


class _ChunkKda(torch.autograd.Function):
    """(o of v's type, final states fp32) of the tokens of this rank."""

    @staticmethod
    def forward(ctx, context, agreed, modes, q, k, v, g, beta, A_log, dt_bias, initial_state):
        sizes = agreed.sizes
        rows = [rows_of(x) for x in (q, k, v, g, beta)]
        parameters = tuple(parameter_of(x) for x in (A_log, dt_bias))
        call = _Call(context._forward, agreed, modes, rows, parameters, from_zero=initial_state is None)
        # On a CPU they come with D at no cost.
        kept = {} if call.by is maps.OnKernels and any(ctx.needs_input_grad) else None
        v_first = modes.state_v_first
        try:
            o = torch.empty(v.shape, dtype=rows[2].dtype, device=v.device)
            starts = None
            if initial_state is not None or context.empty or call.direction.extra_states:
                starts = _starting_states(context, initial_state, sizes, v_first, q.device)
            if initial_state is not None:
                for span in context.spans:
                    if span.first:
                        call.states[span.place] = starts[context.begins.index(span.sequence)]
            behind = call.states.new_empty(len(context.spans), *sizes)

            def run(indices):
                for first, last in runs_of(indices):
                    maps.run_forward(call.spans(first, last), call.tokens(o, first, last), behind[first:last],
                                     call.states[first:last])

            if call.direction.extra_states:
                call.give_extra(_states_of_empty(context, starts))
            call.exchange(run, lambda: call.begin(o, behind), behind, kept)
        except Exception:
            call.gather.refuse()
            raise
        gathered = call.gather.finish()
        call.fold(call.states[:0])
        call.finish(run, lambda first, last, begun: begun.finish(call.states[first:last]))
        final = _final_states(context, call, gathered, behind, starts)
        ctx.context, ctx.agreed, ctx.modes = context, agreed, modes
        ctx.transitions = kept or {}
        ctx.state_like = None if initial_state is None else (initial_state.shape, initial_state.dtype)
        ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, call.states[:len(context.spans)])
        return o, final.mT.contiguous() if v_first else final

    @staticmethod
    def backward(ctx, d_o, d_final):
        with torch.no_grad():
            gradients = _ChunkKda.gradients(ctx, d_o, d_final)
        if not torch.is_grad_enabled():
            return None, None, None, *gradients
        once = iter(_Once.apply(*ctx.saved_tensors[:5], *(x for x in gradients if x is not None)))
        return None, None, None, *(None if x is None else next(once) for x in gradients)

    @staticmethod
    def gradients(ctx, d_o, d_final):
        context, v_first = ctx.context, ctx.modes.state_v_first
        *inputs, states = ctx.saved_tensors
        rows, parameters = [rows_of(x) for x in inputs[:5]], tuple(parameter_of(x) for x in inputs[5:])
        call = _Call(context._backward, ctx.agreed, ctx.modes, rows, parameters)
        direction = call.direction
        try:
            d_o, d_final = dense(d_o), (d_final.mT if v_first else d_final).float().contiguous()
            wanted = sum(1 << i for i, x in enumerate(inputs) if x is not None and ctx.needs_input_grad[3 + i])
            pieces = {}
            before = {}  # by span
            if direction.all:
                call.give_extra(d_final)
            else:
                for span in context.spans:
                    if span.last:
                        call.states[span.place] = d_final[context.ends.index(span.sequence)]

            def run(indices):
                for first, last in runs_of(indices):
                    give(first, last, maps.run_backward(call.spans(first, last), call.tokens(d_o, first, last),
                                                        call.states[first:last], states[first:last], wanted))

            def give(first, last, found):
                pieces[first] = found
                before.update((i, found[7][i - first]) for i in range(first, last))

            def done(first, last, begun):
                give(first, last, begun.finish(call.states[first:last]))

            call.exchange(run, lambda: call.begin_backward(d_o, states, ctx.transitions, wanted), before,
                          ctx.transitions, states, d_o)
        except Exception:
            call.gather.refuse()
            raise
        gathered = call.gather.finish()
        if direction.all:  # every rank has had the states
            d_final = call.extra_of(gathered)
        call.fold(d_final if direction.all else call.states[:0])
        call.finish(run, done)
        gradients = _joined(inputs, pieces, wanted)
        d_initial = _initial_gradients(context, before, d_final, states.device, ctx.state_like,
                                       ctx.needs_input_grad[10], v_first)
        return *gradients, d_initial


class _Once(torch.autograd.Function):
    """Gradients that nobody can differentiate again."""

    @staticmethod
    def forward(ctx, *args):
        return tuple(x.view_as(x) for x in args[5:])  # behind q to beta, which they depend on

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(ops.NO_SECOND)


def _chosen(states, indices):
    """Some of them; without a tensor of indices, which a GPU would wait for."""
    return torch.cat([states[i:i + 1] for i in indices]) if indices else states[:0]


def _starting_states(context, initial_state, sizes, v_first, device):
    """Of the sequences that begin here, [len(begins), HV, K, V]."""
    if initial_state is None:
        return torch.zeros(len(context.begins), *sizes, device=device)
    mine = initial_state.float()
    if len(mine) != len(context.begins):
        mine = _chosen(mine, context.begins)
    return (mine.mT if v_first else mine).contiguous()


def _empty_chains(context):
    return [n for n, chain in enumerate(context.chains) if not chain]


def _states_of_empty(context, starts):
    """Final states of all sequences without tokens, those of other ranks as zeros."""
    empty = _empty_chains(context)
    states = starts.new_zeros(len(empty), *starts.shape[1:])
    for n in context.empty:
        states[empty.index(n)] = starts[context.begins.index(n)]
    return states


def _final_states(context, call, gathered, behind, starts):
    if context.final_states == "all":
        final = call.states[len(context.spans):]
        if call.direction.extra_states:
            for n, state in zip(_empty_chains(context), call.extra_of(gathered)):
                final[n] = state
        return final
    final = behind.new_zeros(len(context.ends), *behind.shape[1:])
    for span in context.spans:
        if span.last:
            final[context.ends.index(span.sequence)] = behind[span.place]
    for n in context.empty:
        final[context.ends.index(n)] = starts[context.begins.index(n)]
    return final


def _joined(inputs, pieces, wanted):
    """Gradients of q to dt_bias: of tokens after each other; of parameters added up in float64, in order."""
    ordered = [pieces[first] for first in sorted(pieces)]
    for i, x in enumerate(inputs):
        if not wanted >> i & 1:
            yield None
        elif not ordered:
            yield torch.zeros_like(x)
        elif i < 5:
            rows = [piece[i] for piece in ordered]
            yield (rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)).to(x.dtype)
        else:
            yield sum(piece[i].double() for piece in ordered).view(x.shape).to(x.dtype)


def _initial_gradients(context, before, d_final, device, like, wanted, v_first):
    if not wanted:
        return None
    shape, dtype = like
    kv = (*shape[:2], shape[3], shape[2]) if v_first else shape
    d_initial = torch.zeros(kv, device=device)
    here = shape[0] == len(context.begins)
    place = lambda n: context.begins.index(n) if here else n
    for span in context.spans:
        if span.first:
            d_initial[place(span.sequence)] = before[span.place]
    for n in context.empty:
        d_initial[place(n)] = d_final[n if context.final_states == "all" else context.ends.index(n)]
    return (d_initial.mT if v_first else d_initial).to(dtype)
