"""The core of the tools: moves keep how tensors lie in memory, and comparisons blame what is wrong."""

import math

import pytest
import torch

from openreg_tools.core.compare import differs, equal, measure, same_bits
from openreg_tools.core.move import Move, Packed, RequiresGrad, Stays, StorageOf, is_written, span

DEVICE = "openreg"

# ---- move ----


def geometry(x):
    return x.dtype, x.shape, x.stride(), x.storage_offset(), x.is_conj(), x.is_neg()


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(24.0).view(4, 6).t()[1:5:2, 1:],
        torch.arange(3.0).expand(2, 3),
        torch.randn(4, dtype=torch.complex64)[1:].conj(),
        torch._neg_view(torch.arange(5.0)[2:]),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.zeros(5)[5:],
        torch.tensor(2),
        torch.zeros(8, dtype=torch.uint8)[4:].view(torch.float32),
    ],
    ids=["strides", "expanded", "conj", "neg", "conj-imag", "empty", "0-dim", "dtype"],
)
def test_a_copy_lies_in_memory_like_its_tensor(x):
    copy = Move(DEVICE)(x)
    assert copy.device.type == DEVICE and geometry(copy) == geometry(x)
    assert copy.untyped_storage().nbytes() == x.untyped_storage().nbytes()
    assert torch.equal(copy.cpu(), x)
    back = Move("cpu", source=None)(copy)
    assert back.device.type == "cpu" and geometry(back) == geometry(x) and torch.equal(back, x)


def test_copies_share_what_their_tensors_share():
    memory, other = torch.arange(8.0), torch.zeros(8)
    given = {"a": memory[1:], "b": [memory.view(torch.int32)[2:], (memory, memory)], "c": other}
    move = Move(DEVICE)
    made = move(given)
    first, (second, (third, fourth)) = made["a"], made["b"]
    assert third is fourth
    third.zero_()
    assert not first.any() and not second.any() and memory[7] == 7
    made["c"].fill_(1)
    assert not third.any() and not other.any()
    assert list(move.tensors.values())[:2] == [first, second] or list(move.tensors.values())[0] is first


def test_gradients_are_required_where_the_arguments_do():
    x, y, z = torch.ones(2, requires_grad=True), torch.ones(2), torch.ones(2)
    move = Move(DEVICE, requires_grad=True)
    a, b, c = move([x, y, RequiresGrad(z)])
    assert a.requires_grad and a.is_leaf and not b.requires_grad and c.requires_grad
    assert [id(leaf) for leaf in move.leaves] == [id(a)]
    assert not Move(DEVICE)(x).requires_grad


def test_what_stays_and_what_is_replaced():
    x, elsewhere = torch.ones(2), torch.ones(2, device=DEVICE)
    move = Move(DEVICE)
    stays, packed, storage = move([Stays(x), Packed(x), StorageOf(x)])
    assert stays.device.type == "cpu" and stays is not x and packed is x
    assert storage.device.type == DEVICE and storage.data_ptr() == move(x).data_ptr()
    assert move([torch.device("cpu"), "cpu", "mean", torch.device("meta")]) == [
        torch.device(DEVICE), DEVICE, "mean", torch.device("meta")
    ]  # fmt: skip
    there = Move("cpu")(elsewhere)
    assert there.device.type == DEVICE and there is not elsewhere
    assert Move("cpu", source=DEVICE)(elsewhere).device.type == "cpu"
    assert move({"s": slice(None, x), "t": torch.Size([2])})["s"].stop is move(x)


def test_generators_draw_the_same_numbers():
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    move = Move(DEVICE)
    first, second = move([generator, generator])
    assert first is second and first.device.type == DEVICE
    assert torch.equal(torch.rand(3, generator=first, device=DEVICE).cpu(), torch.rand(3, generator=generator))


def test_memory_that_tensors_do_not_reach_is_left_out():
    memory = torch.arange(1000.0)
    x, y, alone = memory[500:510], memory[600:620:2], torch.arange(4.0)
    move = Move(DEVICE, within=[x, y])
    a, b, c = move([x, y, alone])
    assert [torch.equal(each.cpu(), want) for each, want in zip((a, b, c), (x, y, alone), strict=True)] == [True] * 3
    assert a.untyped_storage().nbytes() < 1000 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert span([x]) == (1984, 2040) and span([memory[:0]]) == (0, 0)


def test_tensors_without_plain_memory():
    sparse = torch.eye(3).to_sparse()
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.qint8)
    move = Move("cpu")
    assert torch.equal(move(sparse).to_dense(), torch.eye(3)) and move(sparse) is not sparse
    assert torch.equal(move(quantized).dequantize(), torch.ones(3))
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    copy = Move(DEVICE)(freed)
    assert copy.shape == (4,) and copy.untyped_storage().nbytes() == 0


