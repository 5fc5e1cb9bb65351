"""torch.func's transforms: a sample of the sweeps of `python -m openreg_ops conformance`, attention, full transformers, and
tensors of two devices."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, functionalize, grad, hessian, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from openreg_ops.meta import op
from openreg_tools.conformance import sweep, transforms
from openreg_tools.core import opinfo
from openreg_tools.core.samples import sample_of

pytestmark = pytest.mark.conformance

DEVICE = "openreg"

# ---- a sample of the conformance tool's sweeps ----

# Operators that the device overrides, or that choose what they do above the dispatcher.
OVERRIDDEN = (
    "abs", "nn.functional.avg_pool2d", "nn.functional.batch_norm", "nn.functional.binary_cross_entropy",
    "nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv_transpose2d", "nn.functional.dropout",
    "nn.functional.embedding", "nn.functional.layer_norm", "nn.functional.linear", "nn.functional.max_pool2d",
    "nn.functional.multi_head_attention_forward", "nn.functional.scaled_dot_product_attention", "nn.functional.selu",
    "native_batch_norm", "native_layer_norm", "copysign", "index_put", "tensor_split", "to", "clone", "bernoulli",
    "rand_like", "set_",
)  # fmt: skip


def cases():
    """Those, and every eighth of the others that PyTorch has a batching rule for (the foreach lists have none)."""
    database = opinfo.database()
    names = [name for name in sorted(database) if "float32" in opinfo.dtypes_of(database[name])]
    others = [name for name in names if not name.startswith("_foreach") and name not in OVERRIDDEN]
    return [*(name for name in OVERRIDDEN if name in database), *others[::8]]


@pytest.mark.parametrize("name", cases())
def test_operators_agree_with_the_cpu(name):
    samples = 3 if name in OVERRIDDEN else 1
    report = sweep.check(opinfo.database()[name], torch.float32, DEVICE, samples, transforms.CHECKS)
    assert not report.failures, "\n".join(
        f"{f.check}, sample {f.sample} [{f.kind}]: {f.message}" for f in report.failures
    )


# ---- attention ----


def attention_inputs(device):
    """A query, key, value and mask for each of three samples."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, 4, 5, 8, generator=generator).to(device) for _ in range(3))
    return q, k, v, torch.randn(3, 2, 1, 5, 5, generator=generator).to(device)


def total(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, mask).sin().sum()


