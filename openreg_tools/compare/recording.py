"""``with record("a.trace")``: a fingerprint of each operator's results, at most 1 KB each, as lines of JSON.

Equal values give equal fingerprints on any device and with any strides: a fingerprint has a hash of the values in
order. It also has numbers that are close if the values are close: the sum, the norm, the largest, and samples.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import threading
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from openreg_tools import dispatch, forms, script
from openreg_tools.compare.copies import Facts, Quiet, facts, tensors_of
from openreg_tools.compare.draws import Draws
from openreg_tools.compare.lockstep import subclasses, tracing, wait
from openreg_tools.core.place import Places
from openreg_tools.forms import Wrong
from openreg_tools.samples import dtype_name, shape_of
from openreg_tools.threads import InThreads

__all__ = ["KIND", "Recording", "fingerprint", "mark", "record"]

KIND = "openreg_tools.compare"  # at the start of every trace
VERSION = 6  # of the fingerprints
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_MOST = 960  # bytes of one operator's line, out of the 1024 that it may take including new names
_labels: dict[str, Any] = {}  # set in the main thread, for all threads
_of_thread = threading.local()


def _own_labels() -> dict[str, Any]:
    """The labels that the calling thread sets."""
    if threading.get_ident() == threading.main_thread().ident:
        return _labels
    return _of_thread.__dict__


class mark:  # noqa: N801 -- used as a function
    """Label what the program works on: ``mark("batch", 17)``, until the next mark or for a ``with`` block.

    These labels align two runs that visit batches in different orders. A label set in the main thread applies to all
    threads. A label set in another thread applies to that thread only, and takes precedence there.

    Args:
        name, value: the label, such as "batch" and 17.
    """

    def __init__(self, name: str, value: Any) -> None:
        self._name, self._labels = name, _own_labels()
        self._before = self._labels.get(name, self)
        self._labels[name] = value

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: Any) -> None:
        if self._before is self:
            self._labels.pop(self._name, None)
        else:
            self._labels[self._name] = self._before


def record(
    out: str | os.PathLike[str],
    *,
    values: bool = False,
    device: str | None = None,
    name: str = "",
    progress: bool = False,
) -> Recording:
    """A context manager that writes a trace of operators' results on a device.

    Args:
        out: the file; in a process group of several ranks, ".rank0" and so on is added.
        values: also save the results, in the folder `out` + ".values".
        device: the accelerator of the process unless given.
        name: the program's name, for reports.
        progress: print a line to stderr every five seconds.
    Raises:
        Wrong: there is no such device, or the file cannot be written.
    """
    return Recording(Path(out), values, device, name, progress)


class Recording(TorchDispatchMode):
    """The context of `record`; `path` is the file, `operators` how many were recorded, `incomplete` why it lacks others.

    The program goes on if the file cannot be written: only the trace ends.
    """

    supports_higher_order_operators = True

    def __init__(self, path: Path, values: bool, device: str | None, name: str, progress: bool) -> None:
        super().__init__()
        target = dispatch.target(device)
        dispatch.usable(target.device)
        self.type, self.values, self.name, self.progress = torch.device(target.device).type, values, name, progress
        self.out, self.path, self.operators = path, path, 0
        self.places = Places()
        self._file: Any = None
        self._names: dict[str, int] = {}
        self._process = 0  # 0 outside the context: a thread that the program started may outlive it
        self._threads, self._lock = InThreads(self), threading.Lock()
        self._unread: set[str] = set()  # operators whose results could not be read
        self.incomplete = ""
        self._draws = Draws(self.type)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Recording:
        self._folder = os.getcwd()  # which the program may change
        if not self.out.parent.is_dir():
            raise Wrong(f"record: there is no folder {self.out.parent} to write {self.out.name} to; make it first")
        import torch._dynamo  # noqa: F401 -- else a mode imports it at its first operator

        self._said = self._started = time.monotonic()
        self.places.__enter__()
        self._process = os.getpid()
        super().__enter__()
        self._threads.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._threads.__exit__()
        super().__exit__(*exception)
        self.places.__exit__()
        if not self._is_active():
            return
        with self._lock:
            if self._open():
                self._put(json.dumps({"end": self.operators}) + "\n")
                self._close()
            self._process = 0
        if self.incomplete:
            forms.say(f"record: {self.incomplete}")

    def _is_active(self) -> bool:
        """Whether operators are recorded: not after the context, and not in a process that the program forked."""
        return self._process == os.getpid()

    @property
    def is_open(self) -> bool:
        """Whether the file was opened, even if it could not be written to its end."""
        return self._file is not None

    def _open(self) -> bool:
        """Whether there is a file to write to. It gets its name when the first operator runs, because the program knows
        its rank by then."""
        if self._file is None and not self.incomplete:
            rank, size = script.rank()
            if size > 1:
                self.path = Path(f"{self.out}.rank{rank}")
            header = {
                "kind": KIND, "version": VERSION, "torch": torch.__version__, "device": self.type, "rank": rank,
                "world": size, "program": _printable(self.name), "values": self.values,
            }  # fmt: skip
            try:
                self._file = open(self._place(), "w", buffering=1, encoding="utf-8")  # a crash leaves its lines
                if self.values:
                    self._place(".values").mkdir(exist_ok=True)
            except OSError as error:
                self.incomplete = f"{self.path} cannot be written: {error.strerror}"
            else:
                self._put(json.dumps(header) + "\n")
        return not self.incomplete

    def _place(self, suffix: str = "") -> Path:
        return Path(self._folder, f"{self.path}{suffix}")

    def _put(self, text: str) -> None:
        if self.incomplete:
            return
        try:
            self._file.write(text)
        except (OSError, ValueError) as error:  # ValueError: the program has closed the file
            self._fail(str(error))

    def _fail(self, why: str) -> None:
        self.incomplete = f"{self.path} is incomplete, it ends after {self.operators:,} operators: {why}"
        with contextlib.suppress(OSError):
            self._file.close()

    def _close(self) -> None:
        """Close the file, and see that it is still where it was opened."""
        try:
            there = os.path.samestat(os.fstat(self._file.fileno()), self._place().stat())
            self._file.close()
        except (OSError, ValueError) as error:
            self._fail(str(error))
        else:
            if not there:
                self._fail("another file has taken its place")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_active() or not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if subclasses(types):
            return func(*args, **kwargs) if tracing(types) else NotImplemented
        of = facts(func)
        out = func(*args, **kwargs)
        if of.random and self.type != "cpu":
            self._drew(of, args, kwargs, out)
        if of.view or of.skipped:
            return out
        returned = out if of.scratch < 0 else [each for i, each in enumerate(out) if i != of.scratch]
        kinds = [(t, t.device.type) for t in tensors_of((returned,))]
        results = [t for t, kind in kinds if kind == self.type or (kind != "meta" and _from(args, self.type))]
        written = [] if not any(of.written) and not of.collective else [
            t for i, v in [*enumerate(args), *kwargs.items()] if of.writes(i) for t in tensors_of((v,))
        ]  # fmt: skip
        unique = {id(t): t for t in (*written, *results)}
        numbers = [] if unique or not _from(args, self.type) else [v for v in (out,) if type(v) in NUMBERS]
        if not any(t.device.type == self.type for t in (*unique.values(), *tensors_of(args))):
            return out
        if of.name.startswith("_c10d_functional::") and "wait" not in of.name:
            return out  # wait_tensor has the result
        if of.collective:
            wait(out)
        with self._lock, Quiet(self.type):
            if not self._is_active():
                return out
            self._write(of.name, args, kwargs, list(unique.values()), numbers)
        return out

    def _drew(self, of: Facts, args: tuple, kwargs: dict, out: Any) -> None:
        """Write a line if, with this call, both generators have drawn."""
        with self._lock, Quiet(self.type):
            if self._is_active() and self._draws.drew(of, args, kwargs, out) and self._open():
                words = [self._number(text) for text in self._draws.both]
                self._put(json.dumps({"g": words}) + "\n")

    def _write(self, name: str, args: tuple, kwargs: dict, results: list[Tensor], numbers: list[Any]) -> None:
        if not self._open():
            return
        place = self.places.now()
        try:
            prints, copies = _prints(results, numbers)
        except torch.AcceleratorError:
            raise  # an error of the program's kernels
        except Exception as error:  # a tensor that cannot be read; this must not end the program
            if name not in self._unread:
                self._unread.add(name)
                found = (str(error).splitlines() or [""])[0]
                warnings.warn(
                    f"record: the trace has no line for {name}, whose result cannot be read: "
                    f"{type(error).__name__}: {found}",
                    stacklevel=2,
                )
            return
        shown = itertools.islice(tensors_of((*args, *kwargs.values())), 6)
        inputs = [f'["{dtype_name(t.dtype)}",{shape_of(t)}]' for t in shown]
        labels = _labels | _own_labels()
        label = ",".join(f"{k}={v}" for k, v in sorted(labels.items())) if labels else ""
        thread = str(self._threads.number() or "")
        words = {"o": name, "m": place.module, "w": place.line(), "n": place.node, "l": label, "t": thread}
        parts = [f'"{key}":{self._number(text)}' for key, text in words.items() if text]
        parts += [f'"p":"{place.phase[0]}"', '"r":[' + ",".join(map(_json, prints)) + "]"]
        head = "{" + ",".join(parts)
        text = _with_inputs(head, inputs)
        while len(text) > _MOST and inputs:  # more dimensions than most tensors have
            inputs.pop()
            text = _with_inputs(head, inputs)
        self._put(text)
        if self.values:
            self._save(copies)
        self.operators += not self.incomplete
        if self.progress and time.monotonic() - self._said > 5:
            self._said = time.monotonic()
            seconds = self._said - self._started
            forms.say(f"record: {self.operators:,} operators in {seconds:.0f} s")

    def _save(self, copies: list[Tensor]) -> None:
        saved = io.BytesIO()
        torch.save(copies, saved)  # into memory: its own error for a full disk does not say so
        try:
            self._place(f".values/{self.operators}.pt").write_bytes(saved.getbuffer())
        except OSError as error:
            self._fail(str(error))

    def _number(self, text: str) -> int:
        """The number of a text. The trace contains each text once."""
        number = self._names.get(text)
        if number is None:
            number = self._names[text] = len(self._names)
            self._put(json.dumps({"s": _printable(text[:300])}, ensure_ascii=False) + "\n")
        return number


def _printable(text: str) -> str:
    """The text with bytes that are not valid Unicode escaped, such as those of a file's name."""
    return text.encode(errors="backslashreplace").decode()


