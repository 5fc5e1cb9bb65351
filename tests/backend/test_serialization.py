"""Saving, loading, copying and sending device tensors: as on CUDA, and bit for bit equal."""

import copy
import io
import os
import pickle
import threading
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from processes import python
from torch._subclasses import FakeTensorMode
from torch._utils import get_tensor_metadata, set_tensor_metadata

D = torch.device("openreg")
ONE = torch.device("openreg:1")


def round_trip(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def same(a, b):
    return a.device == b.device and a.dtype == b.dtype and a.stride() == b.stride() and a.equal(b)


# ---- torch.save and torch.load ----


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int8, torch.uint16, torch.float8_e4m3fn],
    ids=str,
)
def test_tensors_of_each_dtype(dtype):
    x = torch.arange(6, device=ONE).view(2, 3).t().to(dtype)
    y = round_trip(x)
    assert y.device == ONE and y.dtype == dtype and y.stride() == x.stride()
    assert (
        y.view(torch.uint8).tolist() == x.view(torch.uint8).tolist() if x.is_contiguous() else y.tolist() == x.tolist()
    )


def test_lazy_conjugation_is_saved_as_such():
    x = torch.randn(3, dtype=torch.complex64, device=D).conj()
    assert round_trip(x).is_conj() and round_trip(x).cpu().equal(x.cpu())


def test_views_share_their_storage_again():
    x = torch.arange(6.0, device=D)
    first, rest = round_trip([x[:3], x[1:]])
    rest[0] = 9
    assert first.tolist() == [0, 9, 2]


MAPS = {
    "cpu": ("cpu", "cpu", "cpu"),
    "string": ("openreg:1", ONE, ONE),
    "device": (ONE, ONE, ONE),
    "no index": (D, torch.device("openreg:0"), torch.device("openreg:0")),
    "dict": ({"openreg:0": "openreg:1"}, ONE, "cpu"),
    "dict to cpu": ({"openreg:0": "cpu"}, "cpu", "cpu"),
    "function": (lambda storage, location: storage.openreg(1), ONE, ONE),
    "function that keeps": (lambda storage, location: storage, "cpu", "cpu"),
    "function that declines": (lambda storage, location: None, torch.device("openreg:0"), "cpu"),
    "meta": ("meta", "meta", "meta"),
}


@pytest.mark.parametrize("name", MAPS)
def test_map_location(name):
    to, from_device, from_host = MAPS[name]
    assert round_trip(torch.ones(3, device=D), map_location=to).device == torch.device(from_device)
    assert round_trip(torch.ones(3), map_location=to).device == torch.device(from_host)


def test_a_device_that_does_not_exist_is_named():
    with pytest.raises(RuntimeError, match="device 7 but torch.openreg.device_count.. is 2.*map_location"):
        round_trip(torch.ones(3, device=D), map_location="openreg:7")


def test_mmap_and_the_old_format(tmp_path):
    x = torch.arange(4.0, device=D)
    torch.save({"x": x}, tmp_path / "x.pt")
    assert same(torch.load(tmp_path / "x.pt", mmap=True, map_location="openreg:1")["x"], x.to(ONE))
    torch.save(x, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert same(torch.load(tmp_path / "old.pt"), x)


def test_storages():
    storage = torch.arange(3.0, device=ONE).untyped_storage()
    for again in (round_trip(storage, weights_only=False), copy.deepcopy(storage)):
        assert again.device == ONE and again.data_ptr() != storage.data_ptr() and again.tolist() == storage.tolist()
    typed = round_trip(torch.arange(3.0, device=ONE).storage(), weights_only=False)
    assert typed.device == ONE and typed.dtype == torch.float32 and typed.tolist() == [0, 1, 2]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_training_goes_on_where_it_was_saved(optimizer):
    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(2, 3, device=model.weight.device)).square().sum().backward()
        optimizer.step()

    model = torch.nn.Linear(3, 2, device=D)
    its = optimizer(model.parameters(), lr=0.1)
    step(model, its)
    saved = round_trip({"model": model.state_dict(), "optimizer": its.state_dict()}, weights_only=True)
    other = torch.nn.Linear(3, 2, device=ONE)
    others = optimizer(other.parameters(), lr=0.1)
    other.load_state_dict(saved["model"])
    others.load_state_dict(saved["optimizer"])
    step(model, its)
    step(other, others)
    assert other.weight.device == ONE and other.weight.cpu().equal(model.weight.cpu())


