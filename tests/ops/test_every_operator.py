"""The checks for every operator, once per operator and sample; kit.py and the checker implement them.

The samples come from the meta files. OPTIONS adds some with arguments that these leave at their defaults.
"""

import itertools
import re

import kit
import pytest
import torch
from kit import DEVICE, LAYOUTS, NAME, OTHER, check, random
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from openreg_ops.meta import op
from openreg_ops.testing import Sample
from openreg_tools import backends
from openreg_tools.core.samples import sample_of

NAMES = sorted(op.SAMPLES)
MUTABLE = {name for name in NAMES if getattr(torch.ops.openreg, name).default._schema.is_mutable}
NO_SECOND_DERIVATIVE = {"linear_cross_entropy"}
SMALL = 128  # elements up to which whole Jacobians are looked at

LOSSES = [
    dict(reduction="sum", label_smoothing=0.1),
    dict(reduction="none", z_loss=0.01),
    dict(reduction="mean", label_smoothing=0.2, z_loss=0.1, ignore_index=1),
]


def _with(samples, options):
    return Sample(*samples[0].args, **samples[0].kwargs | options)


def _with_bias(samples, options):
    """Without a gradient of logsumexp, too."""
    (with_bias,) = (sample for sample in samples[:2] if sample.args[5] is not None)
    return Sample(with_bias.args[0], None, *with_bias.args[2:], **options)


def _of_loss(samples, options):
    grad_loss, grad_logsumexp, *rest = samples[0].args
    grad_loss = grad_logsumexp.sin() if options["reduction"] == "none" else grad_loss
    return Sample(grad_loss, grad_logsumexp, *rest, **options)


def _masked(samples, mask):
    return Sample(*samples[0].args[:4], mask)


OPTIONS = {
    "attention": (_with, [dict(causal=True), dict(scale=0.3)]),
    "attention_backward": (_with_bias, [dict(causal=True, scale=0.3, bias_grad=True)]),
    "cross_entropy": (_with, LOSSES),
    "cross_entropy_backward": (_of_loss, LOSSES),
    "dequantize_rowwise": (_with, [dict(dtype=torch.bfloat16)]),
    "grouped_linear_backward": (_masked, [[False, True, False], [True, False, True], [False] * 3]),
    "linear_cross_entropy": (_with, LOSSES),
    "linear_cross_entropy_gradients": (_with, [dict(wanted=[False, True, False])]),
}


def options_of(name, device=DEVICE, dtype=torch.float32):
    """A sample of the operator with each set of options."""
    make, every = OPTIONS.get(name, (None, ()))
    samples = [*map(sample_of, op.SAMPLES[name](device, dtype))]
    return [make(samples, options) for options in every]


def samples_of(name, device=DEVICE, dtype=torch.float32):
    return [*map(sample_of, op.SAMPLES[name](device, dtype)), *options_of(name, device, dtype)]


def calls(name, dtype=torch.float32):
    """The operator as a function of tensors, and these, for each sample that it has an output for."""
    for sample in samples_of(name, DEVICE, dtype):
        function, tensors = kit.split(getattr(torch.ops.openreg, name).default, sample)
        if function(*tensors):
            yield function, tensors


def has_derivative(name):
    """Returns true if an output belongs to a node of its own. No backward runs, whose threads a fork would lack."""
    if name in {f"{forward}_gradients" for forward in NO_SECOND_DERIVATIVE}:
        return False
    function, tensors = next(calls(name))
    outs = function(*(x.detach().requires_grad_(x.is_floating_point()) for x in tensors))
    return any(out.grad_fn and out.grad_fn.name() != "torch::autograd::NotImplemented" for out in outs)


