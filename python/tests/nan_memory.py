# SPDX-License-Identifier: Apache-2.0
"""Runs tests with memory in which nobody has written anything but NaN.

    python3 python/tests/nan_memory.py COMMAND...      as python3 -m pytest python/tests, on a CPU or a GPU

Outputs, gradients and workspaces are full of NaN before a kernel runs (nan_memory.c; torch.empty and its kin on a GPU:
here). Processes that tests start inherit this. Where conftest.py finds it, it also looks at the tensors of every
operator of libkda: a NaN that comes out although nothing that went in was infinite or NaN is an error, also in rows
that no test looks at (but where numbers overflow). --library FILE is where the library is built, by default beside
other temporary files. With --tensors malloc is as always, for programs that do not bear it: tensors are filled alone.
"""
import ctypes
import functools
import os
import pathlib
import subprocess
import sys
import tempfile

SWITCH = "KDA_NAN_MEMORY"
SOURCE = pathlib.Path(__file__).with_name("nan_memory.c")


def build(library):
    """The library to preload. Another process may be at it too."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = pathlib.Path(folder) / library.name
        compiler = [os.environ.get("CC", "cc"), "-O2", "-fPIC", "-shared", "-fno-builtin-malloc"]
        subprocess.run([*compiler, "-o", made, SOURCE, "-ldl"], check=True)
        os.replace(made, library)


def main(arguments):
    library = pathlib.Path(tempfile.gettempdir()) / f"kda_nan_memory_{os.getuid()}.so"
    what = "1"
    if arguments[:1] == ["--library"]:
        library, arguments = pathlib.Path(arguments[1]).absolute(), arguments[2:]
    if arguments[:1] == ["--tensors"]:
        what, arguments = "tensors", arguments[1:]
    if not arguments:
        raise SystemExit(__doc__)
    build(library)
    preloaded = [str(library), *filter(None, [os.environ.get("LD_PRELOAD")])]
    os.environ |= {"LD_PRELOAD": ":".join(preloaded), SWITCH: what}
    os.execvp(arguments[0], arguments)


def is_on():
    return os.environ.get(SWITCH) in ("1", "tensors")


def write_evidence(path, binaries, stats, arguments):
    """What a run of pytest showed; `binaries`: the build of the package, whose kernels it speaks for."""
    import torch
    sys.path.append(str(SOURCE.parent.parent.parent / "bench" / "report"))
    import evidence
    report_only = ("--nan-json", "--binaries")  # with their values, which follow or stand behind a "="
    given = [argument for before, argument in zip(["", *arguments], arguments)
             if not argument.startswith(report_only) and before not in report_only]
    command = " ".join(["python3 python/tests/nan_memory.py python3 -m pytest", *given])
    report = evidence.header(binaries, "gpu_nan_memory", command, list(evidence.FAMILIES))
    counts = {outcome: len(stats.get(outcome, ())) for outcome in ("passed", "failed", "error", "skipped")}
    failed = [x.nodeid for outcome in ("failed", "error") for x in stats.get(outcome, ())]
    evidence.write(path, report | {"torch": torch.__version__, **counts, "failures": failed,
                                   "tensors_filled": tensors_on_a_gpu(),
                                   "skipped_names": [x.nodeid for x in stats.get("skipped", ())]})


FILLED_BY_WORKERS = []  # of pytest-xdist


def tensors_on_a_gpu():
    """How many tensors of libkda's operators have been filled there."""
    count = ctypes.CDLL(None).kda_nan_memory_tensors
    count.restype = ctypes.c_int64
    return count() + sum(FILLED_BY_WORKERS)


