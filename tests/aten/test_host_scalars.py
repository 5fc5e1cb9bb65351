"""CPU scalars (0-dim CPU tensors) with tensors on the device: accepted where CUDA accepts them, rejected elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openreg_ops import _build
from openreg_tools.conformance import outcomes
from openreg_tools.core import opinfo
from openreg_tools.core.move import Move

pytestmark = pytest.mark.usefixtures("mode")

D = "openreg"
REFUSED = "Expected all tensors to be on the same device"


@pytest.mark.parametrize("call", [torch.addcmul, torch.addcdiv, torch.Tensor.addcmul_, torch.lerp, torch.Tensor.lerp_])
def test_two_scalars_or_one_tensor_twice(call):
    """Of the tensor that is there twice, the second time counts as seen."""
    x, scalar = torch.tensor([1.0, 2.0], device=D), torch.tensor(0.5)
    for wrong in ((x, scalar, scalar), (x, scalar, x)):
        with pytest.raises(RuntimeError, match=REFUSED):
            call(*wrong)
    assert x.tolist() == [1, 2]


def test_one_scalar_of_two():
    x, scalar = torch.tensor([1.0, 2.0], device=D), torch.tensor(2.0)
    for call in (torch.add, torch.mul, torch.pow, torch.maximum, torch.eq, torch.atan2, torch.fmod, torch.xlogy):
        assert torch.equal(call(x, scalar).cpu(), call(x.cpu(), scalar))
        assert torch.equal(call(scalar, x).cpu(), call(scalar, x.cpu()))
        with pytest.raises(RuntimeError, match="takes one CPU scalar, as on CUDA"):
            call(scalar, scalar, out=torch.empty((), dtype=call(scalar, scalar).dtype, device=D))
    assert torch.where(scalar > 1, scalar, x).tolist() == [2, 2]  # which moves every scalar
    assert torch.equal(torch._foreach_mul([x, x], [scalar, x])[0].cpu(), x.cpu() * 2)
    parameter = torch.ones(2, device=D, requires_grad=True)
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(0.1), fused=True)
    parameter.grad = torch.ones(2, device=D)
    optimizer.step()
    assert torch.allclose(parameter.detach().cpu(), torch.tensor(0.9))


def test_index_put_takes_indices_and_numbers_from_the_host(mode):
    def x():
        return torch.zeros(3, 3, device=D)

    def ones(*shape):
        return torch.ones(shape)

    for index in (torch.tensor([0, 2]), torch.tensor([0, 2], device=D)):
        y = x()
        y[index] = ones()
        assert y.index_put_((index,), ones(), accumulate=True).sum() == 12
        x()[index] = ones(1)  # Python makes this a 0-dim tensor
        for wrong in (ones(2, 3), ones(3), ones(1)):
            with pytest.raises(RuntimeError, match="index_put_impl_: Expected all tensors to be on the same device"):
                x()[index] = wrong.expand(2, 3)
            with pytest.raises(RuntimeError, match="same device"):
                x().index_put_((index,), wrong, accumulate=True)
            with pytest.raises(RuntimeError, match="same device"):
                torch.ops.aten._unsafe_index_put(x(), (index,), wrong)
    y = x()
    with pytest.raises(RuntimeError, match="same device"):
        y[y == 0] = ones(9)


@pytest.mark.parametrize("device", ["cpu", "openreg:1"])
def test_a_value_of_the_device_is_written_into_another_devices_tensor(mode, device):
    """As on CUDA, by fill_() and by indexing, and as long as it has no dimension."""
    value = torch.full((), 3.0, device="openreg:0", requires_grad=True)
    x = torch.zeros(3, device=device)
    assert x.clone().fill_(value).tolist() == [3, 3, 3] and value.dtype == torch.float32
    assert torch.zeros(2, dtype=torch.int64, device=device).fill_(value).tolist() == [3, 3]
    for index in (torch.tensor([0, 2]), torch.tensor([True, False, True]), [0, 2], slice(0, None, 2), (..., [0, 2])):
        y = x.clone()
        y[index] = value
        assert y.tolist() == [3, 0, 3] and y.device == x.device
        (gradient,) = torch.autograd.grad(y.sum(), value)
        assert gradient.device == value.device and gradient.item() == 2
    assert x.new_zeros(1).expand(3).fill_(value.detach()).tolist() == [3, 3, 3]  # a number may be written twice
    for dtype, wrong in (
        (torch.int8, 1000.0),
        (torch.int64, float("nan")),
        (torch.float32, 1e300),
        (torch.float32, 2j),
    ):
        of_it = torch.tensor(wrong, dtype=torch.complex128 if isinstance(wrong, complex) else torch.float64)
        with pytest.raises(RuntimeError, match="without overflow"):
            x.new_zeros(2, dtype=dtype).fill_(of_it.to("openreg:0"))
    y = torch.ones(3, device=device)
    assert y.index_put_((torch.tensor([1, 1]),), value.detach(), accumulate=True).tolist() == [1, 7, 1]
    for write in (
        lambda: x.fill_(value[None]),
        lambda: x.masked_fill_(x == 0, value),
        lambda: x.index_put_((torch.tensor([0, 2]),), value.detach().expand(2)),
        lambda: x.add_(value.detach()),
    ):
        with pytest.raises(RuntimeError, match=f"{REFUSED}|0-dimension"):
            write()
    assert x.tolist() == [0, 0, 0]


def test_the_host_waits_for_a_value_that_it_is_given():
    torch.openreg.set_sync_debug_mode("error")
    try:
        for device in ("cpu", "openreg:1"):
            x = torch.zeros(3, device=device)
            with pytest.raises(RuntimeError, match="synchroni"):
                x.fill_(torch.ones((), device="openreg:0"))
        torch.zeros(3, device=D).fill_(torch.ones((), device=D))  # which the host does not read
    finally:
        torch.openreg.set_sync_debug_mode("default")


def test_probabilities_elsewhere():
    p = torch.linspace(0, 1, 100).reshape(10, 10).t()
    for probabilities in (p, p[:1], p[0, 3], p.double()):
        drawn = []
        for each in (probabilities, probabilities.to(D), probabilities.to("openreg:1")):
            generator = torch.Generator(D).manual_seed(7)
            drawn.append(torch.empty(10, 10, device=D).bernoulli_(each, generator=generator).cpu())
        assert torch.equal(*drawn[:2]) and torch.equal(*drawn[1:]) and 0 < drawn[0].mean() < 1
    with pytest.raises(RuntimeError, match="p_in >= 0|to be in"):
        torch.empty(2, device=D).bernoulli_(torch.tensor([2.0, 0.5]))
        torch.openreg.synchronize()
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.empty(2).bernoulli_(torch.ones(2, device=D))


# ---- rules by argument ----

# For each operator whose tensors do not all follow one rule: which of them CUDA accepts as CPU scalars. In
# native_functions.yaml, only these have device_check: NoCheck; CUDA's kernels decide as follows.
ACCEPTED_BY_CUDA = {
    **dict.fromkeys(("addcmul", "addcmul_", "addcmul.out"), {"tensor2"}),  # cuda/PointwiseOpsKernel.cu
    **dict.fromkeys(("addcdiv", "addcdiv_", "addcdiv.out"), set()),
    **dict.fromkeys(("lerp.Tensor", "lerp_.Tensor"), {"weight"}),  # cuda/Lerp.cu
    **dict.fromkeys(("lerp.Scalar", "lerp_.Scalar"), set()),  # gpu_kernel() takes no CPU scalars
    "masked_fill_.Tensor": {"value"},  # Indexing.cpp: self and mask on one device
    "masked_fill_.Scalar": set(),
    "index_fill_.int_Tensor": {"value"},
    "index_fill_.int_Scalar": set(),
    "binary_cross_entropy": {"weight"},  # cuda/Loss.cu multiplies by it afterwards
    "mse_loss": set(),
    "smooth_l1_loss": set(),
    "where.self": {"condition", "self", "other"},  # moved to the device
    # cuda/ForeachBinaryOpScalarTensor.cu: add compares the devices of `self` and `other` if their dtypes are equal; mul
    # and div read the item() of an `other` on the CPU. For a `self` on the CPU, they compare devices too; not here, where mul
    # and div are PyTorch's composites, which are faster than kernels of ours in Python.
    "_foreach_add.Tensor": set(),
    "_foreach_add_.Tensor": set(),
    "_foreach_mul.Tensor": {"self", "other"},
    "_foreach_mul_.Tensor": {"other"},
    "_foreach_div.Tensor": {"self", "other"},
    "_foreach_div_.Tensor": {"other"},
    # ForeachUtils.h, can_use_fast_route: lists on several devices are not fast, so ForeachOpsKernels.cpp calls the
    # operator for each element, in which a TensorIterator takes one CPU scalar.
    **{f"_foreach_{name}.List": {"self", "other"} for name in ("add", "sub", "mul", "div")},
    "_foreach_pow.List": {"self", "exponent"},
    **{f"_foreach_{name}.List": set() for name in ("maximum", "minimum", "clamp_max", "clamp_min")},  # clamp checks
    **{f"_foreach_addcmul{form}": {"tensor2"} for form in (".Scalar", ".ScalarList", "_.Scalar")},
    **{f"_foreach_addcdiv{form}": set() for form in (".Scalar", ".ScalarList", "_.Scalar")},
    "_foreach_lerp.List": {"weights"},
    "_foreach_lerp.Scalar": set(),
    **{f"_fused_{name}_": set() for name in ("adam", "adamw", "sgd", "adagrad")},
    **{f"_fused_{name}_.tensor_lr": {"lr"} for name in ("adam", "adamw", "sgd", "adagrad")},
}


def arguments_of(schema):
    """Valid device arguments by name; a tensor has three elements, or none where the operator reads a number."""
    made = {}
    for argument in schema.arguments:
        kind, name = str(argument.type), argument.name
        ones = torch.ones(3, device=D)
        zero_dim = torch.ones((), device=D)
        if kind in ("Tensor", "Optional[Tensor]", "Tensor?"):
            single = name in ("lr", "value", "other", "grad_scale", "found_inf") and schema.name != "aten::where"
            made[name] = zero_dim if single else ones
            if name in ("mask", "condition"):
                made[name] = ones.bool()
            elif name == "index":
                made[name] = torch.tensor([0, 2], device=D)
            elif name == "found_inf":
                made[name] = torch.zeros((), device=D)
        elif kind == "List[Tensor]":
            made[name] = [zero_dim.clone() if name == "state_steps" else ones.clone()]
            if name == "max_exp_avg_sqs":
                made[name] = []
        elif argument.has_default_value():
            continue
        else:
            made[name] = {"int": 0, "bool": False, "number": 0.5, "float": 0.5, "List[number]": [0.5]}[
                kind.replace("Scalar", "number")
            ]
    return made


@pytest.mark.parametrize("name", ACCEPTED_BY_CUDA)
def test_each_argument_on_the_cpu(name):
    """One after the other, as a 0-dim CPU tensor: accepted, with the result of a device tensor, and refused as on CUDA."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    op(**arguments_of(op._schema))
    torch.openreg.synchronize()
    tried = set()
    for key, value in arguments_of(op._schema).items():
        if not isinstance(value[0] if isinstance(value, list) and value else value, torch.Tensor):
            continue
        several = isinstance(value, list)
        tried.add(key)
        given = value[0] if several else value
        scalar = torch.full((), 1 if given.dtype == torch.bool else 2, dtype=given.dtype)

        def call(scalar, key=key, several=several):
            arguments = {**arguments_of(op._schema), key: [scalar] if several else scalar}
            return [x.cpu() for x in tree_leaves((op(**arguments), arguments)) if isinstance(x, torch.Tensor)]

        if key in ACCEPTED_BY_CUDA[name]:
            torch.testing.assert_close(call(scalar), call(scalar.to(D)))
            continue
        with pytest.raises((RuntimeError, NotImplementedError)) as error:
            call(scalar)
            torch.openreg.synchronize()
        said = str(error.value)
        assert any(
            part in said
            for part in (
                REFUSED,
                "scalar tensor expected to be on",
                "scalar tensor is expected",
                "is on cpu",
                "written to",
            )
        ), said
        if packet.startswith("_fused"):
            devices, blamed = ("cpu and openreg:0", "grads") if key == "self" else ("openreg:0 and cpu", key)
            wrapper = f"(when checking argument for argument {blamed} in method wrapper_openreg__{packet})"
            assert said.startswith(f"{REFUSED}, but found at least two devices, {devices}! {wrapper}")
    assert tried >= ACCEPTED_BY_CUDA[name] and tried


