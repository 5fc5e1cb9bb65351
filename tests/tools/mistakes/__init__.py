"""Mistakes that authors of custom operators make: each kind has a file, with wrong operators and correct ones.

`python tests/tools/mistakes` prints which kinds `check` finds, and which `torch.library.opcheck` finds.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


@dataclasses.dataclass
class Example:
    """An operator with samples on the CPU, and further arguments of `check`, such as a reference."""

    op: Any
    samples: Sequence[Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Operator:
    """A function that defines an operator, once, and returns its `Example`."""

    kind: str  # the file
    name: str
    make: Callable[[], Example]
    found_by: tuple[str, ...]  # the checks that may fail, of which the first must; empty for a correct operator
    devices: tuple[str, ...]
    says: str  # what the first of the checks says on the first of the devices; " … " stands for any text


OPERATORS: list[Operator] = []


def _add(
    make: Callable[[], Example], found_by: tuple[str, ...], devices: tuple[str, ...], says: str = ""
) -> Callable[[], Example]:
    made = functools.cache(make)
    OPERATORS.append(Operator(make.__module__.rpartition(".")[2], make.__name__, made, found_by, devices, says))
    return made


def wrong(*found_by: str, devices: tuple[str, ...] = ("cpu", "openreg"), says: str = "") -> Callable[[Any], Any]:
    """Adds a wrong operator that the first of these checks reports. The others may report the same cause."""
    return lambda make: _add(make, found_by, devices, says)


def pattern(sentence: str) -> str:
    """The regular expression of a sentence in which " … " stands for any text."""
    return ".*".join(re.escape(part) for part in re.split(r" ?… ?", sentence))


def right(*, devices: tuple[str, ...] = ("cpu", "openreg")) -> Callable[[Any], Any]:
    """Adds a correct operator, which passes."""
    return lambda make: _add(make, (), devices)


LIBRARY = torch.library.Library("mistakes", "FRAGMENT")


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    setup: Callable[..., Any] = lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    vmap: Callable[..., Any] | None = None,
    tags: Sequence[torch.Tag] = (),
    key: str = "CompositeExplicitAutograd",
) -> Any:
    """An operator of the namespace "mistakes" with one kernel, by default for all devices."""
    name = f"mistakes::{schema.partition('(')[0]}"
    LIBRARY.define(schema, tags=tags)
    LIBRARY.impl(name, kernel, key)
    if fake:
        torch.library.register_fake(name, fake, lib=LIBRARY)
    if backward:
        torch.library.register_autograd(name, backward, setup_context=setup, lib=LIBRARY)
    if vmap:
        torch.library.register_vmap(name, vmap, lib=LIBRARY)
    return getattr(torch.ops.mistakes, schema.partition("(")[0]).default


def contiguous_like(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """A fake kernel."""
    return x.new_empty(x.shape)


def no_derivative(ctx: Any, *grads: Any) -> None:
    """A backward that refuses."""
    raise NotImplementedError("this operator has no derivative")


def keeps_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    """A setup_context."""


def without_gradient(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], **more: Any) -> Any:
    """Defines an operator that has no derivative, and says so."""

    return define(
        schema, kernel, fake, no_derivative, lambda ctx, inputs, output, keyword_only_inputs=None: None, **more
    )


def load() -> list[Operator]:
    """The operators of every file."""
    for file in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        importlib.import_module(f"{__name__}.{file.stem}")
    return OPERATORS
