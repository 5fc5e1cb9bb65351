"""ATen's operators in async mode: queued where their results are known before they run, equal to the CPU's."""

import pytest
import torch
from stream_kit import in_threads
from torch.testing import assert_close

MS = 1_000_000

CASES = {
    "add": lambda x, y: x + y,
    "add scalar": lambda x, y: x + 2.5,
    "add cpu number": lambda x, y: x + torch.tensor(2),
    "mul broadcast": lambda x, y: x * y[0],
    "promotion": lambda x, y: x.to(torch.int64) * 1.5 + (x > 0),
    "transposed": lambda x, y: (x.mT + y.mT).contiguous(),
    "mm": lambda x, y: x @ y.mT,
    "addmm": lambda x, y: torch.addmm(y[:, :4], x, y.mT[:, :4]),
    "bmm": lambda x, y: torch.bmm(x.unsqueeze(0), y.mT.unsqueeze(0)),
    "sum": lambda x, y: (x.sum(), x.sum(1), x.mean(0, keepdim=True), x.argmax(1), x.amax()),
    "softmax": lambda x, y: (x.softmax(1), y.log_softmax(0)),
    "activations": lambda x, y: (x.relu(), torch.nn.functional.gelu(x), torch.nn.functional.silu(y), x.tanh()),
    "cat": lambda x, y: torch.cat([x, y, x], 1),
    "two outputs": lambda x, y: torch.sort(x, stable=True, dim=1),
    "max": lambda x, y: torch.max(x, 1),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "in place": lambda x, y: x.clone().add_(y).mul_(2).clamp_(-1, 1),
    "in place on a view": lambda x, y: (z := x.clone(), z[1:].sub_(y[1:]), z.mT.exp_())[0],
    "with itself": lambda x, y: (z := x.clone()).mul_(z),
    "fill": lambda x, y: (z := x.clone(), z[:2].zero_(), z[2].fill_(3), z[3].fill_(y[0, 0]))[0],
    "out": lambda x, y: torch.add(x, y, out=torch.empty_like(x)),
    "copies": lambda x, y: (x.double(), x.clone()[:, ::2].contiguous(), torch.empty_like(y).copy_(x[0])),
    "cumsum": lambda x, y: x.cumsum(1),
    "empty": lambda x, y: (x[:0] + y[:0], x[:0].sum()),
    "not structured": lambda x, y: (
        torch.nn.functional.layer_norm(x, (4,)),
        x[x > 0],
        x.nonzero(),
        x.index_select(1, (y[0] > 0).long()),
    ),
}


# Part of each of these has a Meta kernel only in Python, or none, so it waits for the stream.
WAIT = {"promotion", "not structured", "in place", "max", "sum", "two outputs", "where", "activations"}


def inputs():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(5, 4, generator=generator), torch.randn(5, 4, generator=generator)


@pytest.mark.parametrize("name", CASES)
def test_the_host_runs_ahead(name):
    """After a sleep, so that all of it is queued at once; the results are the CPU's."""
    x, y = inputs()
    expected = CASES[name](x, y)
    there = x.to("openreg"), y.to("openreg")
    CASES[name](*there)
    torch.openreg.synchronize()
    with torch.openreg.launch_mode("async"):
        torch.openreg._sleep((20 if name in WAIT else 200) * MS)
        actual = CASES[name](*there)
        assert name in WAIT or not torch.openreg.current_stream().query()
        torch.openreg.synchronize()
    for a, b in zip(*(each if isinstance(each, tuple) else (each,) for each in (actual, expected)), strict=True):
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and a.stride() == b.stride()
            assert_close(a.cpu(), b)


def test_shape_errors_are_raised_at_once_and_kernel_errors_at_synchronisation():
    x = torch.ones(3, 4, device="openreg")
    with torch.openreg.launch_mode("async"):
        torch.openreg._sleep(1000 * MS)
        with pytest.raises(RuntimeError, match="The size of tensor a"):
            x + torch.ones(3, 5, device="openreg")
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            x @ x
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3, 4)
        assert not torch.openreg.current_stream().query()
        with pytest.raises(RuntimeError, match="must match"):
            torch.empty(2, 2, device="openreg").copy_(x.double())
        loss = torch.nn.functional.nll_loss(x, torch.tensor([0, 1, 9], device="openreg"))
        assert loss.shape == ()
        with pytest.raises(torch.AcceleratorError, match="(?s)Target 9 is out of bounds.*nll_loss_forward.*openreg:0"):
            torch.openreg.synchronize()
    assert torch.equal((x + x).cpu(), torch.full((3, 4), 2.0))


