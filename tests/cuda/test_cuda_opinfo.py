"""Under the name cuda, PyTorch's operators and modules compute what the CPU computes: all of OpInfo, a few samples each."""

from __future__ import annotations

import json

import pytest
from processes import python

pytestmark = pytest.mark.processes

# Operators and checks that differ from the CPU, or from what OpInfo expects of CUDA, each with the reason.
KNOWN = {
    ("median", "errors"): "OpInfo expects an error for 26 dimensions, the limit of CUDA's kernels; the CPU's have none",
}

# Prints a line before each case, so that the last one names an operator that ends the process, and one for each failure.
# Every operator runs in float32 and in one other of its dtypes, in turn, and in each dtype that only CUDA has.
PROGRAM = """
import faulthandler, json
faulthandler.enable()
import torch.testing._internal.common_utils
torch.testing._internal.common_utils.extract_test_fn = lambda: None  # it reads the stack for each sample
from openreg_tools.conformance import command, sweep, training
from openreg_tools.core import opinfo

def cases():
    checks = ("forward", "backward", "inplace", "out", "errors", "cuda_dtypes")
    for turn, (name, op) in enumerate(opinfo.database().items()):
        dtypes = opinfo.dtypes_of(op)
        others = [dtype for dtype in dtypes if dtype != "float32"]
        if "float32" in dtypes:
            yield name, "float32", checks
        if others:
            yield name, others[turn % len(others)], ("forward",) if "float32" in dtypes else checks
    for name in training.modules():
        yield name, "float32", ("train",)

for name, dtype, checks in cases():
    print(json.dumps({"operator": name, "dtype": dtype}), flush=True)
    for failure in command.check(name, dtype, "cuda", 1, checks, lambda at: None).failures:
        print(json.dumps({"operator": name, "dtype": dtype, **vars(failure)}), flush=True)
"""


def test_operators_and_modules():
    result = python("-c", PROGRAM, OPENREG_DEVICE="cuda", OMP_NUM_THREADS="1")
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"operator"')]
    last = f"{lines[-1]['operator']} in {lines[-1]['dtype']}" if lines else "the first case"
    assert result.returncode == 0, f"the process ended at {last}:\n{result.stderr[-2000:]}"

    failures = [line for line in lines if "check" in line]
    unknown = [
        f"{failure['operator']} {failure['dtype']} {failure['check']}: {failure['message']}"
        for failure in failures
        if (failure["operator"], failure["check"]) not in KNOWN
    ]
    assert not unknown, "\n".join(unknown)
    assert len({line["operator"] for line in lines}) > 800, "PyTorch's database has more operators and modules than ran"
    passed = KNOWN.keys() - {(failure["operator"], failure["check"]) for failure in failures}
    assert not passed, f"these pass now; remove them from KNOWN: {sorted(passed)}"
