"""`torch.openreg.set_sync_debug_mode`: what CUDA reports, and nothing else; the operator and the line."""

import warnings

import pytest
import torch
from processes import python


@pytest.fixture(autouse=True)
def off():
    yield
    torch.openreg.set_sync_debug_mode("default")


def put(x, index, value):
    x[index] = value


def inputs():
    x, y = torch.rand(4, device="openreg:1"), torch.rand((), device="openreg:1")
    index = torch.tensor([0, 2, 3], device="openreg:1")
    mask = torch.tensor([True, False, True, False], device="openreg:1")
    return {
        "x": x,
        "y": y,
        "i": index,
        "m": mask,
        "i_cpu": index.cpu(),
        "m_cpu": mask.cpu(),
        "two": torch.full_like(index[:1], 2),
    }


WAITS = {
    "y.item()": "aten::_local_scalar_dense",
    "bool(y)": "aten::_local_scalar_dense",
    "x.cpu()": "aten::copy_",
    "x.tolist()": "aten::copy_",
    "torch.tensor([1.0], device='openreg')": "aten::copy_",
    "torch.ones(3).to('openreg')": "aten::copy_",
    "x.nonzero()": "aten::nonzero",
    "x[m]": "aten::index",
    "x[i_cpu]": "aten::index",
    "put(x, i_cpu, y)": "aten::_index_put_impl_",
    "put(x, m, x[:2].clone())": "aten::_index_put_impl_",
    "x.masked_select(m)": "aten::masked_select",
    "x.masked_fill_(m, y)": "aten::masked_fill_",
    "torch.unique(i)": "aten::_unique2",
    "torch.bincount(i)": "aten::bincount",
    "torch.equal(x, x.clone())": "aten::equal",
    "torch.repeat_interleave(x, two)": "aten::repeat_interleave",
    "torch.nn.functional.one_hot(i)": "aten::_local_scalar_dense",
    "torch.histc(x, 3)": "aten::histc",
    "torch.linalg.svd(x.view(2, 2))": "aten::_linalg_svd",
    "torch.linalg.lstsq(x.view(2, 2), x.view(2, 2))": "aten::linalg_lstsq",
    "torch.linalg.pinv(x.view(2, 2))": "aten::_linalg_svd",
    "torch.where(m, x, torch.tensor(1.0))": "aten::where",
    "torch.where(torch.tensor(True), x, x)": "aten::where",
    "torch.isin(x, x.repeat(5))": "aten::isin",
    "torch.isin(1, x.repeat(5))": "aten::isin",
    "torch.matrix_exp(x.view(2, 2))": "aten::linalg_matrix_exp",
    "x.index_fill(0, i, y)": "aten::index_fill_",
    "x.to_sparse()": "aten::_to_sparse",
    "torch.normal(0.0, x)": "aten::normal",
    "torch.openreg.current_stream().synchronize()": "Stream.synchronize",
}
DOES_NOT = [
    "x + y",
    "x[i]",
    "x[m_cpu]",
    "put(x, i, y)",
    "put(x, m, 1.0)",
    "put(x, m_cpu, y)",
    "x.masked_fill_(m, 1.0)",
    "torch.nn.functional.one_hot(i, num_classes=4)",
    "torch.repeat_interleave(x, 2, output_size=8)",
    "torch.repeat_interleave(x, two, output_size=8)",
    "torch.any(y)",
    "torch.multinomial(x, 2)",
    "torch.multinomial(x, 2, replacement=True)",
    "torch.equal(x, x)",
    "torch.histc(x, 3, 0, 1)",
    "torch.histc(x[:0], 3)",
    "torch.isin(x, x)",
    "torch.isin(x[:0], x.repeat(5))",
    "torch.matrix_exp(x[:1].view(1, 1))",
    "torch.where(m, x, 1.0)",
    "torch.linalg.svd(x[:0].view(0, 0))",
    "torch.randperm(100, device='openreg')",
    "x.to('openreg:0')",
    "torch.ones(3).to('openreg', non_blocking=True)",
    "x.to('cpu', non_blocking=True)",
    "x[:0].cpu()",
    "torch.openreg.synchronize()",
    "torch.openreg.current_stream().record_event().synchronize()",
    "torch.ones(3).sum().item()",
]


@pytest.mark.parametrize("code", WAITS)
def test_waits(mode, code):
    given = inputs() | {"put": put, "torch": torch}
    torch.openreg.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match=f"synchronizing openreg operation, {WAITS[code]} at .*: the host waits"):
        eval(code, given)
    torch.openreg.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match=f"synchronizing openreg operation, {WAITS[code]} at .* permits it"):
        eval(code, given)


@pytest.mark.parametrize("code", DOES_NOT)
def test_does_not_wait(mode, code):
    given = inputs() | {"put": put, "torch": torch}
    torch.openreg.set_sync_debug_mode("error")
    eval(code, given)


def test_mode():
    for name, number in {"default": 0, "warn": 1, "error": 2}.items():
        torch.openreg.set_sync_debug_mode(name)
        assert torch.openreg.get_sync_debug_mode() == number
        torch.openreg.set_sync_debug_mode(number)
        assert torch.openreg.get_sync_debug_mode() == number
    for wrong in ("none", 3, -1, None, True):
        with pytest.raises(RuntimeError, match="expected one of `default`, `warn`, `error` or 0, 1, 2, but got"):
            torch.openreg.set_sync_debug_mode(wrong)


def line_of(warning):
    with open(warning.filename) as file:
        return file.read().splitlines()[warning.lineno - 1].strip()


def test_the_line():
    x = torch.ones(3, device="openreg")
    torch.openreg.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.nn.functional.one_hot(x.long())  # the line
    assert [line_of(each) for each in caught] == ["torch.nn.functional.one_hot(x.long())  # the line"] * len(caught)
    assert caught and f"{__file__}:{caught[0].lineno}" in str(caught[0].message)


def test_the_line_of_a_backward():
    """That of backward(), where the node is PyTorch's; that in the node, where it is the program's."""

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            grad.sum().item()  # in the node
            return grad

    x = torch.ones(3, device="openreg", requires_grad=True)
    loss = Reads.apply(x)[torch.tensor([True, False, True], device="openreg")].sum()
    torch.openreg.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning) as caught:
        loss.backward()  # the call
    found = {(str(each.message).split(",")[1].split(" at ")[0].strip(), line_of(each)) for each in caught}
    assert ("aten::_index_put_impl_", "loss.backward()  # the call") in found
    assert ("aten::_local_scalar_dense", "grad.sum().item()  # in the node") in found
    assert any("in the backward of IndexBackward0" in str(each.message) for each in caught)


def test_a_training_step_does_not_wait(mode):
    model = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, device="openreg")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(8, 5, 16, device="openreg")
    torch.openreg.set_sync_debug_mode("error")
    for _ in range(2):
        torch.nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.processes
def test_under_isolation():
    """Reports are the same: the copies that isolation itself makes are not reported."""
    code = """
import torch
x = torch.rand(4, device="openreg")
torch.openreg.set_sync_debug_mode("error")
y = (x * 2 + 1).sort().values.cumsum(0)
z = torch.nn.functional.dropout(y, 0.5) @ x
for call in (z.item, y.nonzero, y.cpu):
    try:
        call()
    except RuntimeError as error:
        assert "called a synchronizing openreg operation" in str(error)
    else:
        raise AssertionError(call)
"""
    done = python("-c", code, OPENREG_ISOLATION="strict")
    assert done.returncode == 0, done.stderr