class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class PlainFunction(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def inside(mode, function):
    with mode:
        return function()


sdpa = F.scaled_dot_product_attention
ATTENTION = {
    "vmap": lambda q, k, v, m: vmap(sdpa)(q, k, v, m),
    "vmap of the query": lambda q, k, v, m: vmap(sdpa, (0, None, None))(q, k[0], v[0]),
    "vmap of the key": lambda q, k, v, m: vmap(sdpa, (None, 0, None))(q[0], k, v[0]),
    "vmap of the value": lambda q, k, v, m: vmap(sdpa, (None, None, 0))(q[0], k[0], v),
    "vmap of the mask": lambda q, k, v, m: vmap(sdpa, (None, None, None, 0))(q[0], k[0], v[0], m),
    "vmap of the mask it closes over": lambda q, k, v, m: vmap(lambda m: sdpa(q[0], k[0], v[0], attn_mask=m))(m),
    "vmap of the last dimension": lambda q, k, v, m: vmap(sdpa, (-1, -1, -1))(*(x.movedim(0, -1) for x in (q, k, v))),
    "vmap of vmap": lambda q, k, v, m: vmap(vmap(lambda q, k, v: sdpa(q[None], k[None], v[None])))(q, k, v),
    "vmap, causal and grouped": lambda q, k, v, m: vmap(
        lambda q, k, v: sdpa(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True)
    )(q, k, v),
    "vmap with dropout": lambda q, k, v, m: vmap(lambda q, k, v: sdpa(q, k, v, dropout_p=0.5), randomness="different")(
        q, k, v
    ),
    "grad": lambda q, k, v, m: grad(total, (0, 1, 2, 3))(q[0], k[0], v[0], m[0]),
    "grad in the key": lambda q, k, v, m: grad(lambda k: total(q[0], k, v[0], m[0]))(k[0]),
    "grad in the mask": lambda q, k, v, m: grad(lambda m: total(q[0], k[0], v[0], m))(m[0]),
    "grad of grad": lambda q, k, v, m: grad(
        lambda q: inside(sdpa_kernel(SDPBackend.MATH), lambda: grad(total)(q, k[0], v[0]).square().sum())
    )(q[0]),
    "jvp": lambda q, k, v, m: inside(
        sdpa_kernel(SDPBackend.MATH), lambda: jvp(lambda k: sdpa(q[0], k, v[0], m[0]), (k[0],), (v[0],))
    ),
    "vjp": lambda q, k, v, m: vjp(lambda v: sdpa(q[0], k[0], v), v[0])[1](q[0]),
    "jacrev": lambda q, k, v, m: jacrev(lambda k: sdpa(q[0], k, v[0])[0, 0, 0])(k[0]),
    "hessian": lambda q, k, v, m: inside(
        sdpa_kernel(SDPBackend.MATH), lambda: hessian(lambda s: total(q[0] * s, k[0], v[0]))(q[0, 0, 0, :1])
    ),
    "vmap of grad": lambda q, k, v, m: vmap(grad(total, (0, 1, 2)))(q, k, v),
    "vmap of grad in the mask": lambda q, k, v, m: vmap(grad(total, 3))(q, k, v, m),
    "vmap of grad in the mask alone": lambda q, k, v, m: vmap(grad(lambda m: total(q[0], k[0], v[0], m)))(m),
    "grad of vmap": lambda q, k, v, m: grad(lambda q: vmap(sdpa)(q, k, v).sin().sum())(q),
    "backward of vmap": lambda q, k, v, m: torch.autograd.grad(
        vmap(sdpa)(x := q.clone().requires_grad_(), k, v, m).sin().sum(), x
    ),
    "functionalize": lambda q, k, v, m: functionalize(sdpa)(q[0], k[0], v[0], m[0]),
    "functionalize of vmap": lambda q, k, v, m: functionalize(vmap(sdpa))(q, k, v, m),
    "vmap of functionalize": lambda q, k, v, m: vmap(functionalize(sdpa))(q, k, v, m),
    "vmap in a dispatch mode": lambda q, k, v, m: inside(Plain(), lambda: vmap(sdpa)(q, k, v, m)),
    "vmap of grad in a dispatch mode": lambda q, k, v, m: inside(Plain(), lambda: vmap(grad(total))(q, k, v, m)),
    "grad in a function mode": lambda q, k, v, m: inside(PlainFunction(), lambda: grad(total)(q[0], k[0], v[0], m[0])),
    "traced vmap of grad": lambda q, k, v, m: make_fx(vmap(grad(total)))(q, k, v, m)(q, k, v, m),
    "traced with symbols": lambda q, k, v, m: make_fx(vmap(sdpa), tracing_mode="symbolic")(q, k, v, m)(q, k, v, m),
}


def assert_same(got, expected, **tolerance):
    for g, e in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        assert g.device.type == DEVICE
        torch.testing.assert_close(g.cpu(), e, **tolerance)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("mode", ["inline", "async"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, mode):
    expected = ATTENTION[name](*attention_inputs("cpu"))
    torch.manual_seed(0)
    with torch.openreg.launch_mode(mode):
        got = ATTENTION[name](*attention_inputs(DEVICE))
        torch.openreg.synchronize()
    assert_same(got, expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_attention_gives_a_mask_outside_of_vmap_its_gradient():
    """The CPU's flash kernel rejects it there; the decomposition, which eager mode uses, supports it."""
    q, k, v, mask = attention_inputs(DEVICE)
    leaf = mask.clone().requires_grad_()
    (got,) = torch.autograd.grad(vmap(total)(q, k, v, leaf).sum(), leaf)
    expected = torch.stack([grad(total, 3)(*sample) for sample in zip(q, k, v, mask, strict=True)])
    torch.testing.assert_close(got, expected)
    outer = grad(lambda mask: vmap(total)(q, k, v, mask).sum())(mask)
    torch.testing.assert_close(outer, expected)


def test_attention_of_fake_tensors_under_transforms():
    with FakeTensorMode() as mode:
        q, k, v, m = (mode.from_tensor(x) for x in attention_inputs(DEVICE))
        assert vmap(sdpa)(q, k, v, m).shape == q.shape
        assert [x.shape for x in vmap(grad(total, (0, 3)))(q, k, v, m)] == [q.shape, m.shape]


# ---- transformers ----

MODULES = {
    "MultiheadAttention": lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "TransformerDecoderLayer": lambda: nn.TransformerDecoderLayer(8, 2, 16, batch_first=True),
    "TransformerEncoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True), 2, enable_nested_tensor=False
    ),
}


def loss(module, parameters, x, mask):
    if isinstance(module, nn.MultiheadAttention):
        out, weights = functional_call(module, parameters, (x, x, x), {"attn_mask": mask})
        return out.square().sum() + weights.sum()
    if isinstance(module, nn.TransformerDecoderLayer):
        return functional_call(module, parameters, (x, x.flip(1)), {"tgt_mask": mask}).sin().sum()
    arguments = {"mask": mask} if isinstance(module, nn.TransformerEncoder) else {"src_mask": mask}
    return functional_call(module, parameters, (x,), arguments).sin().sum()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", MODULES)
def test_gradients_for_each_sample_of_a_transformer(name, train):
    """Those of vmap(grad(functional_call)), against the CPU; with dropout, which draws the CPU's numbers, in training."""
    torch.manual_seed(0)
    module = MODULES[name]().train(train)
    state = {key: value.detach() for key, value in module.named_parameters()}
    x, mask = torch.randn(3, 1, 5, 8), torch.randn(5, 5)
    found = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(1)
        parameters = {key: value.to(device) for key, value in state.items()}
        gradients = vmap(grad(loss, argnums=1), (None, None, 0, None), randomness="different")
        found.append(gradients(module, parameters, x.to(device), mask.to(device)))
    assert_same(found[1], found[0])
    # And against one sample after the other, without a transform.
    if not train:
        for i, sample in enumerate(x):
            leaves = {key: value.to(DEVICE).requires_grad_() for key, value in state.items()}
            loss(module, leaves, sample.to(DEVICE), mask.to(DEVICE)).backward()
            for key, leaf in leaves.items():
                torch.testing.assert_close(found[1][key][i], leaf.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_for_each_sample_under_autocast(dtype):
    torch.manual_seed(0)
    module = MODULES["TransformerEncoderLayer"]().eval()
    parameters = {key: value.detach().to(DEVICE) for key, value in module.named_parameters()}
    x, mask = torch.randn(3, 1, 5, 8, device=DEVICE), torch.zeros(5, 5, device=DEVICE)
    gradients = vmap(grad(loss, argnums=1), (None, None, 0, None))
    with torch.autocast(DEVICE, dtype=dtype):
        got = gradients(module, parameters, x, mask)
    for key, expected in gradients(module, parameters, x, mask).items():
        torch.testing.assert_close(got[key], expected, rtol=0.1, atol=0.1)


# ---- the suite's operators ----


def overload(name):
    return getattr(torch.ops.openreg, name).default


def as_sample(name):
    """The first sample of an operator, of CPU tensors, its floating ones requiring a gradient."""
    sample = sample_of(next(iter(op.SAMPLES[name]("cpu", torch.float32))))
    return tree_map_only(
        torch.Tensor,
        lambda x: x.detach().clone().requires_grad_(x.is_floating_point()),
        (tuple(sample.args), dict(sample.kwargs)),
    )


def test_results_of_jacrev_require_no_gradient():
    x, w = torch.randn(4, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    backward = torch.ops.openreg.rms_norm_backward
    y, rstd = torch.ops.openreg.rms_norm(x, w)
    assert not jacrev(lambda x: backward(y, x, w, rstd)[0].sum())(x).requires_grad
    target = torch.tensor([1, 2, 3, 4], device=DEVICE)
    head = torch.randn(5, 8, device=DEVICE)
    assert not jacrev(lambda x: torch.ops.openreg.linear_cross_entropy(x, head, target))(x).requires_grad
    # Autograd still records outside.
    leaf = x.clone().requires_grad_()
    jacobian = jacrev(lambda g: backward(g, leaf, w, rstd)[0].sum())(y)
    assert jacobian.requires_grad
    outer = grad(lambda x: jacrev(lambda x: backward(y, x, w, rstd)[0].sum())(x).square().sum())(x)
    inner = vjp(lambda x: backward(y, x, w, rstd)[0].sum(), x)[1](torch.ones((), device=DEVICE))[0]
    assert outer.abs().sum() > 0 and inner.shape == x.shape


def transformed(function, tensors):
    """`function` under each transform, with these tensors, as calls."""
    floats = tuple(i for i, x in enumerate(tensors) if x.is_floating_point())
    stacked = [torch.stack([x, x]) for x in tensors]

    def outputs(*tensors):
        return [out for out in tree_leaves(function(*tensors)) if out is not None and out.is_floating_point()]

    def of_floats(*chosen):
        given = dict(zip(floats, chosen, strict=True))
        return outputs(*(given.get(i, x) for i, x in enumerate(tensors)))

    def loss(*tensors):
        return sum(out.sum() for out in outputs(*tensors))

    chosen = tuple(tensors[i] for i in floats)
    return {
        "vmap": lambda: vmap(function, randomness="different")(*stacked),
        "vmap of the second": lambda: vmap(
            function, tuple(0 if i == 1 else None for i in range(len(tensors))), randomness="different"
        )(tensors[0], stacked[1], *tensors[2:]),
        "grad": lambda: grad(loss, floats)(*tensors),
        "jvp": lambda: jvp(of_floats, chosen, tuple(map(torch.ones_like, chosen))),
        "jacrev": lambda: jacrev(outputs, floats[0])(*tensors),
        "vmap of grad": lambda: vmap(grad(loss, floats), randomness="different")(*stacked),
    }


def test_tensors_of_two_devices_are_refused_under_transforms():
    """A device tensor anywhere among CPU tensors, and the reverse."""
    cases = {
        "attention of ATen": (sdpa, list(attention_inputs("cpu"))),
        "convolution": (F.conv2d, [torch.ones(1, 2, 4, 4), torch.ones(3, 2, 2, 2), torch.ones(3)]),
        "normalization": (
            lambda x, w, b: F.layer_norm(x, (4,), w, b),
            [torch.ones(2, 4), torch.ones(4), torch.ones(4)],
        ),
    }
    for name in sorted(op.SAMPLES):
        leaves, spec = tree_flatten(as_sample(name))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def call(*tensors, name=name, leaves=leaves, spec=spec, places=places):
            given = dict(zip(places, tensors, strict=True))
            args, kwargs = tree_unflatten([given.get(i, leaf) for i, leaf in enumerate(leaves)], spec)
            return overload(name)(*args, **kwargs)

        if len(places) > 1:
            cases[name] = call, [leaves[i].detach() for i in places]
    asked = 0
    for function, tensors in cases.values():
        for which in range(len(tensors)):
            for alone, others in (("cpu", DEVICE), (DEVICE, "cpu")):
                moved = [x.to(alone if i == which else others) for i, x in enumerate(tensors)]
                for attempt in transformed(function, moved).values():
                    with pytest.raises(RuntimeError):  # NotImplementedError is one
                        attempt()
                    asked += 1
    assert asked > 500
