"""Sparse, quantized and nested tensors: computed by the CPU's kernels for their layout, or rejected with a clear
error."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def coo():
    return torch.sparse_coo_tensor(torch.tensor([[0, 1, 1], [2, 0, 0]]), torch.tensor([3.0, 4.0, 5.0]), (2, 3))


COO = {
    "to_dense": lambda s: s.to_dense(),
    "coalesce": lambda s: s.coalesce(),
    "values": lambda s: s.coalesce().values(),
    "indices": lambda s: s.coalesce().indices(),
    "add": lambda s: s + s,
    "mul": lambda s: s.coalesce() * 2,
    "mm": lambda s: s @ torch.arange(6.0, device=s.device).view(3, 2),
    "spmm": lambda s: torch.sparse.mm(s, s.t()),
    "t": lambda s: s.t(),
    "sum": lambda s: torch.sparse.sum(s, 0),
    "neg": lambda s: -s,
    "clone": lambda s: s.clone(),
    "to_csr": lambda s: s.to_sparse_csr(),
    "dense round trip": lambda s: s.to_dense().to_sparse(),
    "double": lambda s: s.to(torch.double),
    "cat": lambda s: torch.cat([s, s]),
    "softmax": lambda s: torch.sparse.softmax(s, 1),
}


def test_coo_in_place_and_construction(coo):
    s = torch.sparse_coo_tensor(coo._indices().to("openreg"), coo._values().to("openreg"), (2, 3))
    assert s.device.type == "openreg" and s._values().is_openreg
    s.mul_(2)
    assert_close(s.to_dense().cpu(), coo.to_dense() * 2)
    dense = torch.ones(2, 3, device="openreg")
    dense.add_(s)
    assert_close(dense.cpu(), 1 + coo.to_dense() * 2)


def test_sparse_gradients_train():
    embedding = torch.nn.Embedding(5, 3, sparse=True).to("openreg")
    before = embedding.weight.detach().cpu()
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    embedding(torch.tensor([1, 2, 1], device="openreg")).sum().backward()
    assert embedding.weight.grad.is_sparse and embedding.weight.grad.device.type == "openreg"
    optimizer.step()
    expected = before - torch.tensor([0.0, 2, 1, 0, 0])[:, None]
    assert_close(embedding.weight.detach().cpu(), expected)


CSR = {
    "to_dense": lambda s: s.to_dense(),
    "values": lambda s: s.values(),
    "mm": lambda s: s @ torch.arange(6.0, device=s.device).view(3, 2),
    "mv": lambda s: s @ torch.arange(3.0, device=s.device),
    "add": lambda s: s + s,
    "mul": lambda s: s * 2,
    "transpose": lambda s: s.transpose(0, 1).to_dense(),
    "to_coo": lambda s: s.to_sparse_coo(),
    "clone": lambda s: s.clone(),
}


def dense(x):
    return x if x.layout == torch.strided else x.to_dense()


@pytest.mark.parametrize("layout, name", [*(("coo", name) for name in COO), *(("csr", name) for name in CSR)], ids=str)
def test_sparse(coo, layout, name):
    given, function = (coo, COO[name]) if layout == "coo" else (coo.to_sparse_csr(), CSR[name])
    expected, got = function(given), function(given.to("openreg"))
    assert got.device.type == "openreg" and got.layout == expected.layout
    assert_close(dense(got.cpu()), dense(expected))


QUANTIZE = {
    "per tensor": lambda x: torch.quantize_per_tensor(x, 0.1, 3, torch.quint8),
    "per channel": lambda x: torch.quantize_per_channel(
        x,
        torch.tensor([0.1, 0.2], dtype=torch.double, device=x.device),
        torch.zeros(2, dtype=torch.long, device=x.device),
        0,
        torch.qint8,
    ),
}


@pytest.mark.parametrize("kind", QUANTIZE)
def test_quantized(kind):
    x = torch.randn(2, 5)
    expected, got = QUANTIZE[kind](x), QUANTIZE[kind](x.to("openreg"))
    assert got.is_quantized and got.device.type == "openreg"
    assert got.dequantize().cpu().equal(expected.dequantize()) and got.int_repr().cpu().equal(expected.int_repr())
    assert got.qscheme() == expected.qscheme()
    assert got.clone().dequantize().cpu().equal(expected.dequantize())


def test_a_quantizer_keeps_its_scales_alive():
    scales = torch.tensor([0.5, 2.0], dtype=torch.double, device="openreg")
    q = torch.quantize_per_channel(
        torch.ones(2, 2, device="openreg"), scales, torch.zeros(2, dtype=torch.long, device="openreg"), 0, torch.qint8
    )
    del scales
    filler = [torch.full((2,), 7.0, dtype=torch.double, device="openreg") for _ in range(100)]
    assert q.q_per_channel_scales().tolist() == [0.5, 2.0] == q.q_per_channel_scales().tolist()
    assert q.dequantize().tolist() == [[1, 1], [0, 0]]  # 1 / 2.0 rounds to the even 0
    assert q.q_per_channel_scales().is_openreg and len(filler) == 100


def test_nested():
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    host, device = torch.nested.nested_tensor(parts), torch.nested.nested_tensor(parts, device="openreg")
    assert device.is_nested and device.device.type == "openreg"
    for function in (
        lambda n: n,
        lambda n: n * 2,
        lambda n: torch.nn.functional.relu(n),
        lambda n: n @ torch.ones(2, 3, 4, device=n.device),
    ):
        try:
            expected = torch.nested.to_padded_tensor(function(host), 0.0)
        except RuntimeError:
            continue
        assert_close(torch.nested.to_padded_tensor(function(device), 0.0).cpu(), expected)


def test_a_layout_without_a_kernel_is_refused_with_the_remedy(coo):
    with warnings.catch_warnings(), pytest.raises((NotImplementedError, RuntimeError), match="openreg|sparse|Sparse"):
        torch.cumsum(coo.to("openreg"), 0)
    with pytest.raises(RuntimeError, match="strided|sparse|Sparse"):
        coo.to("openreg").view(6)


def test_an_update_in_place_that_gives_a_sparse_tensor_other_members():
    """Otherwise it writes to the old ones, which have been freed, and the process crashes within a few dozen rounds."""
    for _ in range(200):
        indices, values = torch.empty(0, 1, dtype=torch.long), torch.empty(1, 2, 3, 4, 10, 0)
        s = torch.sparse_coo_tensor(indices.to("openreg"), values.to("openreg"), (2, 3, 4, 10, 0))
        s.mul_(torch.empty(10, 0, device="openreg"))
        assert s._nnz() == 0 and s._values().is_openreg and s.to_dense().shape == (2, 3, 4, 10, 0)


def test_sparse_invariants_are_checked():
    indices, values = torch.tensor([[1, 0], [0, 1]], device="openreg"), torch.ones(2, device="openreg")
    make = torch.sparse_coo_tensor
    assert make(indices.flip(1), values, (2, 2), check_invariants=True, is_coalesced=True).is_coalesced()
    with pytest.raises(RuntimeError, match="cannot set is_coalesced to true if indices correspond to uncoalesced"):
        make(indices, values, (2, 2), check_invariants=True, is_coalesced=True)
    values.requires_grad_()
    make(indices, values, (2, 2), check_invariants=True).to_dense().sum().backward()
    assert values.grad.tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore")
def test_nested_dropout_leaves_the_cpus_generator_alone():
    nested = torch.nested.nested_tensor([torch.ones(50), torch.ones(30)], device="openreg")
    host, device = torch.get_rng_state(), torch.openreg.get_rng_state()
    F.dropout(nested, 0.5)
    assert torch.get_rng_state().equal(host) and not torch.openreg.get_rng_state().equal(device)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", [lambda x: x.fill_(1.0), torch.clone, torch.empty_like, lambda x: x[None].resize_(2)])
def test_a_quantized_tensor_without_a_quantizer_is_refused(op):
    with pytest.raises(
        NotImplementedError, match="expected quantized tensors with a quantizer, but got one that torch.empty made"
    ):
        op(torch.empty((), dtype=torch.qint8, device="openreg"))
    with pytest.raises(NotImplementedError):  # which calls fill_; on the CPU it is also this error
        torch.scalar_tensor(2.0, dtype=torch.qint8, device="openreg")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", [
    lambda x: x.view(7), lambda x: x.squeeze(9), lambda x: x.unfold(0, 9, 1), lambda x: torch.eq(x, x.view(2, 6)),
    lambda x: F.max_pool2d(x.view(1, 1, 3, 4), 9),
], ids=["view", "squeeze", "unfold", "eq", "max_pool2d"])  # fmt: skip
def test_other_errors_of_a_quantized_tensor_without_a_quantizer_are_pytorchs(op):
    with pytest.raises((RuntimeError, IndexError)) as expected:
        op(torch.empty(3, 4, dtype=torch.quint8))
    with pytest.raises(expected.type) as raised:
        op(torch.empty(3, 4, dtype=torch.quint8, device="openreg"))
    assert type(raised.value) is expected.type and str(raised.value) == str(expected.value)
