"""Checks modules and optimizers of PyTorch's test databases on a device against the CPU.

`check_module` and `check_optimizer` do for ModuleInfo and the optimizer database what `sweep.check` does for OpInfo.
Both sides get the same weights, inputs and seeds; outputs, gradients and parameters are compared.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from openreg_tools.conformance import graphs
from openreg_tools.conformance.outcomes import Comparison, Outcome, Tally, one_line
from openreg_tools.core.blocks import first_line

CHECKS = ("train", "eval", "step", "vmap_grad", graphs.CHECK)
DTYPES = ("float32", "float64")

# Modules whose results differ from run to run on one device are run in evaluation mode only.
RANDOM = {"FractionalMaxPool2d", "FractionalMaxPool3d"}


@functools.cache
def modules() -> dict[str, Any]:
    """Every ModuleInfo by its name (``nn.Conv2d``)."""
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db}


@functools.cache
def optimizers() -> dict[str, Any]:
    """Every OptimizerInfo by its name (``optim.Adam``)."""
    from torch.testing._internal.common_optimizers import optim_db

    return {f"optim.{info.optim_cls.__name__}": info for info in optim_db}


def _both(tally: Tally, check: str, sample: int, run: Callable[[str], Any], device: str) -> list[Any] | None:
    """The results of `run` on the CPU and on the device. None if either raised, and a failure if only one did."""
    tally.ran[check] += 1
    outcomes = []
    for place in ("cpu", device):
        try:
            outcomes.append(Outcome(run(place)))
        except Exception as error:
            outcomes.append(Outcome(error=error))
    is_whole = Comparison(tally, check, sample, device, True).returned(*outcomes)
    return [outcome.value for outcome in outcomes] if is_whole else None


# ---- modules ----


def _moved(value: Any, device: str) -> Any:
    def one(x: Any) -> Any:
        return x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    return tree_map(one, value)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def check_module(
    info: Any,
    dtype: torch.dtype,
    device: str,
    checks: tuple[str, ...] = CHECKS,
    at: Callable[[str], None] = lambda _: None,
) -> Tally:
    """Compare forward and the gradients of parameters and inputs, in training and evaluation mode, and per sample."""
    tally = Tally()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for check, compare in (("train", _module), ("eval", _module), ("vmap_grad", _per_sample)):
            if check in checks:
                inputs = info.module_inputs_func(
                    info, device="cpu", dtype=dtype, requires_grad=True, training=check != "eval"
                )
                for i, sample in enumerate(inputs):
                    if sample.forward_input is not None:
                        at(f"{check}, sample {i}")
                        compare(tally, info, dtype, device, check, i, sample)
        if graphs.CHECK in checks and graphs.supported(device):
            graphs.check_module(info, dtype, device, tally, at)
    return tally


def _module(tally: Tally, info: Any, dtype: torch.dtype, device: str, check: str, i: int, sample: Any) -> None:
    torch.manual_seed(0)
    host = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).to(dtype)
    host.train(check == "train" and type(host).__name__ not in RANDOM)

    def run(place: str) -> list[list[torch.Tensor | None]]:
        module = host if place == "cpu" else copied.to(place)
        torch.manual_seed(1)
        args, kwargs = _moved((sample.forward_input.args, sample.forward_input.kwargs), place)
        out = module(*args, **kwargs)
        differentiable = [x for x in _tensors(out) if x.requires_grad]
        if differentiable:
            sum(x.sum() if not x.is_complex() else x.abs().sum() for x in differentiable).backward()
        return [_tensors(out), [p.grad for p in module.parameters()], [x.grad for x in _tensors((args, kwargs))]]

    copied = copy.deepcopy(host)
    values = _both(tally, check, i, run, device)
    if values is None:
        return
    comparison = Comparison(tally, check, i, device, True)
    for kind, expected, actual in zip(("value", "gradient", "gradient"), *values, strict=True):
        for e, a in zip(expected, actual, strict=True):
            if (e is None) != (a is None):
                comparison.fail(kind, f"expected {'no' if e is None else 'a'} gradient")
            elif e is not None:
                comparison.tensors(e.detach(), a.detach(), kind)


def _per_sample(tally: Tally, info: Any, dtype: torch.dtype, device: str, check: str, i: int, sample: Any) -> None:
    """The parameters' gradients for each of two samples: torch.vmap of torch.func.grad of functional_call."""
    torch.manual_seed(0)
    host = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).to(dtype)
    if any(map(torch.nn.parameter.is_lazy, host.parameters())):
        return  # a lazy module has no parameters before its first call
    state = {name: x.detach() for name, x in host.named_parameters()}
    leaves, spec = tree_flatten((sample.forward_input.args, sample.forward_input.kwargs))
    places = [k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.layout == torch.strided]
    samples = [torch.stack([x, x * 0.5 if x.is_floating_point() else x]) for x in (leaves[k].detach() for k in places)]
    if not state or not samples:
        return

    def run(place: str) -> dict[str, torch.Tensor]:
        module = copy.deepcopy(host).to(place)

        def loss(parameters: dict[str, torch.Tensor], *tensors: torch.Tensor) -> Any:
            given = dict(zip(places, tensors, strict=True))
            args, kwargs = tree_unflatten([given.get(k, x) for k, x in enumerate(leaves)], spec)
            out = torch.func.functional_call(module, parameters, args, kwargs)
            return sum(x.abs().sum() for x in _tensors(out) if x.is_floating_point() or x.is_complex())

        torch.manual_seed(1)
        dims = (None, *(0 for _ in places))
        return torch.vmap(torch.func.grad(loss), dims, randomness="different")(*_moved((state, *samples), place))

    # What functorch can map depends on a module's operators, which depend on the device. Where the CPU refuses, for
    # example a write into a tensor that is not mapped, the device may succeed.
    try:
        expected = run("cpu")
    except Exception:
        return
    tally.ran[check] += 1
    comparison = Comparison(tally, check, i, device, True)
    try:
        actual = run(device)
    except Exception as error:
        return comparison.fail("error", f"{device} raised {first_line(error)}")
    for name, e in expected.items():
        comparison.tensors(e, actual[name], "gradient")


