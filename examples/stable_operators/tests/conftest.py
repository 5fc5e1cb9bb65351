import pytest
import torch

# On openreg each test runs in every launch mode; "async" is how hardware behaves.
DEVICES = ["cpu", "openreg inline", "openreg async", "openreg sync", "cuda"]


def is_there(name):
    return name == "cpu" or (hasattr(torch, name) and getattr(torch, name).is_available())


@pytest.fixture(params=[each for each in DEVICES if is_there(each.split()[0])])
def device(request):
    name, _, mode = request.param.partition(" ")
    if not mode:
        yield name
        return
    before = torch.openreg.get_launch_mode()
    torch.openreg.set_launch_mode(mode)
    yield name
    torch.openreg.synchronize()
    torch.openreg.set_launch_mode(before)
