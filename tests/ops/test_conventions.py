"""The suite as a whole: samples for every operator, the list in docs/operators.md, names of nodes, what all refuse."""

import re
from pathlib import Path

import kit
import pytest
import torch
from kit import DEVICE, NAME, OTHER
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from openreg_ops.meta import op
from openreg_tools.core.samples import sample_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/operators.md"
SOURCES = [path.read_text() for path in (ROOT / "csrc/ops").glob("*.cpp")]


def operators() -> set[str]:
    return {
        name.removeprefix("openreg::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("openreg::")
    }


def test_every_operator_has_samples():
    assert {name.partition(".")[0] for name in operators()} == set(op.SAMPLES)


def test_every_operator_takes_dtensors():
    """By a rule or by a function, not both; tests/backend/test_dtensor.py runs them."""
    assert not op.SHARDED.keys() & op.DISTRIBUTED.keys()
    assert op.SHARDED.keys() | op.DISTRIBUTED.keys() == op.OPERATORS.keys()


@pytest.mark.skipif(not PAGE.exists(), reason="needs the source tree")
def test_the_page_lists_every_operator_as_it_is():
    """Its signatures are the schemas; its styles are the code's, by what is registered for a derivative."""
    schemas = {
        re.sub("9.99+5e-07", "1e-6", str(torch._C._get_schema(*(f"openreg::{name}".partition(".")[::2]))))
        for name in operators()
        if not name.partition(".")[0].endswith(("_backward", "_gradients"))
    }
    (listed,) = re.findall(r"^## Signatures\n\n```\n(.*?)```", PAGE.read_text(), re.S | re.M)
    assert {f"openreg::{line}" for line in re.sub(r"\n    +", " ", listed).splitlines()} == schemas

    forward = {schema.partition("::")[2].partition("(")[0].partition(".")[0] for schema in schemas}
    styles = {}
    for names, style in re.findall(
        r"^\| (`.*?) \| (forward-only|separate backward|`autograd::Function`|mutating) \|", PAGE.read_text(), re.M
    ):
        for name in re.findall(r"`(\w+|…\w+)`", names):
            styles[name.replace("…", "custom_autograd_fn")] = style.strip("`")
    assert set(styles) == forward
    for name, style in styles.items():
        source = next(text for text in SOURCES if f'"{name}(' in text or f'm.def(("{name}" +' in text)
        separate = f"{name}_backward" in operators()
        assert separate == (style == "separate backward"), name
        derivative = re.search(r"m\.impl\([^;]*\bautograd(_of_view)?<", source)
        assert (style == "autograd::Function") == (bool(derivative) and not separate), name


@pytest.mark.parametrize("name", ["swiglu", "rms_norm", "quantize_rowwise", "custom_abs", "nms"])
def test_nested_tensors_are_refused(name):
    x = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], device=NAME)
    others = {"swiglu": (x,), "rms_norm": (torch.ones(4, device=NAME), 1e-5), "nms": (x, 0.5)}.get(name, ())
    refused = rf"^openreg::{name}: .* called with \(Float\[2 nested\]@{DEVICE}.*Convert"
    if name in ("swiglu", "rms_norm"):  # which the plain reference is asked about
        refused = rf"^{name}: expected (x|gate) to be one tensor, but got nested ones; call it for each"
    with pytest.raises(RuntimeError, match=refused):
        getattr(torch.ops.openreg, name)(x, *others)


def test_none_for_a_tensor_is_named():
    x = torch.ones(2, 4, device=NAME)
    for where in (NAME, "cpu"):
        with pytest.raises(RuntimeError, match="^swiglu: expected up to be a tensor, but got None"):
            torch.ops.openreg.swiglu(x.to(where), None)
        with pytest.raises(RuntimeError, match="^rms_norm: expected weight to be a tensor, but got None"):
            torch.ops.openreg.rms_norm(x.to(where), None)


@pytest.mark.parametrize("device", [NAME, "cpu"])
@pytest.mark.parametrize(
    "name, grad",
    [("scale_gradient", 4.0), ("custom_autograd_fn_returns_self", 1.0), ("custom_autograd_fn_aliasing", 1.0)],
)
def test_backward_runs_twice_where_it_needs_no_tensor(name, grad, device):
    """As for `x + 1`: two losses may share the output of a gradient reversal."""
    x = torch.ones(3, device=device, requires_grad=True)
    factor = (2.0,) if name == "scale_gradient" else ()
    y = getattr(torch.ops.openreg, name)(x, *factor)
    (y + 1).sum().backward()
    (y + 2).sum().backward()
    assert x.grad.tolist() == [grad] * 3


