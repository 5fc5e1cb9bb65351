"""Copies what a call reads and writes to the reference device, with strides, offsets and aliases.

Each device storage is copied once: an operator's results are kept for the operators that read them. See `Copies`.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from openreg_tools import backends

__all__ = [
    "Arguments",
    "Copies",
    "Facts",
    "Quiet",
    "copied",
    "dense",
    "equal",
    "facts",
    "same_bits",
    "tensors_of",
    "tied",
]

_SMALL = 1 << 14  # bytes of a storage that is copied whole for a call that writes a part of it
# Their results have no content yet, or they only manage memory.
UNDEFINED = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "_empty_affine_quantized",
    "resize_", "resize_as_", "set_", "_unsafe_view", "_reshape_alias", "record_stream", "is_pinned", "_pin_memory",
    "_resize_output_", "_efficientzerotensor",
}  # fmt: skip
# Results that only the operator's own backward reads, as bytes that are partly never written.
SCRATCH = {
    "mkldnn_rnn_layer": 3, "_cudnn_rnn": 3, "miopen_rnn": 3, "cudnn_batch_norm": 3, "_batch_norm_with_update": 3,
    "_batch_norm_with_update_functional": 3,
}  # fmt: skip
# Effects on the host or the process that no tensor shows.
ASIDE = {"profiler", "prim", "debug_mode_ops", "mempool", "streams", "prims_debug"}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the schema of an operator says."""

    name: str  # "aten::add.Tensor"
    base: str  # "add", of add_, add.out and _foreach_add too
    view: bool  # returns its argument as another view
    skipped: bool
    random: bool
    written: tuple[bool, ...]  # by argument
    names: tuple[str, ...]
    aliased: tuple[bool, ...]  # by result: an argument that was written
    collective: bool
    scratch: int  # the index of a result whose bytes have no meaning, or -1

    def writes(self, position: int | str) -> bool:
        if isinstance(position, str):
            position = self.names.index(position) if position in self.names else -1
        return self.collective or (0 <= position < len(self.written) and self.written[position])


@functools.cache
def facts(func: OpOverload) -> Facts:
    schema = func._schema
    namespace, _, plain = schema.name.partition("::")
    write = lambda each: each.alias_info is not None and each.alias_info.is_write  # noqa: E731
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    base = plain.removeprefix("_foreach_").rstrip("_") or plain
    return Facts(
        func.name(),
        base,
        view and not any(write(a) for a in schema.arguments),
        plain in UNDEFINED or namespace in ASIDE,
        torch.Tag.nondeterministic_seeded in func.tags,
        tuple(write(a) for a in schema.arguments),
        tuple(a.name for a in schema.arguments),
        tuple(write(r) for r in schema.returns),
        namespace == "c10d",  # its operators do not declare their writes
        SCRATCH.get(plain, -1),
    )


def tensors_of(values: Any) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operator."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


class Quiet:
    """For a tool's own work: modes, autograd and injected faults do not see it."""

    def __init__(self, device: str) -> None:
        self._own = backends.of_device(device).own_work

    def __enter__(self) -> None:
        self._work = self._own()
        self._work.__enter__()
        self._guards = (
            torch._C._AutoDispatchBelowAutograd(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction()
        )  # fmt: skip
        for guard in self._guards:
            guard.__enter__()

    def __exit__(self, *exception: Any) -> None:
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)
        self._work.__exit__(None, None, None)


