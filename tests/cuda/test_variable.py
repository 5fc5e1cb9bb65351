"""OPENREG_DEVICE: what it takes, and when the device cannot have the name cuda."""

import re

import pytest

from openreg_ops import environment
from tests.processes import python

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("value", ["gpu", "CUDA", "cuda:0", "cuda:sm_9", "cuda:sm_90a", "openreg:1"])
def test_a_wrong_value_is_one_sentence(value):
    ended = python("-c", "import torch", OPENREG_DEVICE=value)
    assert ended.returncode == 1
    assert ended.stderr.strip() == (
        "openreg_ops: OPENREG_DEVICE: expected openreg, cuda, or cuda:sm_90 for a compute capability, but got "
        f"{value!r}; set it to one of these, or unset it"
    )


@pytest.mark.parametrize("value", ["", "openreg"])
def test_without_it_nothing_changes(value):
    code = (
        "import sys, torch; assert 'openreg_device' not in sys.modules and not torch.cuda.is_available(); "
        "assert torch.ones(2, device='openreg').device.type == 'openreg' and not hasattr(torch._C, '_cuda_init')"
    )
    ended = python("-c", code, OPENREG_DEVICE=value)
    assert ended.returncode == 0, ended.stderr


def test_it_must_be_set_before_python_starts():
    ended = python("-B", "-c", "import os; os.environ['OPENREG_DEVICE'] = 'cuda'; import torch")
    assert ended.returncode == 1
    assert re.fullmatch(r"openreg_ops: OPENREG_DEVICE=cuda must be set before Python starts[^\n]*\n", ended.stderr)


@pytest.mark.parametrize("library", ["cuda", "hip"])
def test_a_pytorch_with_cuda_is_refused(library, monkeypatch):
    import torch

    monkeypatch.setenv("OPENREG_DEVICE", "cuda")
    monkeypatch.setattr(torch.version, library, "13.0")
    version = torch.__version__.split("+")[0]
    with pytest.raises(environment.CudaUnavailable) as refused:
        environment.check_cuda()
    assert f"pip install torch=={version} --index-url https://download.pytorch.org/whl/cpu" in str(refused.value)
    assert torch.__version__ in str(refused.value)


def test_a_capability_can_be_pretended():
    code = (
        "import torch; c = torch.cuda; p = c.get_device_properties(1); "
        "print(c.get_device_capability(), (p.major, p.minor), c.get_arch_list(), torch.backends.cuda.is_built(), "
        "torch.version.cuda, c.get_gencode_flags())"
    )
    ended = python("-c", code, OPENREG_DEVICE="cuda:sm_86")
    assert ended.stdout.strip() == "(8, 6) (8, 6) ['sm_86'] True 13.0 -gencode compute=compute_86,code=sm_86", ended.stderr


def test_every_process_of_a_program_has_it(tmp_path):
    code = (
        "import torch, torch.multiprocessing as mp\n"
        "def child(queue): x = queue.get(); x += 1; queue.task_done()\n"
        "if __name__ == '__main__':\n"
        "    context = mp.get_context('spawn'); queue = context.JoinableQueue(); x = torch.ones(3, device='cuda:1')\n"
        "    process = context.Process(target=child, args=(queue,)); process.start(); queue.put(x); queue.join()\n"
        "    print(x.tolist(), x.device); process.join(); raise SystemExit(process.exitcode)\n"
    )
    program = tmp_path / "program.py"
    program.write_text(code)
    ended = python(program, OPENREG_DEVICE="cuda")
    assert ended.stdout.strip() == "[2.0, 2.0, 2.0] cuda:1", ended.stderr
