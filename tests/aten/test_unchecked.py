"""Arguments that a CPU kernel uses without a check: on the device, a wrong one raises, and the process goes on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

aten = torch.ops.aten


def _pooled(name, dims):
    def make():
        torch.manual_seed(0)
        x = torch.rand(2, 3, *[4] * dims)
        y, indices = getattr(aten, name)(x, [2] * dims)
        numbers = ([2] * dims, [2] * dims, [0] * dims, [1] * dims, False) if "with_indices" in name else ()
        return getattr(aten, f"{name}_backward").default, [y, x, *numbers, indices], {}

    return make


def _ctc(targets, tensors=False):
    def make():
        torch.manual_seed(0)
        lengths = [torch.tensor([5, 4]), torch.tensor([3, 1])] if tensors else [[5, 4], [3, 1]]
        return aten._ctc_loss, [torch.randn(5, 2, 4).log_softmax(-1), torch.tensor(targets), *lengths], {}

    return make


def _ctc_backward(targets, tensors=False):
    def make():
        loss, args, _ = _ctc(targets, tensors)()
        return aten._ctc_loss_backward, [torch.ones(2), *args, *loss(*args), 0], {}

    return make


def _bags(name, bags=(0, 0, 1), offsets=(0, 2), mode=0):
    def make():
        torch.manual_seed(0)
        grad, weight = torch.rand(2, 4), torch.rand(5, 4)
        indices, starts = torch.tensor([0, 4, 2]), torch.tensor(offsets)
        _, _, sizes, largest = aten._embedding_bag(weight, indices, starts, False, mode)
        of_index = torch.tensor(bags, dtype=torch.int64)
        args = {
            "_embedding_bag": [weight, indices, starts, False, 2],
            "_embedding_bag_forward_only": [weight, indices, starts, False, 2],
            "_embedding_bag_backward": [grad, indices, starts, of_index, sizes, largest, 5, False, mode, False, None],
            "_embedding_bag_dense_backward": [grad, indices, of_index, sizes, largest, 5, False, mode, None],
            "_embedding_bag_per_sample_weights_backward": [grad, weight, indices, starts, of_index, 0],
        }
        return getattr(aten, name), args[name], {}

    return make


def _last_offset():
    op, args, _ = _bags("_embedding_bag")()
    args[2] = torch.tensor([0, 2, 3])
    return op, [*args, False, None, True], {}


def _quantized_bags():
    torch.manual_seed(0)
    weight = torch.ops.quantized.embedding_bag_byte_prepack(torch.rand(5, 4))
    return (
        torch.ops.quantized.embedding_bag_byte_rowwise_offsets.default,
        [weight, torch.tensor([0, 4, 2]), torch.tensor([0, 2])],
        {},
    )


def _classes():
    torch.manual_seed(0)
    x, target = torch.rand(2, 3, 2, 2), torch.tensor([0, 1, 2, -100] * 2).view(2, 2, 2)
    return aten.nll_loss2d_backward.default, [torch.ones(2, 2, 2), x, target, None, 0, -100, torch.tensor(0.0)], {}


def _segments(backward, which, **kwargs):
    def make():
        torch.manual_seed(0)
        data, given = torch.rand(4, 3), torch.tensor([1, 3] if which == "lengths" else [0, 1, 4])
        if not backward:
            return aten.segment_reduce, [data, "sum"], {which: given, **kwargs}
        output = aten.segment_reduce(data, "sum", **{which: given})
        return aten._segment_reduce_backward, [torch.ones_like(output), output, data, "sum"], {which: given}

    return make


def _sparse_product():
    torch.manual_seed(0)
    x = torch.tensor([[1.0, 2], [0, 0]]).to_sparse_csr().requires_grad_()
    other = torch.rand(2, 3)
    out, chosen = aten._sparse_mm_reduce_impl(x, other, "amax")
    return (
        aten._sparse_mm_reduce_impl_backward,
        [x.detach(), torch.ones_like(out), other, "amax", chosen, [True, True]],
        {},
    )


def _embedding():
    return aten.embedding_dense_backward, [torch.ones(2, 3), torch.tensor([0, 3]), 4, -1, True], {}


def _transform(name, x, *rest):
    return lambda: (getattr(aten, name), [x, [1], *rest], {})


def _pad(dims):
    shape = [2] + [4] * dims
    return lambda: (
        getattr(aten, f"reflection_pad{dims}d_backward").default,
        [torch.ones(2, *[6] * dims), torch.ones(shape), [1] * (2 * dims)],
        {},
    )


def _changed(position, value):
    """Replace an argument. Of a tensor, replace the first element, or keep a part of the given shape."""

    def change(args, kwargs):
        where = kwargs if isinstance(position, str) else args
        old = where[position]
        if isinstance(old, torch.Tensor):
            where[position] = old.clone()
            if isinstance(value, tuple):
                where[position] = old[tuple(slice(n) for n in value)]
            else:
                where[position].view(-1)[0] = value
        else:
            where[position] = value

    return change


ROWS = [
    ("adaptive_max_pool2d", _pooled("adaptive_max_pool2d", 2), [(2, 16), (2, -1), (2, 2**40), (2, (2, 3, 1)), (0, (2, 1))]),
    ("adaptive_max_pool3d", _pooled("adaptive_max_pool3d", 3), [(2, 64), (2, -1), (2, 2**40), (2, (2, 3, 1)), (0, (2, 1))]),
    ("max_pool2d_with_indices", _pooled("max_pool2d_with_indices", 2), [(7, 16), (7, -1), (7, 2**40)]),
    ("max_pool3d_with_indices", _pooled("max_pool3d_with_indices", 3), [(7, 64), (7, -1), (7, 2**40)]),
    ("ctc rows", _ctc([[1, 2, 3], [1, -1, 99]]), [(1, 4), (1, -1), (1, 2**40)]),
    ("ctc one row", _ctc([1, 2, 3, 1]), [(1, 4), (1, -2**40)]),
    ("ctc tensors", _ctc([1, 2, 3, 1], tensors=True), [(1, 4), (1, -2**40)]),
    ("ctc backward", _ctc_backward([[1, 2, 3], [1, -1, 99]]),
     [(2, 4), (2, -1), (2, (1,)), (3, [6, 4]), (3, [-1, 4]), (4, [4, 1]), (4, [2**40, 1]), (4, [1]), (7, 4), (7, -1),
      (6, (1,)), (6, (2, 2)), (0, (1,)), (5, (1,))]),
    ("ctc backward, tensors", _ctc_backward([1, 2, 3, 1], tensors=True), [(2, 4), (2, (2,)), (3, 6), (4, 2**40)]),
    ("_embedding_bag", _bags("_embedding_bag"), [(2, -(2**40)), (2, 4)]),
    ("_embedding_bag_forward_only", _bags("_embedding_bag_forward_only"), [(2, -(2**40)), (2, 4)]),
    ("_embedding_bag, a last offset", _last_offset, [(2, (1,)), (2, (2,))]),
    ("_embedding_bag_backward, bags of the kernel's own", _bags("_embedding_bag_backward", [], [0, 2]), [(0, (0,)), (0, (1,))]),
    ("_embedding_bag_backward, mean", _bags("_embedding_bag_backward", mode=1), [(4, (0,)), (4, (1,))]),
    ("_embedding_bag_dense_backward, mean", _bags("_embedding_bag_dense_backward", mode=1), [(3, (1,))]),
    ("quantized bags", _quantized_bags, [(2, -1), (2, 4), (2, -(2**40))]),
    ("nll_loss2d_backward", _classes, [(2, 3), (2, -1), (2, 2**40)]),
    ("coo to csr", lambda: (aten._convert_indices_from_coo_to_csr.default, [torch.tensor([0, 2, 2]), 3], {}), [(0, 3), (0, -1), (0, -(2**40))]),
    ("csr to coo", lambda: (aten._convert_indices_from_csr_to_coo.default, [torch.tensor([0, 1, 3]), torch.tensor([0, 1, 1])], {}), [(0, 4), (0, -1), (0, 2**40)]),
    ("_embedding_bag_backward", _bags("_embedding_bag_backward"), [(1, 5), (1, -2), (1, 2**40), (3, 2), (3, -1), (2, 4)]),
    ("_embedding_bag_dense_backward", _bags("_embedding_bag_dense_backward"), [(1, 5), (1, -2), (2, 2), (2, 2**40)]),
    ("_embedding_bag_per_sample_weights_backward", _bags("_embedding_bag_per_sample_weights_backward"),
     [(2, 5), (2, -2), (2, 2**40), (4, 2), (4, -(2**40)), (3, 4)]),
    ("segment_reduce, unsafe", _segments(False, "lengths", unsafe=True), [("lengths", 2), ("lengths", 2**40), ("lengths", -1)]),
    ("segment_reduce, offsets", _segments(False, "offsets"), [("offsets", -1), ("offsets", 5)]),
    ("segment_reduce backward", _segments(True, "lengths"),
     [("lengths", 2), ("lengths", 2**40), ("lengths", -1), (0, (1,)), (1, (2, 1)), ("lengths", (1,))]),
    ("segment_reduce backward, offsets", _segments(True, "offsets"), [("offsets", -1), ("offsets", 5), ("offsets", (2,))]),
    ("sparse product", _sparse_product, [(4, 3), (4, -1), (4, 2**40), (4, (1,))]),
    ("embedding, counted", _embedding, [(1, 4), (1, -1), (1, 2**40)]),
    ("_fft_c2c", _transform("_fft_c2c", torch.ones(3, 4, dtype=torch.complex64), 0, True), [(1, [2]), (1, [0, -1])]),
    ("_fft_c2r", _transform("_fft_c2r", torch.ones(3, 4, dtype=torch.complex64), 0, 6), [(1, [2]), (1, [-3])]),
    ("_fft_r2c", _transform("_fft_r2c", torch.ones(3, 4), 0, True), [(1, [2]), (1, [2**40])]),
    ("reflection_pad1d", _pad(1), [(2, [1]), (2, []), (2, [1, 4]), (2, [100, 1])]),
    ("reflection_pad2d", _pad(2), [(2, [1]), (2, [1, 1, 1]), (2, [1, 1, 4, 1]), (2, [1, 100, 1, 1])]),
]  # fmt: skip
BY_NAME = {name: (make, changes) for name, make, changes in ROWS}
WRONG = [
    pytest.param(make, change, id=f"{name}-{change[0]}-{change[1]}")
    for name, make, changes in ROWS
    for change in changes
]
POOLING = ("adaptive_max_pool2d", "max_pool2d_with_indices")


def _on_device(args, kwargs):
    def move(value):
        return value.to("openreg") if isinstance(value, torch.Tensor) else value

    return [move(each) for each in args], {name: move(each) for name, each in kwargs.items()}


@pytest.mark.parametrize("name", BY_NAME)
def test_right_arguments_give_what_the_cpu_gives(name):
    op, args, kwargs = BY_NAME[name][0]()
    moved, named = _on_device(args, kwargs)
    expected, got = op(*args, **kwargs), op(*moved, **named)
    if op is aten._ctc_loss:  # the second result is not initialized where there are no targets
        expected, got = expected[0], got[0]
    for want, have in zip(*[each if isinstance(each, tuple) else (each,) for each in (expected, got)], strict=True):
        assert have.device.type == "openreg"
        torch.testing.assert_close(have.cpu(), want)


@pytest.mark.parametrize("make, change", WRONG)
def test_wrong_arguments_raise(make, change):
    op, args, kwargs = make()
    _changed(*change)(args, kwargs)
    args, kwargs = _on_device(args, kwargs)
    with pytest.raises((IndexError, RuntimeError), match=r"^\w+: expected .*, but got ") as raised:
        op(*args, **kwargs)
    assert raised.value.args[0].startswith(
        op._schema.name.partition("::")[2] if hasattr(op, "_schema") else op.__name__
    )


def test_an_index_that_is_padding_is_not_used():
    op, args, kwargs = BY_NAME["_embedding_bag_per_sample_weights_backward"][0]()
    args[2], padding = torch.tensor([-1, 4, 2]), [-1]
    moved, _ = _on_device(args, {})
    torch.testing.assert_close(op(*moved, *padding).cpu(), op(*args, *padding))


@pytest.mark.parametrize("forward", [True, False])
def test_strided_labels_of_the_ctc_loss_are_those_that_are_checked(forward):
    op, args, _ = (_ctc if forward else _ctc_backward)([1, 2, 3, 1])()
    place = 1 if forward else 2
    expected = op(*args)
    moved, _ = _on_device(args, {})
    moved[place] = torch.tensor([1, 2**40, 2, 2**40, 3, 2**40, 1, 2**40], device="openreg")[::2]
    got = op(*moved)
    torch.testing.assert_close((got[0] if forward else got).cpu(), expected[0] if forward else expected)


@pytest.mark.parametrize("name", POOLING)
def test_a_wrong_index_raises_at_the_call_in_async_mode_too(name):
    op, args, kwargs = BY_NAME[name][0]()
    right, _ = _on_device(args, {})
    wrong, _ = _on_device([*args[:-1], args[-1] + 2**40], {})
    grad_input = getattr(aten, op._schema.name.partition("::")[2]).grad_input
    with torch.openreg.launch_mode("async"):
        for form, named in ((op, {}), (grad_input, {"grad_input": torch.empty_like(right[1]).mT})):
            with pytest.raises(IndexError, match="expected indices from 0 to 15"):
                form(*wrong, **named)
            torch.testing.assert_close(form(*right, **named).cpu(), op(*args))


@pytest.mark.parametrize("name", [*POOLING, "adaptive_max_pool3d", "embedding, counted"])
def test_a_replay_checks_the_indices_that_it_reads(name):
    op, args, kwargs = BY_NAME[name][0]()
    moved, _ = _on_device(args, {})
    indices = next(x for x in reversed(moved) if isinstance(x, torch.Tensor))
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        out = op(*moved)
    graph.replay()
    torch.testing.assert_close(out.cpu(), op(*args))
    indices[0] = 2**40
    with pytest.raises((IndexError, RuntimeError), match="expected indices from 0 to"):
        graph.replay()
        torch.openreg.synchronize()


def test_the_gradient_of_pooling_of_a_permuted_input_reads_its_indices():
    x = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    y, indices = F.max_pool2d(x, 2, return_indices=True)
    args = [y, x, [2, 2], [2, 2], [0, 0], [1, 1], False]
    backward = aten.max_pool2d_with_indices_backward
    moved, _ = _on_device([*args, indices], {})
    torch.testing.assert_close(backward(*moved).cpu(), backward(*args, indices))
    wrong = indices.clone()  # which keeps the strides
    wrong[1, 2, 1, 1] = 16
    with pytest.raises(IndexError, match="from 0 to 15, .* but got 16"):
        backward(*_on_device([*args, wrong], {})[0])


# Every operator that OpInfo's samples reach with a tensor of integers, each integer in turn far out of range, in a child
# process for each operator: none may end by a signal.
SWEEP = """
import itertools, os, signal, sys, torch
torch.set_num_threads(1)
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

