"""One operator with one sample, for the checks, and the ways a check can end."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from openreg_tools.samples import Sample

Operator = torch._ops.OpOverload
SEED = 4321
KNOWN = ("builtins", "torch")  # packages of the types for which compilers have literals


def name_of(op: Operator) -> str:
    """``mylib::foo``, or ``mylib::foo.out`` for an overload other than the default."""
    return op.name().removesuffix(".default")


# What Case.trying is told before a call with fake tensors; the report then names the fake kernel.
FAKE = "fake tensors, which have no memory"


class Outcome(Exception):  # noqa: N818 -- it ends a check; only some of them are errors
    """Ends a check that has something to report."""

    def __init__(self, status: str, sentence: str, remedy: str = "") -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.remedy = status, sentence, remedy


def last_line(error: BaseException) -> str:
    """``Type: message`` of an exception, on one line."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}" if lines else type(error).__name__


class Case:
    """One operator with one sample, which gives checks fresh copies of its arguments."""

    def __init__(
        self,
        op: Operator,
        sample: Sample,
        device: str,
        reference: Callable[..., Any] | None,
        differentiate: Callable[[Case], None],
        intended_gradient: Callable[..., Any] | None = None,
    ) -> None:
        self.op, self.device, self.reference = op, torch.device(device), reference
        self.sample = self._on_device(sample)
        self._differentiate = differentiate  # set to checks.derivatives.derivative, which needs this class
        self.trying: Callable[[str], None] = lambda inputs: None  # called with inputs that the author did not give
        self.intended_gradient = intended_gradient
        self.name = name_of(op)
        self.schema = op._schema
        self.leaves = [x for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, Tensor)]
        wanted = [x.requires_grad for x in self.leaves]
        self.wanted = [
            differentiable(x) and (flag or not any(wanted)) for x, flag in zip(self.leaves, wanted, strict=True)
        ]
        # Each call starts from these states of the generators that the sample passes.
        self.generators = [
            (x, x.get_state())
            for x in tree_leaves((self.sample.args, self.sample.kwargs))
            if isinstance(x, torch.Generator)
        ]
        self.seeded = torch.Tag.nondeterministic_seeded in op.tags or bool(self.generators)
        self.mutable = self.schema.is_mutable
        self._source()

    def _on_device(self, sample: Sample) -> Sample:
        """The sample with its generators on the device, which draws its own numbers."""

        def moved(x: Any) -> Any:
            if not isinstance(x, torch.Generator) or x.device.type == self.device.type:
                return x
            return torch.Generator(self.device).manual_seed(x.initial_seed())

        args, kwargs = tree_map(moved, (sample.args, sample.kwargs))
        return Sample(*args, **kwargs)

    def _source(self) -> None:
        """`names`, and the text of a function of the tensors alone; see `function`."""
        position, constants = itertools.count(), {}
        self.names: list[str] = []
        written: list[str] = []

        def text(value: Any, name: str, writes: bool) -> str:
            if isinstance(value, Tensor):
                self.names.append(name)
                tensor = f"t{next(position)}"
                if writes:
                    written.append(tensor)
                return tensor
            if isinstance(value, (list, tuple)) and any(isinstance(x, Tensor) for x in tree_leaves(value)):
                return f"[{', '.join(text(x, f'{name}[{i}]', writes) for i, x in enumerate(value))}]"
            if (
                value is None
                or isinstance(value, (bool, int, float, str))
                and repr(value) not in ("inf", "-inf", "nan")
            ):
                return repr(value)
            constants[f"c{len(constants)}"] = value
            return f"c{len(constants) - 1}"

        arguments = {argument.name: argument for argument in self.schema.arguments}
        positional = [argument for argument in self.schema.arguments if not argument.kwarg_only]
        pieces = []
        for argument, value in zip(positional, self.sample.args, strict=False):
            pieces.append(text(value, argument.name, argument.is_write))
        for name, value in self.sample.kwargs.items():
            pieces.append(f"{name}={text(value, name, name in arguments and arguments[name].is_write)}")
        returns = [str(each.type) for each in self.schema.returns]
        one = len(returns) == 1
        outs = [
            f"*{'out' if one else f'out[{i}]'}" if kind.startswith("List") else ("out" if one else f"out[{i}]")
            for i, kind in enumerate(returns)
            if "Tensor" in kind
        ]
        tensors = [f"t{i}" for i in range(len(self.names))]

        def returned(values: list[str]) -> str:
            """A tuple of the values; an output may be None, such as a gradient that was not requested."""
            text = f"({''.join(f'{each}, ' for each in values)})"
            return text if returns == ["Tensor"] else f"tuple(each for each in {text} if each is not None)"

        self.call_text = f"op({', '.join(pieces)})"
        self.text = f"def function({', '.join(tensors)}):\n" + "".join(f"    {t} = {t}.clone()\n" for t in written)
        self.text += f"    out = {self.call_text}\n    return {returned([*outs, *written])}\n"
        self.raw_text = f"def function({', '.join(tensors)}):\n    out = {self.call_text}\n"
        self.raw_text += f"    return {returned(outs)}\n"
        more = ["out.contiguous()", "torch.zeros(out.shape, dtype=out.dtype, device=out.device)"]
        self.program_text = self.text.replace("    return ", "    outs = ")
        self.program_text += f"    return (*outs, {', '.join(f'*[{each} for out in outs]' for each in more)})\n"
        self.constants = constants
        self.written = [int(t[1:]) for t in written]

    def function(self, op: Any = None, raw: bool = False, program: bool = False) -> Callable[..., tuple[Tensor, ...]]:
        """The operator as a function of its tensors that returns a tuple of tensors.

        It does not write to its arguments: it clones those that the schema says are written to, and returns them too;
        `raw` skips that. A `program` returns the outputs, then contiguous() and zeros of the shape and dtype of each,
        which depend on what a compiler assumes about the outputs. Every call creates new code, so compilers keep
        nothing from another check.
        """
        text = self.raw_text if raw else self.program_text if program else self.text
        scope = {"op": op or self.op, "torch": torch, "__name__": __name__, **self.constants}
        exec(compile(text, f"<{self.name}>", "exec"), scope)
        function = scope["function"]
        if not self.seeded:
            return function

        @functools.wraps(function)
        def seeded(*tensors: Tensor) -> tuple[Tensor, ...]:
            self.seed()
            return function(*tensors)

        return seeded

    def seed(self) -> None:
        """Make the next call draw the same numbers as every other call."""
        torch.manual_seed(SEED)
        for generator, state in self.generators:
            generator.set_state(state)

    def fresh(
        self, grad: bool = False, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> list[Tensor]:
        """Copies of the tensors with their strides and the memory around them, as leaves."""
        storages: dict[int, Tensor] = {}
        with torch.no_grad():
            tensors = [_copied(x.detach(), device or self.device, storages) for x in self.leaves]
        if dtype:
            complex_dtype = dtype.to_complex()
            tensors = [x.to(complex_dtype if x.is_complex() else dtype) if differentiable(x) else x for x in tensors]
        return self.leaf(tensors) if grad else tensors

    def leaf(self, tensors: list[Tensor]) -> list[Tensor]:
        """The same, with requires_grad where the sample asks for a gradient."""
        return [x.detach().requires_grad_(flag) for x, flag in zip(tensors, self.wanted, strict=True)]

    def arguments(self, tensors: Iterable[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The sample's arguments with its tensors replaced by these."""
        rest = iter(tensors)
        return tree_map(lambda x: next(rest) if isinstance(x, Tensor) else x, (self.sample.args, self.sample.kwargs))

    def of(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors whose gradient the sample asks for."""
        return [x for x, flag in zip(tensors, self.wanted, strict=True) if flag]

    @functools.cached_property
    def run(self) -> Callable[..., tuple[Tensor, ...]]:
        return self.function()

    @functools.cached_property
    def expected(self) -> list[Tensor]:
        """The eager result."""
        with torch.no_grad():
            return [out.detach().clone() for out in self.run(*self.fresh())]

    @functools.cached_property
    def gradients(self) -> list[Tensor | None]:
        """The eager gradients under `cotangents`; empty if the operator has none."""
        return gradients(self.run, self.fresh(grad=True), self.wanted)

    @functools.cached_property
    def wide(self) -> torch.dtype | None:
        """float64 if the operator takes it and its results are as exact, else None for the samples' own dtypes."""
        try:
            with torch.no_grad():
                outs = self.run(*self.fresh(dtype=torch.float64))
        except Exception:
            return None
        exact = all(out.dtype in (torch.float64, torch.complex128) for out in outs if differentiable(out))
        return torch.float64 if exact else None

    @functools.cached_property
    def derivative(self) -> Outcome:
        """Whether the operator has a derivative: status pass, skip (nothing to differentiate), refused, or fail.

        An operator may refuse the gradients of some arguments, such as a table of cosines. `wanted` then loses these, unless
        the sample asks for them.
        """
        whole = self._derivative()
        if whole.status != "refused" or sum(self.wanted) == 1 or any(x.requires_grad for x in self.leaves):
            return whole
        every, found = self.wanted, []
        for i, flag in enumerate(every):
            self.wanted = [flag and i == j for j in range(len(every))]
            found.append(self._derivative() if flag else whole)
            if found[-1].status == "fail":
                return found[-1]
        self.wanted = [each.status == "pass" for each in found]
        if any(self.wanted) and self._derivative().status == "pass":
            refused = [n for n, flag, now in zip(self.names, every, self.wanted, strict=True) if flag and not now]
            return Outcome("pass", f"it refuses the gradients of {', '.join(refused)}")
        self.wanted = every
        return whole

    def _derivative(self) -> Outcome:
        try:
            self._differentiate(self)
        except Outcome as outcome:
            return outcome
        return Outcome("pass", "")

    def has_kernel(self, *keys: str) -> bool:
        """Whether a kernel was registered at one of these keys directly."""
        return any(torch._C._dispatch_has_kernel_for_dispatch_key(self.op.name(), key) for key in keys)

    def has_computed_kernel(self, key: str) -> bool:
        """Whether a call at this key finds a kernel, including an alias key's or a composite's."""
        return torch._C._dispatch_has_computed_kernel_for_dispatch_key(self.op.name(), key)

    @property
    def key(self) -> str:
        """The dispatch key of the device: CPU, CUDA, PrivateUse1."""
        return torch._C._dispatch_key_for_device(self.device.type)

    @property
    def composite(self) -> bool:
        return self.has_kernel("CompositeImplicitAutograd")

    @property
    def objects(self) -> list[str]:
        """The classes of the objects among the arguments, other than generators, of which compilers know little."""
        values = self.constants.values()
        foreign = [
            x for x in values if isinstance(x, torch.ScriptObject) or type(x).__module__.split(".")[0] not in KNOWN
        ]
        return list(dict.fromkeys(str(x._type()) if hasattr(x, "_type") else type(x).__name__ for x in foreign))

    def numbers(self, tensors: list[Tensor]) -> list[Any]:
        """The outputs that are not tensors, of a call on these tensors."""
        args, kwargs = self.arguments(tensors)
        with torch.no_grad():
            out = self.op(*args, **kwargs)
        outs = (out,) if len(self.schema.returns) == 1 else out or ()
        kinds = [str(each.type) for each in self.schema.returns]
        return tree_leaves([value for value, kind in zip(outs, kinds, strict=True) if "Tensor" not in kind])

    @functools.cached_property
    def intended(self) -> Callable[..., tuple[Tensor, ...]] | None:
        """The function whose gradient the author intends, as `function`; None for the operator's own derivative."""
        return self.function(op=self.intended_gradient) if self.intended_gradient else None

    index = 0  # the sample's number
    others: tuple[Sample, ...] = ()  # the operator's other samples
    command: tuple[str, ...] = ()  # that runs the checks, for Python; empty in a program


def _copied(x: Tensor, device: torch.device | str, storages: dict[int, Tensor]) -> Tensor:
    """A copy with the strides and the memory around x; tensors that share memory still share it."""
    if x.layout != torch.strided or x.is_quantized or x.is_nested or x.is_conj() or x.is_neg():
        return x.clone().to(device)
    storage = x.untyped_storage()
    if storage._cdata not in storages:
        count = storage.nbytes() // x.element_size()
        whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, (count,), (1,))
        storages[storage._cdata] = whole.clone().to(device)
    whole = storages[storage._cdata]
    return whole.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset()).detach()


def small(x: Tensor) -> bool:
    """Whether x is float8 or float4, which have no arithmetic, and no gradient."""
    return x.is_floating_point() and x.element_size() == 1


def differentiable(x: Tensor) -> bool:
    return x.is_floating_point() and not small(x) or x.is_complex()


def attached(outs: Iterable[Tensor]) -> list[Tensor]:
    """The outputs that have a gradient."""
    return [out for out in outs if out.requires_grad and differentiable(out)]


def cotangents(outs: Iterable[Tensor]) -> list[Tensor]:
    """Fixed, ordinary numbers in the outputs' shapes."""
    made = []
    for out in outs:
        numbers = torch.sin(1.3 * torch.arange(out.numel(), dtype=torch.float64) + 0.7)
        made.append(numbers.reshape(out.shape).to(out.dtype).to(out.device))
    return made


def gradients(
    function: Callable[..., tuple[Tensor, ...]], tensors: list[Tensor], wanted: list[bool]
) -> list[Tensor | None]:
    """Gradients of the requested tensors, through every output that has one."""
    outs = attached(function(*tensors))
    leaves = [x for x, flag in zip(tensors, wanted, strict=True) if flag]
    if not outs or not leaves:
        return [None] * len(leaves)
    return list(torch.autograd.grad(outs, leaves, cotangents(outs), allow_unused=True))