DIFFERENTIABLE = [name for name in NAMES if name not in MUTABLE and has_derivative(name)]
# The gradient is not the derivative, on purpose: the checker is told so, or (the last) x and scale count as constants.
UNLIKE_THE_DERIVATIVE = {
    name for name in NAMES if "gradcheck" in backends.of_operator(f"openreg::{name}").known(f"openreg::{name}")
} | {"fake_quantize_backward"}
# gradgradcheck takes half a minute for each, and the operator that runs them has its own.
ONCE = NO_SECOND_DERIVATIVE | {"attention_backward"}
# A mask, or an argument that counts as a constant, has no gradient.
PARTIAL = {"dropout_add", "fake_quantize_backward", "grouped_linear_backward"}
# A graph holds an alias in their place.
IDENTITIES = {name for name in NAMES if name.startswith(("scale_gradient", "custom_autograd_fn"))}
# Its second derivative is a graph that compiles for half a minute; test_checker compiles it.
SLOW_GRAPH = {"attention_backward"}
# The result's shape depends on the data, or (a mask) its bits on a seed: vmap has no loop to be compared with.
NOT_MAPPED = MUTABLE | {"nms", "dropout_add"}


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
@pytest.mark.parametrize("name", sorted({*NAMES} - MUTABLE - {*DIFFERENTIABLE}))
def test_the_others_say_that_they_have_no_derivative(name, where):
    """By each of their arguments, if an output can have a gradient, even where another path would give a partial one."""
    for function, tensors in calls(name):
        floats = [i for i, x in enumerate(tensors) if x.is_floating_point()]
        derived = where == "cpu" and name.endswith("_gradients")  # of the reference
        if not any(out.is_floating_point() for out in function(*tensors)) or derived:
            continue
        for wanted, more in itertools.product(floats, (lambda x: 0, lambda x: x.sum())):
            leaves = [x.detach().to(where).requires_grad_(i == wanted) for i, x in enumerate(tensors)]
            outs = [out for out in function(*leaves) if out.requires_grad]
            with pytest.raises(
                RuntimeError, match=r"derivative for \S+ is not implemented|has no (second )?derivative"
            ):
                (sum(out.sum() for out in outs) + more(leaves[wanted])).backward()
            assert leaves[wanted].grad is None


def size(tensors):
    return sum(x.numel() for x in tensors if x.is_floating_point())


DERIVATIVES = ["gradcheck", "gradgradcheck", "forward_ad"]
# What takes a second or more for a sample.
LONG = [
    "compile",
    "compile_unbacked",
    "fake_unbacked",
    "fake_dynamic",
    "dtensor",
    "poison",
    "determinism",
    "threads",
    "large",
    "state",
]


def tensors_in(sample):
    return sum(isinstance(x, torch.Tensor) for x in tree_leaves((sample.args, sample.kwargs)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_checker(name):
    """All checks of the sample with most tensors; test_second_device has the others.

    test_gradients has the derivatives, unless the gradient is not the derivative, and the half types have their own test.
    """
    skip = ["half_precision", *([] if name in UNLIKE_THE_DERIVATIVE else DERIVATIVES)]
    skip += ["compile_unbacked"] if name in SLOW_GRAPH else []
    if name == "attention_backward":  # weights of a random logsumexp grow to 1e18, and amplify a rounding of the scores
        skip.append("large")
    sample = max(map(sample_of, op.SAMPLES[name](DEVICE, torch.float32)), key=tensors_in)
    report = check(f"openreg::{name}", [sample], skip=skip)
    assert report.device == DEVICE and report.of("pass")
    report.raise_if_failed()
    assert not report.of("warn", "fake_unbacked") and report.of("pass", "fake_unbacked"), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_checker_with_options(name):
    check(f"openreg::{name}", options_of(name), skip=[*LONG, *DERIVATIVES, "half_precision"]).raise_if_failed()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_second_device(name):
    """Streams and layouts of each sample on device 1, while device 0 is the current one."""
    only = ["runs", "reference", "backward", "fake_layouts", "layouts", "stream"]
    report = check(f"openreg::{name}", samples_of(name, OTHER), OTHER, only=only)
    assert report.device == OTHER and report.of("pass", "stream")
    report.raise_if_failed()


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_runs_on_the_device(name):
    """On the second one, while the first is current."""
    function = getattr(torch.ops.openreg, name).default
    for sample in samples_of(name, OTHER):
        found = []
        for call in (function, op.reference_of(name)):
            args, kwargs = tree_map(
                lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (sample.args, sample.kwargs)
            )
            found.append([x for x in tree_leaves((call(*args, **kwargs), args)) if isinstance(x, torch.Tensor)])
        torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat16"])
@pytest.mark.parametrize("device", ["cpu", DEVICE])
@pytest.mark.parametrize("name", NAMES)
def test_half_types_are_computed_in_float32_and_rounded_once(name, device, dtype):
    """To the bit, as the docstrings say: outputs, and what is written to."""

    def wide(x):
        if isinstance(x, torch.Tensor):
            return x.float() if x.dtype == dtype else x.clone()
        return torch.float32 if x == dtype else x

    function, outcomes = getattr(torch.ops.openreg, name).default, 0
    # The docstring says so: the gradients of the logits are rounded before a product.
    rounds_twice = (name, device, dtype) == ("linear_cross_entropy_gradients", DEVICE, torch.bfloat16)
    near = kit.TOLERANCE[dtype] if rounds_twice else dict(rtol=0, atol=0)
    samples = samples_of(name, device, dtype)
    if name == "adamw_step_":
        samples += [_with(samples, dict(grad_scale=torch.tensor(3.0, device=device), maximize=True))]
    for sample in samples:
        half = tree_map(
            lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, (sample.args, sample.kwargs)
        )
        if name == "fused_add_rms_norm":  # the norm is of the sum as it is returned, which is rounded
            half[0][1].zero_()
        found = []
        for args, kwargs in (half, tree_map(wide, half)):
            torch.manual_seed(0)
            found.append(tree_leaves((function(*args, **kwargs), args, kwargs)))
        for narrow, x in zip(*found, strict=True):
            if isinstance(narrow, torch.Tensor):
                outcomes += narrow.dtype == dtype
                torch.testing.assert_close(narrow, x.to(narrow.dtype), equal_nan=True, **near)
    assert outcomes or not any(x.dtype == dtype for x in tree_leaves(samples[0].args) if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", sorted({*NAMES} - {"nms"}))
def test_metadata(name, layout):
    """The fake kernel and meta tensors give the kernel's outputs their metadata, in inference mode too."""
    for function, tensors in calls(name):
        # Expanded, indices would repeat.
        changed = [LAYOUTS[layout](x) if x.is_floating_point() or layout != "expanded" else x for x in tensors]
        kit.check_same_metadata(function, *changed)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*DIFFERENTIABLE} - UNLIKE_THE_DERIVATIVE))