def _with_inputs(head: str, inputs: list[str]) -> str:
    return f'{head},"i":[{",".join(inputs)}]}}\n'


def _from(args: tuple, kind: str) -> bool:
    return any(t.device.type == kind for t in tensors_of(args))


def _prints(results: list[Tensor], numbers: list[Any]) -> tuple[list[list[Any]], list[Tensor]]:
    """The fingerprints of what an operator returned, and host copies of its tensors."""
    if len(results) > 4 and not numbers and (joined := _joined(results)) is not None:
        flat, copies = joined
        return [_of_list(flat, copies)], copies
    prints = [
        [dtype_name(x.dtype), [], zlib.crc32(repr(v).encode()), *fingerprint(x)[3:]]
        for v in numbers
        for x in (torch.tensor(v, dtype=NUMBERS[type(v)]),)
    ]
    copies = [_on_host(t) for t in results]
    prints += [fingerprint(t) for t in copies]
    return [_folded(prints)] if len(prints) > 4 else prints, copies


def _on_host(x: Tensor) -> Tensor:
    x = x.detach()
    if x.is_nested:
        x = x.contiguous().values()
    elif x.is_quantized:
        x = x.dequantize()
    elif x.layout != torch.strided:
        x = x.to_dense()
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x.contiguous().cpu()