@dataclasses.dataclass
class Arguments:
    """The arguments of one call on the reference device; `pairs` has each device tensor with its copy."""

    args: list[Any]
    kwargs: dict[str, Any]
    written: list[tuple[str, Tensor, Tensor]]  # argument, the device's, the copy
    # The same before the call, to rerun it; clone its tensors if they are written.
    before: Callable[[], tuple[list[Any], dict[str, Any]]]
    read: list[tuple[Tensor, Tensor]]  # the device's, the copy, of arguments that are read only
    # Views that are written: the name, the view, the same as it was, and its whole storage on the reference.
    parts: list[tuple[str, Tensor, Tensor, torch.UntypedStorage]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Kept:
    of: StorageWeakRef
    storage: torch.UntypedStorage
    by: int  # the call that wrote it
    tensor: Tensor | None = None  # a tensor on `storage`, for those that view all of it in the same way


class Copies:
    """Copies on the `reference` device, cached by storage, up to `limit` bytes."""

    def __init__(self, device: str, reference: torch.device, limit: int = 4 << 30) -> None:
        self.type, self.reference, self.limit = device, reference, limit
        self.kept: dict[int, _Kept] = {}
        self.keeping = True  # off while compiled kernels write memory unseen
        self.bytes, self._purge_at = 0, 64

    # ---- before a call ----

    def take(self, of: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The arguments of a call, copied."""
        groups: dict[int, list[tuple[Tensor, bool]]] = {}
        for position, value in [*enumerate(args), *kwargs.items()]:
            if isinstance(value, (Tensor, list, tuple)):
                writes = of.writes(position)
                for tensor in tensors_of((value,)):
                    if _plain(tensor):
                        groups.setdefault(tensor.untyped_storage()._cdata, []).append((tensor, writes))
        copies: dict[int, Tensor] = {}
        before: dict[int, Callable[[], Tensor]] = {}
        wholes: dict[int, tuple[Tensor, torch.UntypedStorage]] = {}
        for cdata, group in groups.items():
            self._group(cdata, group, copies, before, wholes)
        written: list[tuple[str, Tensor, Tensor]] = []
        read: list[tuple[Tensor, Tensor]] = []
        out: list[Any] = []
        named = {}
        for position, value in enumerate(args):
            name = of.names[position] if position < len(of.names) else str(position)
            out.append(self._argument(name, value, of.writes(position), copies, before, written, read))
        for name, value in kwargs.items():
            named[name] = self._argument(name, value, of.writes(name), copies, before, written, read)

        def earlier() -> tuple[list[Any], dict[str, Any]]:
            def at_the_call(value: Any) -> Any:
                return before[id(value)]() if id(value) in before else value

            def argument(value: Any) -> Any:
                return [*map(at_the_call, value)] if isinstance(value, (list, tuple)) else at_the_call(value)

            return [*map(argument, out)], {name: argument(value) for name, value in named.items()}

        parts = [(name, tensor, *wholes[id(tensor)]) for name, tensor, _ in written if id(tensor) in wholes]
        return Arguments(out, named, written, earlier, read, parts)

    def _argument(
        self, name: str, value: Any, writes: bool, copies: dict, before: dict, written: list, read: list
    ) -> Any:
        if isinstance(value, Tensor):
            copy = copies.get(id(value))
            if copy is None:  # sparse, nested or without a storage
                same = value.device == self.reference
                copy = value.detach().clone() if same else value.detach().to(self.reference, copy=True)
                if writes:
                    before[id(copy)] = functools.partial(_itself, copy.clone())
            if writes:
                written.append((name, value, copy))
            elif value.device.type == self.type:
                read.append((value, copy))
            return copy
        if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
            return [
                self._argument(f"{name}[{i}]", each, writes, copies, before, written, read)
                for i, each in enumerate(value)
            ]
        if isinstance(value, torch.device) and value.type == self.type:
            return self.reference
        return value

    def _group(self, cdata: int, group: list[tuple[Tensor, bool]], copies: dict, before: dict, wholes: dict) -> None:
        """Copy the arguments that share one storage: the full storage, cached, if they are only read; also if one is
        written and the storage is small, to see writes outside it; else what they span."""
        here = group[0][0].device.type == self.type
        if not any(writes for _, writes in group):
            if not here and group[0][0].device == self.reference:
                copies.update((id(tensor), tensor) for tensor, _ in group)
                return
            kept = self.kept.get(cdata) if self.keeping else None
            storage = self._storage(group[0][0]) if kept is None else kept.storage
            for tensor, _ in group:
                whole = kept is not None and kept.tensor is not None and _alike(kept.tensor, tensor)
                copies[id(tensor)] = kept.tensor if whole else _view(storage, tensor, 0)
            return
        kept = self.kept.get(cdata) if here else None
        if len(group) == 1 and kept is not None and _whole(tensor := group[0][0]):
            copy = copies[id(tensor)] = tensor.to(self.reference, copy=True)
            before[id(copy)] = functools.partial(_view, kept.storage, tensor.detach(), 0)
            return
        low, high = _span([tensor for tensor, _ in group])
        if whole := here and (size := group[0][0].untyped_storage().nbytes()) <= _SMALL:
            low, high = 0, size
        own = _bytes(group[0][0], low, high).to(self.reference, copy=True).untyped_storage()
        earlier, start = (kept.storage, 0) if kept else (own.clone(), low)
        for tensor, writes in group:
            if writes and whole and not _whole(tensor):
                wholes[id(tensor)] = tensor.detach(), own
            copy = copies[id(tensor)] = _view(own, tensor, low)
            # The call may resize or transpose the tensor, but not its detached alias.
            before[id(copy)] = functools.partial(_view, earlier, tensor.detach(), start)

    def _storage(self, tensor: Tensor) -> torch.UntypedStorage:
        storage = tensor.untyped_storage()
        copy = _bytes(tensor, 0, storage.nbytes()).to(self.reference, copy=True).untyped_storage()
        self._keep(storage, copy, -1)
        return copy

    # ---- after it ----

    def strayed(self, arguments: Arguments) -> str:
        """The first view beside which a call changed the device's memory, and not the reference's; "" if there is none."""
        for name, tensor, earlier, expected in arguments.parts:
            storage = tensor.untyped_storage()
            if storage.nbytes() != expected.nbytes() or not _alike(tensor, earlier):  # resized
                continue
            now = _bytes(tensor, 0, storage.nbytes()).to(self.reference, copy=True).untyped_storage()
            for _, _, each, own in arguments.parts:
                if own._cdata == expected._cdata:  # the values themselves are compared within their tolerance
                    _of_elements(now, each).copy_(_of_elements(expected, each))
            both = [torch.empty(0, dtype=torch.uint8, device=self.reference).set_(each) for each in (now, expected)]
            if not torch.equal(*both):
                return name
        return ""

    def read(self, tensor: Tensor, by: int) -> tuple[Tensor, Callable[[], None]]:
        """A tensor's present content, and a function that caches it for later calls and drops the old cache entry."""
        if not _plain(tensor):
            return tensor.detach().to(self.reference, copy=True), _nothing
        if tensor.device.type != self.type:
            return tensor.to(self.reference), _nothing
        storage = tensor.untyped_storage()
        if _whole(tensor):
            copy = tensor.to(self.reference, copy=True)
            return copy, functools.partial(self._keep, storage, copy.untyped_storage(), by, copy)
        low, high = _span([tensor])
        copy = _bytes(tensor, low, high).to(self.reference, copy=True)
        if low == 0 and high == storage.nbytes():
            keep = functools.partial(self._keep, storage, copy.untyped_storage(), by)
        elif (kept := self.kept.get(storage._cdata)) is not None:
            keep = functools.partial(self._update, kept, storage, low, high, copy, by)
        else:
            keep = _nothing
        return _view(copy.untyped_storage(), tensor, low), keep

    def _keep(
        self, storage: torch.UntypedStorage, copy: torch.UntypedStorage, by: int, tensor: Tensor | None = None
    ) -> None:
        if not self.keeping:
            self.forget(storage)
            return
        if self.bytes + copy.nbytes() > self.limit or len(self.kept) >= self._purge_at:
            self.purge()
            self._purge_at = max(64, 2 * len(self.kept))  # soon: memory that is used again is in the cache
        if self.bytes + copy.nbytes() > self.limit:
            self.kept.clear()
            self.bytes = 0
        before = self.kept.pop(storage._cdata, None)
        self.bytes += copy.nbytes() - (before.storage.nbytes() if before else 0)
        self.kept[storage._cdata] = _Kept(StorageWeakRef(storage), copy, by, tensor)

    def _update(self, kept: _Kept, storage: torch.UntypedStorage, low: int, high: int, copy: Tensor, by: int) -> None:
        if not self.keeping or kept.storage.nbytes() != storage.nbytes():
            self.forget(storage)
            return
        all_bytes = torch.empty(0, dtype=torch.uint8, device=self.reference).set_(kept.storage)
        all_bytes[low:high].copy_(copy)
        kept.by = by

    def forget(self, storage: torch.UntypedStorage) -> None:
        if (kept := self.kept.pop(storage._cdata, None)) is not None:
            self.bytes -= kept.storage.nbytes()

    def purge(self) -> None:
        """Forget storages that are gone."""
        for cdata in [cdata for cdata, kept in self.kept.items() if kept.of.expired()]:
            self.bytes -= self.kept.pop(cdata).storage.nbytes()

    def refresh(self, arguments: Arguments) -> list[int]:
        """Copy again what a call only reads; returns, for each copy that differed from memory, the call that wrote
        it."""
        changed, seen = [], weakref.WeakSet()
        written = {each.untyped_storage()._cdata for _, each, _ in arguments.written if _plain(each)}
        for tensor, copy in arguments.read:
            if not _plain(tensor) or copy.device != self.reference or tensor in seen:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in written:  # by the call itself
                continue
            low, high = _span([tensor])
            now = _view(_bytes(tensor, low, high).to(self.reference, copy=True).untyped_storage(), tensor, low)
            if not same_bits(now, copy):
                kept = self.kept.get(storage._cdata)
                changed.append(kept.by if kept else -1)
                copy.copy_(now)
        return changed


def _of_elements(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """The bits of a tensor's elements in a copy of its storage, each element once."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    kind = kinds[like.element_size()]
    sizes = [1 if step == 0 else size for size, step in zip(like.shape, like.stride(), strict=True)]
    x = torch.empty(0, dtype=kind, device=storage.device)
    return x.set_(storage, like.storage_offset(), sizes, like.stride())


def _nothing() -> None:
    pass


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _whole(tensor: Tensor) -> bool:
    """Whether a plain tensor is its storage, in order."""
    whole = tensor.nbytes == tensor.untyped_storage().nbytes() and tensor.is_contiguous()
    return whole and not (tensor.is_conj() or tensor.is_neg())


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether both view their storages in the same way."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
        and not (b.is_conj() or b.is_neg())
    )


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is a view of bytes in a storage."""
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested and _has_storage(tensor)


def _has_storage(tensor: Tensor) -> bool:
    return not tensor._is_zerotensor() and torch._C._has_storage(tensor)


def _span(tensors: list[Tensor]) -> tuple[int, int]:
    """The bytes of their storage that tensors reach, starting at a multiple of 64."""
    low, high = None, 0
    for x in tensors:
        if not x.numel():
            continue
        first = x.storage_offset() * x.element_size()
        reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        low = first if low is None else min(low, first)
        high = max(high, first + (reach + 1) * x.element_size())
    return (low or 0) // 64 * 64, high


def _bytes(tensor: Tensor, low: int, high: int) -> Tensor:
    """Bytes of the tensor's storage, as a tensor on its device."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(), low, (max(0, high - low),), (1,)
    )


def _view(storage: torch.UntypedStorage, like: Tensor, low: int) -> Tensor:
    """A tensor like another, on a storage that holds the other's from byte `low` on."""
    offset = like.storage_offset() - low // like.element_size() if like.numel() else 0
    x = torch.empty(0, dtype=like.dtype, device=storage.device).set_(storage, offset, like.shape, like.stride())
    if like.is_conj():
        x = torch._conj(x)
    return torch._neg_view(x) if like.is_neg() else x


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def equal(a: Tensor, b: Tensor) -> bool:
    """`torch.equal` of tensors of one dtype and shape on one device, in the time of reading them."""
    if (
        a.device.type == "cpu"
        and a.stride() == b.stride()
        and not (a.is_conj() or a.is_neg() or b.is_conj() or b.is_neg())
    ):
        whole = a.is_contiguous() or (a.dim() > 1 and a.mT.is_contiguous())
        if whole and _memcmp(a.data_ptr(), b.data_ptr(), a.nbytes) == 0:
            return True  # also where there are NaNs
    return torch.equal(a, b)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether tensors of one dtype and shape hold the same values; NaN equals NaN."""
    if equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    return bool(((a == b) | ((a != a) & (b != b))).all())


def copied(values: list[Any], device: torch.device, whole: bool = True) -> list[Any]:
    """Copies of tensors, and of those in lists, on a device, with strides, offsets and aliases.

    Args:
        whole: if False, a view of more than 16 KiB that shares its storage with no other value is copied without the memory
            beside it, and its offset may become smaller.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    views: dict[Any, Tensor] = {}
    count = collections.Counter(each.untyped_storage()._cdata for each in tensors_of(values) if _plain(each))

    def copy(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [*map(copy, value)]
        if not isinstance(value, Tensor):
            return value
        if not _plain(value):
            same = value.device == device
            return value.detach().clone() if same else value.detach().to(device, copy=True)
        storage = value.untyped_storage()
        low = 0
        if not whole and storage.nbytes() > _SMALL and count[storage._cdata] == 1:
            low, high = _span([value])
            low = max(0, low - _SMALL)
        else:
            high = storage.nbytes()
        if storage._cdata not in storages:
            storages[storage._cdata] = _bytes(value, low, high).to(device, copy=True).untyped_storage()
        key = (
            storage._cdata,
            value.dtype,
            value.shape,
            value.stride(),
            value.storage_offset(),
            value.is_conj(),
            value.is_neg(),
        )
        if key not in views:
            views[key] = _view(storages[storage._cdata], value.detach(), low)
        return views[key]

    return [*map(copy, values)]


def dense(x: Tensor) -> Tensor:
    """A tensor's numbers as a plain tensor."""
    return x if x.layout == torch.strided and not x.is_quantized else x.dequantize() if x.is_quantized else x.to_dense()


# These return the index of one of several equal elements; devices may choose differently.
CHOOSES = {"sort", "argsort", "topk", "max", "min", "argmax", "argmin", "median", "nanmedian", "kthvalue", "mode"}


def tied(func: OpOverload, arguments: Arguments, got: Tensor, want: Tensor) -> bool:
    """Whether results are indices that differ only in which of several equal elements they name."""
    if facts(func).base not in CHOOSES or got.dtype != torch.int64:
        return False
    args, kwargs = arguments.before()
    given = dict(zip(facts(func).names, args, strict=False)) | kwargs
    x, dim = given.get("self"), given.get("dim")
    if not isinstance(x, Tensor) or x.dtype == torch.int64 or given.get("stable"):
        return False
    if dim is None and "arg" in facts(func).base and facts(func).base != "argsort":
        x, dim = x.flatten(), 0
    dim = -1 if dim is None else dim
    if x.dim() == 0:
        return False
    try:
        index = [i if i.dim() == x.dim() else i.unsqueeze(dim) for i in (got, want)]
        return same_bits(x.gather(dim, index[0]), x.gather(dim, index[1]))
    except (RuntimeError, IndexError):  # an index out of range
        return False