def test_gradients(name):
    """First and second derivatives against finite differences, batched gradients too, in both modes."""
    for function, tensors in calls(name, torch.float64):
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
        kit.check_gradients(function, *leaves, twice=name not in ONCE, fast=size(tensors) > SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(NAMES) - NOT_MAPPED))
def test_transforms(name):
    differentiable = name in DIFFERENTIABLE and name not in ONCE
    for function, tensors in calls(name, torch.float64):
        kit.check_transforms(function, *tensors, grads=differentiable and size(tensors) <= 2 * SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*NAMES} - {"nms"}))
def test_compiled_among_others(name):
    """Between a view and arithmetic, in one graph, which holds the operator and the one that computes its gradients.

    With dynamic sizes; test_checker compiles it for static ones, too.
    """
    which, function, tensors = next((i, *call) for call in calls(name) for i, x in enumerate(call[1]) if x.dim() > 1)

    def among(*tensors):
        views = [x.mT if i == which else x for i, x in enumerate(tensors)]
        return [y * 2 if y.is_floating_point() else y for y in function(*views)]

    grads = name in DIFFERENTIABLE and name not in SLOW_GRAPH
    inputs = [x.mT.contiguous() if i == which else x for i, x in enumerate(tensors)]
    targets = kit.check_compiled(among, *inputs, grads=grads, partial=name in PARTIAL, dynamic=[True])
    if name in DIFFERENTIABLE and not name.endswith("_backward") and name not in IDENTITIES:
        one = [f"{name}_gradients"] if f"{name}_gradients" in NAMES else [name, f"{name}_backward"]
        assert {getattr(torch.ops.openreg, called).default for called in one if called in NAMES} <= targets


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*NAMES} - {"nms"}))
def test_exported(name):
    """The program, which holds the operator, and its decompositions run."""
    function, tensors = next(calls(name))

    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return function(*tensors)

    program = torch.export.export(Module(), tuple(tensors))
    if name not in MUTABLE | IDENTITIES:
        assert getattr(torch.ops.openreg, name).default in {node.target for node in program.graph.nodes}
    found = []
    for call in (function, program.module(), program.run_decompositions().module()):
        torch.manual_seed(0)
        found.append(call(*tensors))
    torch.testing.assert_close(found[1:], found[:1] * 2, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted({*NAMES} - {"nms"}))
