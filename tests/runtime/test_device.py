"""Devices, streams, events, memory numbers, and the methods that PyTorch generates for a named backend."""

import pytest
import torch
from processes import python

from openreg_ops.device import devices


def test_module_is_registered():
    assert torch.get_device_module("openreg") is torch.openreg
    assert torch.accelerator.current_accelerator() == torch.device("openreg")
    assert torch.accelerator.is_available() and torch.accelerator.device_count() == 2 == torch.openreg.device_count()
    assert torch._C._get_privateuse1_backend_name() == "openreg"


def test_peers_and_dtypes():
    """What is said of the device is so: bfloat16 computes, and a copy reaches the other device's memory."""
    assert torch.openreg.is_bf16_supported() and torch.openreg.is_bf16_supported(including_emulation=False)
    x = torch.full((2,), 1.5, dtype=torch.bfloat16, device="openreg:0")
    assert torch.openreg.can_device_access_peer(0, "openreg:1") and (x + x).to("openreg:1").tolist() == [3, 3]
    assert not torch.openreg.can_device_access_peer(1, "openreg:1")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.openreg.can_device_access_peer(0, 7)
    assert torch.openreg.ipc_collect() is None


def test_what_a_system_does_not_tell(monkeypatch):
    """A device's properties are there where the system has no size of a cache, and no identity of the machine."""

    def untold(*_):
        raise OSError

    monkeypatch.setattr("os.sysconf", untold)
    monkeypatch.setattr("builtins.open", untold)
    assert devices._cache_size() == 0
    assert devices._uuid(0) == devices._uuid(0) != devices._uuid(1)


@pytest.mark.parametrize("bad", [2, 63, "openreg:9", 127, 255, 257, 10**6, -2])
def test_a_device_that_is_not_there(bad):
    """Its number is not cut to eight bits."""
    o, number = torch.openreg, 9 if bad == "openreg:9" else bad
    current = (o.set_device, o.device) if number > 0 else ()  # which take a negative one as none
    for use in (o.get_device_name, o.memory_allocated, o.get_rng_state, *current):
        with pytest.raises(RuntimeError, match=f"invalid device ordinal {number}; there are 2 devices"):
            use(bad)
    if number in (2, 9, 63):
        for use in (torch.zeros(1).to, lambda device: torch.Generator(device=device)):
            with pytest.raises(RuntimeError, match="invalid device ordinal"):
                use(torch.device("openreg", number))
    assert torch.openreg.current_device() == 0


def test_a_device_of_another_type():
    with pytest.raises(ValueError, match="expected a device of type openreg, but got cpu"):
        torch.openreg.set_device("cpu")


def test_tensor_methods():
    x = torch.zeros(2)
    assert not x.is_openreg and x.openreg().is_openreg and x.openreg(1).device.index == 1
    assert x.openreg().openreg().device == torch.device("openreg:0")
    y = x.openreg()
    assert y.openreg() is y


def test_module_methods():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).openreg(1)
    assert {t.device for t in module.state_dict().values()} == {torch.device("openreg:1")}


def test_storage_methods():
    storage = torch.arange(3.0).untyped_storage()
    assert not storage.is_openreg and storage.openreg().is_openreg
    assert storage.openreg(1).device == torch.device("openreg:1")
    assert storage.openreg().cpu().tolist() == storage.tolist()


def test_unsupported_dtypes_are_named():
    with pytest.raises(RuntimeError, match="Cannot store torch.quint4x2 on openreg|quint4x2|not supported"):
        torch.TypedStorage(2, dtype=torch.quint4x2).openreg()


THREAD_LOADS = """
import threading

def load():
    global torch
    import torch, openreg_ops
    torch.openreg.set_device(1)
    torch.openreg.set_stream(torch.openreg.ExternalStream(3, 1))
    assert torch.ones(2, device="openreg:1").sum().item() == 2

thread = threading.Thread(target=load)
thread.start()
thread.join()
assert torch.openreg.current_device() == 0 and torch.openreg.current_stream().stream_id == 0
assert torch.arange(3.0, device="openreg").sum().item() == 3
print("as expected")
"""


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["inline", "async"])
def test_each_thread_has_its_own_device_and_stream(mode):
    """Also if another thread than the main one loads the device."""
    done = python("-c", THREAD_LOADS, OPENREG_LAUNCH_MODE=mode, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (done.returncode, done.stdout) == (0, "as expected\n"), done.stderr


def test_untimed_events_have_no_time():
    """Nor has one that has timing with one that has not, the first or the second, nor two of different devices."""
    timed, plain = torch.openreg.Event(enable_timing=True), torch.openreg.Event()
    timed.record(), plain.record()
    for a, b in ((plain, plain), (timed, plain), (plain, timed)):
        with pytest.raises((RuntimeError, ValueError), match="enable_timing"):
            a.elapsed_time(b)
    with torch.openreg.device(1):
        other = torch.openreg.Event(enable_timing=True)
        other.record()
    for a, b in ((timed, other), (other, timed)):
        with pytest.raises((RuntimeError, ValueError), match="device"):
            a.elapsed_time(b)
    assert timed.elapsed_time(timed) == 0 == other.elapsed_time(other)


def test_out_of_memory_loses_nothing():
    keep = torch.arange(10.0, device="openreg")
    before = torch.openreg.memory_allocated()
    for size in (1 << 44, 1 << 55):
        with pytest.raises(
            torch.OutOfMemoryError, match="openreg out of memory. Tried to allocate .*iB. Device 0 has a total"
        ):
            torch.empty(size, dtype=torch.uint8, device="openreg")
        with pytest.raises(torch.openreg.OutOfMemoryError):
            keep.expand(size // 4, 10).contiguous()
    with pytest.raises(RuntimeError, match="overflow|Storage size"):
        torch.empty(1 << 62, 8, device="openreg")
    assert torch.openreg.memory_allocated() == before and keep.sum().item() == 45


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: x + y,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.stack([x, y]),
        lambda x, y: x.mul_(y),
        lambda x, y: torch.add(x, x, out=y),
        lambda x, y: x @ y,
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: torch._foreach_add([x], [y]),
        lambda x, y: torch.nn.functional.linear(x, y),
        lambda x, y: torch.gather(x, 0, y.long()),
        lambda x, y: y[x.long()],
    ],
)
@pytest.mark.parametrize("other", ["cpu", "openreg:1"])
def test_mixed_devices(call, other):
    x, y = torch.ones(2, 2, device="openreg"), torch.ones(2, 2, device=other)
    rule = "Expected all tensors to be on the same device|indices should be either on cpu or on the same device"
    with pytest.raises(RuntimeError, match=rf"aten::\w+: ({rule}).*[Mm]ove one with .to"):
        call(x, y)
    assert x.tolist() == [[1, 1], [1, 1]] and y.tolist() == [[1, 1], [1, 1]]