def test_foreach_add_of_a_cpu_scalar_in_mixed_dtypes():
    """CUDA refuses the number only if one kernel adds all tensors, which have one dtype, and the number has it too."""
    add, number, x = torch.ops.aten._foreach_add.Tensor, torch.tensor(1.0), torch.ones(2, 2, device=D)
    assert add([x, x], number.double())[0].dtype == torch.float32
    assert add([x, x.double()], number)[1].dtype == torch.float64


# Operators that take host tensors by design, on CUDA too.
BY_DESIGN = {"aten::_ctc_loss", "aten::index", "aten::_index_put_impl_"}


class Substitutes(TorchDispatchMode):
    """Replaces each tensor of a device call by a CPU scalar, for the calls that CUDA checks."""

    def __init__(self):
        super().__init__()
        self.tried, self.accepted = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        value = func(*args, **kwargs)
        name = func._schema.name
        tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
        if _build.HOST_SCALARS.get(name) != 0 or len(tensors) < 2 or func in self.tried or name in BY_DESIGN:
            return value
        if func._schema.is_mutable or not all(args[i].is_openreg and args[i].layout == torch.strided for i in tensors):
            return value
        self.tried.add(func)
        for i in tensors:
            changed = [torch.ones((), dtype=a.dtype) if k == i else a for k, a in enumerate(args)]
            try:
                func(*changed, **kwargs)
                self.accepted.append((str(func), i))
            except Exception as error:
                if "same device" not in str(error) and "on cpu" not in str(error):
                    self.accepted.append((str(func), i, str(error)[:90]))
        return value

    @classmethod
    def _should_skip_dynamo(cls):
        return False


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["inline"], indirect=True)
def test_operators_that_cuda_checks_take_none(mode):
    """Operators refuse the scalars that CUDA refuses; tried are those that the forward of every other OpInfo calls."""
    substitutes = Substitutes()
    for op in [*opinfo.database().values()][::2]:
        if not opinfo.dtypes_of(op):
            continue
        sample = next(iter(opinfo.samples(op, getattr(torch, opinfo.dtypes_of(op)[0]), False, 1)), None)
        if sample is None:
            continue
        move = Move(D)
        with substitutes, torch.no_grad():
            outcomes.run(lambda _, op=op, sample=sample, move=move: op(move(sample.input), *move(tuple(sample.args)), **move(sample.kwargs)), "cpu")  # fmt: skip
    assert len(substitutes.tried) > 20, len(substitutes.tried)
    assert not substitutes.accepted, substitutes.accepted