def test_other_devices(name, dtype):
    """On the CPU, eager, compiled and in inference mode, it gives the device's result; on meta, the shapes."""
    grads = name in DIFFERENTIABLE and name not in SLOW_GRAPH
    for i, (function, tensors) in enumerate(calls(name, dtype)):
        compiled = i == 0 and dtype == torch.float32
        kit.check_other_devices(function, *tensors, grads=grads, compiled=compiled, partial=name in PARTIAL)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_checker_on_the_cpu(name):
    """The reference stands for the operator there, in its derivatives too."""
    # Attention takes ten seconds for it, and has it in test_checker, on the device.
    unbacked = [] if name.startswith("attention") else ["fake_unbacked"]
    derivatives = ["autograd_registration", *DERIVATIVES] if name in DIFFERENTIABLE else []
    samples = [*op.SAMPLES[name]("cpu", torch.float32)][:1]
    report = check(f"openreg::{name}", samples, "cpu", only=[*unbacked, *derivatives])
    report.raise_if_failed()
    assert not report.of("warn", "fake_unbacked") and (report.of("pass", "fake_unbacked") or not unbacked), str(report)


# ---- operators that write to their arguments ----


def in_place(name, where):
    """The operator as a function of a list of tensors; these; and the name of each, with whether it is written to."""
    overload, sample = getattr(torch.ops.openreg, name).default, max(samples_of(name), key=tensors_in)
    tensors, spec = tree_flatten(tree_map(lambda x: x.to(where), sample.args))
    described = []
    for argument, value in zip(overload._schema.arguments, sample.args, strict=False):
        names = [f"{argument.name}[{i}]" for i in range(len(value))] if isinstance(value, list) else [argument.name]
        described += [(name, bool(argument.alias_info and argument.alias_info.is_write)) for name in names]
    return lambda given: overload(*tree_unflatten(given, spec), **sample.kwargs), tensors, described


# custom_abs_ is like PyTorch's in-place operators: it may be recorded, and its backward raises.
REFUSING = sorted(MUTABLE - {"custom_abs_"})


@pytest.mark.parametrize("where", [DEVICE, "cpu", "meta"])
@pytest.mark.parametrize("name", REFUSING)
def test_gradients_are_refused(name, where):
    """Of any argument, and nothing is written then. With gradients disabled, the same call runs."""
    call, tensors, described = in_place(name, where)
    for wanted in (i for i, x in enumerate(tensors) if x.is_floating_point()):
        given = [x.clone().requires_grad_(i == wanted) for i, x in enumerate(tensors)]
        sentence = (
            f"{name}: expected no gradient, but {described[wanted][0]} requires one and there is no derivative; call"
        )
        with pytest.raises(RuntimeError, match=re.escape(sentence)):
            call(given)
        with pytest.raises(RuntimeError, match=re.escape(sentence)), FakeTensorMode() as mode:
            call([mode.from_tensor(x) for x in given])
        assert where == "meta" or all(torch.equal(a, b) for a, b in zip(given, tensors, strict=True))
        with torch.no_grad():
            call(given)


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
@pytest.mark.parametrize("name", REFUSING)
def test_tangents_are_refused(name, where):
    call, tensors, described = in_place(name, where)
    for wanted in (i for i, x in enumerate(tensors) if x.is_floating_point()):

        def function(x, wanted=wanted):
            call([x if i == wanted else y for i, y in enumerate(tensors)])

        x, argument = tensors[wanted], re.escape(described[wanted][0])
        with pytest.raises(RuntimeError, match=f"{name}: expected no tangent, but {argument} carries one"):
            torch.func.jvp(function, (x,), (x,))
        with pytest.raises(RuntimeError, match=f"{name}: expected no gradient, but {argument} requires one"):
            torch.func.grad(function)(x)


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
@pytest.mark.parametrize("name", sorted(MUTABLE))
def test_versions_count_what_is_written(name, where):
    """So a backward that saved such a tensor notices."""
    call, tensors, described = in_place(name, where)
    versions = [x._version for x in tensors]
    call(tensors)
    assert [x._version > n for x, n in zip(tensors, versions, strict=True)] == [written for _, written in described]
    with torch.inference_mode():
        call([x.clone() for x in tensors])


