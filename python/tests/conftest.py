# SPDX-License-Identifier: Apache-2.0
import pytest

torch = pytest.importorskip("torch")
torch.set_flush_denormal(True)  # else the references crawl where states decay

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)
