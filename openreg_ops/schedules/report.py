"""Describes an order of streams (explore.py) and the wait that is missing in it."""

from __future__ import annotations

from typing import Any, NamedTuple

from openreg_ops.identity import identity
from openreg_tools.core.timeline import TimelineRow

__all__ = ["RETURN", "Action", "OrderExplanation", "Step", "heading", "pieces", "plain", "raises"]


class Step(NamedTuple):
    """A step of a host thread: a launch, a wait or a query; see Note [Schedules]."""

    thread: int  # 0: the one that called `schedules`; -1: any other
    number: int
    poll: int


class Action(NamedTuple):
    """Something that happened in an order."""

    what: str  # launch, run, wait, query
    step: Step  # of work that runs, the step that launched it
    stream: tuple[int, int]  # device, id
    place: int  # the stream's index in the order
    name: str
    where: str  # in the program, "train.py:12"


def pieces(count: int) -> str:
    return f"{count} piece{'s' * (count != 1)} of work"


def plain(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def raises(error: BaseException | None) -> str:
    """The type and message of an exception; only the message if the type is private."""
    if error is None:
        return "does not raise"
    name = type(error).__name__
    return f"raises {plain(error)}" if name.startswith("_") else f"raises {name}: {plain(error)}"


def _stream(action: Action) -> str:
    device, id = action.stream
    where = f"{identity.name}:{device}"
    return f"stream {id} of {where}" if id else f"the default stream of {where}"


COLLECTIVES = 65  # the id of the queue of a device's collectives: kStreams
RETURN = "return"  # the name of the step at which the program has returned


def heading(work: int, exceptions: int) -> str:
    return (
        f"The shortest order that shows it is the program's order of {pieces(work)}, with {exceptions} "
        f"exception{'s' * (exceptions != 1)}:"
    )


class OrderExplanation:
    """Describes an order with a few exceptions: for each late piece of work, the work that it ran just behind.

    `at_host` is the late work that conflicts with an action of the host between two steps, whatever runs meanwhile.
    """

    def __init__(self, log: list[Action], late: list[Step], at_host: set[Step]) -> None:
        self.log = log
        self.launches = {action.step: action for action in log if action.what == "launch"}
        self.late = [self.launches[step] for step in late if step in self.launches]
        self.host = [action for action in log if action.what != "run"]
        self.at_host = at_host

    def behind(self, item: Action) -> Action | None:
        """The work of another stream that the late work `item` ran just behind, or None if the host continued instead."""
        ran = next((i for i, action in enumerate(self.log) if action.what == "run" and action.step == item.step), 0)
        for action in reversed(self.log[:ran]):
            if action.what != "run":
                break
            if action.stream != item.stream and item.step not in self.at_host:
                return self.launches.get(action.step)
        return None

    def between(self, item: Action) -> tuple[Action, Action]:
        """The host's steps just before and just after the action that came too early."""
        ran = next(i for i, action in enumerate(self.log) if action.what == "run" and action.step == item.step)
        before = [action for action in self.log[:ran] if action.what != "run"]
        return before[-2] if len(before) > 1 else before[-1], before[-1]

    def work(self, launch: Action) -> str:
        name = (
            f"the collective {launch.name}"
            if launch.stream[1] == COLLECTIVES
            else f"{launch.name} on {_stream(launch)}"
        )
        return f"{name}, launched at {launch.where}" if launch.where else name

    def names(self) -> list[str]:
        return [launch.name for launch in self.late]

    def order(self) -> list[str]:
        lines = []
        for item in self.late:
            if behind := self.behind(item):
                then = f"runs only after {self.work(behind)}"
            else:
                then = f"is still pending when {self.host_did(item)}"
            lines += [f"  late: {self.work(item)}", f"        {then}"]
        return lines

    def rows(self) -> list[TimelineRow]:
        """The order, step by step."""
        devices = len({action.stream[0] for action in self.log if action.what == "run"}) > 1
        launched = {action.step: i for i, action in enumerate(self.log) if action.what == "launch"}
        late, early = {item.step for item in self.late}, set[int]()
        for item in self.late:
            behind = self.behind(item)
            too_early = behind.step if behind else self.between(item)[1].step
            early |= {
                i for i, action in enumerate(self.log)
                if action.step == too_early and (action.what == "run") == (behind is not None)
            }  # fmt: skip
        return [
            TimelineRow(
                _lane(action, devices), _did(action), action.where, launched.get(action.step, -1) if action.what == "run" else -1,
                "fail" if action.step in late else "warn" if i in early else "",
            )
            for i, action in enumerate(self.log)
        ]  # fmt: skip

    def host_did(self, item: Action) -> str:
        before, after = self.between(item)
        if self.returned(after):
            return "the program has returned and its result is read"
        if after.name == RETURN:
            return "the program returns"
        if before.where == after.where:
            return f"the host goes past {after.where}"
        return f"the host reaches {after.where}"

    def returned(self, step: Action) -> bool:
        names = [action.name for action in self.host]
        return RETURN in names and self.host.index(step) > names.index(RETURN)

    def missing(self, races: list[Any]) -> str:
        """The wait that is missing; the race detector's remedy if it sees the same two accesses."""
        if not self.late:
            return "nothing orders the program's threads; use an event, a lock or a join"
        item = self.late[0]
        behind = self.behind(item)
        late = _stream(item)
        if not behind and self.returned(self.between(item)[1]) and item.stream[1] != COLLECTIVES:
            return (
                f"the program does not wait for {late} before it returns. Call wait_stream() on the current stream with it. "
                f"For a result in host memory, call synchronize() on an event recorded there after {item.where}"
            )
        places = [behind.where] if behind else [action.where for action in self.between(item)]
        for race in sorted(races, key=lambda race: race.previous_access.freed is not None):
            if _at(race.previous_access, [item.where]) and (place := _at(race.current_access, places)):
                return race._remedy() + f" This access is at {place}." * ("this access" in race._remedy())
        if item.stream[1] == COLLECTIVES:
            return f"call wait() on the Work of {item.name}, launched at {item.where}, before its tensors are used"
        if behind:
            return (
                f"{_stream(behind)} does not wait for {late} between {item.where} and {behind.where}. Call its "
                f"wait_stream() with {late}, or its wait_event() with an event recorded there after {item.where}. If the "
                "tensor that the late work uses was freed, call its record_stream() first"
            )
        return (
            f"the host does not wait for {late}. Before it uses the result, call synchronize() on {late}, or on an event "
            f"recorded there after {item.where}"
        )


def _lane(action: Action, devices: bool) -> str:
    if action.what != "run":
        return {0: "host", -1: "other threads"}.get(action.step.thread, f"thread {action.step.thread}")
    device, id = action.stream
    name = "collectives" if id == COLLECTIVES else f"stream {id}" if id else "default stream"
    return f"{name} of {device}" if devices else name


def _did(action: Action) -> str:
    """What the host or the stream does."""
    names = {RETURN: "program returns", "end": "result is read"}
    return names.get(action.name, action.name) if action.what in ("wait", "query") else action.name


def _at(access: Any, places: list[str]) -> str | None:
    """The one of these places where an access of the race detector is made."""
    trace = "".join(access.stack_trace.format())
    for place in filter(None, places):
        path, _, line = place.rpartition(":")
        if f'"{path}", line {line},' in trace:
            return place
    return None
