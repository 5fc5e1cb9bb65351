"""Automatic mixed precision: PyTorch's own lists of operators and policies, and training under them."""

import copy

import pytest
import torch
from torch.testing import assert_close
from torch.testing._internal.autocast_test_lists import AutocastTestLists

LISTS = AutocastTestLists(torch.device("openreg"))
HALF = [torch.float16, torch.bfloat16]


def cases(name, namespace):
    for i, entry in enumerate(getattr(LISTS, name)):
        yield pytest.param(entry, namespace, id=f"{name}-{entry[0]}-{i}")


def call(entry, namespace, dtype):
    name, arguments = entry[0], entry[1]
    keywords = entry[2] if len(entry) > 2 and isinstance(entry[2], dict) else {}
    with torch.autocast("openreg", dtype=dtype):
        function = getattr(namespace, name, None) or getattr(torch.Tensor, name)
        return function(*arguments, **keywords)


def dtypes(result):
    return {t.dtype for t in (result if isinstance(result, (tuple, list)) else [result]) if t.is_floating_point()}


LOWER = [*cases("torch_fp16", torch), *cases("nn_fp16", torch._C._nn), *cases("methods_fp16", torch)]
WIDE = [*cases("torch_fp32", torch), *cases("nn_fp32", torch._C._nn), *cases("methods_fp32", torch)]
# cuDNN's names for what runs here under the names without the prefix
# and einsum, for which the list has a four-letter equation and matrices; it has its own test
LOWER = [c for c in LOWER if "cudnn" not in c.id and "einsum" not in c.id]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("entry,namespace", LOWER)
def test_lower_precision(entry, namespace, dtype):
    wide = lambda a: a.to(torch.float32) if isinstance(a, torch.Tensor) and a.is_floating_point() else a  # noqa: E731
    arguments = torch.utils._pytree.tree_map(wide, entry[1])
    assert dtypes(call((entry[0], arguments, *entry[2:]), namespace, dtype)) == {dtype}


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_einsum_in_lower_precision(dtype):
    with torch.autocast("openreg", dtype=dtype):
        assert (
            torch.einsum("ij,jk->ik", torch.ones(2, 3, device="openreg"), torch.ones(3, 4, device="openreg")).dtype
            == dtype
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry,namespace", WIDE)
def test_float32(entry, namespace):
    assert dtypes(call(entry, namespace, torch.float16)) == {torch.float32}


@pytest.mark.parametrize(
    "entry,namespace", [*cases("torch_need_autocast_promote", torch), *cases("torch_expect_builtin_promote", torch)]
)
def test_promotes_to_the_widest(entry, namespace):
    expected = entry[2] if len(entry) > 2 and isinstance(entry[2], torch.dtype) else torch.float32
    result = call(entry[:2], namespace, torch.float16)
    found = {
        t.dtype for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, torch.Tensor)
    }
    assert found == {expected} or (entry[0] == "equal" and isinstance(result, bool))


def test_a_banned_operator_says_what_to_do():
    x = torch.rand(2, device="openreg")
    with (
        torch.autocast("openreg"),
        pytest.raises(RuntimeError, match="binary_cross_entropy: unsafe to autocast.*with_logits"),
    ):
        torch.nn.functional.binary_cross_entropy(x, x)


def test_nesting_disabling_and_dtypes():
    x = torch.ones(2, 2, device="openreg")
    with torch.autocast("openreg", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16 and torch.openreg.is_autocast_enabled()
        assert torch.openreg.get_autocast_dtype() == torch.bfloat16
        with torch.autocast("openreg", enabled=False):
            assert (x @ x).dtype == torch.float32
        with torch.autocast("openreg", dtype=torch.float16):
            assert (x @ x).dtype == torch.float16
        assert (x.cpu() @ x.cpu()).dtype == torch.float32
    assert (x @ x).dtype == torch.float32 and not torch.openreg.is_autocast_enabled()
    assert torch.openreg.get_amp_supported_dtype() == [torch.float16, torch.bfloat16]


def test_module_functions():
    before = torch.openreg.get_autocast_dtype()
    torch.openreg.set_autocast_enabled(True)
    torch.openreg.set_autocast_dtype(torch.bfloat16)
    try:
        x = torch.ones(2, 2, device="openreg")
        assert (x @ x).dtype == torch.bfloat16
    finally:
        torch.openreg.set_autocast_enabled(False)
        torch.openreg.set_autocast_dtype(before)
    with pytest.raises(ValueError, match="autocast on openreg supports .* but got torch.float64"):
        torch.openreg.set_autocast_dtype(torch.float64)


def test_weight_casts_are_cached():
    linear = torch.nn.Linear(4, 4).to("openreg")
    x = torch.ones(2, 4, device="openreg", dtype=torch.bfloat16)
    from openreg_ops import _C

    with torch.autocast("openreg", dtype=torch.bfloat16):
        before = _C.launch_count()
        linear(x)
        first = _C.launch_count() - before
        linear(x)
        assert _C.launch_count() - before - first < first


def test_grad_scaler_skips_steps_with_infinite_gradients():
    scaler = torch.amp.GradScaler("openreg", init_scale=4.0)
    weight = torch.nn.Parameter(torch.ones(3, device="openreg"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale((weight * 2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [-1, -1, -1] and scaler.get_scale() == 4.0
    optimizer.zero_grad()
    scaler.scale((weight * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [-1, -1, -1] and scaler.get_scale() == 2.0


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_transformer_trains_to_the_cpus_losses(dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(20, 16),
        torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        torch.nn.Linear(16, 20),
    )
    tokens = torch.randint(20, (4, 9))

    def train(device):
        net = copy.deepcopy(model).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
        losses = []
        for _ in range(10):
            with torch.autocast(device, dtype=dtype):
                logits = net(tokens[:, :-1].to(device))
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().to(device))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return losses

    got, expected = train("openreg"), train("cpu")
    assert got[-1] < got[0] - 0.5
    assert_close(torch.tensor(got), torch.tensor(expected), rtol=0.03, atol=0.03)