def test_nodes_of_the_graph_are_called_after_their_operators():
    """`print(y)`, anomaly mode and torchviz show these names. Nodes of forward-only operators only refuse."""
    asked = 0
    for name, samples in op.SAMPLES.items():
        overload = getattr(torch.ops.openreg, name).default
        if overload._schema.is_mutable:
            continue
        expected = "ByReference" if name.endswith("_backward") else "".join(map(str.capitalize, name.split("_")))
        for x in (
            tree_map_only(torch.Tensor, lambda x: x.to(NAME), [*sample]) for sample in samples("cpu", torch.float32)
        ):
            x = tree_map_only(torch.Tensor, lambda x: x.requires_grad_(x.is_floating_point()), x)
            nodes = {y.grad_fn.name() for y in tree_leaves(overload(*x)) if y.grad_fn}
            assert nodes <= {f"{expected}Backward", "torch::autograd::NotImplemented"}, name
            asked += bool(nodes)
    assert asked > 50


# ---- each tensor argument in turn ----

# Operator and argument where another dtype, or another shape, is right for one argument alone. A single tensor may have any.
OTHER_DTYPE = """cross_entropy.logits cross_entropy_backward.logits dropout_add_backward.grad_out fake_quantize.x int8_linear.x
rotary_embedding.x rotary_embedding_backward.grad_y""".split()
OTHER_ROWS = "fake_quantize.x int8_linear.x rms_norm.x".split()
MORE_DIMENSIONS = """attention.bias attention_backward.bias int8_linear.x rms_norm.x rotary_embedding.x
rotary_embedding_backward.grad_y""".split()
CHANGES = {
    "another device": (lambda x: x.to(f"{NAME}:{1 - x.device.index}"), []),
    "the host": (lambda x: x.cpu(), []),
    "another dtype": (lambda x: x.half() if x.is_floating_point() else x.double(), OTHER_DTYPE),
    "other rows": (lambda x: torch.cat([x, x]) if x.dim() else x.expand(3).clone(), OTHER_ROWS),
    "more dimensions": (lambda x: x.unsqueeze(0), MORE_DIMENSIONS),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_tensor_argument_is_checked(change):
    """One tensor that does not fit the others, in each place, also of a list: an error names the operator and an argument.

    Fake kernels say the same about devices and dtypes. On the second device, while the first is the current one.
    """
    wrong, right = CHANGES[change]
    accepted, asked = set(), 0
    for name in sorted(op.SAMPLES):
        overload = getattr(torch.ops.openreg, name).default
        names = [argument.name for argument in overload._schema.arguments]
        samples = map(sample_of, op.SAMPLES[name](OTHER, torch.float32))
        *_, sample = sorted(samples, key=lambda sample: len(kit.tensors((sample.args, sample.kwargs))))
        given = dict(zip(names, sample.args, strict=False)) | sample.kwargs
        values, spec = tree_flatten(given)
        of = tree_leaves({key: tree_map(lambda _, key=key: key, x) for key, x in given.items()})

        def call(*values, overload=overload, spec=spec):
            return overload(**tree_unflatten(values, spec))

        tensors = [i for i, x in enumerate(values) if isinstance(x, torch.Tensor)]
        for i in tensors if len(tensors) > 1 else ():
            asked += 1
            changed = [wrong(x) if i == j else x for j, x in enumerate(values)]
            try:
                call(*changed)
                accepted.add(f"{name}.{of[i]}")
                continue
            except RuntimeError as error:
                sentence = str(error)
            if not (
                in_shape := change in ("other rows", "more dimensions")
            ):  # group sizes are data, which a fake lacks
                kit.check_error(call, *changed, match=name)
            named = names if in_shape else [of[i]]
            assert re.match(rf"{name}: .*\b({'|'.join(named)})\b", sentence), (name, of[i], sentence)
            if change in ("another device", "the host"):
                places = {OTHER, str(wrong(values[i]).device)}
                found = re.match(rf"{name}: \S+ is on (\S+) but \S+ is on (\S+); move one with .to\(\)$", sentence)
                assert found and {*found.groups()} == places, (name, of[i], sentence)
            elif change == "another dtype":
                assert re.match(rf"{name}: expected \S+ of (float|int|bool).*, but got \w+", sentence), (
                    name,
                    of[i],
                    sentence,
                )
    assert accepted == set(right) and asked > 60
