"""The kernels of each vector capability that was built and that this processor has; see Note [Libraries] in setup.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import openreg_ops
from openreg_ops import _build, kernel_library

# Runs every operator's samples in its own process, and the same on the CPU, where the plain reference runs.
CODE = """
import sys
import torch
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves, tree_map_only
from openreg_ops import kernel_library
from openreg_ops.meta import op
from openreg_tools.core.samples import sample_of

libraries = {line.rpartition("/")[2].strip() for line in open("/proc/self/maps") if "/_ops_" in line}
print(kernel_library.capability(), *libraries)
asked = 0
for name, samples in op.SAMPLES.items():
    overload = getattr(torch.ops.openreg, name).default
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for sample in map(sample_of, samples("cpu", dtype)):
            results = []
            for where in ("openreg", "cpu"):
                arguments, options = tree_map_only(torch.Tensor, lambda x: x.clone().to(where), (sample.args, sample.kwargs))
                if any(isinstance(x, torch.Generator) for x in tree_leaves((arguments, options))) or "dropout" in name:
                    break  # the two devices draw different numbers
                out = overload(*arguments, **options)
                results.append([x.cpu() for x in tree_leaves((out, arguments)) if isinstance(x, torch.Tensor)])
            else:
                for ours, expected in zip(*results, strict=True):
                    rtol = {torch.bfloat16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-9}.get(ours.dtype, 0)
                    whole = not ours.dtype.is_floating_point  # quantized: a tie may round to either side
                    assert_close(ours, expected, rtol=rtol, atol=whole or 4 * rtol, equal_nan=True, msg=lambda m: f"{name}: {m}")
                    asked += 1
print(asked)
"""


def run(code: str, **environment: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(openreg_ops.__file__).parents[1]), **environment}
    result = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def supported() -> list[str]:
    return [
        cpu_capability
        for cpu_capability in _build.CPU_CAPABILITIES
        if cpu_capability not in kernel_library._WIDER or kernel_library._WIDER[cpu_capability]()
    ]


@pytest.mark.processes
@pytest.mark.parametrize("capability", supported())
def test_operators_agree_with_their_references(capability):
    chosen, library, asked = run(CODE, ATEN_CPU_CAPABILITY=capability.lower())
    assert (chosen, library) == (capability, kernel_library.library(capability))
    assert int(asked) > 500


@pytest.mark.parametrize(
    "built, torchs, expected",
    [
        (("DEFAULT", "AVX2", "AVX512"), "AVX2", "AVX2"),
        (("DEFAULT", "AVX2", "AVX512"), "DEFAULT", "DEFAULT"),
        (("DEFAULT", "AVX2", "AVX512"), "AVX512", "AVX512"),
        (("DEFAULT",), "SVE256", "DEFAULT"),
        (("AVX2",), "DEFAULT", "AVX2"),
        (("AVX2",), "AVX512", "AVX2"),
    ],
)
def test_the_widest_that_torch_may_use(built, torchs, expected, monkeypatch):
    """Or the narrowest, where torch may use none that was built."""
    monkeypatch.setattr(_build, "CPU_CAPABILITIES", built)
    monkeypatch.setattr(kernel_library, "_WIDER", {"AVX2": lambda: True, "AVX512": lambda: True})
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: torchs)
    assert kernel_library.capability() == expected


def test_a_processor_without_any_is_refused(monkeypatch):
    monkeypatch.setattr(_build, "CPU_CAPABILITIES", ("AVX512",))
    monkeypatch.setattr(kernel_library, "_WIDER", {"AVX512": lambda: False})
    with pytest.raises(ImportError, match="^openreg_ops was built for AVX512, which this processor lacks; rebuild it"):
        kernel_library.capability()
