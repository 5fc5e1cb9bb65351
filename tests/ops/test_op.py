"""meta/op.py: the functions that `op.operator` makes."""

import inspect
import itertools
import pickle
from types import FunctionType

import pytest
import torch
from kit import NAME
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import openreg_ops
from openreg_ops import _C
from openreg_ops.meta import op

every_operator = pytest.mark.parametrize("name", sorted(op.OPERATORS))


@every_operator
def test_function_has_the_arguments_of_the_schema(name):
    function, packet = op.OPERATORS[name], getattr(torch.ops.openreg, name)
    parameters = inspect.signature(function).parameters
    for overload in packet.overloads():
        arguments = getattr(packet, overload)._schema.arguments
        assert [each.name for each in arguments] == [each for each in parameters if each in {a.name for a in arguments}]
        for argument in arguments:
            parameter = parameters[argument.name]
            assert argument.kwarg_only == (parameter.kind is inspect.Parameter.KEYWORD_ONLY)
            if argument.has_default_value():
                default = parameter.default
                assert (list(default) if isinstance(default, tuple) else default) == argument.default_value
            elif overload == "default":
                assert parameter.default is inspect.Parameter.empty


@every_operator
def test_function_is_a_plain_one(name):
    function = getattr(openreg_ops, name)
    assert isinstance(function, FunctionType) and function.__name__ == name
    assert pickle.loads(pickle.dumps(function)) is function
    assert inspect.getdoc(function) and "return" in function.__annotations__
    source = inspect.getsourcefile(inspect.unwrap(function))
    assert source == inspect.getsourcefile(inspect.getmodule(function))
    assert f"def {name}(" in inspect.getsource(function)


@every_operator
def test_scripts_call_the_operator(name):
    """TorchScript calls the operator, where it would compile another function's body."""
    function, arguments = op.OPERATORS[name], getattr(torch.ops.openreg, name).default._schema.arguments  # noqa: F841 -- the script uses it
    takes = ", ".join(f"{each.name}: {each.type.annotation_str}" for each in arguments)
    given = ", ".join(f"{each.name}={each.name}" for each in arguments)
    unit = torch.jit.CompilationUnit(f"def call({takes}):\n    return function({given})\n")
    assert f"openreg::{name}" in {node.kind() for node in unit.call.graph.nodes()}


def test_reference_is_the_mathematics_behind_the_checks():
    x, weight = torch.randn(3, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    y, rstd = openreg_ops.rms_norm.reference(x, weight)  # with eps by default
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, [4], eps=1e-6))
    with pytest.raises(RuntimeError, match=r"^rms_norm: expected weight of shape \[4\]"):
        openreg_ops.rms_norm.reference(x, weight[:3])


@every_operator
def test_kernel_fake_and_reference_have_one_check(name):
    """In C++; the operators that give their argument back take any."""
    any_tensor = {"scale_gradient", "custom_autograd_fn_aliasing", "custom_autograd_fn_returns_self"}
    assert (_C.check_of(name) is None) == (name in any_tensor)


def test_check_leaves_no_trace():
    """It is not an operator: modes, autograd and profiles do not see it, and it does not use the device."""
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **kwargs or {})

    x, weight = torch.randn(3, 4, device=NAME, requires_grad=True), torch.ones(4, device=NAME)
    launches = _C.launch_count()
    with profile(activities=[ProfilerActivity.CPU]) as profiled, Mode():
        assert _C.check_of("rms_norm")(x, weight, 1e-6) is None
    assert not seen and _C.launch_count() == launches
    assert not [event.name for event in profiled.events() if "::" in event.name]


def test_check_asserts_of_sizes_that_are_not_known():
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        gate, up = (torch.empty(environment.create_unbacked_symint(), 4, device=NAME) for _ in range(2))
        assert torch.ops.openreg.swiglu(gate, up).shape[1] == 4
        with pytest.raises(
            RuntimeError, match=r"^swiglu: expected up of shape \[u\d, 4\], the same as gate, but got \[u\d, 5\]"
        ):
            torch.ops.openreg.swiglu(gate, torch.empty(environment.create_unbacked_symint(), 5, device=NAME))
    asserted = {str(each.expr) for group in environment.deferred_runtime_asserts.values() for each in group}
    assert asserted & {"Eq(u0, u1)", "Eq(u1, u0)"}


