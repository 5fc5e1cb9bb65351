"""The thread on which backward() runs."""

import threading

import pytest
import torch
from torch.autograd.functional import jacobian

from openreg_ops.torch_patches import backward

DEVICE = "openreg"


def threads_of(run):
    """The threads on which the hooks of a gradient on the device run."""
    found = []
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    x.register_hook(lambda grad: found.append(threading.get_ident()))
    run((x * 2).sum(), x)
    assert found
    return set(found)


CALLS = {
    "backward": lambda loss, x: loss.backward(),
    "torch.autograd.backward": lambda loss, x: torch.autograd.backward([loss]),
    "grad": lambda loss, x: torch.autograd.grad(loss, x),
    "a vector at a time": lambda loss, x: torch.autograd.grad(
        loss, x, torch.ones(2, device=DEVICE), is_grads_batched=True
    ),
}


@pytest.mark.parametrize("mode", ["inline", "sync"])
@pytest.mark.parametrize("call", CALLS)
def test_work_stays_on_the_thread(call, mode):
    with torch.openreg.launch_mode(mode):
        assert threads_of(CALLS[call]) == {threading.get_ident()}


def test_torch_alone_uses_a_thread_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", backward._original)
    assert threading.get_ident() not in threads_of(CALLS["backward"])


def test_queued_work_is_launched_by_a_thread_of_its_own():
    with torch.openreg.launch_mode("async"):
        assert threading.get_ident() not in threads_of(CALLS["backward"])


def test_both_devices_and_the_host():
    """As in one graph, with a backward inside a hook."""
    a, b, c = (torch.ones(3, device=device, requires_grad=True) for device in ("openreg:0", "openreg:1", "cpu"))
    inner = []
    b.register_hook(lambda grad: inner.append(jacobian(lambda x: x * x, a.detach()).diagonal().tolist()))
    loss = a.exp().sum() + (b * 2).to("openreg:0").sum() + (c * 3).to("openreg:0").sum()
    loss.backward()
    torch.testing.assert_close(a.grad.cpu(), torch.ones(3).exp())
    assert b.grad.tolist() == [2, 2, 2] and c.grad.tolist() == [3, 3, 3] and inner == [[2, 2, 2]]


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_dynamo_does_not_trace_it(device):
    """As a frame of its own, when it leaves the graph at a backward."""
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def step(x):
        loss = x.square().sum()
        loss.backward()
        return loss * 2

    x = torch.ones(3, device=device, requires_grad=True)
    assert step(x).item() == 6 and x.grad.tolist() == [2, 2, 2]
    assert not torch._C._dynamo.eval_frame._debug_get_cache_entry_list(backward._engine_run_backward.__code__)


def test_what_the_program_chose_stays():
    def fails(grad):
        assert not torch.autograd.is_multithreading_enabled()
        raise RuntimeError("of the hook")

    x = torch.ones(3, device=DEVICE, requires_grad=True)
    x.register_hook(fails)
    for enabled in (True, False):
        with torch.autograd.set_multithreading_enabled(enabled):
            with pytest.raises(RuntimeError, match="of the hook"):
                x.sum().backward()
            assert torch.autograd.is_multithreading_enabled() == enabled