def test_two_devices_are_refused_at_once():
    x, y = torch.ones(3, device="openreg:0"), torch.ones(3, device="openreg:1")
    calls = [
        lambda: x + y,
        lambda: x.mul_(y),
        lambda: torch.add(x, x, out=y),
        lambda: torch.where(x > 0, x, y),
        lambda: torch.cat([x, y]),
        lambda: torch.mm(x.view(1, 3), y.view(3, 1)),
        lambda: torch.sum(x, 0, out=y.new_empty(())),
    ]
    with torch.openreg.launch_mode("async"):
        for call in calls:
            torch.openreg._sleep(20 * MS)
            with pytest.raises(RuntimeError, match="same device"):
                call()
    assert x.tolist() == y.tolist() == [1, 1, 1]


def test_the_default_dtype_is_that_of_the_call():
    a = torch.arange(1000, device="openreg")
    results = []
    try:
        with torch.openreg.launch_mode("async"):
            torch.openreg._sleep(20 * MS)
            results = [a / 3, a * 1.1, a.sin(), a < 2.5]
            torch.set_default_dtype(torch.bfloat16)
            torch.openreg.synchronize()
    finally:
        torch.set_default_dtype(torch.float32)
    x = torch.arange(1000)
    assert_close([result.cpu() for result in results], [x / 3, x * 1.1, x.sin(), x < 2.5])


def test_converted_arguments_give_the_layout_of_the_cpu():
    def program(device):
        a = torch.ones(2, 3, dtype=torch.float64, device=device)
        return (a * torch.ones(2, 2, 1, device=device).as_strided((2, 2, 1), (1, 0, 2))).stride()

    with torch.openreg.launch_mode("async"):
        assert program("openreg") == program("cpu")


def test_fills_and_copies_say_at_once_what_they_refuse():
    with torch.openreg.launch_mode("async"):
        assert torch.zeros(1, device="openreg").expand(4).fill_(2.0).tolist() == [2, 2, 2, 2]
        assert torch.ones(3, 1, device="openreg").expand(3, 4).zero_().sum() == 0
        for wrong in (
            lambda: torch.zeros(3, dtype=torch.uint8, device="openreg").fill_(300),
            lambda: torch.zeros(3, device="openreg").fill_(1j),
            lambda: torch.zeros(3, dtype=torch.bool, device="openreg").relu_(),
            lambda: torch.zeros(1, device="openreg").expand(4).copy_(torch.ones(4, device="openreg")),
        ):
            with pytest.raises(RuntimeError) as caught:
                wrong()
            assert not isinstance(caught.value, torch.AcceleratorError)
        torch.openreg.synchronize()


def test_an_operator_that_writes_to_more_than_it_returns():
    """_amp_update_scale_ writes to the growth tracker too."""
    scale, tracker = torch.full((1,), 4.0, device="openreg"), torch.ones(1, dtype=torch.int32, device="openreg")
    with torch.openreg.launch_mode("async"):
        out = torch._amp_update_scale_(scale, tracker, torch.zeros(1, device="openreg"), 2.0, 0.5, 2)
        assert out is scale and scale.tolist() == [8.0] and tracker.tolist() == [0]


def test_threads_of_the_process_stay_as_they_are():
    x, threads, seen = torch.ones(4, device="openreg"), torch.get_num_threads(), []
    try:
        with torch.openreg.launch_mode("async"):
            torch.openreg._sleep(20 * MS)
            torch.set_num_threads(1)
            x + x
            torch.set_num_threads(threads)
            torch.openreg.synchronize()
        in_threads(lambda: seen.append(torch.get_num_threads()))
    finally:
        torch.set_num_threads(threads)
    assert seen == [threads]