@pytest.mark.slow
@pytest.mark.processes
def test_no_devices():
    code = (
        "import torch, openreg_ops\n"
        "assert torch.openreg.device_count() == 0 and not torch.accelerator.is_available()\n"
        "for call in (lambda: torch.ones(1, device='openreg'), lambda: torch.UntypedStorage(4, device='openreg'),\n"
        "             torch.openreg.get_rng_state, torch.openreg.synchronize, torch.openreg.memory_allocated):\n"
        "    try: call()\n"
        "    except RuntimeError as e: assert 'there are no devices. Set OPENREG_DEVICE_COUNT' in str(e), e\n"
        "    else: raise SystemExit('no error')\n"
    )
    done = python("-c", code, OPENREG_DEVICE_COUNT="0")
    assert done.returncode == 0, done.stderr


# ---- the second of everything ----


def test_the_current_device():
    """Each entry of a context makes its device current. Each exit restores the previous one, whatever the program did."""
    assert torch.openreg.current_device() == 0
    context = torch.openreg.device(1)
    for before in (0, 1, 0):
        (torch.openreg.set_device if before else torch.accelerator.set_device_index)(before)
        with context:
            assert torch.openreg.current_device() == torch.accelerator.current_device_index() == 1
            assert torch.zeros(1, device="openreg").device.index == 1
        assert torch.openreg.current_device() == before
    with torch.openreg.device(1), torch.openreg.device(0), torch.openreg.device(None), torch.openreg.device(-1):
        assert torch.openreg.current_device() == 0
    with torch.openreg.device_of(torch.ones(1, device="openreg:1")), torch.openreg.device_of(torch.ones(1)):
        assert torch.openreg.current_device() == 1
    assert torch.openreg.current_device() == 0


@pytest.mark.parametrize("nowhere", [None, -1])
def test_a_context_of_no_device_puts_nothing_back(nowhere):
    """As torch.cuda.device: what its body makes current stays so."""
    with torch.openreg.device(nowhere):
        torch.openreg.set_device(1)
    assert torch.openreg.current_device() == 1


def test_what_is_no_stream_or_event():
    event = torch.openreg.Event()
    assert isinstance(event, torch.openreg.Event) and not isinstance(event, torch.openreg.Stream)
    assert not isinstance(torch.openreg.Stream(), torch.openreg.Event)
    for other in (3, None, "openreg", torch.device("openreg"), torch.ones(1, device="openreg"), torch.Stream, object()):
        assert not isinstance(other, torch.openreg.Stream) and not isinstance(other, torch.openreg.Event)


def test_a_stream_context_is_entered_again():
    first, second = torch.openreg.Stream(0), torch.openreg.Stream(1)
    for _ in range(2):
        with torch.openreg.stream(second):
            assert torch.openreg.current_stream(1) == second and torch.openreg.current_device() == 1
            with torch.openreg.stream(first), torch.openreg.stream(None):
                assert torch.openreg.current_stream() == first and torch.openreg.current_stream(1) == second
            assert torch.openreg.current_device() == 1
        assert torch.openreg.current_device() == 0
        assert torch.openreg.current_stream(0) == torch.openreg.default_stream(0)
        assert torch.openreg.current_stream(1) == torch.openreg.default_stream(1)


def test_memory_of_the_second_device_is_its_own():
    torch.openreg.synchronize()
    before = [torch.openreg.memory_allocated(i) for i in (0, 1)]
    x = torch.ones(1 << 20, device="openreg:1")
    assert [torch.openreg.memory_allocated(i) for i in (0, 1)] == [before[0], before[1] + x.nbytes]
    torch.openreg.reset_peak_memory_stats(0)
    assert torch.openreg.max_memory_allocated(1) >= before[1] + x.nbytes
    del x
    torch.openreg.synchronize(1)
    assert torch.openreg.max_memory_allocated(1) >= before[1] + (4 << 20)
    torch.openreg.reset_peak_memory_stats(1)
    assert torch.openreg.max_memory_allocated(1) == before[1]
