"""OPENREG_DEVICE: what it takes, and when the device cannot have the name cuda."""

import re

import pytest
from processes import python

from openreg_ops import environment

pytestmark = pytest.mark.processes


WRONG = (
    "OPENREG_DEVICE: expected openreg, cuda, or cuda:sm_90 for a compute capability, but got {!r}; set it to one of "
    "these, or unset it"
)


@pytest.mark.parametrize("value", ["gpu", "CUDA", "cuda:0", "cuda:sm_9", "cuda:sm_90a", "openreg:1"])
def test_a_wrong_value(value, monkeypatch):
    monkeypatch.setenv("OPENREG_DEVICE", value)
    with pytest.raises(environment.WrongVariable) as refused:
        environment.check()
    assert str(refused.value) == WRONG.format(value)


def test_a_wrong_value_is_one_sentence():
    ended = python("-c", "import torch", OPENREG_DEVICE="cuda:0")
    assert (ended.returncode, ended.stderr.strip()) == (1, "openreg_ops: " + WRONG.format("cuda:0"))


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
    """Graphs compile with it."""
    code = (
        "import torch; c = torch.cuda; p = c.get_device_properties(1)\n"
        "print(c.get_device_capability(), (p.major, p.minor), c.get_arch_list(), torch.backends.cuda.is_built(), "
        "torch.version.cuda, c.get_gencode_flags())\n"
        "x = torch.ones(3, device='cuda'); f = lambda x: x.sin() + 1\n"
        "torch.testing.assert_close(torch.compile(f, mode='reduce-overhead')(x), f(x))"
    )
    ended = python("-c", code, OPENREG_DEVICE="cuda:sm_86")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "(8, 6) (8, 6) ['sm_86'] True 13.0 -gencode compute=compute_86,code=sm_86"


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
    ended = python(program, nested=True, OPENREG_DEVICE="cuda")
    assert ended.stdout.strip() == "[2.0, 2.0, 2.0] cuda:1", ended.stderr


@pytest.mark.parametrize(("listed", "count"), [("0,-1,1", 1), ("0,7,1", 1), ("x", 0)])
def test_visible_devices(listed, count):
    """Where a device of the list does not exist; programs/visible_devices.py has the others."""
    code = "import torch; print(torch.cuda.device_count(), torch.cuda.is_available(), (torch.ones(2) + 1).tolist())"
    ended = python("-c", code, OPENREG_DEVICE="cuda", CUDA_VISIBLE_DEVICES=listed)
    assert ended.stdout.strip() == f"{count} {count > 0} [2.0, 2.0]", ended.stderr


def test_visible_devices_are_cudas():
    assert python("-c", "import torch; print(torch.openreg.device_count())", CUDA_VISIBLE_DEVICES="0").stdout == "2\n"


def test_the_report_of_a_run(tmp_path):
    """Tests that ran, races with the sanitizer, and each place that needs a GPU; the same from several processes."""
    (tmp_path / "test_mine.py").write_text(
        "import pytest, torch\n"
        "@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs CUDA')\n"
        "def test_add(): assert (torch.ones(2, device='cuda') + 1).sum() == 4\n"
        "def test_host(): assert torch.ones(2).sum() == 2\n"
        "def test_triton(): pytest.importorskip('triton_for_gpus')\n"
        "def test_nvml():\n"
        "    with pytest.raises(NotImplementedError): torch.cuda.temperature()\n"
        "def test_cudnn(): torch.cudnn_is_acceptable(torch.ones(1)); torch.ops.aten.cudnn_grid_sampler(*2 * [torch.ones(1).cuda()])\n"
        "def test_race():\n"
        "    x, side = torch.ones(5, device='cuda'), torch.cuda.Stream()\n"
        "    x += 1\n"
        "    with torch.cuda.stream(side): x += 1\n"
    )
    for options, found in (("-q", "sanitizer: 1 failure"), ("-n2", "sanitizer: off")):
        on = "0" if found.endswith("off") else "1"
        ended = python(
            "-m", "pytest", options, "-p", "no:cacheprovider", "test_mine.py",
            cwd=tmp_path, OPENREG_DEVICE="cuda", OPENREG_SANITIZER=on,
        )  # fmt: skip
        report = ended.stdout[ended.stdout.index("cuda, simulated") :]
        assert "3 tests used the simulated device" in report, ended.stdout
        assert found in report and ("test_mine.py:9: openreg's sanitizer found a possible data race" in report) == (
            on == "1"
        )
        assert "3 places that need a real GPU" in report
        for place in (
            "test_mine.py:5: skipped: could not import 'triton_for_gpus'",
            "test_mine.py:7: torch.cuda.temperature() needs NVML",
            "test_mine.py:8: aten::cudnn_grid_sampler has no kernel for cuda. PyTorch calls cuDNN here",
        ):
            assert place in report, report


def test_without_the_name_there_is_no_report(tmp_path):
    (tmp_path / "test_mine.py").write_text("def test(): pass\n")
    assert "simulated" not in python("-m", "pytest", "test_mine.py", cwd=tmp_path).stdout


def test_schedules_and_misuse_under_the_name(tmp_path):
    (tmp_path / "test_mine.py").write_text(
        "import torch\n"
        "def test(device):\n"
        "    host = torch.empty(1000, pin_memory=True)\n"
        "    host.copy_(torch.ones(1000, device=device), non_blocking=True)\n"
        "    assert host.sum() == 1000\n"
    )
    words = ("-m", "pytest", "-p", "no:cacheprovider", "--device", "cuda", "test_mine.py")
    found = python(*words, "--device-schedules", "20", cwd=tmp_path, OPENREG_DEVICE="cuda").stdout
    assert "late: Memcpy DtoH (Device -> Pinned) on the default stream of cuda:0, launched at" in found
    found = python(*words, "--device-misuse", "race", cwd=tmp_path, OPENREG_DEVICE="cuda").stdout
    assert "test_mine.py:5  the host did not wait for aten::copy_" in found
