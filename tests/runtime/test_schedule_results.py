"""How the orders of a program are compared: results of every kind."""

import collections
import dataclasses
import datetime
import enum
import fractions
import types
from pathlib import Path

import numpy as np
import pytest
import torch

DEVICE = "openreg"
current = torch.openreg.current_stream
schedules = torch.openreg.schedules

KINDS = {
    "list": lambda x: [x],
    "dict": lambda x: {"a": {"b": x}},
    "keyed by a tensor's size": lambda x: {x.shape: x},
    "set": lambda x: {1, float(x[0])},
    "set of tensors": lambda x: {x + 1, x * 2},
    "frozenset": lambda x: frozenset([str(x.tolist())]),
    "named tuple": lambda x: Named(1, x),
    "dataclass": lambda x: Data(x, 1),
    "object": lambda x: Plain(a=1, x=[x]),
    "object with slots": lambda x: Slots(x),
    "namespace": lambda x: types.SimpleNamespace(x=x),
    "object in itself": lambda x: (one := Plain(x=x), setattr(one, "me", one))[0],
    "deque": lambda x: collections.deque([x]),
    "mapping": lambda x: types.MappingProxyType({"x": x}),
    "values": lambda x: {"x": x}.values(),
    "module": lambda x: module_with(x),
    "optimizer": lambda x: optimizer_with(x),
    "generator": lambda x: torch.Generator().manual_seed(int(x[0])),
    "fraction": lambda x: fractions.Fraction(float(x[0])),
    "date": lambda x: datetime.timedelta(float(x[0])),
    "path": lambda x: Path(str(float(x[0]))),
    "enumeration": lambda x: Two(float(x[0]) != 1),
    "class": lambda x: int if x[0] == 1 else float,
    "range": lambda x: range(int(x[0])),
    "bytes": lambda x: bytearray([int(x[0])]),
    "memory": lambda x: memoryview(bytes([int(x[0])])),
    "numpy array": lambda x: x.numpy(),
    "numpy number": lambda x: x.numpy()[0],
    "numpy text": lambda x: x.numpy().astype(str),
    "numpy date": lambda x: np.datetime64(int(x[0]), "D"),
    "numpy dates": lambda x: x.numpy().astype("M8[s]"),
    "numpy objects": lambda x: np.array([x, "a", None], dtype=object),
    "numpy record": lambda x: np.array([(1, float(x[0]))], dtype=[("a", "i4"), ("b", "f4")]),
    "numpy long": lambda x: x.numpy().astype(np.longdouble),
    "numpy dtype": lambda x: np.dtype("f4") if x[0] == 1 else np.dtype("f8"),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:1]]),
    "meta": lambda x: torch.empty(int(x[0]), 3, device="meta"),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.qint8),
    "complex": lambda x: torch.complex(x, x).conj(),
    "dtype": lambda x: torch.float32 if x[0] == 1 else torch.float64,
    **{str(dtype): lambda x, dtype=dtype: x.to(dtype) for dtype in (
        torch.bool, torch.int8, torch.uint8, torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.float16,
        torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32, torch.complex64)},
}  # fmt: skip
Named = collections.namedtuple("Named", "number x")
Plain = type("Plain", (), {"__init__": lambda self, **attributes: self.__dict__.update(attributes)})
Two = enum.Enum("Two", {"NO": False, "YES": True})


@dataclasses.dataclass
class Data:
    x: torch.Tensor
    number: int


class Slots:
    __slots__ = ("absent", "x")

    def __init__(self, x):
        self.x = x


def module_with(x):
    net = torch.nn.BatchNorm1d(2)
    net.running_mean.copy_(x[:2])
    return net


def optimizer_with(x):
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=float(x[0]) + 1)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_results_of_every_kind_are_compared(kind):
    """A difference in any one is found, and no other: the copy is read too early, when the host still has zeros or ones."""

    def program(fixed, early):
        host = torch.full((4,), early, pin_memory=True)
        host.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
        if fixed:
            current().synchronize()
        return KINDS[kind](host.clone())

    assert schedules(program, True, 0.0, seeds=4).passed
    assert schedules(program, False, 1.0, seeds=40).passed
    assert not schedules(program, False, 0.0, seeds=40).passed


def test_results_of_kinds_that_are_not_compared():
    net = torch.nn.Linear(2, 2, device=DEVICE)

    def program():
        return (
            net,
            torch.ones(2, device=DEVICE),
            "text",
            1.5,
            float("nan"),
            None,
            {"a": (True, torch.eye(2, device=DEVICE).to_sparse())},
            object(),
        )

    assert schedules(program, seeds=10).passed
