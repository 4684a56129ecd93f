# SPDX-License-Identifier: Apache-2.0
"""Triton configs for FLA's kernels, tuned once and kept under bench/peers/fla_configs/<GPU>/<heads>/.

FLA tunes every kernel anew for each head count, type and layout, minutes each. Here they are tuned at
T = 8192 with 64 and with 16 heads (FLA's own search, every config), saved in the format of FLA's own
config cache (FLA_CONFIG_DIR), and taken from there for every other shape: the nearer head count.
The kernels of its context parallelism have no such cache (bench/many_cards.py --tune): they are kept
beside, and a kernel that has a config there is left no other one.
"""
import json
import os
import pathlib
import re

os.environ["FLA_CACHE_MODE"] = "fuzzy"

import fla_untuned
import torch
import triton

ROOT = pathlib.Path(__file__).resolve().parent / "fla_configs"


def directory(heads):
    gpu = re.sub(r"[^0-9A-Za-z]+", "_", torch.cuda.get_device_name()).strip("_")
    return ROOT / gpu / ("h64" if heads >= 32 else "h16")


def use(heads):
    """FLA's calls from now on take the configs for this many heads; a kernel without one is tuned."""
    from fla.ops.utils import cache
    os.environ["FLA_CONFIG_DIR"] = str(directory(heads))
    # Any entry of a kernel matches: one config a kernel and head count.
    cache.AutotuneKey.fuzzy_matches = lambda self, entry: True
    for tuner in _tuners():
        tuner.cache.clear()
        if not isinstance(tuner, cache.CachedAutotuner):
            _take_kept(tuner, directory(heads) / f"{_name_of(tuner)}.json")


def _take_kept(tuner, path):
    """Leaves a kernel without FLA's cache the config that is kept, or all of them where there is none."""
    tuner.every_config = getattr(tuner, "every_config", tuner.configs)
    tuner.configs = tuner.every_config
    if path.exists():
        (entry,) = json.loads(path.read_text())["autotune_entries"].values()
        config = entry["config"]
        tuner.configs = [triton.Config(config["kwargs"], num_warps=config["num_warps"],
                                       num_stages=config["num_stages"], num_ctas=config["num_ctas"])]


def save(heads):
    """Adds what was tuned since use() to the configs for this many heads."""
    from fla.ops.utils import cache
    target = directory(heads)
    target.mkdir(parents=True, exist_ok=True)
    for tuner in _tuners():
        path = target / f"{_name_of(tuner)}.json"
        if path.exists() or not tuner.cache:
            continue
        key, config = next(iter(tuner.cache.items()))
        entry = {"autotune_key": list(key),
                 "config": {"kwargs": config.kwargs, "num_warps": config.num_warps,
                            "num_stages": config.num_stages, "num_ctas": config.num_ctas}}
        path.write_text(json.dumps(
            {"kernel_name": _name_of(tuner), "triton_version": triton.__version__,
             "autotune_entries": {cache.AutotuneKey.key_hash(key): entry}}, indent=1) + "\n")
    cache.load_config_file.cache_clear()


def take_one():
    """Leaves every kernel one config to try: the first with four warps and two stages, if there is one."""
    for tuner in _tuners():
        tuner.configs = [c for c in tuner.configs if c.num_warps == 4 and c.num_stages == 2][:1] or tuner.configs[:1]


def take_part(part, parts):
    """Leaves every kernel only its share of the configs to try: a worker that compiles them ahead."""
    for tuner in _tuners():
        share = tuner.configs[part::parts]
        # Two at least: a search passes over one that does not fit the card.
        tuner.configs = share + [c for c in tuner.configs[:1] if c not in share]


def _name_of(tuner):
    return getattr(tuner, "kernel_name", None) or tuner.fn.fn.__name__


def _tuners():
    """FLA's, and of those without its cache the ones of context parallelism."""
    from fla.ops.utils.cache import CachedAutotuner
    return [tuner for tuner in fla_untuned.tuners() if isinstance(tuner, CachedAutotuner)
            or getattr(tuner.fn, "__module__", "").startswith("fla.ops.cp.")]
