"""Checks modules and optimizers of PyTorch's test databases on a device against the CPU, and in graphs.

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
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from openreg_tools.conformance import graphs, transforms
from openreg_tools.conformance.one_sample import OneSample
from openreg_tools.conformance.outcomes import Tally, run
from openreg_tools.core.move import Move

CHECKS = ("train", "eval", "step", "vmap_grad", graphs.CHECK)
DTYPES = ("float32", "float64")

# Modules whose results differ from run to run on one device are run in evaluation mode only.
RANDOM = {"FractionalMaxPool2d", "FractionalMaxPool3d"}

# Optimizers whose step needs values on the host, which a graph cannot read, and why.
HOST_STEPS = {
    "Adafactor": "the step count is on the host",
    "Adagrad": "the step count is on the host",
    "LBFGS": "the step reads losses on the host",
    "SparseAdam": "it takes sparse gradients",
}


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


# ---- modules ----


def check_module(
    info: Any,
    dtype: torch.dtype,
    device: str,
    checks: tuple[str, ...] = CHECKS,
    at: Callable[[str], None] = lambda _: None,
) -> Tally:
    """Compare forward and the gradients of parameters and inputs, in training and evaluation mode, per sample, in graphs."""
    tally = Tally()
    ways = {"train": _whole, "eval": _whole, "vmap_grad": _per_sample}
    if graphs.supported(device):
        ways[graphs.CHECK] = _captured
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for check in [check for check in ways if check in checks]:
            options = {"device": "cpu", "dtype": dtype, "requires_grad": True, "training": check != "eval"}
            for i, sample in enumerate(info.module_inputs_func(info, **options)):
                if sample.forward_input is None:
                    continue
                at(f"{check}, sample {i}")
                torch.manual_seed(0)
                module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).to(dtype)
                # A lazy module has no parameters before its first call.
                if ways[check] is _whole or not any(map(torch.nn.parameter.is_lazy, module.parameters())):
                    one = OneSample(info, sample, i, device, tally)
                    one.exact = False  # dropout is followed by sums
                    ways[check](one, check, module, (sample.forward_input.args, sample.forward_input.kwargs))
    return tally


def _whole(one: OneSample, check: str, module: torch.nn.Module, arguments: tuple[Any, Any]) -> None:
    """The results, and the gradients of the parameters and inputs."""
    module.train(check == "train" and type(module).__name__ not in RANDOM)

    def call(move: Move) -> Any:
        moved = copy.deepcopy(module).to(move.device)
        args, kwargs = move(arguments)
        result = moved(*args, **kwargs)
        move.leaves += moved.parameters()
        return result

    one.differentiate(call, check)


def _per_sample(one: OneSample, check: str, module: torch.nn.Module, arguments: tuple[Any, Any]) -> None:
    """The parameters' gradients for each of two samples: torch.vmap of torch.func.grad of functional_call."""
    state = {name: x.detach() for name, x in module.named_parameters()}
    leaves, spec = tree_flatten(arguments)
    places = [k for k, x in enumerate(leaves) if transforms.is_strided(x)]
    dims = (0,) * len(places)
    samples = transforms.batch([leaves[k].detach() for k in places], dims)
    if not state or not samples:
        return

    def call(move: Move) -> Any:
        moved = copy.deepcopy(module).to(move.device)

        def loss(parameters: dict[str, torch.Tensor], *tensors: torch.Tensor) -> Any:
            given = dict(zip(places, tensors, strict=True))
            args, kwargs = tree_unflatten([given.get(k, x) for k, x in enumerate(leaves)], spec)
            out = tree_leaves(torch.func.functional_call(moved, parameters, args, kwargs))
            return sum(x.abs().sum() for x in out if x.is_floating_point() or x.is_complex())

        return torch.vmap(torch.func.grad(loss), (None, *dims), randomness="different")(*move([state, *samples]))

    # What functorch can map depends on a module's operators, which depend on the device. Where the CPU refuses, for
    # example a write into a tensor that is not mapped, the device may succeed.
    cpu, there = one.both(call)
    if cpu.error is None:
        one.comparison(check).outcomes(cpu, there)