def test_check_reads_what_it_is_given():
    """None for a list or a tensor, a number or a tensor for lr, too few arguments."""
    x, weights, sizes = torch.randn(3, 4), [torch.randn(2, 4)], torch.tensor([3])
    check = _C.check_of("grouped_linear")
    check(x, weights, None, sizes)
    check(x, tuple(weights), [torch.randn(2)], sizes)
    with pytest.raises(RuntimeError, match="^grouped_linear: expected x to be a tensor, but got None"):
        check(None, weights, None, sizes)
    with pytest.raises(
        RuntimeError, match="^grouped_linear: expected all arguments of the operator, but got 3 of at least 4"
    ):
        check(x, weights, None)
    check = _C.check_of("adamw_step_")
    for lr in (1, 1e-3, torch.tensor(1e-3)):
        check([x], [x], [x], [x], [], [torch.tensor(0.0)], lr, 0.9, 0.99, 0.0, 1e-8, False, False, None, None)
    with pytest.raises(RuntimeError, match="^adamw_step_: expected lr of float32 or float64 and no dimension"):
        check([x], [x], [x], [x], [], [torch.tensor(0.0)], x, 0.9, 0.99, 0.0, 1e-8, False, False, None, None)


def test_an_argument_of_another_type_is_named():
    x = torch.randn(3, 4)
    with pytest.raises(TypeError, match="^swiglu: expected up of type Tensor, but got str$"):
        openreg_ops.swiglu.reference(x, "up")
    with pytest.raises(TypeError, match="^dropout_add: expected p of type float, but got str$"):
        openreg_ops.dropout_add.reference(x, x, "0.5")
    sentence = r"^grouped_linear: expected weights of type List\[Tensor\], but got "
    with pytest.raises(TypeError, match=sentence + "list of Tensor and int$"):
        openreg_ops.grouped_linear.reference(x, [x, 1], None, torch.tensor([3]))
    with pytest.raises(TypeError, match=sentence + "float$"):
        openreg_ops.grouped_linear.reference(x, 0.5, None, torch.tensor([3]))


def test_an_argument_that_the_operator_lacks_is_named():
    with pytest.raises(TypeError, match="takes up, which rms_norm does not"):
        openreg_ops.rms_norm.fake(lambda up: up)
    with pytest.raises(TypeError, match="takes up, which rms_norm does not"):
        openreg_ops.rms_norm.sharded(lambda x, shards, up: ())
    with pytest.raises(TypeError, match="takes up, which rms_norm does not"):
        openreg_ops.rms_norm.distributed(lambda shards, x, up: ())
    assert "rms_norm" not in op.DISTRIBUTED


def test_what_is_sharded_together_is_named():
    def swiglu(gate, up):
        return gate * up

    with pytest.raises(TypeError, match="^swiglu: inner needs batch_first"):
        op.operator(inner=0)(swiglu)


@pytest.mark.parametrize(
    ("pieces", "in_place"),
    [
        (lambda x: x.chunk(2, -1), True),
        (lambda x: (x[:, 0], x[:, 1]), True),
        (lambda x: (x[:, :3, :70], x[:, 2:, 1:71].contiguous()), True),
        (lambda x: x.transpose(0, 1).chunk(2, -1), True),
        (lambda x: (x[..., ::2], x[..., 1::2]), False),
        (lambda x: x[..., :14].chunk(2, -1), False),
    ],
    ids=["halves", "every fifth row", "unequal distances", "transposed", "columns", "short rows"],
)
def test_swiglu_reads_long_rows_in_place(pieces, in_place):
    gate, up = pieces(torch.rand(6, 5, 150, device=NAME))
    for operator, arguments in ((openreg_ops.swiglu, (gate, up)), (openreg_ops.swiglu_backward, (gate, gate, up))):
        before = _C.launch_count()
        operator(*arguments)
        assert (_C.launch_count() - before == 1) is in_place


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_the_memory_order_of_sizes_that_may_change(order):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.empty(2, 3, 4, 5).permute(order), static_shapes=False)
    assert isinstance(fake.stride(order.index(0)), torch.SymInt)
    assert op.memory_order(fake) == [order.index(dim) for dim in range(4)]
