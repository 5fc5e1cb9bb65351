"""One operator with one sample, for the checks, and the ways a check can end."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from openreg_tools.core.compare import differs, has_numbers
from openreg_tools.core.move import Move
from openreg_tools.core.samples import Sample

Operator = torch._ops.OpOverload
Function = Callable[..., tuple[Tensor, ...]]
Cotangents = Callable[[list[Tensor]], Sequence[Tensor | None]]  # makes the gradients of outputs
SEED = 4321
KNOWN = ("builtins", "torch")  # packages of the types for which compilers have literals
# What Case.trying is told before a call with fake tensors; the report then names the fake kernel.
FAKE = "fake tensors, which have no memory"


def name_of(op: Operator) -> str:
    """``mylib::foo``, or ``mylib::foo.out`` for an overload other than the default."""
    return op.name().removesuffix(".default")


# ---- how a check ends ----


class Verdict(Exception):  # noqa: N818 -- it ends a check; only some of them are errors
    """How a check ended, with a sentence and a remedy; raised to end it early."""

    def __init__(self, status: str, sentence: str, remedy: str = "") -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.remedy = status, sentence, remedy


def refuse(sentence: str) -> NoReturn:
    """End the check: the operator, or PyTorch on its behalf, says that this is not supported."""
    raise Verdict("refused", sentence)


def limit(sentence: str) -> NoReturn:
    """End the check at a limit of PyTorch, about which the operator's author can do nothing."""
    raise Verdict("limit", sentence)


def skip(reason: str) -> NoReturn:
    """End the check: it does not apply."""
    raise Verdict("skip", reason)


# ---- the operator with its sample ----


class Results(NamedTuple):
    """What a call and its backward give."""

    outs: list[Tensor]
    grads: list[Tensor | None]  # of `Case.asked`; empty if the operator has no derivative


