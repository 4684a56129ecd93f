# SPDX-License-Identifier: Apache-2.0
"""What the plugins for engines have in common: functions that take the places of an engine's own, in its modules that
are loaded and in those that it loads later."""
from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Callable

from .plugin import Plugin


class Places:
    """Where a plugin's functions go: {module: {name, or class and name: (part, function)}}. A function has the
    signature of the engine's and returns no None; what it refuses is the engine's call, with arguments as `as_host`
    makes them. An engine loads its models late, and importing them for it could change what they find: a module is
    changed when it has been loaded. `after`: {module: what is called with it then}."""

    def __init__(self, plugin: Plugin, sites: dict[str, dict[str, tuple[str, Callable]]],
                 as_host: Callable = lambda x: x, after: dict[str, Callable] | None = None):
        self.plugin, self.sites, self.as_host, self.after = plugin, sites, as_host, after or {}
        self.taken: list[tuple[object, str, object, object]] = []  # place, name, what was there, libkda's

    def enable(self) -> None:
        """Serve the engine's calls in this process, in modules that are loaded and in those that come later."""
        if self.plugin.enabled:
            return
        self.plugin.enabled = True
        sys.meta_path.insert(0, self)
        for name in self.sites:
            if name in sys.modules:
                self.replace(sys.modules[name])

    def disable(self) -> None:
        """Put the engine's own functions back until enable()."""
        self.plugin.enabled = False
        self.plugin.paths.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for place, name, original, ours in self.taken:
            if getattr(place, name) is ours:  # not somebody else's, in front of ours
                setattr(place, name, original)
        self.taken.clear()

    def original(self, place: object, name: str) -> Callable:
        """What was there before libkda's function; of a class, or of one that it is made from."""
        bases = getattr(place, "__mro__", (place,))
        return next(original for where, known, original, _ in self.taken if where in bases and known == name)

    def names(self) -> list[str]:
        """The names in the engine's modules where libkda's functions are now."""
        return [f"{place.__module__}.{place.__name__}.{name}" if isinstance(place, type) else
                f"{place.__name__}.{name}" for place, name, *_ in self.taken]

    def replace(self, module) -> None:
        for path, (part, function) in self.sites[module.__name__].items():
            owner, _, name = path.rpartition(".")
            place = getattr(module, owner, None) if owner else module
            original = getattr(place, name, None)
            if original is not None:  # versions of an engine differ in what they have
                ours = self.instead_of(original, part, function)
                setattr(place, name, ours)
                self.taken.append((place, name, original, ours))
        if module.__name__ in self.after:
            self.after[module.__name__](module)

    def instead_of(self, original, part, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            result = self.plugin.attempt(function.__name__, part, function, *args, **kwargs)
            if result is not None:
                return result
            return original(*map(self.as_host, args), **{name: self.as_host(x) for name, x in kwargs.items()})

        return call

    def find_spec(self, name, path=None, target=None):
        """Of a module that is about to be loaded, as importlib asks."""
        if name not in self.sites:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            if self.plugin.enabled:
                self.replace(module)

        spec.loader.exec_module = exec_module
        return spec
