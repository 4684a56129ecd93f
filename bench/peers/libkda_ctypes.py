# SPDX-License-Identifier: Apache-2.0
"""libkda through its C ABI with ctypes and torch tensors: what the benchmark scripts share.

    lib = Library("build/libkda_c.so")
    call = lib.forward(q, k, v, g, beta, o, final_state=s, gate="bounded", A_log=a, ...)
    call()                      # runs on torch's current stream; plan and workspace are made once
"""
import ctypes
import json
import pathlib
import sys

import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "python"))
from libkda._binding.library import I64, PTR, GradientTensors, PlanOptions, Problem  # noqa: E402

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int32: 3, torch.int64: 4}
GATES = {"log": 0, "softplus": 1, "bounded": 2}
BETAS = {"plain": 0, "sigmoid": 1, "sigmoid2": 2}
INTRA_FORMS = {"auto": 0, "tensor": 1, "token": 2}
POLICIES = {"auto": 0, "off": 1, "flashkda": 3, "cula": 4}


def results_like(t, make=torch.empty_like):
    """Memory for a gradient of t. That of one gate a head, whose last stride is 0, is one a head too."""
    return make(t) if t.stride(-1) else make(t[..., 0])[..., None].expand_as(t)


class Library:
    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path))
        self.lib.kda_last_error.restype = ctypes.c_char_p
        self.lib.kda_plan_json.restype = ctypes.c_char_p
        self.lib.kda_plan_workspace_bytes.restype = ctypes.c_size_t
        self.lib.kda_backward_plan_workspace_bytes.restype = ctypes.c_size_t
        self.lib.kda_stage_buffers.restype = ctypes.c_char_p
        self.buffers = self.lib.kda_stage_buffers().decode().split()

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.kda_last_error().decode())

    def tensor(self, target, x):
        target.data, target.dtype, target.alignment = x.data_ptr(), DTYPES[x.dtype], 0
        for i in range(x.dim()):
            target.strides[i] = x.stride(i)

    def state(self, target, x):
        self.tensor(target.tensor, x)
        target.num_slots, target.present = x.shape[0], 1

    def options(self, x, policy="auto", threads=0, backend=None, intra_form="auto"):
        options = PlanOptions()
        self.lib.kda_plan_options_init(ctypes.byref(options))
        if x.is_cuda:
            self.check(self.lib.kda_plan_options_cuda(ctypes.byref(options), x.device.index or 0))
        options.num_threads = threads
        options.intra_form = INTRA_FORMS[intra_form]
        if backend:
            options.backend = backend.encode()
        if isinstance(policy, int):
            options.context_parallel, options.num_segments = 2, policy
        else:
            options.context_parallel = POLICIES[policy]
        return options

    def problem(self, q, k, v, g, beta, o, gate="log", beta_mode="plain", l2norm=False, A_log=None,
                dt_bias=None, lower_bound=-5.0, seq_lens=None, initial_state=None,
                final_state=None, decode=False):
        p = Problem()
        self.lib.kda_problem_init_size(ctypes.byref(p), ctypes.c_size_t(ctypes.sizeof(Problem)))
        p.operation = int(decode)
        p.batch, p.num_tokens, p.num_heads, p.key_dim = q.shape
        p.num_value_heads, p.value_dim = v.shape[2], v.shape[3]
        p.num_sequences = len(seq_lens) if seq_lens else p.batch
        p.has_cu_seqlens = int(bool(seq_lens))
        p.cu_seqlens_dtype = 4
        p.gate_mode, p.beta_mode, p.qk_l2norm = GATES[gate], BETAS[beta_mode], int(l2norm)
        p.lower_bound = lower_bound
        for name, x in dict(q=q, k=k, v=v, g=g, beta=beta, o=o, A_log=A_log,
                            dt_bias=dt_bias).items():
            if x is not None:
                self.tensor(getattr(p, name), x)
        if initial_state is not None:
            self.state(p.initial_state, initial_state)
        if final_state is not None:
            self.state(p.final_state, final_state)
        return p

    def prepare(self, problem, options, seq_lens=None, keep=()):
        """A callable that runs the problem; its plan and workspace are made once."""
        cu = None
        if seq_lens:
            ends = [0]
            for length in seq_lens:
                ends.append(ends[-1] + length)
            cu = (I64 * len(ends))(*ends)
        plan = PTR()
        self.check(self.lib.kda_plan_create(ctypes.byref(problem), cu, ctypes.byref(options),
                                            ctypes.byref(plan)))
        size = self.lib.kda_plan_workspace_bytes(plan)
        cuda = options.device_kind == 1
        memory = torch.empty(size + 64, dtype=torch.uint8, device="cuda" if cuda else "cpu")
        start = PTR((memory.data_ptr() + 63) // 64 * 64)
        run, arguments = self.lib.kda_run, (plan, ctypes.byref(problem), start, ctypes.c_size_t(size))

        def call(kept_alive=(memory, keep)):
            if cuda:
                problem.stream = torch.cuda.current_stream().cuda_stream
            self.check(run(*arguments))

        call.plan = json.loads(self.lib.kda_plan_json(plan).decode())
        call.handle, call.problem, call.memory = plan, problem, arguments[2:]
        call.destroy = lambda: self.lib.kda_plan_destroy(plan)
        return call

    def forward(self, q, k, v, g, beta, o, policy="auto", threads=0, backend=None,
                intra_form="auto", **rest):
        problem = self.problem(q, k, v, g, beta, o, **rest)
        return self.prepare(problem, self.options(q, policy, threads, backend, intra_form),
                            rest.get("seq_lens"), (q, k, v, g, beta, o, rest))

    def training(self, x, d_o, backend=None, **rest):
        """A callable for a forward of the tensors `x` (q, k, v, g, beta, A_log, dt_bias) and its backward from d_o. It
        returns o and the gradients by name, and takes memory for them and for its workspaces from torch each time.
        Its member `backward` is the second half alone, into memory that it has."""
        rows = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
        results = {f"d{n}": t for n, t in x.items()}
        parameters = {n: x.get(n) for n in ("A_log", "dt_bias")}
        problem = self.problem(**rows, o=torch.empty_like(x["v"]), **parameters, **rest)
        options = self.options(x["q"], backend=backend)
        call = self.prepare(problem, options, rest.get("seq_lens"), (x, d_o))
        call.memory = None  # a workspace a call

        def pointers(outputs):
            gradients = GradientTensors()
            gradients.struct_size = ctypes.sizeof(gradients)
            for name, t in dict(outputs, d_o=d_o).items():
                self.tensor(getattr(gradients, name), t)
            return gradients

        backward = PTR()
        shapes = pointers({n: results_like(t) for n, t in results.items()})
        self.check(self.lib.kda_backward_plan_create(call.handle, ctypes.byref(shapes), ctypes.byref(options),
                                                     ctypes.byref(backward)))
        forward_bytes = self.lib.kda_plan_workspace_bytes(call.handle)
        backward_bytes = self.lib.kda_backward_plan_workspace_bytes(backward)

        def workspace(size):
            memory = torch.empty(size + 64, dtype=torch.uint8, device=d_o.device)
            return memory, PTR((memory.data_ptr() + 63) // 64 * 64), ctypes.c_size_t(size)

        def on_stream():
            if d_o.is_cuda:
                problem.stream = torch.cuda.current_stream().cuda_stream

        def forward():
            o = torch.empty_like(x["v"])
            self.tensor(problem.o, o)
            on_stream()
            _, *room = workspace(forward_bytes)
            self.check(self.lib.kda_run(call.handle, ctypes.byref(problem), *room))
            return o

        def backward_into(gradients, room):
            on_stream()
            self.check(self.lib.kda_backward(backward, ctypes.byref(problem), ctypes.byref(gradients), *room))

        def run():
            o = forward()
            outputs = {n: results_like(t) for n, t in results.items()}
            _, *room = workspace(backward_bytes)
            backward_into(pointers(outputs), room)
            return dict(outputs, o=o)

        def backward_alone():
            """A callable that returns the gradients, always in the same tensors."""
            unwritten = lambda t: torch.full_like(t, float("nan"))
            outputs = {n: results_like(t, unwritten) for n, t in results.items()}
            memory, *room = workspace(backward_bytes)
            gradients = pointers(outputs)

            def again(kept_alive=memory):
                backward_into(gradients, room)
                return outputs
            return again

        def destroy():
            self.lib.kda_backward_plan_destroy(backward)
            call.destroy()

        run.destroy, run.workspace_bytes, run.backward = destroy, backward_bytes, backward_alone
        return run

    def stages(self, call, without=()):
        """Callables of the chunk stages of a forward plan, on buffers of their own."""
        size_t, count = ctypes.c_size_t, len(self.buffers)
        sizes = (size_t * (1 + count))(ctypes.sizeof(size_t) * (1 + count))  # kda_stage_bytes
        self.check(self.lib.kda_stage_sizes(call.handle, ctypes.byref(sizes)))
        bytes_of = dict(zip(self.buffers, sizes[1:]))
        buffers = {n: torch.empty(max(size, 16), dtype=torch.uint8, device="cuda")
                   for n, size in bytes_of.items()}
        found = {}
        for name in ("chunk_intra", "recompute_w_u", "chunk_delta_h", "chunk_o"):
            for bare in (False, True):
                stages = (PTR * (1 + count))(ctypes.sizeof(PTR) * (1 + count), *(  # kda_stages
                    None if bare and n in ("kg", "qg") else buffers[n].data_ptr() for n in self.buffers))
                function = getattr(self.lib, "kda_" + name)

                def run(function=function, stages=stages, kept_alive=(buffers, call)):
                    call.problem.stream = torch.cuda.current_stream().cuda_stream
                    self.check(function(call.handle, ctypes.byref(call.problem),
                                        ctypes.byref(stages), *call.memory))

                found[name + ("_bare" if bare else "")] = run
        found["sizes"] = bytes_of
        return found
