"""What needs a real GPU: a sentence in the error, and a list for the report at the end of a pytest run."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from openreg_tools.core import place

__all__ = ["Refusal", "refusals", "refuse"]


class Refusal(NamedTuple):
    """One call that was refused."""

    what: str  #: what was called, such as "torch.cuda.temperature()"
    needs: str  #: the library or tool, such as "NVML"
    line: str  #: file and line of the program


refusals: dict[Refusal, None] = {}  # in order


def refuse(what: str, needs: str) -> NoReturn:
    """Raise NotImplementedError for a call that needs a library or a tool of a real GPU."""
    refusals[Refusal(what, needs, place.line())] = None
    raise NotImplementedError(f"{what} needs {needs}, which a simulated device does not have; run this on a GPU")
