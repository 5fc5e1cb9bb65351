"""Rung 12: conformance with the CPU above a share, and PyTorch's device-type tests."""

import importlib.util
import json

import pytest
import torch
from conftest import python
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase
from torch_acme import device_type

NAMES = "abs add addmm bmm cat clamp cumsum embedding exp gather index_select logsumexp masked_fill mm softmax".split()
device_type.install()


class TestOperators(TestCase):
    @ops([op for op in op_db if op.name in NAMES], allowed_dtypes=(torch.float32, torch.int64))
    def test_against_the_cpu(self, device, dtype, op):
        for sample in op.sample_inputs("cpu", dtype):
            moved = sample.transform(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x)
            actual = op(moved.input, *moved.args, **moved.kwargs)
            self.assertEqual(actual, op(sample.input, *sample.args, **sample.kwargs), exact_device=False)


instantiate_device_type_tests(TestOperators, globals(), only_for=("acme",))


@pytest.mark.skipif(not importlib.util.find_spec("openreg_tools"), reason="openreg_tools is not installed")
def test_conformance(tmp_path):
    words = ["--import", "torch_acme", "--device", "acme", "--suites", "operators", "--ops", "^(add|mm|sort)$"]
    words += ["--dtypes", "float32", "--checks", "forward", "backward", "inplace", "out", "layouts", "--json", "-"]
    done = python("-m", "openreg_tools", "conformance", *words, cwd=tmp_path)
    cases = json.loads(done.stdout)["cases"]
    assert len(cases) == 3 and not [case for case in cases if case["failures"]]
