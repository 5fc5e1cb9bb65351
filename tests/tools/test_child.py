"""Child processes: answers, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from openreg_tools.core import child
from openreg_tools.core.child import Child, Ended, Hung

PROGRAM = """
import os, sys, threading, time
from openreg_tools.core import child

def work(request, answer):
    answer("at")
    match request:
        case "abort": os.abort()
        case "fork":
            for forked in child.answers(lambda answer: (answer(os.getpid()), time.sleep(100)), 60):
                answer(forked)
        case "late": threading.Timer(0.1, os.abort).start()
    answer(os.getpid())

parent = child.parent()
assert child.parent() is None
print("printed")
parent.serve(work)
"""


def started() -> Child:
    return Child.start([sys.executable, "-c", PROGRAM])


def all_of(process: Child, request: str, seconds: float = 60) -> list[object]:
    process.send(request)
    return list(iter(lambda: process.read(seconds), None))


def raises(answer):
    answer(1)
    try:
        raise KeyError("cause")
    except KeyError:
        raise ValueError("two\nlines") from None


def crashes(answer):
    answer("half")
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    "work, given, how",
    [
        (raises, [1], "exit 1: ValueError: two"),
        (crashes, ["half"], "signal 11: Fatal Python error: Segmentation fault"),
        (lambda answer: os._exit(0), [], "exit 0"),
        (lambda answer: os.kill(os.getpid(), signal.SIGKILL), [], "signal 9"),
        (lambda answer: sys.exit(3), [], "exit 1: SystemExit: 3"),
    ],
    ids=["raises", "crashes", "exits", "killed", "sys.exit"],
)
def test_how_a_forked_child_ends(work, given, how):
    found = []
    with pytest.raises(Ended) as error:
        for answer in child.answers(work, 60):
            found.append(answer)
    assert (found, str(error.value)) == (given, how) and not isinstance(error.value, Hung)


def test_the_time_limit_is_for_each_answer():
    def work(answer):
        for i in range(4):
            time.sleep(0.2)
            answer(i)
        time.sleep(100)

    found = []
    with pytest.raises(Hung, match="no result after 0.6 s"):
        for answer in child.answers(work, 0.6):
            found.append(answer)
    assert found == [0, 1, 2, 3]


def test_a_child_that_is_not_read_to_its_end_is_ended(capfd):
    def work(answer):
        answer(os.getpid())
        time.sleep(100)

    process = next(child.answers(work, 60))
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)

    def prints(answer):
        os.write(1, b"of the child\n")
        answer({"a": [1.5, None, "é\n"], "path": sys})

    (value,) = child.answers(prints, 60)
    assert value == {"a": [1.5, None, "é\n"], "path": str(sys)}
    assert capfd.readouterr() == ("", "of the child\n")


def test_what_a_child_prints_without_a_new_line_is_not_lost():
    code = (
        "import sys\nfrom openreg_tools.core import child\n"
        "def work(answer):\n    sys.stdout.write('out '); sys.stderr.write('err'); answer(1)\n"
        "print(*child.answers(work, 60))"
    )
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run([sys.executable, "-c", code], env=buffered, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1\n", "out err")


def test_a_started_child_serves_until_it_ends():
    with started() as process:
        assert all_of(process, "one") == all_of(process, "two") == ["at", process.process.pid]
        with pytest.raises(Ended, match="^signal 6: Fatal Python error: Aborted$"):
            all_of(process, "abort")
        assert "Fatal Python error: Aborted" in process.errors()
    with started() as process:
        all_of(process, "late")
        process.process.wait()
        with pytest.raises(Ended, match="^signal 6"):
            all_of(process, "one")
    with Child.start([sys.executable, "-c", "import sys; print('out'); sys.exit('no\\nparent')"]) as process:
        with pytest.raises(Ended, match="^exit 1: no parent$"):
            process.read(60)
        assert process.output() == "out\n" and process.errors() == "no\nparent\n"


def test_stop_ends_the_children_that_a_child_forked():
    with started() as process:
        process.send("fork")
        assert process.read(60) == "at"
        forked = process.read(60)
        os.kill(forked, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(forked, 0)


def test_environment_and_directory_of_a_started_child(tmp_path):
    code = "import os; from openreg_tools.core import child; child.parent().answer([os.getcwd(), os.environ['VALUE']])"
    with Child.start([sys.executable, "-c", code], {"VALUE": "7"}, tmp_path) as process:
        assert process.read(60) == [str(tmp_path), "7"]
        with pytest.raises(Ended, match="^exit 0$"):
            process.read(60)


def test_a_limit_of_memory():
    def work(answer):
        with child.at_most(1 << 28):
            try:
                answer(len(bytearray(1 << 29)))
            except MemoryError:
                answer("MemoryError")
        answer(len(bytearray(1 << 29)))

    assert list(child.answers(work, 60)) == ["MemoryError", 1 << 29]