@pytest.mark.parametrize("where", [DEVICE, "cpu"])
@pytest.mark.parametrize("name", sorted(MUTABLE))
def test_inference_tensors_outside_inference_mode(name, where):
    """Refused, as PyTorch's operators refuse them: they have no version by which autograd would see the change."""
    with torch.inference_mode():
        sample = samples_of(name, where)[0]
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        getattr(torch.ops.openreg, name).default(*sample.args, **sample.kwargs)


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if not name.endswith("_backward")])
def test_what_requires_gradients(name):
    """Where one input requires gradients, the same outputs require them as in the reference.

    Not tried with backward operators: their derivative is one graph, so all of their outputs require gradients.
    """
    for function, tensors in calls(name):
        for wanted in (i for i, x in enumerate(tensors) if x.is_floating_point()):
            here = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(tensors)]
            there = [x.detach().cpu().requires_grad_(i == wanted) for i, x in enumerate(tensors)]
            actual, expected = ([out.requires_grad for out in function(*given)] for given in (here, there))
            assert actual == expected, wanted


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_tangent_of_one_input(name):
    """The outputs' tangents are as if the other inputs, later tensors of a list too, had tangents of zeros."""
    function, tensors = next(calls(name))
    floats = [i for i, x in enumerate(tensors) if x.is_floating_point()]
    for one in floats:
        found = []
        for given in ([one], floats):
            torch.manual_seed(0)
            with forward_ad.dual_level():
                tangents = {i: torch.full_like(tensors[i], float(i == one)) for i in given}
                outs = function(
                    *(forward_ad.make_dual(x, tangents[i]) if i in given else x for i, x in enumerate(tensors))
                )
                duals = [forward_ad.unpack_dual(out).tangent for out in outs]
                found.append([torch.zeros_like(y) if t is None else t for y, t in zip(outs, duals, strict=True)])
        torch.testing.assert_close(*found, equal_nan=True)


@pytest.mark.parametrize(
    "name", sorted({*DIFFERENTIABLE} - NO_SECOND_DERIVATIVE - {"dropout_add", "fake_quantize_backward"})
)
def test_gradients_of_one_input_through_one_output(name):
    """They are the reference's: no gradient that nobody asked for is needed, and an output without one counts as zero."""

    def found(function, tensors, wanted, output):
        leaves = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(tensors)]
        out = function(*leaves)[output]
        if not out.requires_grad:
            return torch.zeros_like(tensors[wanted])
        return torch.autograd.grad(out, leaves[wanted], kit.cotangents([out]), materialize_grads=True)[0]

    for sample in samples_of(name, dtype=torch.float64):
        function, tensors = kit.split(getattr(torch.ops.openreg, name).default, sample)
        reference, _ = kit.split(op.reference_of(name), sample)
        for output in range(len(function(*tensors))):
            for wanted in (i for i, x in enumerate(tensors) if x.is_floating_point()):
                actual, expected = (found(call, tensors, wanted, output) for call in (function, reference))
                torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name",
    sorted(name for name in {*DIFFERENTIABLE} - ONCE - PARTIAL - UNLIKE_THE_DERIVATIVE if f"{name}_backward" in NAMES),
)
def test_second_derivative_of_half_types(name, dtype):
    """Test_gradients is for float64; here the half types' second derivative meets the one in float32."""
    function, tensors = next(calls(name, dtype))

    def penalty(*inputs):
        outs = [out for out in function(*inputs) if out.requires_grad]
        wanted = [x for x in inputs if x.requires_grad]
        return torch.autograd.grad(sum(out.square().sum() for out in outs), wanted, create_graph=True)

    if name == "fused_add_rms_norm":  # the norm is of the sum as it is returned, which is rounded
        tensors[1] = torch.zeros_like(tensors[1])
    near = {key: 8 * value for key, value in kit.TOLERANCE[dtype].items()}
    narrow, wide = (kit.run(penalty, *(cast(x) for x in tensors)) for cast in (torch.clone, widened))
    for actual, expected in zip([*narrow[0], *narrow[1]], [*wide[0], *wide[1]], strict=True):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.float(), expected, **near)


def widened(x):
    return x.float() if x.is_floating_point() else x


# The dtype in which autocast to bfloat16 runs an operator with arguments of bfloat16 and float32.
AUTOCAST = {
    **dict.fromkeys(["rms_norm", "fused_add_rms_norm", "cross_entropy", "fake_quantize", "nms"], torch.float32),
    **dict.fromkeys(["attention", "linear_cross_entropy", "grouped_linear"], torch.bfloat16),
    **dict.fromkeys(["rotary_embedding", "swiglu", "dropout_add"], "widest"),
    **dict.fromkeys(["custom_abs", "quantize_rowwise", "dequantize_rowwise", "int8_linear", "adamw_step_"], None),
    **dict.fromkeys(sorted(IDENTITIES), None),
}


