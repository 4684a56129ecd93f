# SPDX-License-Identifier: Apache-2.0
import sys

import pytest
import torch
from common import TOLERANCE, distance, make, reference

from libkda.compat import flash_kda


@pytest.mark.parametrize("packed", [False, True])
def test_fwd(device, packed):
    lengths = [50, 81] if packed else None
    x, parameters, state = make(B=1 if packed else 2, dtype=torch.bfloat16, device=device, gates="bounded", N=2)
    out, final = torch.full_like(x["v"], float("nan")), torch.full_like(state.mT, float("nan")).contiguous()
    cu = torch.tensor([0, 50, 131], device=device) if packed else None
    flash_kda.fwd(**x, scale=0.1, out=out, **parameters, lower_bound=-5.0, initial_state=state.mT.contiguous(),
                  final_state=final, cu_seqlens=cu)
    for n in range(2):
        part = {name: t[:, sum(lengths[:n]):sum(lengths[:n + 1])] if packed else t[n:n + 1] for name, t in x.items()}
        expected = reference(part, parameters, state[n:n + 1], "bounded", -5.0, 0.1)
        got = out[:, sum(lengths[:n]):sum(lengths[:n + 1])] if packed else out[n:n + 1]
        assert distance(got, expected[0]) < TOLERANCE[device, torch.bfloat16]
        assert distance(final[n:n + 1].mT, expected[1]) < TOLERANCE[device, torch.bfloat16]
    assert flash_kda.get_workspace_size(131, 2) == 0


def test_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "flash_kda", raising=False)
    flash_kda.install()
    import flash_kda as found
    assert found is flash_kda
    monkeypatch.delitem(sys.modules, "flash_kda")
