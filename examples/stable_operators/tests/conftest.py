import pytest
import torch


def is_there(name):
    return name == "cpu" or (hasattr(torch, name) and getattr(torch, name).is_available())


def on(*names):
    """A fixture that is each of the devices that are there; on openreg, in a launch mode."""

    @pytest.fixture(params=[each for each in names if is_there(each.split()[0])])
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

    return device


# A long test runs in one launch mode, "async", which is how hardware behaves.
device = on("cpu", "openreg async", "cuda")
device_in_every_mode = on("cpu", "openreg inline", "openreg async", "openreg sync", "cuda")
