# SPDX-License-Identifier: Apache-2.0
"""What context_parallel of a call may be, and its numbers in kda.h. No torch here: arrays and JAX have it too."""
from __future__ import annotations

_MOST_SEGMENTS = 1 << 20
_POLICIES = {"auto": 0, "off": 1, "flashkda": 3, "cula": 4}
_NAMES = ", ".join(map(repr, _POLICIES))
_FIXED = 2


def policy_of(cut: object) -> tuple[int, int]:
    """(policy, number of segments). TypeError and ValueError name context_parallel."""
    if isinstance(cut, bool) or not isinstance(cut, (str, int)):
        raise TypeError(f"context_parallel must be {_NAMES} or a number of segments, got {cut!r}")
    if isinstance(cut, str) and cut not in _POLICIES or isinstance(cut, int) and not 1 <= cut <= _MOST_SEGMENTS:
        raise ValueError(f"context_parallel must be {_NAMES} or 1 to {_MOST_SEGMENTS} segments, got {cut!r}")
    return (_POLICIES[cut], 0) if isinstance(cut, str) else (_FIXED, cut)


def expect_invariant(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"batch_invariant must be a bool, got {value!r}")
    return value