def test_written_arguments():
    written = [argument.name for argument in torch.ops.aten.add.out._schema.arguments if is_written(argument)]
    assert written == ["out"]
    assert not any(map(is_written, torch.ops.aten.t.default._schema.arguments))  # an alias that is not written


# ---- compare ----


def test_errors_are_measured_in_ulps_of_the_dtype():
    one = torch.ones(3)
    error = measure(one + torch.tensor([0, 0, 3 * 2.0**-23]), one, ulps=2)
    assert (error.ulps, error.at, error.count) == (3.0, (2,), 1)
    assert measure(one + 3 * 2.0**-23, one, ulps=3).count == 0
    half = torch.ones(2, dtype=torch.bfloat16)
    assert measure(half + torch.tensor([0, 2.0**-7], dtype=half.dtype), half).ulps == 1.0


@pytest.mark.parametrize("scale", [8.0, torch.tensor([8.0, 8.0])], ids=["number", "tensor"])
def test_the_scale_of_the_computation_counts_where_it_is_larger(scale):
    got, want = torch.tensor([2.0**-23, 64.0]), torch.tensor([0.0, 64.0])
    assert measure(got, want).ulps > 1e6
    assert measure(got, want, scale=scale).ulps == 2.0**-3
    assert measure(got, torch.tensor([2.0**-23, 64.0 - 2.0**-17]), scale=scale).ulps == 2.0


def test_nan_and_infinity():
    nan, inf = torch.tensor([math.nan, 1.0]), torch.tensor([math.inf, 1.0])
    assert measure(nan, nan.clone()) is None and measure(inf, inf.clone()) is None
    for got, want in ((nan, inf), (inf, nan), (inf, -inf), (torch.ones(2), nan)):
        assert measure(got, want, ulps=1e9).ulps == math.inf and measure(got, want, ulps=1e9).count == 1


def test_integers_and_complex_numbers():
    assert measure(torch.tensor([1, 5]), torch.tensor([1, 2])).ulps == 3.0
    assert measure(torch.tensor([True]), torch.tensor([False])).at == (0,)
    z = torch.tensor([1 + 1j, 2 + 2j])
    error = measure(z + torch.tensor([0, 2.0**-20 * 1j]), z)
    assert error.at == (1,) and error.ulps == 4.0 and error.expected == 2 + 2j


def test_equal_bits():
    nan = torch.tensor([math.nan, 1.0])
    assert same_bits(nan, nan.flip(0).flip(0)) and not same_bits(nan, nan.flip(0))
    assert equal(torch.eye(2).t(), torch.eye(2)) and not equal(torch.ones(2), torch.zeros(2))


@pytest.mark.parametrize(
    "got, want, options, sentence",
    [
        ([torch.ones(2)], [], {}, "there are 1 outputs instead of 0"),
        ([None], [torch.ones(1)], {}, "output 0 is missing, but should not be"),
        ([torch.ones(1)], [None], {}, "output 0 is there, but should not be"),
        ([None], [torch.zeros(1)], {}, ""),
        ([torch.ones(2)], [torch.ones(3)], {}, "output 0 has shape [2] instead of [3]"),
        ([torch.ones(2)], [torch.ones(2).int()], {}, "output 0 is float32 instead of int32"),
        ([torch.ones(2)], [torch.ones(2).int()], {"dtype": False}, ""),
        ([torch.ones(1), torch.tensor([1.0, 3.0])], [torch.ones(1), torch.tensor([1.0, 2.0])], {"what": "gradient"},
         "gradient 1 differs in 1 of 2 elements: 3 instead of 2 at [1]"),
        ([torch.tensor([1, 3])], [torch.tensor([1, 2])], {"coarse": 1.0},
         "output 0 differs in 1 of 2 elements: 3 instead of 2 at [1]"),
        ([torch.tensor([1.00001])], [torch.ones(1)], {}, ""),
        ([torch.tensor([1.00001])], [torch.ones(1)], {"exact": True},
         "output 0 differs in 1 of 1 elements: 1.00001 instead of 1 at [0]"),
        ([torch.tensor([1.001])], [torch.ones(1)], {},
         "output 0 differs in 1 of 1 elements: 1.001 instead of 1 at [0]"),
        ([torch.tensor([1.001])], [torch.ones(1)], {"coarse": 1e-2}, ""),
        ([torch.tensor([1.25]).to(torch.float8_e4m3fn)], [torch.tensor([1.125]).to(torch.float8_e4m3fn)], {}, ""),
        ([torch.tensor([2.0]).to(torch.float8_e4m3fn)], [torch.tensor([1.0]).to(torch.float8_e4m3fn)], {},
         "output 0 differs in 1 of 1 elements: 2 instead of 1 at [0]"),
        ([torch.eye(2).to_sparse()], [torch.zeros(2, 2).to_sparse()], {},
         "output 0 differs in 2 of 4 elements: 1 instead of 0 at [0, 0]"),
    ],
)  # fmt: skip
def test_the_first_difference(got, want, options, sentence):
    assert differs(got, want, **options) == sentence
