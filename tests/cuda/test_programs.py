"""Programs of CUDA users run unchanged where the device has the name cuda, and their results are those of the CPU.

Each file of `programs` is right on a machine with two NVIDIA GPUs, and knows nothing of this device.
"""

from pathlib import Path

import pytest
from processes import python

PROGRAMS = {path.stem: path for path in sorted(Path(__file__).with_name("programs").glob("*.py"))}
COMPILES = {"compiled", "compiled_transformer", "cpp_extension"}
SLOW = COMPILES | {
    "assert_close_devices",
    "custom_op",
    "ddp_features",
    "ddp_nccl",
    "device_errors",
    "exported_program",
    "fsdp1",
    "fsdp2",
    "gloo_on_cuda",
    "multiprocessing_share",
    "nccl_collectives",
    "tensor_parallel",
    "visible_devices",
}


# What the device does otherwise, and where docs/cuda.md says so.
DIFFERENT = {
    "host_register": "cudaHostRegister needs the CUDA runtime",
    "memory_statistics": "numbers that operators read take memory of the device while they run",
}


def _marked(name):
    marks = [pytest.mark.processes]
    marks += [pytest.mark.slow] if name in SLOW else []
    marks += [pytest.mark.compiles] if name in COMPILES else []
    marks += [pytest.mark.xfail(reason=DIFFERENT[name], strict=True)] if name in DIFFERENT else []
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [_marked(name) for name in PROGRAMS])
def test_a_program_for_cuda(name, tmp_path):
    # Under CI, PyTorch's run_tests() needs a package that writes XML.
    ended = python(PROGRAMS[name], cwd=tmp_path, dynamo=True, nested=True, OPENREG_DEVICE="cuda", CI="")
    assert ended.returncode == 0, ended.stdout[-10_000:] + ended.stderr[-20_000:]