class Case:
    """One operator with one sample, which gives checks fresh copies of its arguments.

    Args:
        differentiate: ends with the verdict of the check `backward`; by default, there is no derivative.
    """

    others: tuple[Sample, ...] = ()  # the operator's other samples

    def __init__(
        self,
        op: Operator,
        sample: Sample,
        device: str | torch.device,
        reference: Callable[..., Any] | None = None,
        differentiate: Callable[[Case], None] | None = None,
        intended_gradient: Callable[..., Any] | None = None,
    ) -> None:
        self.op, self.device, self.reference = op, torch.device(device), reference
        move = Move(self.device, source=None)  # a device draws its own numbers
        args, kwargs = tree_map(
            lambda x: move.generator(x) if isinstance(x, torch.Generator) else x, (sample.args, sample.kwargs)
        )
        self.sample = Sample(*args, **kwargs)
        self.differentiate = differentiate
        self.trying: Callable[[str], None] = lambda inputs: None  # called with inputs that the author did not give
        self.intended_gradient = intended_gradient
        self.name, self.schema = name_of(op), op._schema
        leaves = tree_leaves((args, kwargs))
        self.leaves = [x for x in leaves if isinstance(x, Tensor)]
        wanted = [x.requires_grad for x in self.leaves]
        self.wanted = [
            has_numbers(x) and (flag or not any(wanted)) for x, flag in zip(self.leaves, wanted, strict=True)
        ]
        # Each call starts from these states of the generators that the sample passes.
        self.generators = [(x, x.get_state()) for x in leaves if isinstance(x, torch.Generator)]
        self.seeded = torch.Tag.nondeterministic_seeded in op.tags or bool(self.generators)
        self.mutable = self.schema.is_mutable
        self._write_function()

    def of_sample(self, sample: Sample, device: torch.device | str | None = None) -> Case:
        """The operator with another sample, without a derivative."""
        return Case(self.op, sample, device or self.device, self.reference)

    # ---- ends ----

    def fail(self, sentence: str, remedy: str) -> NoReturn:
        """End the check: the operator is wrong."""
        raise Verdict("fail", f"{self.name}: {sentence}", remedy)

    def warn(self, sentence: str, remedy: str) -> NoReturn:
        """End the check: the operator works, but is slow or surprising."""
        raise Verdict("warn", f"{self.name}: {sentence}", remedy)

    def expect(
        self, got: Results | Sequence[Tensor], expected: Results | Sequence[Tensor], where: str, who: str, remedy: str,
        **tolerance: Any,
    ) -> None:  # fmt: skip
        """Fail unless results, or outputs alone, are equal: "WHERE output 0 differs …, which WHO gives"."""
        if not isinstance(got, Results):
            got, expected = Results(list(got), []), Results(list(expected), [])
        if wrong := self.unlike(got, expected, **tolerance):
            self.fail(f"{where} {wrong}, which {who}".strip(), remedy)

    # ---- functions of the tensors ----

    def _write_function(self) -> None:
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
            literal = value is None or isinstance(value, (bool, int, float, str))
            if literal and repr(value) not in ("inf", "-inf", "nan"):
                return repr(value)
            constants[f"c{len(constants)}"] = value
            return f"c{len(constants) - 1}"

        writes = {argument.name: argument.is_write for argument in self.schema.arguments}
        pieces = []
        for name, value in self.given().items():
            keyword = f"{name}=" if name in self.sample.kwargs else ""
            pieces.append(keyword + text(value, name, writes.get(name, False)))
        returns = [str(value.type) for value in self.schema.returns]
        places = ["out"] if len(returns) == 1 else [f"out[{i}]" for i in range(len(returns))]
        outs = [
            f"{'*' * kind.startswith('List')}{p}" for p, kind in zip(places, returns, strict=True) if "Tensor" in kind
        ]
        tensors = [f"t{i}" for i in range(len(self.names))]
        start, call = f"def function({', '.join(tensors)}):\n", f"    out = op({', '.join(pieces)})\n"
        copies = "".join(f"    {tensor} = {tensor}.clone()\n" for tensor in written)
        # An output may be None, such as a gradient that was not requested.
        end = "    return tuple(x for x in [{}] if x is not None)\n"
        self._text = start + copies + call + end.format(", ".join([*outs, *written]))
        self._raw_text = start + call + end.format(", ".join(outs))
        self.constants = constants
        self.written = [int(t[1:]) for t in written]

    def function(self, op: Any = None, raw: bool = False) -> Function:
        """The operator as a function of its tensors that returns a tuple of tensors.

        It does not write to its arguments: it clones those that the schema says are written to, and returns them too;
        `raw` skips that. Every call creates new code, so compilers keep nothing from another check.
        """
        scope = {"op": op or self.op, "torch": torch, "__name__": __name__, **self.constants}
        exec(compile(self._raw_text if raw else self._text, f"<{self.name}>", "exec"), scope)
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

    @functools.cached_property
    def run(self) -> Function:
        return self.function()

    @functools.cached_property
    def intended(self) -> Function | None:
        """The function whose gradient the author intends; None for the operator's own derivative."""
        return self.function(op=self.intended_gradient) if self.intended_gradient else None

    # ---- arguments ----

    def given(self, tensors: Iterable[Tensor] | None = None) -> dict[str, Any]:
        """The arguments that the sample gives, by name, with its tensors or with these."""
        args, kwargs = (self.sample.args, self.sample.kwargs) if tensors is None else self.arguments(tensors)
        positional = [argument.name for argument in self.schema.arguments if not argument.kwarg_only]
        return {**dict(zip(positional, args, strict=False)), **kwargs}

    def value(self, name: str) -> Any:
        """The sample's value of an argument, or its default."""
        given = self.given()
        argument = next(argument for argument in self.schema.arguments if argument.name == name)
        return given[name] if given.get(name) is not None else argument.default_value

    def sample_with(self, name: str, value: Any) -> Sample:
        """The sample with another value of one argument."""
        positional = [argument.name for argument in self.schema.arguments if not argument.kwarg_only]
        args, kwargs = list(self.sample.args), dict(self.sample.kwargs)
        if name in positional[: len(args)]:
            args[positional.index(name)] = value
        else:
            kwargs[name] = value
        return Sample(*args, **kwargs)

    def arguments(self, tensors: Iterable[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The sample's arguments with its tensors replaced by these."""
        rest = iter(tensors)
        return tree_map(lambda x: next(rest) if isinstance(x, Tensor) else x, (self.sample.args, self.sample.kwargs))

    def fresh(
        self, grad: bool = False, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> list[Tensor]:
        """Copies of the tensors with their strides and the memory around them, as leaves."""
        move = Move(device or self.device, source=None)
        tensors = [move.tensor(x) for x in self.leaves]
        if dtype:
            complex_dtype = dtype.to_complex()
            tensors = [x.to(complex_dtype if x.is_complex() else dtype) if has_numbers(x) else x for x in tensors]
        return self.leaf(tensors) if grad else tensors

    def leaf(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The tensors, detached, with requires_grad where the sample asks for a gradient."""
        return [x.detach().requires_grad_(flag) for x, flag in zip(tensors, self.wanted, strict=True)]

    def of(self, tensors: Iterable[Any]) -> list[Any]:
        """The items at the positions of the tensors whose gradient the sample asks for."""
        return [x for x, flag in zip(tensors, self.wanted, strict=True) if flag]

    @property
    def asked(self) -> list[str]:
        """The names of the tensors whose gradient the sample asks for."""
        return self.of(self.names)

    # ---- results ----

    def outputs(self, tensors: Iterable[Tensor], function: Function | None = None) -> list[Tensor]:
        """The outputs without autograd, copied so that nothing overwrites them."""
        with torch.no_grad():
            return [x.detach().clone() for x in (function or self.run)(*tensors)]

    def in_place(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of a call on these tensors themselves, then what it wrote: `outputs` without copies of the inputs."""
        outs = self.outputs(tensors, self.function(raw=True))
        return [*outs, *(tensors[i].detach().clone() for i in self.written)]

    def gradients_of(self, tensors: Iterable[Tensor], function: Function | None = None) -> list[Tensor | None]:
        """The gradients of the `asked` tensors under `cotangents`, through every output that has one."""
        tensors = self.leaf(tensors)
        return pull((function or self.run)(*tensors), tensors)

    def results(self, tensors: Sequence[Tensor] | None = None, function: Function | None = None) -> Results:
        """What calls on these tensors, or on the sample's, give: without autograd, and with it if there is a derivative."""
        tensors = self.fresh() if tensors is None else tensors
        outs = self.outputs(tensors, function)
        grads = self.gradients_of(tensors, function) if self.has_derivative else []
        return Results(outs, [x if x is None else x.clone() for x in grads])

    def unlike(self, got: Results, expected: Results, coarse: float = 0, grads: float = 4, **how: Any) -> str:
        """The first difference, as "output 0 differs in …"; gradients may differ by `grads` times as much."""
        if wrong := differs(got.outs, expected.outs, coarse=coarse, **how):
            return wrong
        if not got.grads or not expected.grads:
            return ""
        return unlike_gradients(self.asked, got.grads, expected.grads, coarse=grads * coarse, **how)

    @functools.cached_property
    def expected(self) -> list[Tensor]:
        """The outputs of the sample in eager mode."""
        return self.outputs(self.fresh())

    @functools.cached_property
    def gradients(self) -> list[Tensor | None]:
        """The gradients of the sample in eager mode; empty if the operator has no derivative."""
        return self.gradients_of(self.fresh()) if self.has_derivative else []

    @property
    def eager(self) -> Results:
        """What the sample gives in eager mode."""
        return Results(self.expected, self.gradients)

    @functools.cached_property
    def wide(self) -> torch.dtype | None:
        """float64 if the operator takes it and its results are as exact, else None for the samples' own dtypes."""
        try:
            outs = self.outputs(self.fresh(dtype=torch.float64))
        except Exception:
            return None
        exact = all(out.dtype in (torch.float64, torch.complex128) for out in outs if has_numbers(out))
        return torch.float64 if exact else None

    @property
    def reference_function(self) -> Function | None:
        """The reference, or the operator's CPU kernel, as a function of tensors on the CPU; None if there is neither."""
        if self.reference:
            return self.function(op=self.reference)
        host = not any(isinstance(c, torch.device) for c in self.constants.values())
        # Each device's generator gives different random numbers.
        if self.device.type != "cpu" and host and not self.seeded and self.has_computed_kernel("CPU"):
            return self.function()
        return None

    # ---- derivatives ----

    @functools.cached_property
    def derivative(self) -> Verdict:
        """The verdict on the operator's derivative: pass, skip (nothing to differentiate), refused, or fail.

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
        self.wanted = [verdict.status == "pass" for verdict in found]
        if any(self.wanted) and self._derivative().status == "pass":
            refused = [n for n, flag, now in zip(self.names, every, self.wanted, strict=True) if flag and not now]
            return Verdict("pass", f"it refuses the gradients of {', '.join(refused)}")
        self.wanted = every
        return whole

    def _derivative(self) -> Verdict:
        if self.differentiate is None:
            return Verdict("skip", "")
        try:
            self.differentiate(self)
        except Verdict as verdict:
            return verdict
        return Verdict("pass", "")

    @property
    def has_derivative(self) -> bool:
        return self.derivative.status == "pass"

    # ---- kernels ----

    def has_kernel(self, *keys: str) -> bool:
        """Returns true if a kernel was registered at one of these keys directly."""
        return any(torch._C._dispatch_has_kernel_for_dispatch_key(self.op.name(), key) for key in keys)

    def has_computed_kernel(self, key: str) -> bool:
        """Returns true if a call at this key finds a kernel, including an alias key's or a composite's."""
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


def attached(outs: Iterable[Tensor]) -> list[Tensor]:
    """The outputs that have a gradient."""
    return [out for out in outs if out.requires_grad and has_numbers(out)]


def cotangents(outs: Iterable[Tensor]) -> list[Tensor]:
    """Fixed, ordinary numbers in the outputs' shapes."""
    made = []
    for out in outs:
        numbers = torch.sin(1.3 * torch.arange(out.numel(), dtype=torch.float64) + 0.7)
        made.append(numbers.reshape(out.shape).to(out.dtype).to(out.device))
    return made


def pull(outs: Iterable[Tensor], tensors: Iterable[Tensor], given: Cotangents = cotangents) -> list[Tensor | None]:
    """The gradients of those tensors that require one, under those that `given` makes for the outputs that have one.

    A None among the given ones is an undefined gradient.
    """
    outs, leaves = attached(outs), [x for x in tensors if x.requires_grad]
    pairs = [(out, cotangent) for out, cotangent in zip(outs, given(outs), strict=True) if cotangent is not None]
    if not pairs or not leaves:
        return [None] * len(leaves)
    outs, made = zip(*pairs, strict=True)
    return list(torch.autograd.grad(outs, leaves, made, allow_unused=True))


def unlike_gradients(
    names: Sequence[str], got: Sequence[Tensor | None], expected: Sequence[Tensor | None], **how: Any
) -> str:
    """The first gradient that differs, as "the gradient of x differs in …"."""
    for name, a, e in zip(names, got, expected, strict=True):
        if wrong := differs([a], [e], f"the gradient of {name}", **how):
            return wrong.replace(f"{name} 0 ", f"{name} ", 1)
    return ""
