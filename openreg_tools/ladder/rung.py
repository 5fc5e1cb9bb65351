"""The rungs of the ladder, and what a check is."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
from collections.abc import Callable, Iterable

import torch
from torch.nn import functional

__all__ = [
    "IMPORTS",
    "RUNGS",
    "TRANSLATION",
    "Check",
    "Rung",
    "Skip",
    "address",
    "check",
    "equal",
    "imports",
    "raises",
    "trained",
]

TUTORIALS = "https://docs.pytorch.org/tutorials/advanced"
# PyTorch's documents for people who write a backend, by the name that their sections begin with here.
DOCUMENTS = {
    "Extending dispatcher": f"{TUTORIALS}/extend_dispatcher.html",
    "PrivateUse1": f"{TUTORIALS}/privateuseone.html",
    "Accelerator": "https://docs.pytorch.org/docs/main/accelerator/operators.html",
}

# The Chinese translation of "Extending dispatcher".
TRANSLATION = "https://docs.pytorch.ac.cn/tutorials/advanced/extend_dispatcher.html"


def address(section: str) -> str:
    """The address of a section "Document: Section" on the web."""
    document, _, title = section.partition(": ")
    anchor = re.sub(r"[^a-z0-9]+", "-", title.lower().replace("'", "")).strip("-")
    return f"{DOCUMENTS[document]}#{anchor}"


class Skip(Exception):  # noqa: N818 -- it says why a check does not apply here
    """A check does not apply here, for the reason that it gives."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One check of a rung.

    Args:
        run: raises if the device of this name fails, and `Skip` if the check does not apply.
        key: the dispatch key of what it tests, "" for what the dispatcher does not call.
        file: the file of the scaffold that implements it.
        section: the section of PyTorch's documents about it.
        todo: what to write if it fails.
    """

    run: Callable[[str], None]
    key: str
    file: str
    section: str
    todo: str

    @property
    def name(self) -> str:
        """What it checks, as the first line of its docstring."""
        return (self.run.__doc__ or self.run.__name__).strip().splitlines()[0].rstrip(".")


def check(file: str, section: str, todo: str, key: str = "") -> Callable[[Callable[[str], None]], Check]:
    """A decorator that makes a `Check` of a function of the device's name."""
    return lambda run: Check(run, key, file, section, todo)


@dataclasses.dataclass(frozen=True)
class Rung:
    """A step of a backend's development.

    Args:
        module: of `openreg_tools.ladder.checks`.
        sections: of PyTorch's documents, in the form "Document: Section".
    """

    number: int
    title: str
    module: str
    sections: tuple[str, ...]

    def checks(self) -> list[Check]:
        """The checks, in the order of the file."""
        module = importlib.import_module(f"openreg_tools.ladder.checks.{self.module}")
        return [value for value in vars(module).values() if isinstance(value, Check)]


RUNGS = (
    Rung(1, "name, device, autoload", "names", (
        "Extending dispatcher: What's a new backend?",
        "Extending dispatcher: Get a dispatch key for your backend",
        "Extending dispatcher: Build an extension",
        "PrivateUse1: Why is it PrivateUse1?",
        "PrivateUse1: Register device guard for the new backend",
        "PrivateUse1: Rename privateuse1 to a custom name for the new backend",
        "PrivateUse1: Generate methods and properties related to the new backend",
    )),
    Rung(2, "memory and minimal operators", "memory", (
        "Extending dispatcher: Get the full list of PyTorch operators",
        "Extending dispatcher: Register kernels for the new backend",
        "PrivateUse1: Register kernels for the new backend",
        "Accelerator: Operator Set",
        "Accelerator: Step 1",
    )),
    Rung(3, "copies, pinned memory, non_blocking", "copies", (
        "PrivateUse1: Register kernels for the new backend",
        "Accelerator: Operator Set",
    )),
    Rung(4, "fallback without wrong answers, autograd", "fallback", (
        "Extending dispatcher: Register kernels for the new backend",
        "Extending dispatcher: Autograd support for the new backend",
        "Extending dispatcher: Custom operator support",
        "Accelerator: Step 2",
        "Accelerator: Selective Fallback",
        "Accelerator: PyTorch STUB",
        "Accelerator: Custom Operators",
    )),
    Rung(5, "streams and events", "streams", ("PrivateUse1: Register device guard for the new backend",)),
    Rung(6, "random numbers", "random", ("PrivateUse1: Register generator for the new backend",)),
    Rung(7, "autocast, GradScaler", "mixed_precision", (
        "PrivateUse1: Generate methods and properties related to the new backend",
        "Extending dispatcher: Register kernels for the new backend",
    )),
    Rung(8, "serialization, DLPack, processes", "sharing", (
        "PrivateUse1: Register serialization/deserialization functions for new backend metadata",
        "Extending dispatcher: Known issues & additional notes",
    )),
    Rung(9, "profiler, memory history", "profiler", ("Accelerator: Environment Variables",)),
    Rung(10, "compile", "compiled", (
        "Extending dispatcher: JIT support",
        "Accelerator: Forward Only",
    )),
    Rung(11, "distributed", "distributed", ("Extending dispatcher: Future Work",)),
    Rung(12, "conformance", "conformance", (
        "Extending dispatcher: Testing your backend against native PyTorch backends",
        "Extending dispatcher: Backward Compatibility",
        "Extending dispatcher: Stay in touch",
        "Accelerator: Commands",
    )),
)  # fmt: skip


# ---- what checks share ----

IMPORTS = "OPENREG_TOOLS_LADDER_IMPORTS"  # the modules of --import, for the processes of checks


def imports() -> list[str]:
    """The modules that a process imports to have the device."""
    return list(filter(None, os.environ.get(IMPORTS, "").split(",")))


def trained(
    device: str,
    steps: int,
    optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer],
    compiled: Callable[[torch.nn.Module], Callable[[torch.Tensor], torch.Tensor]] = lambda model: model,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of a small model, and the last gradient of its first weight. On every device it starts from the same numbers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    x, target = torch.randn(10, 8).to(device), torch.randint(0, 4, (10,)).to(device)
    model = model.to(device)
    run, updates, losses = compiled(model), optimizer(model.parameters()), []
    for _ in range(steps):
        updates.zero_grad()
        loss = functional.cross_entropy(run(x), target)
        loss.backward()
        updates.step()
        losses.append(loss.item())
    return torch.tensor(losses), model[0].weight.grad.cpu()


def equal(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raise unless a tensor of the device has the values of one on the CPU, bit for bit or within rounding."""
    on_host = found.detach().cpu()
    try:
        torch.testing.assert_close(on_host, expected.detach().cpu(), equal_nan=True)
    except AssertionError as error:
        lines = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise AssertionError(f"{what} differs from the CPU: {lines}") from None


def raises(call: Callable[[], object], what: str, kinds: tuple[type[Exception], ...] = (Exception,)) -> str:
    """Raise unless a call raises one of `kinds`; returns its message."""
    try:
        call()
    except kinds as error:
        return str(error)
    raise AssertionError(f"{what} raises no error")