def watch():
    """Makes torch.empty and its kin fill what they make on a GPU, and looks at what operators of libkda return."""
    import torch
    if not torch.empty(1000).isnan().all():
        raise RuntimeError(f"{SWITCH} is set, but memory is as always: start with python3 {__file__}")

    def fill(x):
        if type(x) is torch.Tensor and x.is_cuda and not torch.compiler.is_compiling():
            torch.Tensor.fill_(empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()), 0xff)
        return x

    def filling(make):
        @functools.wraps(make)
        def made(*args, **kwargs):
            return fill(make(*args, **kwargs))
        return made

    empty = torch.empty
    with torch.device("cpu"):  # as a context it serves the functions that it finds at its first use
        torch.empty(0)
    if torch.cuda.is_available():  # torch.compile, too, knows what it finds at its first use
        torch.compile(lambda: torch.empty(0).new_empty(0), backend="eager")()
    for owner, names in ((torch, ("empty", "empty_like", "empty_strided", "empty_permuted")),
                         (torch.Tensor, ("new_empty", "new_empty_strided"))):
        if torch.cuda.is_available():
            for name in names:
                setattr(owner, name, filling(getattr(owner, name)))
    from libkda import ops
    from libkda._binding import layer_ops
    from libkda.context_parallel import maps
    for module in (ops, layer_ops, maps):
        for name, value in list(vars(module).items()):
            if not isinstance(value, torch._ops.OpOverload) or value.namespace != "libkda":
                continue
            if not name.endswith("_begin"):  # the other half writes what these return
                setattr(module, name, Watched(value))


POOLS = ("states", "conv_state", "state")  # read and written
PLACES = ("drafts", "checkpoints")  # of which some rows are nobody's


class Watched:
    """An operator of libkda that raises AssertionError where a NaN comes out of what had none."""

    def __init__(self, operator):
        self.operator = operator
        self.arguments = operator._schema.arguments

    def __getattr__(self, name):
        return getattr(self.operator, name)

    def __hash__(self):
        return hash(self.operator)

    def __eq__(self, other):
        return self.operator == (other.operator if isinstance(other, Watched) else other)

    def __call__(self, *args, **kwargs):
        import torch
        if torch.compiler.is_compiling() or kwargs or not _can_be_read(args):
            return self.operator(*args, **kwargs)
        named = {argument.name: x for argument, x in zip(self.arguments, args)}
        written = [argument.name for argument in self.arguments if argument.alias_info and argument.name in named]
        # NaN that pools hold before the call: they are read too, all but what others own.
        before = {name: named[name].isnan() for name in written if name in POOLS and is_float(named[name])}
        result = self.operator(*args)
        returned = result if isinstance(result, tuple) else (result,)
        found = [(f"result {i}", x, None) for i, x in enumerate(returned)]
        found += [(name, named[name], before.get(name)) for name in written
                  if name not in PLACES and not (name == "o" and self.leaves_rows(named))]
        # Keys that no norm bounds may make states that overflow, to Inf first and then to NaN.
        if any(bool((x.abs() > 1e30).any()) for _, x, _ in found if is_float(x) and not x.is_meta):
            return result
        for name, x, old in found:
            nan = x.isnan() if is_float(x) else None
            nan = nan & ~old if nan is not None and old is not None else nan
            if nan is not None and nan.any() and self.read_finite(named, written, before):
                raise AssertionError(f"{self.operator._schema.name}: {name} {list(x.shape)} has {int(nan.sum())} NaN, "
                                     f"the first at {nan.nonzero()[0].tolist()}, though nothing that it reads has one")
        return result

    def read_finite(self, named, written, before):
        inputs = [x for name, x in named.items() if name not in written]
        return all(x.isfinite().all() for x in inputs if is_float(x)) and not any(x.any() for x in before.values())

    def leaves_rows(self, named):
        """Whether rows of o stay as they were where a sequence is skipped."""
        return named.get("decode") and "zero_skipped" in named and not named["zero_skipped"] and not named["first_slot"]


def _can_be_read(args):
    """Whether these are plain tensors, and no graph is captured, whose kernels have not run."""
    import torch
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if any(type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_meta or
           torch._C._functorch.is_functorch_wrapped_tensor(x) for x in tensors):
        return False
    return not (any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing())


def is_float(x):
    """Of a tensor that holds numbers: what tests of refusals give may have no memory."""
    import torch
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.numel() == 0 or x._is_zerotensor():
        return False
    last = x.storage_offset() + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.untyped_storage().nbytes() >= (last + 1) * x.element_size()


if __name__ == "__main__":
    main(sys.argv[1:])
