"""tests/processes.py: programs that fork end as programs that start from nothing."""

import ast
import os
import signal
import subprocess
import sys
import time

import pytest
from processes import forking, python

import openreg_ops
import openreg_tools

pytestmark = pytest.mark.processes
MODULE = "import sys; print(sys.stdin.readline().strip(), flush=True); {}"


@pytest.fixture(params=[subprocess.Popen, None], ids=["started", "forked"])
def start(request, tmp_path):
    """Starts a module that prints its first line of input and then does what it is told."""
    kind = request.param or forking()

    def start(then):
        (tmp_path / "echo.py").write_text(MODULE.format(then))
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        return kind([sys.executable, "-m", "echo"], cwd=tmp_path, **pipes)

    return start


def says(process, line):
    process.stdin.write(line)
    process.stdin.flush()
    return process.stdout.readline()


def test_a_process_that_ends_by_itself_may_still_be_killed(start):
    process = start("sys.exit(3)")
    assert says(process, b"hello\n") == b"hello\n" and process.stdout.read() == b""
    time.sleep(0.2)
    process.kill()
    assert process.wait() == 3 and process.poll() == 3


def test_programs_import_what_the_tests_import():
    """PYTHONPATH may name another checkout than the installed one. A program that changes it has no other folders."""
    code = "import sys, openreg_ops, openreg_tools; print(openreg_ops.__file__, openreg_tools.__file__, sys.path)"
    *files, path = python("-c", code).stdout.split(maxsplit=2)
    assert files == [openreg_ops.__file__, openreg_tools.__file__]
    found = ast.literal_eval(python("-c", "import sys; print(sys.path)", PYTHONPATH="/elsewhere").stdout)
    inherited = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    assert found == ["/elsewhere", *(folder for folder in ast.literal_eval(path) if folder not in inherited)]


def test_how_programs_end():
    assert python("-c", "import os; os.abort()").returncode == -signal.SIGABRT
    done = python("-c", "import sys; print(input()); sys.exit('wrong')", input="a line\n")
    assert (done.returncode, done.stdout, done.stderr) == (1, "a line\n", "wrong\n")
    with pytest.raises(subprocess.TimeoutExpired) as raised:
        python("-c", "import time; print('said', flush=True); time.sleep(100)", timeout=1)
    assert raised.value.output == "said\n"
