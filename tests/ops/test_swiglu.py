"""swiglu and swiglu_backward."""

import subprocess

import kit
import processes
import pytest
import torch
from kit import DEVICE, FLOATS, random
from torch.testing import assert_close

from openreg_ops import swiglu, swiglu_backward

OP = torch.ops.openreg.swiglu.default
BACKWARD = torch.ops.openreg.swiglu_backward.default


def reference(gate, up):
    return gate * torch.sigmoid(gate) * up


def reference_backward(grad_y, gate, up):
    sigma = torch.sigmoid(gate)
    return grad_y * up * sigma * (1 + gate * (1 - sigma)), grad_y * gate * sigma


def test_by_hand():  # silu(0) = 0, silu(1) = 0.7311
    y = swiglu(kit.tensor([0.0, 1.0, 1.0]), kit.tensor([5.0, 1.0, -2.0]))
    assert_close(y.cpu(), torch.tensor([0.0, 0.7311, -1.4621]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 123), (0, 4), (4, 0), (2, 3, 64), (3, 20000)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matches_reference(shape, dtype):
    kit.check_against(swiglu, reference, random(*shape, dtype=dtype), random(*shape, dtype=dtype))


# Pieces of wider tensors. All but the short ones and the columns are read in place.
PIECES = {
    "halves": (lambda x: x.chunk(2, -1), (6, 5, 320)),
    "halves of odd width": (lambda x: x.chunk(2, -1), (6, 5, 302)),
    "halves of one row": (lambda x: x.chunk(2, -1), (1, 1, 270)),
    "halves of a batch of one": (lambda x: x.chunk(2, -1), (4, 1, 3, 290)),
    "short halves": (lambda x: x.chunk(2, -1), (6, 5, 46)),
    "every second row": (lambda x: (x[::2], x[1::2]), (6, 133)),
    "width 1": (lambda x: x.chunk(2, -1), (40, 2)),
    "one of them": (lambda x: (x[..., :140], x[..., 140:].contiguous()), (7, 280)),
    "rows that are not equally far apart": (lambda x: x[:, :3].chunk(2, -1), (6, 5, 280)),
    "expanded": (lambda x: x[:1].expand(x.shape).chunk(2, -1), (5, 280)),
    "columns": (lambda x: (x[..., ::2], x[..., 1::2]), (5, 280)),
    "transposed": (lambda x: x.transpose(0, 1).chunk(2, -1), (6, 5, 280)),
}


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_pieces_of_wider_tensors(name, dtype):
    pieces, shape = PIECES[name]
    gate, up = pieces(random(*shape, dtype=dtype))
    grad = random(*gate.shape, dtype=dtype)
    kit.check_against(swiglu, reference, gate, up)
    for order in ((grad, gate, up), (gate, grad, up), (gate, up, grad)):
        kit.check_against(swiglu_backward, reference_backward, *order)


NO_CACHE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
long sysconf(int name) {
  return name == _SC_LEVEL3_CACHE_SIZE ? 0 : ((long (*)(int))dlsym(RTLD_NEXT, "sysconf"))(name);
}
"""
GRADIENTS = """
import torch
from openreg_ops import swiglu_backward

for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
    few = torch.randn(3, 4099, dtype=dtype, device='NAME').unbind()
    n = (8 << 20) // dtype.itemsize + 5
    many = lambda x: x.repeat(n // x.numel() + 1)[:n]
    for gradient, expected in zip(swiglu_backward(*map(many, few)), swiglu_backward(*few), strict=True):
        print(dtype, torch.equal(gradient, many(expected)))
    flat = [many(x)[: n // 128 * 128].view(-1, 128) for x in few]
    halves = torch.cat(flat[1:], 1).chunk(2, 1)
    for gradient, expected in zip(swiglu_backward(flat[0], *halves), swiglu_backward(*flat), strict=True):
        print(dtype, torch.equal(gradient, expected))
"""


@pytest.mark.slow
@pytest.mark.processes
def test_gradients_that_no_cache_holds(tmp_path):
    """Gradients of more than 8 MB, the least size of a cache, equal those of few elements to the bit.

    The process learns that the last cache has no size, because real ones may hold 300 MB. The elements leave a rest that
    fills no register.
    """
    (tmp_path / "no_cache.c").write_text(NO_CACHE)
    command = ["gcc", "-shared", "-fPIC", tmp_path / "no_cache.c", "-o", tmp_path / "no_cache.so"]
    subprocess.run(command, check=True)
    done = processes.python("-c", GRADIENTS.replace("NAME", kit.NAME), LD_PRELOAD=str(tmp_path / "no_cache.so"))
    assert done.stdout.splitlines() == [f"{dtype} True" for dtype in FLOATS for _ in range(4)], done.stderr


def test_all_magnitudes():
    """As gate * sigmoid(gate) in float64 over all of float32's exponents, and where exp overflows or is subnormal."""
    ends = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 3e38, -3e38, 1e-45, 88.8, -88.8, -104.0])
    gate = torch.cat([ends, torch.linspace(-110, 110, 200_000), torch.logspace(-40, 38, 10_000)])
    expected = gate.double() * torch.sigmoid(gate.double())
    y = swiglu(gate.to(DEVICE), torch.ones_like(gate, device=DEVICE)).cpu()
    usual = ~(gate < -88)
    assert_close(y[usual], expected.float()[usual], rtol=1e-6, atol=0, equal_nan=True)
    assert y[gate == -torch.inf].isnan().all()
    tiny = (gate < -88) & gate.isfinite()  # sigmoid is subnormal, or 0 when its denominator has overflowed
    assert ((y <= 0) & (y >= 1.1 * expected.float()))[tiny].all()


def test_saves_only_its_arguments():
    saved = []

    def pack(x):
        saved.append(x)
        return x

    gate, up = random(4, 5, grad=True), random(4, 5, grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        swiglu(gate, up)
    assert [x.data_ptr() for x in saved] == [gate.data_ptr(), up.data_ptr()]


def test_rejects():
    gate, up = random(2, 3), random(2, 3)
    kit.check_error(OP, gate, random(3), match="swiglu: expected up of shape [2, 3], the same as gate, but got [3]")
    kit.check_error(OP, gate.long(), up, match="swiglu: expected gate of float32, float64, float16 or bfloat16, but go")
    kit.check_error(BACKWARD, random(2, 4), gate, up, match="swiglu_backward: expected grad_y of shape [2, 3], the sam")
    kit.check_error(BACKWARD, gate.double(), gate, up, match="swiglu_backward: expected grad_y of float32")
