"""Automatic mixed precision: PyTorch's own lists of operators and policies, and training under them."""

import io

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


def asked():
    """What code sees that does not name a device."""
    return torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_a_question_without_a_device_is_about_the_device():
    assert asked()[0] is False
    with torch.autocast("openreg", dtype=torch.bfloat16):
        assert asked() == (True, torch.bfloat16) and torch._C.is_autocast_enabled()
        assert not torch.is_autocast_enabled("cuda") and not torch.is_autocast_enabled(device_type="cpu")
        with torch.autocast("cpu", dtype=torch.float16):
            assert asked() == (True, torch.bfloat16)
        with torch.autocast("openreg", enabled=False):
            assert asked()[0] is False
    with torch.autocast("cpu"):
        assert asked()[0] is False
    torch.set_autocast_enabled("cuda", True)
    try:
        assert asked()[0] is True
    finally:
        torch.set_autocast_enabled("cuda", False)
    with pytest.raises(TypeError, match=r"is_autocast_enabled.*must be str, not int"):
        torch.is_autocast_enabled(3)


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_code_without_a_device_turns_autocast_off_and_on_again():
    x = torch.ones(2, 2, device="openreg")
    with torch.autocast("openreg", dtype=torch.bfloat16):
        enabled, dtype = asked()
        torch.set_autocast_enabled(False)
        assert (x @ x).dtype == torch.float32
        torch.set_autocast_gpu_dtype(torch.float16)
        torch.set_autocast_enabled(enabled=enabled)
        assert (x @ x).dtype == torch.float16
        torch.set_autocast_gpu_dtype(dtype)
        assert (x @ x).dtype == torch.bfloat16
    assert asked()[0] is False and not torch.is_autocast_enabled("cuda")
    with pytest.raises(TypeError, match="must be bool, not int|invalid combination"):
        torch.set_autocast_enabled(1)


def asks(x):
    return x + 1 if torch.is_autocast_enabled() else x - 1


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_graph_asks_without_a_device(compiler):
    compiled = torch.compile(asks, backend=compiler, fullgraph=True)
    x = torch.ones(2, device="openreg")
    for enabled in (False, True, False):
        with torch.autocast("openreg", enabled=enabled):
            assert compiled(x).equal(asks(x))

    @torch.compile(backend=compiler, fullgraph=True)
    def inside(x):
        with torch.autocast("openreg", dtype=torch.bfloat16):
            return x + 1, torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()

    assert inside(x)[1:] == (True, torch.bfloat16)


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_a_script_asks_without_a_device():
    script = torch.jit.script(asks)
    torch.jit.save(script, file := io.BytesIO())
    assert "torch.is_autocast_enabled()" in script.code  # PyTorch's own operator: other machines load the file too
    for function in (script, torch.jit.load(io.BytesIO(file.getvalue()))):
        for enabled in (False, True, False, True):
            with torch.autocast("openreg", enabled=enabled), torch.autocast("cpu"):
                assert function(torch.ones(1)).item() == 2 * enabled


def layers():
    options = {"batch_first": True, "dropout": 0.0}
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, **options)
    return {
        "encoder": torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        "nested": torch.nn.TransformerEncoder(layer, 1),
        "layer": layer,
        "norm first": torch.nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, **options),
    }


@pytest.mark.parametrize("mode", ["inline", "async"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("data", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", layers())
def test_inference_of_transformers_under_autocast(name, data, weights, mode):
    """The fused operators of inference ignore autocast; PyTorch must not take them, as on CUDA."""
    torch.manual_seed(0)
    model = layers()[name].to("openreg:1", weights).eval()
    x = torch.randn(2, 5, 16, device="openreg:1", dtype=data)
    padding = torch.zeros(2, 5, dtype=torch.bool, device="openreg:1")
    padding[0, 3:] = name == "nested"
    options = {"src_key_padding_mask": padding}
    with torch.openreg.launch_mode(mode), torch.autocast("openreg", dtype=torch.bfloat16):
        expected = model(x, **options)
        for without in (torch.inference_mode, torch.no_grad):
            with without():
                result = model(x, **options)
            assert result.dtype == expected.dtype
            assert_close(result, expected.detach())
    if weights == data:
        with torch.inference_mode():
            assert model(x, **options).dtype == data  # without autocast, the fused operators


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_inference_of_attention_under_autocast(dtype):
    torch.manual_seed(0)
    model = torch.nn.MultiheadAttention(16, 2, batch_first=True).to("openreg", dtype).eval()
    x = torch.randn(2, 5, 16, device="openreg")
    with torch.autocast("openreg", dtype=dtype):
        expected, shares = model(x, x, x)
        with torch.inference_mode():
            result, others = model(x, x, x)
    assert (result.dtype, others.dtype) == (expected.dtype, shares.dtype)
    assert_close(result, expected.detach())


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