def _joined(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]] | None:
    """Plain tensors of one dtype copied to the host in one piece, and the copies; None for other tensors."""
    dtype = tensors[0].dtype
    for x in tensors:
        if x.dtype != dtype or x.layout != torch.strided or x.is_nested or x.is_quantized or x.is_conj() or x.is_neg():
            return None
    flat = torch.empty(sum(x.numel() for x in tensors), dtype=dtype)
    pieces = flat.split([x.numel() for x in tensors])
    copies = [piece.view(x.shape) for piece, x in zip(pieces, tensors, strict=True)]
    torch._foreach_copy_(copies, tensors)
    return flat, copies


# ---- fingerprints ----

_SMALL = 1 << 14  # elements of a tensor whose numbers are added in float64, by numpy
_ROW = 2048  # bytes that one sum of a hash covers
_WEIGHTS = np.frombuffer(hashlib.shake_128(b"openreg_tools").digest(_ROW), "<u8") | np.uint64(1)


def fingerprint(x: Tensor) -> list[Any]:
    """The fingerprint of a contiguous host tensor: dtype, shape, hash, sum, norm, largest, NaNs, infinities,
    samples."""
    dtype, shape, count = dtype_name(x.dtype), list(x.shape), x.numel()
    if not count:
        return [dtype, shape, 0, 0.0, 0.0, 0.0, 0, 0, []]
    digest = _hash(x)
    if x.is_complex():
        x, count = torch.view_as_real(x), 2 * count
    flat = x.view(-1)
    if flat.dtype != torch.float64 and (flat.dtype != torch.float32 or count <= _SMALL):
        flat = flat.to(torch.float64)
    values = flat.numpy()  # NumPy's functions have less overhead than torch's
    numbers = _numbers(flat, values)
    nans = infinities = 0
    if not math.isfinite(numbers[0]) or not math.isfinite(numbers[1]):
        nans, infinities = int(flat.isnan().sum()), int(flat.isinf().sum())
        flat = torch.where(flat.isfinite(), flat, 0.0).to(torch.float64)
        values = flat.numpy()
        numbers = _numbers(flat, values)
    last = count - 1
    samples = [values.item(i) for i in (0, last // 3, 2 * last // 3, last)]
    return [dtype, shape, digest, *map(_short, numbers), nans, infinities, list(map(_short, samples))]


def _numbers(flat: Tensor, values: np.ndarray) -> tuple[float, float, float]:
    """The sum, the Euclidean norm and the largest absolute value."""
    with np.errstate(all="ignore"):
        # For many elements, torch's sum takes less time, and NumPy's dot starts threads of its own.
        many = values.size > 1 << 12
        total = float(flat.sum() if many else np.add.reduce(values))
        squares = float(torch.dot(flat, flat) if many else np.dot(values, values))
        largest = max(abs(float(np.minimum.reduce(values))), abs(float(np.maximum.reduce(values))))
        return total, math.sqrt(squares), largest


def _short(value: float) -> float:
    return float(f"{value:.9g}")


def _json(found: list[Any]) -> str:
    """A fingerprint as JSON."""
    dtype, shape, digest, total, norm, largest, nans, infinities, samples = found
    numbers = (total, norm, largest, *samples)
    if not all(map(math.isfinite, numbers)):
        return json.dumps(found, separators=(",", ":"))
    return f'["{dtype}",{shape},{digest},{total},{norm},{largest},{nans},{infinities},{samples}]'.replace(" ", "")


def _hash(x: Tensor) -> int:
    """A hash of the bytes in order; for large tensors, of the sums of their rows of words, weighted by column.

    The words are mixed before: a difference in the highest bit times the difference of two odd weights is 0.
    """
    data = x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy()  # one element may have any stride
    if data.nbytes <= 1 << 15:
        return zlib.crc32(data)
    whole = data.nbytes // _ROW * _ROW
    digest = zlib.crc32(data[whole:])
    words = data[:whole].view("<u8").reshape(-1, len(_WEIGHTS))
    for start in range(0, len(words), 256):  # rows that fit the processor's cache
        rows = words[start : start + 256]
        digest = zlib.crc32(np.einsum("ij,j->i", rows ^ (rows >> np.uint64(29)), _WEIGHTS), digest)
    return digest


def _of_list(flat: Tensor, copies: list[Tensor]) -> list[Any]:
    """The fingerprint of many results in one piece, as from an operator on lists; its shape is their number."""
    dtype, _, digest, *rest = fingerprint(flat)
    return [dtype, [len(copies)], zlib.crc32(repr([x.shape for x in copies]).encode(), digest), *rest]


def _folded(prints: list[list[Any]]) -> list[Any]:
    """One fingerprint for many results that are not in one piece."""
    digest = 0
    for each in prints:
        digest = zlib.crc32(repr(each[:3]).encode(), digest)
    total, norm = sum(p[3] for p in prints), math.sqrt(sum(p[4] ** 2 for p in prints))
    samples = [p[4] for p in prints[:: max(1, len(prints) // 4)]][:4]
    return [
        prints[0][0], [len(prints)], digest, _short(total), _short(norm), max(p[5] for p in prints),
        sum(p[6] for p in prints), sum(p[7] for p in prints), samples,
    ]  # fmt: skip