def quantized():
    return torch.quantize_per_tensor(torch.arange(4.0), 0.5, 1, torch.qint8).to(D)


LAYOUTS = {
    "coo": lambda: torch.eye(3, device=D).to_sparse(),
    "csr": lambda: torch.eye(3, device=D).to_sparse_csr(),
    "quantized": quantized,
    "quantized by channel": lambda: torch.quantize_per_channel(
        torch.arange(4.0).view(2, 2), torch.tensor([0.5, 0.1]), torch.tensor([1, 2]), 0, torch.qint8
    ).to(D),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]).to(D),
}


def dense(x):
    x = x.cpu()
    return x.to_padded_tensor(7.0) if x.is_nested else x.dequantize() if x.is_quantized else x.to_dense()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["save", "pickle", "deepcopy"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, how):
    x = LAYOUTS[name]()
    if how == "deepcopy" and name in ("csr", "nested"):
        host = x.cpu()
        with pytest.raises((RuntimeError, NotImplementedError)):  # nor on the CPU, where torch has no storage of one
            copy.deepcopy(host)
        return
    y = {
        "save": lambda: round_trip(x, weights_only=False),
        "pickle": lambda: pickle.loads(pickle.dumps(x)),
        "deepcopy": lambda: copy.deepcopy(x),
    }[how]()
    assert y.device == x.device and y.layout == x.layout and y.dtype == x.dtype and dense(y).equal(dense(x))


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_move_between_devices():
    x = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    for device in (D, ONE, "cpu"):
        moved = x.to(D).to(device, torch.float64)
        assert moved.device.type == torch.device(device).type and moved.dtype == torch.float64
        assert dense(moved).equal(dense(x).double())


# ---- metadata: BackendMeta through TensorBackendMetaRegistry ----

METADATA = {"version_number": True, "format_number": True, "é": False}

KEEPS = {
    "save": round_trip,
    "save, weights only": lambda x: round_trip(x, weights_only=True),
    "save, other device": lambda x: round_trip(x, map_location=ONE),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "clone": torch.clone,
    "clone, contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "detach": torch.detach,
    "to device": lambda x: x.to(ONE),
    "to dtype": lambda x: x.to(torch.float64),
    "to host and back": lambda x: x.cpu().to(ONE),
    "parameter": torch.nn.Parameter,
    "saved parameter": lambda x: round_trip(torch.nn.Parameter(x)),
    "with gradient": lambda x: x.requires_grad_().clone(),
    "deepcopy": copy.deepcopy,
    "deepcopy of two names of it": lambda x: copy.deepcopy({"a": x, "b": [x]})["b"][0],
    "deepcopy with gradient": lambda x: copy.deepcopy(x.requires_grad_()).detach(),
    "deepcopy of a parameter": lambda x: copy.deepcopy(torch.nn.Parameter(x)),
}


@pytest.mark.parametrize("name", KEEPS)
def test_what_keeps_metadata(name):
    x = torch.arange(3.0, device=D)
    assert get_tensor_metadata(x) == {}
    set_tensor_metadata(x, METADATA)
    y = KEEPS[name](x)
    assert get_tensor_metadata(y) == METADATA and y.tolist() == x.tolist()


def test_metadata_is_the_tensors_own():
    x = torch.arange(3.0, device=D)
    set_tensor_metadata(x, METADATA)
    y = x.clone()
    set_tensor_metadata(y, {"only": True})
    assert get_tensor_metadata(x) == METADATA and get_tensor_metadata(y) == {"only": True}
    set_tensor_metadata(y, {})
    assert get_tensor_metadata(y) == get_tensor_metadata(x + 1) == get_tensor_metadata(x[1:]) == {}
    assert get_tensor_metadata(round_trip(x, map_location="cpu")) == {}


