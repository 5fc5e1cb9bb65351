"""``torch.openreg.schedules``: runs a program in many orders of its streams, and finds the order that makes it wrong.

The runtime (csrc/runtime/explore/schedule.h) runs one order: the order of a seed, or the program's own with exceptions. This
module chooses the orders, compares their results, and shrinks an order that makes a difference. results.py reads results,
report.py reports the wait that is missing, and state.py keeps the state that every order starts from.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from openreg_ops import _C
from openreg_ops.schedules.report import RETURN, Action, OrderExplanation, Step, heading, pieces, raises
from openreg_ops.schedules.results import difference_of, values_of
from openreg_ops.schedules.state import Ranks, State, alone, without_collector
from openreg_tools.core.timeline import TimelineRow

__all__ = ["Difference", "ScheduleError", "Schedules", "schedules"]

RANDOM = 32  # seeds below this one are random orders; the next ones make exceptions to the program's order, one by one
TRIES = 5  # to see an order again that depends on more than its seed
TRIALS = 150  # the most orders that are run to shrink one


class ScheduleError(AssertionError):
    """A program's result depends on the order of its streams. The text is the report."""


class Late(NamedTuple):
    """A piece of work that runs after a later step than the one that launched it."""

    item: Step
    after: Step
    needed: bool  # only when the host waits for it
    rank: int  # among those that are late until the same step


class Deviation(NamedTuple):
    """An exception to the program's order."""

    rank: int  # of torch.distributed
    late: Late


@dataclass
class OrderOutcome:
    """What one order of a program returned or raised, and the actions in the order in which they ran."""

    values: dict[str, Any]
    error: Exception | None
    log: list[Action]

    def differs(self, other: OrderOutcome, rtol: float, atol: float) -> str | None:
        """How this outcome differs from the outcome of the program's own order, if it does."""
        if (self.error is None) != (other.error is None) or type(self.error) is not type(other.error):
            return f"the program {raises(self.error)}; in program order it {raises(other.error)}"
        if self.error is not None:
            return None
        return difference_of(self.values, other.values, rtol, atol)


@dataclass
class Difference:
    """An order that gives a different result."""

    seed: int
    what: str  #: how the result differs
    order: list[str]  #: the shortest order that shows it, in words
    missing: str  #: the wait that is missing, as far as the order shows it
    late: list[str] = field(default_factory=list)  #: the names of the work that is late in it
    orders: int = 0  #: orders that were run to find it
    rows: list[list[TimelineRow]] = field(default_factory=list, repr=False)  #: by rank, the order as a timeline

    def __str__(self) -> str:
        return "\n".join([self.what, *self.order, self.missing])


@dataclass
class Schedules:
    """What `schedules` found. Printing it gives the report."""

    seeds: Sequence[int]
    orders: int = 0  #: orders that were run and compared
    work: int = 0  #: pieces of work in the program's order
    difference: Difference | None = None
    again: str = "torch.openreg.schedules(program, seeds=[{seed}])"  #: how to run the order of a seed
    fingerprints: dict[int, str] = field(default_factory=dict)  #: by seed; equal orders have equal fingerprints

    @property
    def passed(self) -> bool:
        """True if every order gave the same result."""
        return self.difference is None

    def raise_if_failed(self) -> None:
        """Raise `ScheduleError`, with the report, if an order made a difference."""
        if not self.passed:
            raise ScheduleError("\n" + str(self))

    def html(self) -> str:
        """The report as one HTML page, with a timeline of the order that gives a different result."""
        from openreg_ops.schedules.page import SchedulesPage

        return SchedulesPage(self).html()

    def __enter__(self) -> Schedules:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            self.raise_if_failed()

    def __str__(self) -> str:
        if (found := self.difference) is None:
            orders = "1 order" if self.orders == 1 else f"{self.orders} orders"
            return f"schedules: {orders} of {pieces(self.work)} give{'s' * (self.orders == 1)} the same result"
        return "\n".join(
            [
                f"schedules: order {found.orders} of {len(self.seeds)}, seed {found.seed}, gives a different result",
                f"  {found.what}",
                *found.order,
                f"Missing: {found.missing}",
                f"To run this order again: {self.again.format(seed=found.seed)}",
            ]
        )


