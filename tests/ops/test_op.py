"""meta/op.py: the functions that `op.operator` makes."""

import inspect
import pickle
from types import FunctionType

import pytest
import torch

import openreg_ops
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
    assert inspect.getsourcefile(function) == inspect.getsourcefile(inspect.getmodule(function))
    assert f"def {name}(" in inspect.getsource(function)


def test_reference_is_the_mathematics_behind_the_checks():
    x, weight = torch.randn(3, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    y, rstd = openreg_ops.rms_norm.reference(x, weight)  # with eps by default
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, [4], eps=1e-6))
    with pytest.raises(RuntimeError, match=r"^rms_norm: expected weight of shape \[4\]"):
        openreg_ops.rms_norm.reference(x, weight[:3])


def test_an_argument_that_the_operator_lacks_is_named():
    with pytest.raises(TypeError, match="takes up, which rms_norm does not"):
        openreg_ops.rms_norm.fake(lambda up: up)
    with pytest.raises(TypeError, match="takes up, which rms_norm does not"):
        openreg_ops.rms_norm.sharded(lambda x, shards, up: ())
    with pytest.raises(TypeError, match="takes up, which rms_norm does not"):
        openreg_ops.rms_norm.distributed(lambda shards, x, up: ())
    assert "rms_norm" not in op.DISTRIBUTED