def test_fake_tensors_keep_metadata():
    """In a FakeTensorMode, and in the example inputs that a compiler gets."""
    x, plain = torch.arange(3.0, device=D), torch.arange(3.0, device=D)
    set_tensor_metadata(x, METADATA)
    mode = FakeTensorMode()
    assert get_tensor_metadata(mode.from_tensor(x)) == METADATA and get_tensor_metadata(mode.from_tensor(plain)) == {}
    set_tensor_metadata(x, {"later": True})
    assert get_tensor_metadata(mode.from_tensor(x)) == {"later": True}
    assert mode.from_tensor(torch.ones(3)).device.type == "cpu"
    found = []

    def compiler(graph, inputs):
        found.extend(get_tensor_metadata(tensor) for tensor in inputs)
        return graph

    torch.compile(lambda x, y: x + y, backend=compiler)(x, plain)
    assert found == [{"later": True}, {}]


def test_metadata_beside_a_conjugate():
    x = torch.ones(2, dtype=torch.complex64, device=D).conj()
    set_tensor_metadata(x, METADATA | {"conj": True})
    y = round_trip(x)
    assert get_tensor_metadata(y) == METADATA | {"conj": True} and y.is_conj()


def test_deepcopy_leaves_other_devices_alone():
    class Sub(torch.Tensor):
        def new_empty(self, size):  # PyTorch asks this of a subclass
            return torch.empty(size, dtype=self.dtype, device=self.device).as_subclass(Sub)

    for x in (torch.ones(2), torch.ones(2).as_subclass(Sub), torch.ones(2, device=D).as_subclass(Sub)):
        y = copy.deepcopy(x)
        assert type(y) is type(x) and y.device == x.device and y.tolist() == x.tolist()
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(torch.ones(2, device=D, requires_grad=True) * 2)


# ---- torch.multiprocessing ----


def serve(inbox, outbox):
    """Another process: doubles the tensors that it gets, in place, and sends back new ones."""
    kept = []
    for tensor in iter(inbox.get, None):
        with torch.no_grad():
            tensor.mul_(2)
        torch.openreg.synchronize(tensor.device)
        kept.append(tensor.detach() + 1)
        outbox.put((str(tensor.device), type(tensor).__name__, tensor.requires_grad, kept[-1]))
    inbox.get()


@pytest.fixture(scope="module")
def other():
    context = torch.multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=serve, args=(inbox, outbox), daemon=True)
    process.start()

    def exchange(tensor):
        inbox.put(tensor)
        return outbox.get(timeout=120)

    yield exchange
    inbox.put(None)
    inbox.put(None)
    process.join(timeout=60)
    assert process.exitcode == 0