# ---- optimizers ----


def implementations(info: Any) -> Iterator[dict[str, bool]]:
    """The implementations of an optimizer's step."""
    yield {"foreach": False} if "foreach" in info.supported_impls else {}
    if "foreach" in info.supported_impls:
        yield {"foreach": True}
    if "fused" in info.supported_impls and "cpu" in info.supports_fused_on:
        yield {"fused": True}


def check_optimizer(
    info: Any,
    dtype: torch.dtype,
    device: str,
    checks: tuple[str, ...] = CHECKS,
    at: Callable[[str], None] = lambda _: None,
) -> Tally:
    """Compare four steps from the same weights with each sample of options: single, foreach, fused, and in graphs."""
    tally = Tally()
    if graphs.CHECK in checks and graphs.supported(device):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for flags in implementations(info):
                graphs.check_optimizer(info, flags, dtype, device, tally, at)
    if "step" not in checks:
        return tally
    i = -1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for flags in implementations(info):
            for sample in info.optim_inputs_func(device="cpu"):
                i += 1
                options = dict(sample.kwargs)
                if options.get("capturable"):  # for graph capture, on CUDA and XPU only
                    continue
                if any(flags.values()) and options.get("differentiable"):
                    continue
                if flags.get("fused") and isinstance(options.get("lr"), torch.Tensor) and options["lr"].dim():
                    continue
                at(f"step, sample {i}")
                run = functools.partial(_steps, info, {**options, **flags}, dtype)
                values = _both(tally, "step", i, run, device)
                for e, a in zip(*(values or ([], [])), strict=True):
                    comparison = Comparison(tally, "step", i, device, True)
                    if a.device.type != torch.device(device).type:
                        comparison.fail("device", f"a result is on {a.device}")
                        continue
                    try:  # four steps amplify rounding
                        torch.testing.assert_close(a.cpu(), e, rtol=1e-4, atol=1e-5, equal_nan=True)
                    except AssertionError as error:
                        comparison.fail("value", f"{sample.desc} {flags}: {one_line(error)}")
    return tally


def _steps(info: Any, options: dict[str, Any], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """The losses and the parameters at the end."""
    torch.manual_seed(0)
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items() if k != "params"}
    if info.optim_cls.__name__ == "SparseAdam":
        options.pop("foreach", None)
        embedding = torch.nn.Embedding(6, 3, sparse=True, dtype=dtype).to(device)
        optimizer = info.optim_cls(embedding.parameters(), **options)
        for _ in range(4):
            optimizer.zero_grad()
            embedding(torch.tensor([1, 2, 1, 5], device=device)).square().sum().backward()
            optimizer.step()
        return [embedding.weight.detach()]
    layers = torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
    model = torch.nn.Sequential(*layers).to(device, dtype)
    matrices = info.optim_cls.__name__ == "Muon"  # which takes them only
    optimizer = info.optim_cls([p for p in model.parameters() if p.dim() == 2 or not matrices], **options)
    torch.manual_seed(1)
    x, y = torch.randn(8, 5, dtype=dtype).to(device), torch.randn(8, 3, dtype=dtype).to(device)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    losses = []
    for _ in range(4):
        if info.step_requires_closure:
            losses.append(optimizer.step(closure).detach())
        else:
            losses.append(closure().detach())
            optimizer.step()
    return [*losses, *(p.detach() for p in model.parameters())]
