"""Arguments made from an operator's schema: calls that the CPU accepts, and garbage; and a place where either may crash.

`call(op, k)` is the k-th call of an operator, `garbage(op, call, k)` the k-th damage to one: equal numbers give equal
arguments, in every process. `survey` makes calls in a forked child. `recorded` takes arguments from PyTorch's OpInfo.
Everything is on the CPU; `Move` takes it to a device. `stays_within` says whether a call keeps to its arguments' memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import math
import os
import random
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openreg_tools import dispatch
from openreg_tools.conformance import opinfo

__all__ = [
    "Call",
    "Move",
    "RequiresGrad",
    "Stays",
    "StorageOf",
    "call",
    "garbage",
    "overload",
    "recorded",
    "stays_within",
    "survey",
]


@dataclasses.dataclass
class Call:
    """The arguments of one call, on the CPU."""

    args: list[Any]
    kwargs: dict[str, Any]
    alone: bool = False  # whether the CPU has no call like this one: an argument is elsewhere, or has no memory

    def __str__(self) -> str:
        words = [*map(_shown, self.args), *(f"{name}={_shown(value)}" for name, value in self.kwargs.items())]
        return f"({', '.join(words)})"


@dataclasses.dataclass
class StorageOf:
    """Stands for the storage of a tensor."""

    tensor: torch.Tensor


@dataclasses.dataclass
class Stays:
    """A tensor that stays on the CPU when the others move."""

    tensor: torch.Tensor


@dataclasses.dataclass
class RequiresGrad:
    """A tensor that requires a gradient where it is moved to."""

    tensor: torch.Tensor


class Move(opinfo.Mover):
    """Takes the arguments of a `Call` to a device."""

    def __call__(self, value: Any) -> Any:
        if isinstance(value, StorageOf):
            return self.tensor(value.tensor).untyped_storage()
        if isinstance(value, Stays):
            return value.tensor
        if isinstance(value, RequiresGrad):
            return self.tensor(value.tensor).requires_grad_()
        if isinstance(value, torch.ScriptObject):
            return value
        return super().__call__(value)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        if tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized:
            if tensor.numel() and not tensor.untyped_storage().nbytes():  # a tensor whose memory was taken away
                copy = torch.empty_like(tensor, device=self.device)
                copy.untyped_storage().resize_(0)
                return copy
        return super().copy(tensor)


class _Guarded(Move):
    """Copies arguments into CPU memory between two guards, each a page of bytes of one value."""

    PAGE = 4096

    def __init__(self, value: int) -> None:
        super().__init__("cpu")
        self.guard, self.memory = bytes([value]), []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        lazy = tensor.is_conj() or tensor.is_neg()
        if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized or lazy or not tensor.numel():
            return super().copy(tensor)
        storage = tensor.untyped_storage()
        key, count = (storage._cdata, tensor.dtype), storage.nbytes() // tensor.element_size()
        if not count:
            return super().copy(tensor)
        if key not in self.storages:
            buffer = bytearray(2 * self.PAGE + storage.nbytes())
            memory = torch.frombuffer(buffer, dtype=torch.uint8)
            start = -memory.data_ptr() % 64 + self.PAGE - 64  # aligned as the memory of a tensor is
            held = torch.frombuffer(buffer, dtype=tensor.dtype, count=count, offset=start)
            buffer[:] = self.guard * len(buffer)
            held.copy_(torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (count,), (1,)))
            self.storages[key] = held
            self.memory.append((buffer, start, start + storage.nbytes()))
            self.kept.append(storage)
        return self.storages[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def is_whole(self) -> bool:
        return all(
            buffer[:start] == self.guard * start and buffer[end:] == self.guard * (len(buffer) - end)
            for buffer, start, end in self.memory
        )


def stays_within(call: Callable[[Move], Any], resizes: bool = False) -> bool:
    """Whether a call on the CPU stays within the memory of its arguments. Some kernels do not check shapes.

    The call runs three times, with guards of another value each time. It must return the same results each time and
    leave the guards unchanged. A call that resizes an argument with elements, or raises, is answered by `resizes`.
    """
    found = []
    for value in (0, 0xFF, 0x5A):
        move = _Guarded(value)
        torch.manual_seed(opinfo.SEED)
        try:
            out = call(move)
        except RuntimeError:  # what it was given cannot be resized
            return resizes
        if not move.is_whole():
            return False
        found.append([_bits(x) for x in tree_leaves(out) if isinstance(x, torch.Tensor)])
    return all(each == found[0] for each in found)


def _bits(x: torch.Tensor) -> Any:
    if x.layout != torch.strided or x.is_nested or x.is_quantized or x.device.type != "cpu":
        return str(x.layout)
    with torch.no_grad():
        x = x.detach().resolve_conj().resolve_neg().contiguous()
        return x.dtype, x.shape, ctypes.string_at(x.data_ptr(), x.nbytes) if x.numel() else b""


def overload(name: str) -> Any:
    """``torch.ops.aten.add.Tensor`` for ``aten::add.Tensor``."""
    namespace, _, rest = name.partition("::")
    base, _, which = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), which or "default")


def _shown(value: Any) -> str:
    match value:
        case RequiresGrad():
            return f"{_shown(value.tensor)} that requires a gradient"
        case Stays():
            return f"{_shown(value.tensor)} on the CPU"
        case StorageOf():
            return f"storage of {_shown(value.tensor)}"
        case torch.Tensor():
            layout = "" if value.layout == torch.strided else f" {value.layout}"
            shape = "nested" if value.is_nested else list(value.shape)
            return f"{str(value.dtype).removeprefix('torch.')}{shape}{layout}"
        case list() | tuple():
            return f"[{', '.join(map(_shown, value))}]"
    return repr(value)


# ---- types ----


@dataclasses.dataclass(frozen=True)
class _Type:
    """The type of an argument: a kind of JIT type, whether it may be None, and the length of a list (-1: any)."""

    kind: str
    optional: bool = False
    length: int | None = None

    @classmethod
    def of(cls, argument: Any) -> _Type:
        type_, optional, length = argument.real_type, False, None
        if type_.kind() == "OptionalType":
            type_, optional = type_.getElementType(), True
        if type_.kind() == "ListType":
            type_, length = type_.getElementType(), argument.N if argument.N is not None else -1
            if type_.kind() == "OptionalType":
                type_ = type_.getElementType()
        return cls(type_.kind().removesuffix("Type").replace("SymInt", "Int"), optional, length)


# ---- calls that the CPU may accept ----

_SHAPES = (
    (3, 3), (2, 3), (4,), (2, 3, 4), (1, 2, 5, 5), (2, 2, 4, 4), (), (1, 2, 3, 4, 4), (2, 3, 3), (4, 4), (1, 4, 4, 4), (8,),
)  # fmt: skip
_DTYPES = (
    torch.float32, torch.float32, torch.float32, torch.int64, torch.bool, torch.float64, torch.complex64, torch.uint8,
    torch.float32, torch.int32, torch.bfloat16, torch.int8,
)  # fmt: skip
_WORDS = {
    "reduce": ("sum", "mean", "prod", "amax", "amin"),
    "rounding_mode": ("floor", "trunc"),
    "mode": ("reduced", "complete", "constant", "reflect"),
    "pad_mode": ("reflect", "constant"),
    "padding": ("valid", "same"),
    "UPLO": ("L", "U"),
    "ord": ("fro", "nuc"),
    "norm": ("backward", "forward", "ortho"),
    "approximate": ("none", "tanh"),
    "indexing": ("ij", "xy"),
    "side": ("left", "right"),
    "driver": ("gelsd", "gels", "gelsy"),
    "driver_name": ("gelsd", "gels"),
    "equation": ("ij,jk->ik", "i,i->i"),
}
# Arguments that hold the sizes of tensors.
SIZES = {
    "size", "sizes", "shape", "self_sizes", "input_sizes", "input_size", "output_size", "sym_size", "normalized_shape"
}  # fmt: skip
_INDICES = ("index", "indices", "idx", "target", "labels", "offsets", "lengths", "batch_sizes", "pivots", "crow", "col_", "ccol", "row_", "repeats", "segment", "sorter")  # fmt: skip
_MASKS = ("mask", "condition", "bool")


class _Maker:
    """One call's choices: a shape and a dtype that most tensors share."""

    def __init__(self, name: str, k: int) -> None:
        self.random = random.Random(f"{name} {k}")
        self.k = k
        self.shape = _SHAPES[k % len(_SHAPES)] if k < 3 * len(_SHAPES) else self.random.choice(_SHAPES)
        self.dtype = _DTYPES[k // len(_SHAPES) % len(_DTYPES)] if k >= len(_SHAPES) else torch.float32
        self.uniform = 1.0 if k < len(_SHAPES) else self.random.choice((0.95, 0.7, 0.4))  # tensors of the shared shape
        self.count = 2 if k < len(_SHAPES) else self.random.randint(1, 3)
        self.defaults = k < 2 * len(_SHAPES) or self.random.random() < 0.6
        torch.manual_seed(k)

    def value(self, argument: Any) -> Any:
        type_ = _Type.of(argument)
        if argument.alias_info is not None and argument.alias_info.is_write and argument.is_out:
            dtypes = (self.dtype, self.dtype, torch.int64, torch.float32)
            made = [torch.empty(0, dtype=self.random.choice(dtypes)) for _ in range(self.count)]
            return made[0] if type_.length is None else made
        if type_.kind == "DeviceObj":
            return torch.device("cpu")
        if argument.has_default_value() and (self.defaults or self.random.random() < 0.3):
            return argument.default_value
        if type_.optional and self.random.random() < 0.3:
            return None
        if type_.length is None:
            return self.one(type_.kind, argument.name)
        return self.list(type_, argument.name)

    def one(self, kind: str, name: str) -> Any:
        r = self.random
        match kind:
            case "Tensor":
                return self.tensor(name)
            case "Int":
                if name.startswith(("dim", "axis")):
                    return r.choice((0, -1, 1))
                if "size" in name or name in (
                    "n",
                    "m",
                    "steps",
                    "groups",
                    "num_classes",
                    "num_layers",
                    "N",
                    "C",
                    "HxW",
                ):
                    return r.choice((1, 2, 3, 4))
                return r.choice((0, 1, 1, 2, 3))
            case "Float":
                return r.choice((0.5, 1.0, 0.1, 1e-5, 2.0))
            case "Number":
                return r.choice((1, 2, 0.5, 1, True)) if self.dtype.is_floating_point else r.choice((1, 2, 3))
            case "Bool":
                return r.random() < 0.5
            case "String":
                return r.choice(_WORDS.get(name, ("sum",)))
            case "ScalarTypeType" | "ScalarType":
                return r.choice((self.dtype, torch.float32, torch.float64))
            case "Layout":
                return torch.strided
            case "MemoryFormat":
                return torch.contiguous_format
            case "Generator":
                return torch.Generator().manual_seed(1)
            case "Storage":
                return StorageOf(torch.zeros(16, dtype=self.dtype))
            case "DeviceObj":
                return torch.device("cpu")
        return None

    def list(self, type_: _Type, name: str) -> list[Any]:
        r, rank = self.random, len(self.shape)
        if type_.kind == "Int":
            if "stride" == name and type_.length == -1 and r.random() < 0.5:
                return list(torch.empty(self.shape, device="meta").stride())
            if name in SIZES or name in ("stride", "strides", "repeats"):
                if type_.length == -1 and r.random() < 0.8:
                    return list(self.shape)
            if name.startswith(("dim", "axis")):
                return r.sample(range(rank), r.randint(0, rank)) if r.random() < 0.5 else [0][:rank]
            length = type_.length if type_.length > 0 else r.choice((1, 2, 3, max(0, rank - 2), rank, 2 * rank))
            if name.startswith(("pad", "output_pad")):
                return [r.choice((0, 0, 1))] * length
            if name.startswith(("stride", "dilation")):
                return [r.choice((1, 1, 2))] * length
            return [r.choice((1, 2, 3)) for _ in range(length)] if r.random() < 0.3 else [r.choice((1, 2, 3))] * length
        count = type_.length if type_.length > 0 else self.count
        return [self.one(type_.kind, name) for _ in range(count)]

    def tensor(self, name: str) -> torch.Tensor:
        r, shape = self.random, self.shape
        if r.random() > self.uniform:
            last, first = shape[-1:], shape[:1]
            shape = r.choice(
                [last, shape[1:2], first, shape[:-1], (), last * 2, (*shape[:1], *shape[2:]), first + last, (*shape, 2),
                 (shape[1:2] or (2,)) * 2 + (2,) * max(0, len(shape) - 2), (1, *shape), r.choice(_SHAPES), (*shape[:-1], 1)]
            )  # fmt: skip
        dtype = self.dtype
        if any(word in name for word in _INDICES) and r.random() < 0.8:
            return torch.randint(0, max(1, min([2, *shape])), shape, dtype=torch.int64)
        if any(word in name for word in _MASKS) and r.random() < 0.8:
            dtype = torch.bool
        elif self.uniform < 1 and r.random() < 0.1:
            dtype = r.choice(_DTYPES)
        return _filled(shape, dtype)


def _filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return (torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1).to(dtype)
    return torch.randint(0, 3, shape).to(dtype)


def call(name: str, k: int) -> Call:
    """The k-th call of an operator. The first ones give every tensor one shape, later ones try more."""
    maker, made = _Maker(name, k), Call([], {})
    for argument in dispatch.schema(name).arguments:
        value = maker.value(argument)
        if argument.kwarg_only:
            made.kwargs[argument.name] = value
        else:
            made.args.append(value)
    return made


# ---- garbage ----

_HUGE = (2**31, 2**62, -(2**63), 2**63 - 1)


def _bad_tensor(r: random.Random, good: Any) -> Any:
    shape = tuple(good.shape) if isinstance(good, torch.Tensor) and not good.is_nested else (2, 3)
    dtype = good.dtype if isinstance(good, torch.Tensor) else torch.float32
    if not (dtype.is_floating_point or dtype.is_complex) and dtype not in _DTYPES:
        dtype = torch.float32

    def resized() -> torch.Tensor:
        tensor = torch.ones(2, 3)
        tensor.untyped_storage().resize_(0)
        return tensor

    dense = lambda shape, dtype=dtype: _filled(shape, dtype)  # noqa: E731
    return r.choice(
        [
            lambda: None,
            lambda: dense((0,)),
            lambda: dense(()),
            lambda: dense((*shape, 1)),
            lambda: dense(shape[:-1]),
            lambda: dense(tuple(each + 1 for each in shape)),
            lambda: dense(tuple(reversed(shape))),
            lambda: dense((*shape[:-1], 0)),
            lambda: dense((1,) * 7),
            lambda: dense(shape, r.choice(_DTYPES)),
            lambda: dense(shape, r.choice((torch.float16, torch.int16, torch.complex128))),
            lambda: dense(shape, torch.float32).to(torch.float8_e4m3fn),
            lambda: torch.empty(shape, dtype=dtype, device="meta"),
            lambda: Stays(dense(shape)),
            lambda: dense((1,) * len(shape)).expand(shape),
            lambda: dense((*shape, 2))[..., 0],
            lambda: dense(shape, torch.float32).to_sparse() if shape else dense(shape),
            lambda: torch.quantize_per_tensor(dense(shape, torch.float32), 0.1, 0, torch.qint8),
            lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
            lambda: dense(shape, torch.complex64).conj(),
            lambda: torch._neg_view(dense(shape, torch.float32)),
            resized,
            lambda: dense(shape, torch.int64) * 10**12,
            lambda: dense(shape, torch.int64) - 10,
            lambda: dense(shape, torch.float32) * math.nan,
        ]
    )()


def _bad_number(r: random.Random, kind: str) -> Any:
    match kind:
        case "Float":
            return r.choice((math.nan, math.inf, -math.inf, -1.0, 0.0, 1e308, 5e-324))
        case "Number":
            return r.choice((math.nan, math.inf, -1, 0, 2**62, 1e308, 1j, True, -(2**63)))
        case "Bool":
            return r.random() < 0.5
        case "ScalarTypeType" | "ScalarType":
            return r.choice((99, -1, 45, 2**40, torch.qint8, torch.complex64, torch.bool, torch.bits8, torch.float16))
        case "Layout":
            return r.choice((99, -1, torch.sparse_coo, torch.sparse_csr))
        case "MemoryFormat":
            return r.choice((99, -1, torch.channels_last, torch.channels_last_3d, torch.preserve_format))
    return r.choice((-1, 0, 1, 2, 3, -2, 99, 1000, *_HUGE))


def _bad_value(r: random.Random, type_: _Type, good: Any) -> Any:
    if r.random() < (0.1 if type_.optional else 0.03):
        return None
    if type_.length is not None:
        each = (good[0] if isinstance(good, (list, tuple)) and good else None) if type_.kind == "Tensor" else good
        one = dataclasses.replace(type_, optional=False, length=None)
        if r.random() < 0.2:
            return []
        if isinstance(good, (list, tuple)) and good and r.random() < 0.5:
            damaged = list(good)
            damaged[r.randrange(len(good))] = _bad_value(r, one, each)
            return damaged
        if isinstance(good, (list, tuple)) and r.random() < 0.5:
            return [*good, *good[:1]] if r.random() < 0.5 else list(good[:-1])
        return [_bad_value(r, one, each) for _ in range(r.randint(0, 4))]
    match type_.kind:
        case "Tensor":
            return _bad_tensor(r, good)
        case "String":
            return r.choice(("", "garbage", "x" * 1000, "\0", "sum"))
        case "Generator":
            return torch.Generator()
        case "DeviceObj":
            return r.choice((torch.device("cpu"), torch.device("cpu"), torch.device("meta")))
        case "Storage":
            return StorageOf(torch.zeros(r.choice((0, 1, 100))))
    return _bad_number(r, type_.kind)


def garbage(name: str, good: Call, k: int) -> Call:
    """`good` with the k-th damage: one to three arguments are wrong."""
    r = random.Random(f"garbage {name} {k}")
    torch.manual_seed(k)
    made = Call(list(good.args), dict(good.kwargs))
    arguments = [argument for argument in dispatch.schema(name).arguments]
    positional = [argument for argument in arguments if not argument.kwarg_only]
    for argument in r.sample(arguments, min(len(arguments), r.choice((1, 1, 1, 2, 3)))):
        where: Any = made.kwargs if argument.kwarg_only else made.args
        key = argument.name if argument.kwarg_only else positional.index(argument)
        if key in where if argument.kwarg_only else key < len(where):
            where[key] = _bad_value(r, _Type.of(argument), where[key])
    made.alone = any(map(_is_alone, tree_leaves((made.args, made.kwargs))))
    return made


def _is_alone(value: Any) -> bool:
    if isinstance(value, Stays):
        return True
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return value.is_nested or value.is_meta or (value.numel() > 0 and not value.untyped_storage().nbytes())


# ---- arguments of a call that PyTorch's own code makes ----


class _Recorder(TorchDispatchMode):
    """Keeps copies of the arguments of every call of one operator."""

    def __init__(self, wanted: Any) -> None:
        super().__init__()
        self.wanted, self.calls = wanted, []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is self.wanted and len(self.calls) < 3:
            copied = opinfo.Mover("cpu")
            self.calls.append(Call([copied(each) for each in args], {k: copied(v) for k, v in (kwargs or {}).items()}))
        return func(*args, **(kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import dynamo


def recorded(name: str, source: str) -> list[Call]:
    """Calls of an operator that OpInfo `source` makes on the CPU in its samples, forward and backward."""
    op = opinfo.database()[source]
    with _Recorder(overload(name)) as recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in (torch.float32, torch.int64, torch.complex64):
            if dtype not in op.supported_dtypes("cpu"):
                continue
            grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
            for sample in opinfo._samples(op, dtype, grad, 8):
                with contextlib.suppress(Exception):
                    out = op(sample.input, *sample.args, **sample.kwargs)
                    leaves = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
                    sum(x.abs().sum() for x in leaves).backward()
                if len(recorder.calls) == 3:
                    return recorder.calls
    return recorder.calls


# ---- where a call may crash ----


@dataclasses.dataclass
class Outcome:
    """How one attempt of `survey` ended."""

    kind: str  # "returned", "raised", "crashed" or "hung"
    message: str = ""


def survey(
    count: int, attempt: Callable[[int], Any], enough: int | None = None, seconds: float = 10.0
) -> Iterator[tuple[int, Outcome]]:
    """Attempts 0 to count - 1 in a forked child, which is forked again when one ends it or hangs.

    Ends early once `enough` have returned, or three have hung. The attempts must not use a device that the parent has used.
    """
    first = returned = hung = 0
    while first < count and (enough is None or hung < 3):
        for i, outcome in _forked(range(first, count), attempt, None if enough is None else enough - returned, seconds):
            yield i, outcome
            first = i + 1
            hung += outcome.kind == "hung"
            returned += outcome.kind == "returned"
            if enough is not None and returned >= enough:
                return


def _forked(
    which: range, attempt: Callable[[int], Any], enough: int | None, seconds: float
) -> Iterator[tuple[int, Outcome]]:
    sys.stdout.flush()
    sys.stderr.flush()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        _serve(os.fdopen(write, "w", buffering=1), which, attempt, enough)
    os.close(write)
    at, buffer, running = which.start, b"", False
    try:
        while True:
            if not select.select([read], [], [], seconds)[0]:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                child = 0
                yield at, Outcome("hung", f"no result after {seconds:g} s")
                return
            data = os.read(read, 1 << 16)
            if not data:
                _, status = os.waitpid(child, 0)
                child = 0
                if running:
                    died = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {status >> 8}"
                    yield at, Outcome("crashed", died)
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                at, *outcome = json.loads(line)
                running = not outcome
                if outcome:
                    yield at, Outcome(*outcome)
    finally:
        os.close(read)
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _serve(answers: Any, which: range, attempt: Callable[[int], Any], enough: int | None) -> None:
    """The child's side; does not return."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        warnings.simplefilter("ignore")
        for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE):
            signal.signal(number, signal.SIG_DFL)  # a handler of the parent's could wait for its threads
        with at_most(4 << 30):
            for i in which:
                answers.write(json.dumps([i]) + "\n")
                try:
                    attempt(i)
                    answers.write(json.dumps([i, "returned"]) + "\n")
                    if enough is not None and (enough := enough - 1) == 0:
                        break
                except Exception as error:
                    answers.write(json.dumps([i, "raised", opinfo.first_line(error)]) + "\n")
    finally:
        answers.flush()
        os._exit(0)


@contextlib.contextmanager
def at_most(more: int) -> Iterator[None]:
    """Limits the process to `more` bytes of address space beyond what it has, so that a huge size is an error."""
    import resource

    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
