# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter where there is no GPU; TRITON_INTERPRET=1 is in the environment before triton is imported."""
from triton import language
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver


class NoGpu:
    """What triton asks its driver even where it only interprets."""

    def get_current_target(self):
        return GPUTarget("cuda", 80, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_benchmarker(self):
        return None


def tune_nothing(run=Autotuner.run):
    def first_only(self, *args, **kwargs):
        self.configs = self.configs[:1]
        return run(self, *args, **kwargs)
    Autotuner.run = first_only


def looked_up_late(name):
    return lambda *args, **kwargs: getattr(language, name)(*args, **kwargs)


def prepare(modules=()):
    """modules: with kernels that have names of their own for functions of triton's language, which the interpreter
    replaces where they are."""
    driver.set_active(NoGpu())
    tune_nothing()
    for module in modules:
        for alias, function in list(vars(module).items()):
            if getattr(function, "__triton_builtin__", False):
                setattr(module, alias, looked_up_late(function.__name__))
