"""PyTorch's module database: forward, backward and gradients of every parameter, equal to the CPU's."""

import copy

import pytest
import torch
from torch.testing import assert_close
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves, tree_map

# Modules whose results differ from run to run on one device are run in evaluation mode only.
RANDOM = {"FractionalMaxPool2d", "FractionalMaxPool3d"}
CASES = [
    pytest.param(info, dtype, id=f"{info.name.replace('nn.', '')}-{dtype}")
    for info in module_db
    for dtype in (torch.float32, torch.float64)
    if dtype in info.dtypes
]


def move(value, device):
    def one(t):
        if not isinstance(t, torch.Tensor):
            return t
        return t.detach().to(device).requires_grad_(t.requires_grad)

    return tree_map(one, value)


def tensors(value):
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("info,dtype", CASES)
def test_module(info, dtype, training):
    samples = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    compared = 0
    for sample in samples:
        if sample.forward_input is None:
            continue
        torch.manual_seed(0)
        host = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).to(dtype)
        if info.name.startswith("nn.Lazy"):  # see test_lazy_modules
            host(*move(sample.forward_input.args, "cpu"))
        host.train(training and host.__class__.__name__ not in RANDOM)
        device = copy.deepcopy(host).to("openreg")
        results = []
        for module, place in ((host, "cpu"), (device, "openreg")):
            torch.manual_seed(1)
            args, kwargs = move((sample.forward_input.args, sample.forward_input.kwargs), place)
            out = module(*args, **kwargs)
            assert all(t.device.type == place for t in tensors(out))
            differentiable = [t for t in tensors(out) if t.requires_grad]
            if differentiable:
                sum(t.sum() if not t.is_complex() else t.abs().sum() for t in differentiable).backward()
            results.append(
                (tensors(out), [p.grad for p in module.parameters()], [t.grad for t in tensors((args, kwargs))])
            )
        for expected, got in zip(*results, strict=True):
            for e, g in zip(expected, got, strict=True):
                assert (e is None) == (g is None)
                if e is not None:
                    assert_close(g.cpu(), e, equal_nan=True)
        compared += 1
    assert compared or not training, f"{info.name} has no sample with a forward input"


def test_lazy_modules_are_made_on_the_device():
    with torch.device("openreg"):
        module = torch.nn.LazyConv1d(4, 3)
    assert module(torch.ones(2, 3, 8, device="openreg")).shape == (2, 4, 6) and module.weight.is_openreg


def test_lazy_modules_moved_before_their_first_call_are_a_known_failure():
    """module.to() replaces the uninitialised parameter by a plain one, on every PrivateUse1 device.

    It keeps it by setting param.data, which PyTorch permits between its own devices only
    (TensorImpl::has_compatible_shallow_copy_type). When this starts to pass, let test_module move lazy modules.
    """
    module = torch.nn.LazyConv1d(4, 3).to("openreg")
    with pytest.raises(RuntimeError, match="weight should have at least three dimensions"):
        module(torch.ones(2, 3, 8, device="openreg"))