def schedules(
    program: Callable[..., Any],
    *args: Any,
    seeds: int | Iterable[int] = 200,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> Schedules:
    """Run ``program(*args)`` in many orders of its streams, and report the first one that changes the result.

    In an order, the device's scheduler decides which stream runs next, when a copy or a collective lands and how long
    each takes. It allows every order that the program's waits allow, as hardware does. It sees what the device sees:
    streams, events, collectives, and what threads launch, but not when the threads themselves run. For a program of one
    thread, an order depends only on its seed and the program: a seed gives the same order every time and on every
    machine. Seeds below 32 are random orders. The next ones are the program's own order with one piece of work as late
    as possible, then with two. Ctrl-C ends the call.

    Every order must give the result of the program's own order, in which work runs as soon as it is launched. The result
    is what the program raises, and the tensors, arrays, numbers and strings that it returns, in any nesting of containers, dataclasses and objects of your own classes. It is read the way a caller would
    read it: on the current stream, and by the host immediately. A program that returns the output of a side stream must
    therefore wait for it. A program that asserts does not need to return anything. Before a difference is reported, the
    program's own order and the order that differs run again.

    The program is passed as a function, because it runs many times. Used as
    ``with torch.openreg.schedules(program, seeds=200) as found:``, it raises at the end of the body if an order made a
    difference. Without ``with``, look at the report that it returns.

    Args:
        program: creates its own tensors and streams, and gives the same result each time it runs in the same order. The
            generators of PyTorch, Python and NumPy are in the same state at the start of each order.
        args: passed to `program`.
        seeds: how many orders to run, or which seeds.
        rtol, atol: how much floating-point results may differ; 0 by default.
    Returns:
        The report, with `difference`, `passed`, `html()` and `raise_if_failed()`.
    Raises:
        TypeError: `program` cannot be called.
        ValueError: `seeds` names no order, `rtol` or `atol` is no finite number, the program queues no work, or it gives
            two results in one order.
        RuntimeError: called inside another call's program, while another thread tries orders, or inside a capture.

    Exceptions that the program raises in its own order are passed on.

    Example:
        >>> def program():
        ...     host = torch.zeros(4, pin_memory=True)
        ...     host.copy_(torch.ones(4, device="openreg"), non_blocking=True)
        ...     torch.openreg.synchronize()  # without it, the result depends on the order
        ...     return host.clone()
        >>> print(torch.openreg.schedules(program, seeds=10))
        schedules: 10 orders of 2 pieces of work give the same result
    """
    return Exploration(program, args, _seeds(seeds), rtol, atol).run()


def _seeds(seeds: int | Iterable[int]) -> Sequence[int]:
    wanted = "schedules: expected seeds to be a number of orders above 0, or a list of seeds"
    count = _index(seeds)
    if count is None and (isinstance(seeds, bool | str) or not isinstance(seeds, Iterable)):
        raise TypeError(f"{wanted}, but got {seeds!r}")
    found = range(count) if count is not None else list(seeds)  # type: ignore[arg-type]
    if not found:
        raise ValueError(f"{wanted}, but got {seeds!r}")
    if isinstance(found, range):
        return found
    numbers = []
    for seed in found:
        if (number := _index(seed)) is None or not 0 <= number < 2**64:
            raise ValueError(f"{wanted}, each from 0 to 2**64 - 1, but got {seed!r}")
        numbers.append(number)
    return numbers


def _index(value: Any) -> int | None:
    """The value of an integer of any type, also NumPy's and PyTorch's, but not of a bool."""
    if isinstance(value, bool) or getattr(value, "ndim", 0):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


class Exploration:
    """One call of `schedules`. With several ranks, each makes the call, and they run the same orders in lockstep."""

    def __init__(self, program: Callable[..., Any], args: Any, seeds: Sequence[int], rtol: float, atol: float) -> None:
        if not callable(program):
            raise TypeError(
                f"schedules: expected a function to call, but got {program!r}; pass the function itself, as in "
                "schedules(program, seeds=200), not its result"
            )
        if inspect.iscoroutinefunction(program):
            raise TypeError(
                f"schedules: expected a program that runs when it is called, but got the coroutine function {program!r}; "
                "pass lambda: asyncio.run(program())"
            )
        if _C.is_current_stream_capturing():
            raise RuntimeError("schedules: the current stream is being captured; call it outside the capture")
        for name, value in (("rtol", rtol), ("atol", atol)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ValueError(f"schedules: expected {name} to be a finite number, at least 0, but got {value!r}")
        self.program, self.args, self.seeds, self.rtol, self.atol = program, args, seeds, rtol, atol

    def run(self) -> Schedules:
        report, not_repeated = Schedules(self.seeds), ""
        with alone():
            self.state, self.ranks = State(), Ranks(seeds=self.seeds, rtol=self.rtol, atol=self.atol)
            self.base = self.one()
            self.ranks.raise_first(self.base.error)
            first, self.base = self.base, self.one(located=True)
            if what := self.differs(first):
                raise ValueError(_two_results(what))
            self.logs = self.ranks.gather([action for action in self.base.log if action.what != "run"])  # by rank
            report.work = sum(action.what == "launch" for log in self.logs for action in log)
            if not report.work:
                raise ValueError(
                    "schedules: the program queues no work on openreg, so there is nothing to order; run operators on the "
                    "device's tensors inside the program (what is drawn on the host is not queued)"
                )
            for seed in self.seeds:
                self.ranks.order = f"in the order of seed {seed}"
                outcome = self.one(**self.order(seed))
                report.orders += 1
                report.fingerprints[seed] = _fingerprint(outcome.log)
                if what := self.differs(outcome):
                    if not_repeated := self.confirm(seed, outcome):
                        continue
                    report.difference = self.explain(seed, what, outcome)
                    report.difference.orders = report.orders
                    return report
            if not_repeated:
                raise ValueError(not_repeated)
        return report

    # ---- one order ----

    def one(self, exceptions: Sequence[Deviation] = (), **order: Any) -> OrderOutcome:
        """Run the program in the order of a seed, or in its own order with exceptions."""
        order["late"] = [exception.late for exception in exceptions if exception.rank == self.ranks.rank]
        self.state.restore()
        values: dict[str, Any] = {}
        error: Exception | None = None
        try:
            _C.begin_order(**order)
            with without_collector(), torch.autograd.set_multithreading_enabled(False):
                try:
                    result = self.program(*self.args)
                    _C.pass_point(RETURN)
                    values = values_of(result)
                except Exception as raised:
                    error = raised
                log = _C.end_order()
            for device in range(torch.openreg.device_count()):
                try:
                    torch.openreg.synchronize(device)  # raises what queued work has raised
                except torch.AcceleratorError as raised:
                    error = error or raised
        finally:
            _C.abandon_order()  # if Ctrl-C has ended it
            self.state.restore()
        return OrderOutcome(values, error, [Action(what, Step(*step), *rest) for what, step, *rest in log])

    def differs(self, outcome: OrderOutcome, other: OrderOutcome | None = None) -> str | None:
        """How an outcome differs from the program's own, or from another, on the first rank where it does."""
        what = outcome.differs(other or self.base, self.rtol, self.atol)
        if outcome.error:
            outcome.error.with_traceback(None)  # the traceback would keep the order's tensors alive
        return self.ranks.first(what)

    def confirm(self, seed: int, outcome: OrderOutcome) -> str:
        """Run the program's own order, and the order of this seed, again: returns "" if their results still differ.

        Otherwise, returns the sentence that says so. Raises if an order gives two results.
        """
        if what := self.differs(self.one()):
            raise ValueError(_two_results(what))
        for _ in range(TRIES):
            again = self.one(**self.order(seed))
            what = self.differs(again, outcome)
            if not what:
                return ""
            if not self.ranks.first("another order" if _fingerprint(again.log) != _fingerprint(outcome.log) else None):
                raise ValueError(_two_results(what))
            if self.differs(again):  # threads launch at other times, and yet the result is wrong
                return ""
        return (
            f"schedules: the program gives a different result in an order of seed {seed}, but the seed does not repeat that "
            f"order, so it cannot be examined: {outcome.differs(self.base, self.rtol, self.atol)}. The program's "
            "threads launch work in another order in each run; look for a missing wait between them"
        )

    def order(self, seed: int) -> dict[str, Any]:
        if seed >= RANDOM and (exceptions := self.bounded(seed - RANDOM)):
            return {"exceptions": exceptions}
        own = (seed + self.ranks.rank * 0x9E3779B97F4A7C15) % 2**64
        return {"random": True, "seed": own, "length": len(self.base.log)}

    def bounded(self, number: int) -> list[Deviation]:
        """The exceptions of order `number`: the first orders have one exception, later ones two. Empty after the last."""
        single: list[Deviation] = []
        for rank, log in enumerate(self.logs):
            single += [Deviation(rank, Late(e.step, e.step, True, 0)) for e in log if e.what == "launch"]
        if number < len(single):
            return [single[number]]
        pairs = itertools.combinations(single, 2)
        return list(next(itertools.islice(pairs, number - len(single), None), ()))

    # ---- a shorter order ----

    def explain(self, seed: int, what: str, outcome: OrderOutcome) -> Difference:
        self.trials = 0
        exceptions = [
            Deviation(rank, late)
            for rank, some in enumerate(self.ranks.gather(_exceptions(outcome.log)))
            for late in some
        ]
        if not exceptions:
            raise ValueError(_two_results(what))
        if self.fails(exceptions):
            exceptions = self.sooner(self.nearer(self.fewer(exceptions)))
        at_host = {exception for exception in exceptions if self.is_at_host(exception, exceptions)}
        shown = self.one(exceptions, located=True)
        what = self.differs(shown) or what
        races = self.races()
        own = [exception for exception in exceptions if exception.rank == self.ranks.rank]
        told = OrderExplanation(
            shown.log,
            [exception.late.item for exception in own],
            {exception.late.item for exception in own if exception in at_host},
        )
        parts = self.ranks.gather((told.order(), told.missing(races) if own else "", told.names(), told.rows()))
        order = [heading(sum(action.what == "launch" for log in self.logs for action in log), len(exceptions))]
        for rank, (lines, *_) in enumerate(parts):
            order += [f"  on rank {rank}:"] * (self.ranks.size > 1 and bool(lines)) + lines
        missing = next((text for _, text, *_ in parts if text), told.missing(races))
        late = [name for _, _, names, _ in parts for name in names]
        return Difference(seed, what, order, missing, late, rows=[rows for *_, rows in parts])

    def fails(self, exceptions: Sequence[Deviation]) -> bool:
        outcome = self.one(exceptions)
        self.trials += 1
        return self.differs(outcome) is not None

    def fewer(self, exceptions: list[Deviation]) -> list[Deviation]:
        """Delta debugging: drop the exceptions that the difference does not need."""
        parts = 2
        while len(exceptions) > 1 and self.trials < TRIALS:
            size = -(-len(exceptions) // parts)
            chunks = [exceptions[i : i + size] for i in range(0, len(exceptions), size)]
            rests = [[exception for exception in exceptions if exception not in chunk] for chunk in chunks]
            for smaller in (*chunks, *rests) if parts > 2 else chunks:
                if len(smaller) < len(exceptions) and self.fails(smaller):
                    exceptions, parts = smaller, max(2, parts - 1 if smaller in rests else 2)
                    break
            else:
                if size == 1:
                    break
                parts = min(len(exceptions), 2 * parts)
        return exceptions

    def nearer(self, exceptions: list[Deviation]) -> list[Deviation]:
        """Choose the late work that is launched last. Work that waits for late work is late too, but is not the cause."""
        for i, (rank, late) in enumerate(exceptions):
            launches = [action.step for action in self.logs[rank] if action.what == "launch"]
            if late.item not in launches:
                continue
            for item in reversed(launches[launches.index(late.item) + 1 :]):
                tried = [*exceptions[:i], Deviation(rank, Late(item, item, True, late.rank)), *exceptions[i + 1 :]]
                if self.trials >= TRIALS:
                    break
                if self.fails(tried):
                    exceptions = tried
                    break
        return exceptions

    def sooner(self, exceptions: list[Deviation]) -> list[Deviation]:
        """Run each late piece of work as early as the difference allows, just behind the work that it conflicts with."""
        for i, (rank, late) in enumerate(exceptions):
            steps = [action.step for action in self.logs[rank] if action.what != "query"]
            if late.item not in steps:
                continue
            steps = steps[steps.index(late.item) :]
            low, high = 0, len(steps)  # the first that fails, from low to high; len(steps) if none does
            while low < high and self.trials < 2 * TRIALS:
                middle = (low + high) // 2
                tried = Deviation(rank, Late(late.item, steps[middle], False, late.rank))
                if self.fails([*exceptions[:i], tried, *exceptions[i + 1 :]]):
                    high, exceptions = middle, [*exceptions[:i], tried, *exceptions[i + 1 :]]
                else:
                    low = middle + 1
        return exceptions

    def is_at_host(self, one: Deviation, exceptions: list[Deviation]) -> bool:
        """Returns true if late work conflicts with the host, not with the work launched at the step that it waits for."""
        rank, late = one
        if late.needed or not any(action.what == "launch" and action.step == late.after for action in self.logs[rank]):
            return False
        others = [e for e in exceptions if e.rank != rank or e.late.item != late.after]
        return self.fails([*others, Deviation(rank, Late(late.after, late.after, False, late.rank + 1))])

    def races(self) -> list[Any]:
        """What the race detector reports for the program's own order."""
        from openreg_ops import sanitizer

        found: list[Any] = []
        with sanitizer.sanitize(found.extend):
            self.one()
        return found


def _two_results(what: str) -> str:
    return (
        "schedules: the program gives two results in the same order, so no order can be compared with it: "
        f"{what}. Seed its random numbers, start it from the same state each time, or allow the difference with rtol and "
        "atol"
    )


def _exceptions(log: list[Action]) -> list[Late]:
    """The exceptions that turn the program's order into this one."""
    found: list[Late] = []
    last: Step | None = None
    for i, action in enumerate(log):
        if action.what != "run":
            last = action.step
        elif last is not None and (log[i - 1].what != "launch" or log[i - 1].step != action.step):
            found.append(Late(action.step, last, False, i))
    return found


def _fingerprint(log: list[Action]) -> str:
    text = "\n".join(f"{action.what} {tuple(action.step)} {action.place} {action.name}" for action in log)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