@pytest.mark.parametrize("device_type", [NAME, "cpu"])
@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(name, device_type):
    rule, function = AUTOCAST[name], getattr(torch.ops.openreg, name).default
    sample = max(samples_of(name, device_type), key=tensors_in)
    function, tensors = kit.split(function, sample)
    floats = [i for i, x in enumerate(tensors) if x.is_floating_point()]

    def of(given, enabled):
        torch.manual_seed(0)
        with torch.autocast(device_type, torch.bfloat16, enabled=enabled):
            return [out.detach() for out in function(*given)]

    def cast(given, *dtypes):
        """The floating-point tensors in these dtypes, the last of which is for the rest."""
        left = iter([*dtypes, *dtypes[-1:] * len(given)])
        return [x.to(next(left)) if i in floats else x for i, x in enumerate(given)]

    half, single = torch.bfloat16, torch.float32
    for dtypes in ((half,), (half, single)) if rule else ((single,),):
        given = cast(tensors, *dtypes)
        runs_in = rule if isinstance(rule, torch.dtype) else half if half in dtypes[-1:] else single
        for a, b in zip(of(given, True), of(cast(given, runs_in), False), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def _boxes(n, dtype):
    corners = torch.rand(n, 2, device=DEVICE) * 40
    return torch.cat([corners, corners + 1 + torch.rand(n, 2, device=DEVICE)], 1).to(dtype)


def _quantized(rows, columns):
    return torch.ops.openreg.quantize_rowwise(random(rows, columns))


def _classes(rows, classes):
    return torch.randint(classes, (rows,)).to(DEVICE)


# Enough work for several threads: arguments and options for a dtype.
LARGE = {
    "attention": lambda t: ([*(random(1, h, n, 16, dtype=t) for h, n in ((4, 300), (2, 400), (2, 400))), random(300, 1, dtype=t)],
                            dict(causal=True)),
    "cross_entropy": lambda t: ([random(300, 500, dtype=t), _classes(300, 500)], dict(label_smoothing=0.1, z_loss=0.1)),
    "dropout_add": lambda t: ([random(1000, 257, dtype=t), random(1000, 257, dtype=t), 0.3], {}),
    "fake_quantize": lambda t: ([random(3, 200_000, dtype=t), random(3).abs() + 0.1,
                                 torch.zeros(3, dtype=torch.int32, device=DEVICE), -8, 7, 0], {}),
    "fused_add_rms_norm": lambda t: ([random(1000, 64, dtype=t), random(1000, 64, dtype=t), random(64, dtype=t)], {}),
    "grouped_linear": lambda t: ([random(700, 130, dtype=t), [random(300, 130, dtype=t) for _ in range(4)],
                                  [random(300, dtype=t) for _ in range(4)], torch.tensor([0, 300, 1, 399], device=DEVICE)], {}),
    "int8_linear": lambda t: ([random(300, 64, dtype=t), *_quantized(100, 64)], {}),
    "kv_cache_update": lambda t: ([*(random(n, 4, 32, dtype=t) for n in (3000, 3000, 2000, 2000)),
                                   torch.randperm(3000)[:2000].to(DEVICE)], {}),
    "linear_cross_entropy": lambda t: ([random(600, 70, dtype=t), random(1700, 70, dtype=t), _classes(600, 1700),
                                        random(1700, dtype=t)], dict(label_smoothing=0.1, z_loss=0.1)),
    "nms": lambda t: ([_boxes(4000, t), random(4000, dtype=t), 0.2], {}),
    "quantize_rowwise": lambda t: ([random(1000, 77, dtype=t)], {}),
    "rms_norm": lambda t: ([random(1000, 64, dtype=t), random(64, dtype=t)], {}),
    "rotary_embedding": lambda t: ([random(40, 30, 50, 32, dtype=t).transpose(1, 2), random(30, 16, dtype=t),
                                    random(30, 16, dtype=t)], {}),
    "swiglu": lambda t: ([random(300, 2000, dtype=t), random(300, 2000, dtype=t)], {}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_results_do_not_depend_on_threads(name, dtype):
    """To the bit, gradients too."""
    arguments, options = LARGE[name](dtype)
    function, tensors = kit.split(getattr(torch.ops.openreg, name).default, Sample(*arguments, **options))

    def call():
        torch.manual_seed(0)
        return kit.results(function, *tensors, grads=name in DIFFERENTIABLE, partial=True)

    first, *others = kit.with_threads(call, (1, 2, 3, 7))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(other, first, strict=True))