calls = {}

class Record(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(map(integral, tensors)):
            known = calls.setdefault(op, {})
            if len(known) < 3:
                copy = tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, (args, kwargs or {}))
                known.setdefault(str([(x.shape, x.dtype) for x in tensors]), copy)
        return op(*args, **kwargs or {})

def integral(x):
    return isinstance(x, torch.Tensor) and x.dtype in (torch.int64, torch.int32) and x.numel() and x.layout == torch.strided

for info in op_db:
    for dtype in {torch.float32, torch.int64} & {*info.dtypes}:
        gradient = info.supports_autograd and dtype == torch.float32
        try:
            for sample in itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=gradient), 12):
                with Record():
                    out = info(sample.input, *sample.args, **sample.kwargs)
                    if wanted := [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]:
                        torch.autograd.backward(wanted, [torch.ones_like(x) for x in wanted])
        except Exception:
            pass  # a sample that this machine cannot run
import openreg_ops

def child(op, known):
    signal.alarm(60)
    for call in known:
        leaves, spec = tree_flatten(call)
        leaves = [x.to("openreg") if isinstance(x, torch.Tensor) else torch.device("openreg") if isinstance(x, torch.device) else x for x in leaves]
        for i in filter(lambda i: integral(leaves[i]), range(len(leaves))):
            for value, everywhere in itertools.product((2**40, -(2**40), 10**6), (False, True)):
                wrong = leaves[i].clone(memory_format=torch.contiguous_format)
                wrong.view(-1)[slice(None) if everywhere else wrong.numel() // 2] = value if wrong.dtype == torch.int64 else value % 2**30
                args, kwargs = tree_unflatten([*leaves[:i], wrong, *leaves[i + 1:]], spec)
                try:
                    for x in tree_leaves(op(*args, **kwargs)):
                        isinstance(x, torch.Tensor) and x.cpu()
                except Exception:
                    pass

count = 0
for op, known in calls.items():
    if "polynomial" in str(op):
        continue  # an integer is the degree there, and so the number of steps
    count += 1
    if not (pid := os.fork()):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        child(op, known.values())
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        print("signal", os.WTERMSIG(status), op, flush=True)
print("operators", count)
"""


def test_no_integer_in_a_tensor_ends_the_process(tmp_path):
    script = tmp_path / "sweep.py"
    script.write_text(SWEEP)
    child = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", script],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},  # a fork must come before the device is used
    )
    *found, last = child.stdout.splitlines() or [""]
    assert child.returncode == 0, child.stderr[-2000:]
    assert not found, "\n".join(found)
    assert last.startswith("operators ") and int(last.split()[1]) > 150