def _captured(one: OneSample, check: str, module: torch.nn.Module, arguments: tuple[Any, Any]) -> None:
    """`graphs.compare` for forward and backward in training mode, with the parameters and buffers as arguments."""
    module.flatten_parameters = lambda: None  # of recurrent modules; it asks for the addresses of their parameters
    parameters = {name: x.detach() for name, x in module.named_parameters()}
    buffers = {name: x.detach() for name, x in module.named_buffers()}

    def step(parameters: Any, buffers: Any, args: Any, kwargs: Any) -> list[Any]:
        leaves = {name: x.requires_grad_() for name, x in parameters.items()}
        out = tree_leaves(torch.func.functional_call(module, {**leaves, **buffers}, args, kwargs))
        found = [x.detach() for x in out if isinstance(x, torch.Tensor)]
        wanted = [x for x in out if isinstance(x, torch.Tensor) and x.requires_grad]
        if not wanted or not leaves:
            return found
        total = sum(x.abs().sum() if x.is_complex() else x.sum() for x in wanted)
        return [*found, *torch.autograd.grad(total, list(leaves.values()), allow_unused=True)]

    graphs.compare(
        one.tally, one.index, "forward and backward", step, ((parameters, buffers, *arguments), {}), one.device
    )


# ---- optimizers ----


def _choices(info: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The options of each sample with each implementation of the step: single, foreach and fused; and what to call them."""
    ways: list[dict[str, bool]] = [{"foreach": False} if "foreach" in info.supported_impls else {}]
    if "foreach" in info.supported_impls:
        ways.append({"foreach": True})
    if "fused" in info.supported_impls and "cpu" in info.supports_fused_on:
        ways.append({"fused": True})
    for way in ways:
        for sample in info.optim_inputs_func(device="cpu"):
            options = {name: value for name, value in {**sample.kwargs, **way}.items() if name != "params"}
            vector = isinstance(options.get("lr"), torch.Tensor) and options["lr"].dim()
            if not (any(way.values()) and options.get("differentiable") or way.get("fused") and vector):
                yield f"{sample.desc} {way}", options


def check_optimizer(
    info: Any,
    dtype: torch.dtype,
    device: str,
    checks: tuple[str, ...] = CHECKS,
    at: Callable[[str], None] = lambda _: None,
) -> Tally:
    """Compare four steps from the same weights with each of `_choices`, with the CPU, and in a graph with eager mode."""
    tally = Tally()
    graph = graphs.CHECK in checks and graphs.supported(device) and info.optim_cls.__name__ not in HOST_STEPS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, (what, options) in enumerate(_choices(info)):
            train = functools.partial(_train, info, dtype)
            if "step" in checks and not options.get("capturable"):  # which is for graphs
                at(f"step, sample {i}")
                one = OneSample(info, None, i, device, tally)
                comparison = one.comparison("step")
                comparison.where = f"{what}: "
                comparison.outcomes(*one.both(functools.partial(train, options)))
            numbers = tree_leaves([options])
            if not graph or info.has_capturable_arg and options.get("differentiable"):
                continue
            if info.has_capturable_arg:
                options["capturable"] = True
            elif any(isinstance(x, torch.Tensor) for x in numbers):
                continue  # the host reads it in the step
            at(f"{graphs.CHECK}, sample {i}")
            eager, captured = (run(functools.partial(train, options, captured=way), device) for way in (False, True))
            graphs.judge(tally, i, what, eager, captured)
    return tally


def _train(
    info: Any, dtype: torch.dtype, options: dict[str, Any], move: Move, captured: bool = False
) -> list[list[torch.Tensor]]:
    """The loss and the parameters after each of four steps. In a graph, the first is eager, and the others are replays."""
    generator, options = torch.random.get_rng_state(), move(options)
    torch.manual_seed(0)
    model: torch.nn.Module
    if info.optim_cls.__name__ == "SparseAdam":
        options.pop("foreach", None)
        model = torch.nn.Embedding(6, 3, sparse=True, dtype=dtype)
        batches = [torch.randint(0, 6, (4,)) for _ in range(4)]
    else:
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).to(dtype)
        batches = [torch.randn(8, 5, dtype=dtype) for _ in range(4)]
    torch.random.set_rng_state(generator)
    model, x = model.to(move.device), batches[0].to(move.device)
    matrices = info.optim_cls.__name__ == "Muon"  # which takes only these
    optimizer = info.optim_cls([p for p in model.parameters() if p.dim() == 2 or not matrices], **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    def step() -> torch.Tensor:
        if info.step_requires_closure:
            return optimizer.step(closure).detach()
        loss = closure().detach()
        optimizer.step()
        return loss

    if captured:
        stream, current = torch.Stream(device=move.device), torch.accelerator.current_stream(x.device.index)
        stream.wait_stream(current)
        with stream:
            loss = step()
        current.wait_stream(stream)
    else:
        loss = step()
    found = [graphs.copies([loss, *model.parameters()])]
    if captured:
        graph = torch.accelerator.Graph()
        with stream, graph:
            loss = step()
    for batch in batches[1:]:
        x.copy_(batch)
        if captured:
            graph.replay()
        else:
            loss = step()
        found.append(graphs.copies([loss, *model.parameters()]))
    return found