@pytest.mark.parametrize("size", [1, 100, 100_000])
def test_another_process_sees_the_same_memory(other, size):
    x = torch.arange(float(size), device=ONE)
    view = x[size // 2 :]
    device, _, _, result = other(x)
    assert device == "openreg:1" and result.device == ONE
    assert view.tolist() == [2 * i for i in range(size // 2, size)]  # a view made before follows
    assert result.tolist() == [2 * i + 1 for i in range(size)]
    other(view)  # the same memory again, by a view of it
    assert x[-1].item() == 4 * (size - 1) and (size == 1 or x[0].item() == 0)


def test_what_another_process_receives(other):
    p = torch.nn.Parameter(torch.ones(3, device=D))
    assert other(p)[:3] == ("openreg:0", "Parameter", True) and p.tolist() == [2, 2, 2]
    assert other(torch.empty(0, device=ONE))[3].shape == (0,)
    x = torch.ones(2, 3, dtype=torch.bfloat16, device=D).t()
    assert other(x)[3].dtype == torch.bfloat16 and x.stride() == (1, 3) and x.sum().item() == 12


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_sharing_keeps_large_memory_where_it_is(size):
    x = torch.arange(float(size), device=ONE)
    address, view, expected = x.data_ptr(), torch.from_dlpack(x), x.cpu()
    ForkingPickler.dumps(x)
    assert (x.data_ptr() == address) == (size > 4) and x.cpu().equal(expected)
    if size > 4:
        x.add_(1)
        assert view.equal(x) and torch.openreg.memory_allocated(1) >= x.nbytes
    del x, view
    assert torch.zeros(size, device=ONE).count_nonzero().item() == 0


@pytest.mark.slow
def test_updates_while_a_tensor_is_shared_are_kept():
    for _ in range(3):
        x = torch.zeros(1 << 22, device=ONE)
        started, sender = threading.Event(), None

        def send(x=x, started=started):
            started.set()
            ForkingPickler.dumps(x)

        sender = threading.Thread(target=send)
        sender.start()
        started.wait()
        count = 0
        while sender.is_alive() or count < 5:
            x.add_(1)
            count += 1
        sender.join()
        assert x.unique().tolist() == [count]


def test_queued_work_is_finished_before_it_is_sent(other):
    torch.openreg.set_launch_mode("async")
    try:
        x = torch.ones(1000, device=D)
        torch.openreg._sleep(50_000_000)
        x.add_(1)
        assert other(x)[3][0].item() == 5
    finally:
        torch.openreg.set_launch_mode("inline")


def test_shared_memory_counts_and_returns(other):
    torch.openreg.synchronize()
    before = torch.openreg.memory_allocated(0)
    x = torch.ones(1 << 20, device=D)
    result = other(x)[3]
    assert torch.openreg.memory_allocated(0) == before + 2 * (4 << 20)
    files = len(os.listdir("/proc/self/fd"))
    del x, result
    assert torch.openreg.memory_allocated(0) == before and len(os.listdir("/proc/self/fd")) == files - 2
    x = torch.ones(1 << 20, device=D)  # the pages work again
    assert x.sum().item() == 1 << 20


@pytest.mark.slow
def test_shared_memory_cannot_be_resized(other):
    x = torch.ones(3, device=D)
    assert x.is_shared() and x.share_memory_() is x  # as CUDA's: every device tensor can be shared
    other(x)
    with pytest.raises(RuntimeError, match="resize storage that is not resizable"):
        x.resize_(100_000)


PROGRAMS = {
    "sharing after fork": """
import warnings; warnings.simplefilter("ignore", DeprecationWarning)  # of fork() beside threads, since Python 3.12
x = torch.ones(3, device="openreg")
ForkingPickler.dumps(x)
if (pid := os.fork()) == 0:
    try: ForkingPickler.dumps(x); os._exit(1)
    except RuntimeError as error: assert "Cannot re-initialize openreg in forked subprocess" in str(error), error
    del x; os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and x.tolist() == [1, 1, 1]
""",
    "workers made by fork": """
def on_device(batch): return torch.stack([torch.tensor(number, device="openreg:1") for number in batch])
batches = list(DataLoader(range(6), batch_size=2, num_workers=2, collate_fn=on_device, multiprocessing_context="fork"))
assert [b.tolist() for b in batches] == [[0, 1], [2, 3], [4, 5]] and batches[0].device == torch.device("openreg:1")
""",
    "workers made by fork, too late": """
torch.ones(3, device="openreg")
def on_device(batch): return torch.tensor(batch, device="openreg:1")
try: list(DataLoader(range(6), num_workers=1, collate_fn=on_device, multiprocessing_context="fork"))
except RuntimeError as error: assert "Cannot re-initialize openreg in forked subprocess" in str(error), error
else: raise SystemExit("no error")
""",
}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name, isolation", [("sharing after fork", "off"), *((name, "strict") for name in PROGRAMS)])
def test_processes(name, isolation):
    code = (
        "import os, torch, openreg_ops\n"
        "from multiprocessing.reduction import ForkingPickler\n"
        "from torch.utils.data import DataLoader\n"
    )
    done = python("-c", code + PROGRAMS[name], OPENREG_ISOLATION=isolation)
    assert (done.returncode, done.stderr) == (0, "")
