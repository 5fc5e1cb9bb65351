"""The CPU fallback: which operators may use it, which did, and what it cost.

An operator without a device kernel runs on copies of its arguments on the CPU, and its results are
copied back. A process-wide *policy* decides whether it may:

- ``"allow"`` (default): it runs.
- ``"warn"``: it runs, with a warning.
- ``"error"``: it raises NotImplementedError, which names the operator, its arguments and the remedy.

An operator on the *deny* list is always refused, even if the device has a kernel for it; one on the
*allow* list is permitted under every policy. Names are ``"aten::add.Tensor"``, ``"aten::add"`` (every
overload) or patterns such as ``"mylib::*"``. To deny, force or share an operator of another library that has
a device kernel, import that library first: names are looked up when a function here is called.

Environment variables, read once at import: ``OPENREG_FALLBACK`` (policy), ``OPENREG_FALLBACK_ALLOW`` and
``OPENREG_FALLBACK_DENY`` (names separated by commas).

The fallback cannot return views: such an operator raises. Factories make their result on the device
that was asked for, and random operators draw from that device's generator, not from the CPU's.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from openreg_ops import _C
from openreg_ops.environment import WrongVariable

__all__ = ["Record", "allow", "deny", "force", "get_policy", "policy", "report", "reset", "set_policy", "share"]


class Record(NamedTuple):
    """What one operator's fallback has cost."""

    operator: str  #: full name, such as "mylib::foo.out"
    calls: int  #: how often it fell back
    bytes: int  #: bytes copied, both ways
    seconds: float  #: for copies and kernel


_policy = "allow"
_allow: list[str] = []
_deny: list[str] = []
_force: list[str] = []
_share: list[str] = []


def _matching(patterns: Iterable[str]) -> set[str]:
    """The names of all registered operators that a pattern matches."""
    patterns = list(patterns)
    if not patterns:
        return set()
    names = torch._C._dispatch_get_all_op_names()
    return {n for n in names for p in patterns if fnmatch.fnmatchcase(n, p) or fnmatch.fnmatchcase(n.split(".")[0], p)}


def _has_device_kernel(name: str) -> bool:
    """Returns true if an operator has a kernel for the device that no function here registered."""
    known = _device_kernels.get(name) if name in _routed else None
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1") if known is None else known


