"""Arguments that a CPU kernel uses without a check: on the device, a wrong one raises, and the process goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


def _pruned_bags():
    op, args, _ = _quantized_bags()
    rows = torch.tensor([4, 1, -1, 0, 2], dtype=torch.int32)
    return op, args, {"pruned_weights": True, "per_sample_weights": torch.ones(3), "compressed_indices_mapping": rows}


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


def _norm(backward, training=True):
    def make():
        torch.manual_seed(0)
        x, weight, mean, var = torch.rand(2, 3, 4), torch.rand(3), torch.rand(3), torch.rand(3)
        if not backward:
            return aten.native_batch_norm.default, [x, weight, weight, mean, var, training, 0.1, 1e-5], {}
        saved = [torch.rand(3), torch.rand(3)] if training else [torch.empty(0)] * 2
        args = [torch.rand_like(x), x, weight, mean, var, *saved, training, 1e-5, [True] * 3]
        return aten.native_batch_norm_backward.default, args, {}

    return make


def _layer_norm():
    torch.manual_seed(0)
    x = torch.rand(4, 6)
    _, mean, rstd = aten.native_layer_norm(x, [6], None, None, 1e-5)
    args = [torch.rand_like(x), x, [6], mean, rstd, None, None, [True, False, False]]
    return aten.native_layer_norm_backward.default, args, {}


def _attention(backward):
    def make():
        torch.manual_seed(0)
        q, k, v = torch.rand(2, 4, 3, 8), torch.rand(2, 2, 5, 8), torch.rand(2, 2, 5, 8)
        forward = aten._scaled_dot_product_flash_attention_for_cpu.default
        if not backward:
            return forward, [q, k, v], {}
        args = [torch.rand_like(q), q, k, v, *forward(q, k, v), 0.0, False]
        return aten._scaled_dot_product_flash_attention_for_cpu_backward.default, args, {}

    return make


def _function(op, *shapes, rest=()):
    """A function of random tensors of these shapes, and other arguments."""

    def make():
        torch.manual_seed(0)
        return op, [*map(torch.rand, shapes), *rest], {}

    return make


def _fractional(dims):
    def make():
        torch.manual_seed(0)
        x = torch.rand(2, 3, *[5] * dims)
        y, indices = getattr(aten, f"fractional_max_pool{dims}d")(x, [2] * dims, [2] * dims, torch.rand(2, 3, dims))
        return (
            getattr(aten, f"fractional_max_pool{dims}d_backward").default,
            [y, x, [2] * dims, [2] * dims, indices],
            {},
        )

    return make


def _planes(name, dims, *rest):
    """The gradient of a function that makes planes of 2 from planes of 4, or of 6 for a padding of 1."""

    def make():
        torch.manual_seed(0)
        size = 6 if "pad" in name else 2
        op = getattr(aten, f"{name}{dims}d_backward").default
        return op, [torch.rand(2, 3, *[size] * dims), torch.rand(2, 3, *[4] * dims), *rest], {}

    return make


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
    """Replace an argument, by position or name. Of a tensor, replace the first element, or keep a part of the given shape."""

    def change(args, kwargs):
        where = kwargs if isinstance(position, str) else args
        old = where.get(position) if isinstance(position, str) else where[position]
        if isinstance(old, torch.Tensor) and isinstance(value, (tuple, int)):
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
    ("_embedding_bag, a last offset", _last_offset, [(2, (1,)), (2, (0,))]),
    ("_embedding_bag_backward, bags of the kernel's own", _bags("_embedding_bag_backward", [], [0, 2]), [(0, (0,)), (0, (1,)), (2, 1)]),
    ("_embedding_bag_backward, mean", _bags("_embedding_bag_backward", mode=1), [(4, (0,)), (4, (1,))]),
    ("_embedding_bag_dense_backward, mean", _bags("_embedding_bag_dense_backward", mode=1), [(3, (1,))]),
    ("quantized bags", _quantized_bags, [(2, -1), (2, 4), (2, -(2**40)), ("per_sample_weights", torch.ones(1))]),
    ("quantized bags, pruned", _pruned_bags,
     [("compressed_indices_mapping", 5), ("compressed_indices_mapping", -2), ("compressed_indices_mapping", 2**30)]),
    ("nll_loss_backward", _function(aten.nll_loss_backward.default, (4,), (4, 3), rest=(torch.tensor([0, 1, -100, 2]), None, 0, -100, torch.tensor(4.0))),
     [(2, 3), (2, -1), (2, 2**40)]),
    ("native_batch_norm", _norm(False), [(1, (1,)), (2, (2,)), (3, (1,)), (4, torch.ones(4))]),
    ("native_batch_norm, not in training", _norm(False, False), [(3, (1,)), (3, None), (4, None)]),
    ("native_batch_norm_backward", _norm(True), [(0, (2, 3, 1)), (2, (1,)), (5, (1,)), (5, None), (6, (2,)), (6, None)]),
    ("native_batch_norm_backward, not in training", _norm(True, False), [(3, (1,)), (3, None), (4, None)]),
    ("native_layer_norm_backward", _layer_norm, [(0, (1, 6)), (0, (4, 1)), (3, (1,)), (4, (3, 1))]),
    ("attention", _attention(False), [(0, (2, 3)), (0, (1,)), (0, (2, 4, 0)), (1, (2, 2, 1)), (1, (1,)), (2, (2, 2, 5, 4)), (2, (2, 1))]),
    ("attention, gradient", _attention(True), [(0, (2, 4, 1)), (1, (2, 4, 1)), (2, (1,)), (3, (2, 2, 1)), (4, (1,)), (5, (2, 1))]),
    ("_weight_norm_interface", _function(aten._weight_norm_interface.default, (4, 3), (4, 1), rest=(0,)), [(1, (1,)), (0, (0,))]),
    ("_weight_norm_interface_backward", _function(aten._weight_norm_interface_backward.default, (4, 3), (4, 3), (4, 1), (4, 1), rest=(0,)),
     [(0, (1,)), (2, (1,)), (3, (3,))]),
    ("grid_sampler_2d_backward", _function(aten.grid_sampler_2d_backward.default, (2, 3, 5, 6), (2, 3, 4, 4), (2, 5, 6, 2), rest=(0, 0, False, [True, True])),
     [(0, (1,)), (0, (2, 1)), (0, (2, 3, 5, 5))]),
    ("grid_sampler_3d_backward", _function(aten.grid_sampler_3d_backward.default, (2, 3, 2, 5, 6), (2, 3, 4, 4, 4), (2, 2, 5, 6, 3), rest=(0, 0, False, [True, True])),
     [(0, (1,)), (0, (2, 1)), (0, (2, 3, 2, 5, 5))]),
    ("_cdist_backward", _function(aten._cdist_backward.default, (2, 3, 4), (2, 3, 5), (4, 5), rest=(2.0, torch.ones(2, 3, 4))), [(0, (1,)), (4, (2, 1)), (2, (4, 1))]),
    ("_pdist_backward", _function(aten._pdist_backward.default, (6,), (4, 3), rest=(2.0, torch.ones(6))), [(0, (1,)), (3, (5,)), (1, (3,)), (1, torch.ones(4, 3, 1))]),
    ("_log_softmax_backward_data", _function(aten._log_softmax_backward_data.default, (4, 3), (4, 3), rest=(1, torch.float32)), [(1, (1,)), (1, (4, 1)), (0, (2,))]),
    ("_masked_softmax_backward", _function(aten._masked_softmax_backward.default, (4, 3), (4, 3), rest=(torch.zeros(4, 3, dtype=torch.bool), 1)), [(1, (1,)), (1, (4, 1))]),
    ("multi_margin_loss_backward", _function(aten.multi_margin_loss_backward.default, (4,), (4, 3), rest=(torch.tensor([0, 1, 2, 0]), 1, 1, None, 0)), [(0, (1,)), (0, (3,))]),
    ("multi_margin_loss_backward, reduced", _function(aten.multi_margin_loss_backward.default, (1,), (4, 3), rest=(torch.tensor([0, 1, 2, 0]), 1, 1, None, 1)), [(0, torch.rand(0))]),
    ("multilabel_margin_loss_backward", _function(aten.multilabel_margin_loss_backward.default, (4,), (4, 3), rest=(torch.zeros(4, 3, dtype=torch.int64), 0, torch.ones(4, 3))), [(0, (1,)), (0, torch.rand(0))]),
    ("lu_unpack", _function(aten.lu_unpack.default, (2, 3, 3), rest=(torch.tensor([[1, 2, 3]] * 2, dtype=torch.int32),)), [(1, (1,)), (1, (2, 1))]),
    *((f"_adaptive_avg_pool{n}d_backward", _planes("_adaptive_avg_pool", n), [(0, (1,)), (0, (2, 1)), (1, (2, 2)), (1, (2, 3, 0))]) for n in (2, 3)),
    *((f"avg_pool{n}d_backward", _planes("avg_pool", n, [2] * n, [2] * n, [0] * n, False, True, None), [(0, (1,)), (1, (1,))]) for n in (2, 3)),
    *((f"{kind}_pad{n}d_backward", _planes(f"{kind}_pad", n, [1] * 2 * n), [(0, (1,)), (0, (2, 1))]) for n in (1, 2, 3) for kind in ("reflection", "replication")),
    *((f"fractional_max_pool{n}d_backward", _fractional(n), [(0, (1,)), (0, (2, 1)), (4, (1,)), (4, (2, 1)), (1, (1,)), (3, [])]) for n in (2, 3)),
    ("nll_loss2d_backward", _classes, [(2, 3), (2, -1), (2, 2**40)]),
    ("coo to csr", lambda: (aten._convert_indices_from_coo_to_csr.default, [torch.tensor([0, 2, 2]), 3], {}), [(0, 3), (0, -1), (0, -(2**40)), (1, -1)]),
    ("csr to coo", lambda: (aten._convert_indices_from_csr_to_coo.default, [torch.tensor([0, 1, 3]), torch.tensor([0, 1, 1])], {}), [(0, 4), (0, 2), (0, -1), (0, 2**40)]),
    ("_embedding_bag_backward", _bags("_embedding_bag_backward"), [(1, 5), (1, -2), (1, 2**40), (3, 2), (3, -1), (2, 4)]),
    ("_embedding_bag_dense_backward", _bags("_embedding_bag_dense_backward"), [(1, 5), (1, -2), (2, 2), (2, 2**40)]),
    ("_embedding_bag_per_sample_weights_backward", _bags("_embedding_bag_per_sample_weights_backward"),
     [(2, 5), (2, -2), (2, 2**40), (4, 2), (4, -(2**40)), (3, 4)]),
    ("segment_reduce, unsafe", _segments(False, "lengths", unsafe=True), [("lengths", 2), ("lengths", 2**40), ("lengths", -1)]),
    ("segment_reduce, offsets", _segments(False, "offsets"), [("offsets", -1), ("offsets", 5)]),
    ("segment_reduce backward", _segments(True, "lengths"),
     [("lengths", 2), ("lengths", 2**40), ("lengths", -1), (0, (1,)), (1, (2, 1)), ("lengths", (1,))]),
    ("segment_reduce backward, offsets", _segments(True, "offsets"), [("offsets", -1), ("offsets", 5), ("offsets", (2,))]),
    ("sparse product", _sparse_product, [(4, 3), (4, -1), (4, 2**40), (4, (1,)), (4, (0,))]),
    ("embedding, counted", _embedding, [(1, 4), (1, -1), (1, 2**40)]),
    ("_fft_c2c", _transform("_fft_c2c", torch.ones(3, 4, dtype=torch.complex64), 0, True), [(1, [2]), (1, [0, -1])]),
    ("_fft_c2r", _transform("_fft_c2r", torch.ones(3, 4, dtype=torch.complex64), 0, 6), [(1, [2]), (1, [-3])]),
    ("_fft_r2c", _transform("_fft_r2c", torch.ones(3, 4), 0, True), [(1, [2]), (1, [2**40])]),
    ("reflection_pad1d", _pad(1), [(2, [1]), (2, []), (2, [1, 4]), (2, [100, 1])]),
    ("reflection_pad2d", _pad(2), [(2, [1]), (2, [1, 1, 1]), (2, [1, 1, 4, 1]), (2, [1, 100, 1, 1])]),
    ("reflection_pad3d", _pad(3), [(2, [1]), (2, [2**40, -(2**40), 1, 1, 1, 1]), (2, [1, 1, 1, 1, -2, 4])]),
]  # fmt: skip
BY_NAME = {name: (make, changes) for name, make, changes in ROWS}
WRONG = [
    pytest.param(make, change, id=f"{name}-{change[0]}-{getattr(change[1], 'shape', change[1])}")
    for name, make, changes in ROWS
    for change in changes
]
POOLING = ("adaptive_max_pool2d", "max_pool2d_with_indices")


def _on_device(args, kwargs):
    def move(value):
        return value.to("openreg") if isinstance(value, torch.Tensor) else value

    return [move(arg) for arg in args], {name: move(each) for name, each in kwargs.items()}


def _results(op, out):
    """The results. The second one of a CTC loss is not initialized where there are no targets."""
    out = out if isinstance(out, tuple) else (out,)
    return out[:1] if op is aten._ctc_loss else [each for each in out if each is not None]


@pytest.mark.parametrize("name", BY_NAME)
def test_right_arguments_give_what_the_cpu_gives(name):
    op, args, kwargs = BY_NAME[name][0]()
    moved, named = _on_device(args, kwargs)
    for want, have in zip(_results(op, op(*args, **kwargs)), _results(op, op(*moved, **named)), strict=True):
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


# The last values that are right: a check that is stricter by one would refuse them.
LIMITS = [
    ("adaptive_max_pool2d", [(2, 0), (2, 15)]),
    ("adaptive_max_pool3d", [(2, 0), (2, 63)]),
    ("max_pool2d_with_indices", [(7, 0), (7, 15)]),
    ("max_pool3d_with_indices", [(7, 0), (7, 63)]),
    ("ctc rows", [(1, torch.tensor([[1, 2, 3], [3, -1, 99]])), (2, [5, 5]), (3, [3, 0]), (3, [1, 1]), (2, [3, 1])]),
    ("ctc one row", [(1, torch.tensor([3, 2, 3, 1])), (2, [5, 5])]),
    ("ctc tensors", [(1, torch.tensor([3, 2, 3, 3]))]),
    ("ctc backward", [(2, torch.tensor([[1, 2, 3], [3, -1, 99]])), (7, 3), (3, [5, 5]), (4, [3, 0])]),
    ("ctc backward, tensors", [(2, torch.tensor([3, 3, 3, 3])), (3, 5), (4, 2)]),
    ("_embedding_bag", [(2, torch.tensor([0, 3])), (2, torch.tensor([0, 0])), (1, torch.tensor([4, 4, 0]))]),
    ("_embedding_bag_forward_only", [(2, torch.tensor([0, 3])), (1, torch.tensor([4, 0, 0]))]),
    ("_embedding_bag, a last offset", [(2, torch.tensor([0, 3, 3])), (2, torch.tensor([0, 3]))]),
    ("_embedding_bag_backward", [(1, torch.tensor([4, 4, 0])), (3, torch.tensor([1, 1, 1])), (2, torch.tensor([0, 3]))]),
    ("_embedding_bag_backward, bags of the kernel's own", [(2, torch.tensor([0, 3])), (2, torch.tensor([0, 0]))]),
    ("_embedding_bag_dense_backward", [(1, torch.tensor([4, 4, 0])), (2, torch.tensor([1, 1, 1]))]),
    ("_embedding_bag_per_sample_weights_backward", [(2, torch.tensor([4, 4, 0])), (4, torch.tensor([1, 1, 1])), (3, torch.tensor([0, 3]))]),
    ("quantized bags", [(1, torch.tensor([4, 4, 0])), (2, torch.tensor([0, 3])), ("per_sample_weights", torch.ones(3))]),
    ("quantized bags, pruned", [("compressed_indices_mapping", 4), ("compressed_indices_mapping", -1)]),
    ("nll_loss_backward", [(2, torch.tensor([2, 2, -100, 0]))]),
    ("nll_loss2d_backward", [(2, 2), (2, 0), (2, -100)]),
    ("coo to csr", [(0, torch.tensor([2, 2, 2])), (0, torch.tensor([0, 0, 0])), (1, 4), (0, torch.tensor([], dtype=torch.int64))]),
    ("csr to coo", [(0, torch.tensor([0, 3, 3])), (0, torch.tensor([0, 0, 3]))]),
    ("segment_reduce, unsafe", [("lengths", torch.tensor([4, 0])), ("lengths", torch.tensor([0, 4]))]),
    ("segment_reduce, offsets", [("offsets", torch.tensor([0, 4, 4])), ("offsets", torch.tensor([0, 0, 4]))]),
    ("segment_reduce backward", [("lengths", torch.tensor([0, 4])), ("lengths", torch.tensor([4, 0]))]),
    ("segment_reduce backward, offsets", [("offsets", torch.tensor([0, 4, 4]))]),
    ("embedding, counted", [(1, torch.tensor([3, 3])), (1, torch.tensor([0, 0]))]),
    ("reflection_pad1d", [(2, [3, 0]), (2, [0, 3])]),
    ("_fft_c2c", [(1, [0]), (1, [0, 1])]),
    ("_weight_norm_interface", [(1, torch.rand(4)), (1, torch.rand(1, 4))]),
    ("native_batch_norm", [(1, torch.rand(3, 1)), (1, None)]),
]  # fmt: skip
RIGHT = [
    pytest.param(name, change, id=f"{name}-{change[0]}-{tuple(change[1].shape) if isinstance(change[1], torch.Tensor) else change[1]}")
    for name, changes in LIMITS
    for change in changes
]  # fmt: skip


@pytest.mark.parametrize("name, change", RIGHT)
def test_the_last_right_arguments_give_what_the_cpu_gives(name, change):
    op, args, kwargs = BY_NAME[name][0]()
    position, value = change
    if name == "reflection_pad1d":  # whose gradient has the size that the padding gives
        args[0] = torch.ones(2, 4 + sum(value))
    _changed(position, value)(args, kwargs)
    moved, named = _on_device(args, kwargs)
    for want, have in zip(_results(op, op(*args, **kwargs)), _results(op, op(*moved, **named)), strict=True):
        torch.testing.assert_close(have.cpu(), want, equal_nan=True)


def test_an_index_that_is_padding_is_not_used():
    op, args, kwargs = BY_NAME["_embedding_bag_per_sample_weights_backward"][0]()
    args[2], padding = torch.tensor([-1, 4, 2]), [-1]
    moved, _ = _on_device(args, {})
    torch.testing.assert_close(op(*moved, *padding).cpu(), op(*args, *padding))


def _sliced(x):
    """A view of the same values, with others between them that a kernel must not use."""
    if x.layout != torch.strided or not x.dim() or x.is_quantized:
        return x
    other = float("nan") if x.is_floating_point() or x.is_complex() else 2**40 if x.dtype == torch.int64 else 99
    wide = torch.full((*x.shape, 2), other, dtype=x.dtype, device=x.device)
    wide[..., 0] = x
    return wide[..., 0]


@pytest.mark.parametrize("name", BY_NAME)
def test_strided_arguments_are_those_that_are_checked(name):
    op, args, kwargs = BY_NAME[name][0]()
    expected = _results(op, op(*args, **kwargs))
    for where in (*range(len(args)), *kwargs):
        changed, named = [*args], {**kwargs}
        of = named if isinstance(where, str) else changed
        if not isinstance(of[where], torch.Tensor):
            continue
        of[where] = _sliced(of[where])
        moved, moved_named = _on_device(changed, named)
        (moved_named if isinstance(where, str) else moved)[where] = _sliced(of[where].to("openreg"))
        try:
            got = op(*moved, **moved_named)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error))):  # such as: expected a contiguous tensor
                op(*changed, **named)
        else:
            for want, have in zip(expected, _results(op, got), strict=True):
                torch.testing.assert_close(have.cpu(), want, msg=lambda text, where=where: f"argument {where}: {text}")


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


def test_a_loss_without_reduction_checks_its_labels_in_every_mode():
    ones, x, total = (
        torch.ones(4, device="openreg"),
        torch.rand(4, 3, device="openreg"),
        torch.ones((), device="openreg"),
    )
    labels = torch.tensor([0, 1, 2, -100], device="openreg")
    args = (ones, x, labels, None, 0, -100, total)
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        grad = aten.nll_loss_backward(*args)
    graph.replay()
    assert grad.tolist() == [[-1, 0, 0], [0, -1, 0], [0, 0, -1], [0, 0, 0]]
    labels[1] = 3
    with pytest.raises((IndexError, RuntimeError), match="expected target from 0 to 2, the classes of self, but got 3"):
        graph.replay()
        torch.openreg.synchronize()
    with torch.openreg.launch_mode("async"), pytest.raises((IndexError, RuntimeError), match="but got 3"):
        aten.nll_loss_backward(*args)
        torch.openreg.synchronize()


def test_a_loss_of_no_classes_in_async_mode():
    grad, x, total = (
        torch.rand(4, device="openreg"),
        torch.rand(4, 0, device="openreg"),
        torch.rand((), device="openreg"),
    )
    ignored = torch.full((4,), -100, device="openreg")
    with torch.openreg.launch_mode("async"):
        assert aten.nll_loss_backward(grad, x, ignored, None, 0, -100, total).shape == (4, 0)
        with pytest.raises(
            (IndexError, RuntimeError), match="expected no target, because the classes of self are none"
        ):
            aten.nll_loss_backward(grad, x, ignored * 0, None, 0, -100, total)
            torch.openreg.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_graph_captures_bags_with_a_last_offset(mode, dtype):
    def of(device):
        weight = torch.arange(20, dtype=dtype, device=device).view(5, 4).requires_grad_()
        indices, offsets = torch.tensor([0, 4, 2], device=device), torch.tensor([0, 2, 3], device=device)

        def step():
            out = F.embedding_bag(indices, weight, offsets, mode=mode, include_last_offset=True)
            return out, torch.autograd.grad(out.square().sum(), weight)[0]

        return step

    graph, step = torch.openreg.Graph(), of("openreg")
    with torch.openreg.graph(graph):
        got = step()
    graph.replay()
    for want, have in zip(of("cpu")(), got, strict=True):
        torch.testing.assert_close(have.cpu(), want)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4)])
def test_the_gradient_of_a_batch_norm_needs_a_batch_and_channels(shape):
    x, channels = torch.rand(shape, device="openreg"), torch.rand(shape[1], device="openreg")
    for training in (True, False):
        with pytest.raises(RuntimeError, match="expected an input with a batch and channels, but got shape"):
            aten.native_batch_norm_backward(x, x, *[channels] * 5, training, 1e-5, [True] * 3)


@pytest.mark.parametrize("layout", ["expanded", "transposed", "sliced"])
def test_attention_takes_a_gradient_of_any_layout(layout):
    def of(device):
        torch.manual_seed(0)
        q, k, v = (torch.rand(2, 3, 4, 5).to(device).requires_grad_() for _ in range(3))
        out = F.scaled_dot_product_attention(q, k, v)
        wide = torch.rand(2, 3, 4, 5).to(device)
        grad = {"expanded": wide[..., :1].expand(2, 3, 4, 5), "transposed": wide.mT.contiguous().mT}
        return torch.autograd.grad(out, (q, k, v), grad[layout] if layout in grad else _sliced(wide))

    for want, have in zip(of("cpu"), of("openreg"), strict=True):
        torch.testing.assert_close(have.cpu(), want)


@pytest.mark.parametrize("kind", ["max", "sum"])
def test_a_graph_captures_a_segment_reduction_by_lengths(kind):
    x, lengths = torch.rand(6, 2, device="openreg"), torch.tensor([2, 0, 4], device="openreg")
    graph = torch.openreg.Graph()
    with torch.openreg.graph(graph):
        out = torch.segment_reduce(x, kind, lengths=lengths, initial=0.0)
    graph.replay()
    torch.testing.assert_close(out.cpu(), torch.segment_reduce(x.cpu(), kind, lengths=lengths.cpu(), initial=0.0))


@pytest.mark.parametrize("p", [0.0, 1.0, 1.5, 2.0, torch.inf])
@pytest.mark.parametrize("shape", [(0, 3), (1, 3), (5, 0)])
def test_distances_between_no_rows_have_a_gradient(shape, p):
    """On the CPU, the gradient for no rows divides by their number."""
    x = torch.rand(shape, device="openreg", requires_grad=True)
    torch.pdist(x, p).sum().backward()
    assert x.grad.shape == shape and not x.grad.any()


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float64, torch.float32, torch.float32), (torch.float32, torch.float32, torch.float64), [torch.half] * 3],
    ids=["grad", "distances", "half"],
)
def test_the_gradient_of_distances_between_no_rows_refuses_what_the_cpu_refuses(dtypes):
    grad, x, distances = (torch.zeros(s, dtype=d) for s, d in zip([(0,), (0, 3), (0,)], dtypes, strict=True))
    with pytest.raises((RuntimeError, NotImplementedError)) as expected:
        aten._pdist_backward(grad, x, 2.0, distances)
    with pytest.raises(expected.type, match=re.escape(str(expected.value))):
        aten._pdist_backward(grad.to("openreg"), x.to("openreg"), 2.0, distances.to("openreg"))


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


@pytest.mark.slow
def test_no_wrong_tensor_ends_the_process():
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("unchecked_sweep.py")]  # it imports a neighbour
    # Without the device at first, because its threads would not be in the forks.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    *found, last = done.stdout.splitlines() or [""]
    assert done.returncode == 0, done.stderr[-2000:]
    assert not found, "\n".join(found)
    shapes, integers = map(int, last.split())
    assert shapes >= 25 and integers >= 150
