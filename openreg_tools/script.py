"""The old name of `core.program`, until every tool imports from there."""

import contextlib

from openreg_tools.core.device import to_stderr
from openreg_tools.core.program import Rank, add_program, of_rank, program, rank, run  # noqa: F401


def apart(json: str | None) -> contextlib.AbstractContextManager[None]:
    return to_stderr() if json == "-" else contextlib.nullcontext()