def _shareable(patterns: Iterable[str]) -> set[str]:
    """The operators that match a pattern and have a CPU kernel but no device kernel."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {name for name in _matching(patterns) if has(name, "CPU") and not _has_device_kernel(name)}


def _routes() -> dict[str, str]:
    routes = dict.fromkeys(_shareable(_share), "share")
    routes.update(dict.fromkeys(_matching(_force), "fallback"))
    routes.update(dict.fromkeys(_matching(_deny), "fallback"))  # which then rejects it
    return routes


_routed: dict[str, str] = {}
_device_kernels: dict[str, bool] = {}  # for the operators in _routed: whether they had one before


def _checked(names: Iterable[str], must_exist: bool) -> list[str]:
    """The names as a list; raises for a name that no operator can have, or that none has where one is required."""
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if not isinstance(name, str) or "::" not in name:
            raise ValueError(f'expected operator names such as "aten::add" or "mylib::*", but got {name!r}')
        # Another library may define its operators later; torch's own already exist.
        if (must_exist or name.startswith("aten::")) and not _matching([name]):
            raise ValueError(f"no operator matches {name!r}; import the library that defines it first, or fix the name")
    return names


def _apply() -> None:
    _C.set_fallback_policy(_policy, _allow, _deny)
    wanted = _routes()
    for name in _routed.keys() | wanted.keys():
        if _routed.get(name) != wanted.get(name):
            operator, _, overload = name.partition(".")
            _device_kernels[name] = _has_device_kernel(name)
            _C.route_operator(operator, overload, wanted.get(name, ""))
            # Note each operator at once: if a later one is rejected, the earlier ones can be undone.
            if name in wanted:
                _routed[name] = wanted[name]
            else:
                del _routed[name]


def get_policy() -> str:
    """The current policy: ``"allow"``, ``"warn"`` or ``"error"``."""
    return _policy


def set_policy(policy: str) -> None:
    """Set the policy.

    Raises:
        ValueError: `policy` is not ``"allow"``, ``"warn"`` or ``"error"``.
    """
    global _policy
    _C.set_fallback_policy(policy, _allow, _deny)  # raises before anything has changed
    _policy = policy


@contextlib.contextmanager
def policy(policy: str, *, allow: Iterable[str] = (), deny: Iterable[str] = ()) -> Iterator[None]:
    """``with fallback.policy("error", allow=[...], deny=[...]):`` — set a policy and additional names temporarily.

    Example:
        >>> with openreg_ops.fallback.policy("error"):
        ...     y = torch.ones(3, device="openreg").cumsum(0)  # raises if it left the device
        >>> y.tolist()
        [1.0, 2.0, 3.0]
    """
    global _policy
    before, allowed, denied = _policy, list(_allow), list(_deny)
    allow, deny = _checked(allow, must_exist=False), _checked(deny, must_exist=False)
    set_policy(policy)
    _allow.extend(allow)
    _deny.extend(deny)
    try:
        _apply()
        yield
    finally:
        _policy, _allow[:], _deny[:] = before, allowed, denied
        _apply()


class _Names:
    """Adds names to a list; as a context manager, removes them again on exit."""

    def __init__(self, names: list[str], added: tuple[str, ...], must_exist: bool = False) -> None:
        self._names, self._added = names, _checked(added, must_exist)
        names.extend(added)
        try:
            _apply()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> _Names:
        return self

    def __exit__(self, *exception: object) -> None:
        added, self._added = self._added, []  # a second exit has nothing to remove
        for name in added:
            if name in self._names:
                self._names.remove(name)
        _apply()


def allow(*names: str) -> _Names:
    """Permit these operators to fall back under every policy; also ``with fallback.allow(...):``."""
    return _Names(_allow, names)


def deny(*names: str) -> _Names:
    """Refuse these operators, whether or not the device has a kernel; also ``with fallback.deny(...):``."""
    return _Names(_deny, names)


def force(*names: str) -> _Names:
    """Send these operators to the fallback even though the device has a kernel; also a context manager."""
    return _Names(_force, names, must_exist=True)


def share(*names: str) -> _Names:
    """Run these operators' CPU kernels directly on device memory, without copies; also a context manager.

    This is for operators of other libraries: PyTorch's own are already shared. A pattern such as ``"mylib::*"`` shares
    the operators that have a CPU kernel but no device kernel, and leaves the others alone.

    Raises:
        ValueError: no operator has such a name, or none of those that do has a CPU kernel but no device kernel.

    Example:
        >>> library = torch.library.Library("share_example", "DEF")
        >>> _ = library.define("double(Tensor x) -> Tensor")
        >>> library.impl("double", lambda x: x * 2, "CPU")
        >>> with openreg_ops.fallback.share("share_example::*"):
        ...     torch.ops.share_example.double(torch.ones(3, device="openreg")).tolist()
        [2.0, 2.0, 2.0]
    """
    for name in _checked(names, must_exist=True):
        if _shareable([name]):
            continue
        matching = sorted(_matching([name]))
        kernels = {
            has: [
                operator
                for operator in matching
                if torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CPU") == has
            ]
            for has in (True, False)
        }
        why = [f"{kernel} has its own device kernel" for kernel in kernels[True]]
        why += [f"{kernel} has no CPU kernel to share" for kernel in kernels[False]]
        more = f", and {len(why) - 3} more" if len(why) > 3 else ""
        raise ValueError(
            f"openreg_ops.fallback.share: expected {name!r} to match an operator with a CPU kernel and no device "
            f"kernel, but {'; '.join(why[:3])}{more}. Register a CPU kernel, or leave the operator out"
        )
    return _Names(_share, names)


def report() -> list[Record]:
    """The operators that fell back since the start or the last `reset`, the most expensive first.

    Example:
        >>> openreg_ops.fallback.reset()
        >>> y = torch.ones(3, device="openreg") + 1
        >>> openreg_ops.fallback.report()
        []
    """
    records = [Record(name, calls, moved, ns / 1e9) for name, calls, moved, ns in _C.fallback_report()]
    return sorted(records, key=lambda record: -record.seconds)


def reset() -> None:
    """Empty the report."""
    _C.reset_fallback_report()


def _from_environment() -> None:
    """Read the policy and the lists from the environment."""
    global _policy
    for name, names in (("OPENREG_FALLBACK_ALLOW", _allow), ("OPENREG_FALLBACK_DENY", _deny)):
        asked = [pattern.strip() for pattern in os.environ.get(name, "").split(",") if pattern.strip()]
        try:
            names.extend(_checked(asked, must_exist=False))
        except ValueError as error:
            raise WrongVariable(name, str(error)) from None
    _policy = os.environ.get("OPENREG_FALLBACK", "") or "allow"
    _apply()


_from_environment()
