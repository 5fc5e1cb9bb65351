"""Every public name documents its arguments and results; these tests name any that does not."""

import dataclasses
import doctest
import importlib
import inspect
import re

import pytest
import torch

import openreg_ops
from openreg_ops import meta

MODULES = [
    "openreg_ops",
    "openreg_ops.autograd_fallback",
    "openreg_ops.cpp_extension",
    "openreg_ops.fallback",
    "openreg_ops.inductor",
    "openreg_ops.optim",
    "openreg_ops.testing",
    "openreg_tools",
    "openreg_tools.backends",
    "openreg_tools.check",
    "openreg_tools.compare",
    "openreg_tools.drift",
    "openreg_tools.explain",
    "openreg_tools.info",
    "openreg_tools.operators",
    "openreg_tools.trace",
    "torch.openreg",
    "torch.openreg._sanitizer",
    "torch.openreg.faults",
    "torch.openreg.nvtx",
]
OPERATORS = sorted(name for name in meta.__all__ if callable(getattr(meta, name)))


def public():
    """Each public function and class, once, with the name that a user gives it."""
    seen = set()
    for module in MODULES:
        for name in getattr(importlib.import_module(module), "__all__", ()):
            value = getattr(importlib.import_module(module), name)
            if callable(value) and not inspect.ismodule(value) and id(value) not in seen:
                seen.add(id(value))
                yield f"{module}.{name}", value


def document(value):
    """Its own docstring; a class does not inherit its base's."""
    return "" if inspect.isclass(value) and not value.__doc__ else inspect.getdoc(value) or ""


def lacks(value):
    """What its docstring does not say: anything, a parameter, or a public method."""
    text = document(value)
    if not text:
        return ["a docstring"]
    found = []
    record = dataclasses.is_dataclass(value) or hasattr(value, "_fields") or issubclass(type(value), type(torch.dtype))
    if inspect.isclass(value):
        for name, member in vars(value).items():
            function = member.fget if isinstance(member, property) else member
            if not name.startswith("_") and inspect.isfunction(function) and not inspect.getdoc(function):
                found.append(f"a docstring of {name}")
    if record or (inspect.isclass(value) and issubclass(value, Exception)):
        return found
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:  # one of PyTorch's classes in C++
        return found
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return found + [f"`{name}`" for name in named if not re.search(rf"\b{name}\b", text)]


def stray(value):
    """Lines of Args or Raises that begin no entry, which the site shows as an entry of their own."""
    sections = re.findall(r"^(?:Args|Attributes|Raises):\n((?: +.*\n?)+)", document(value), re.M)
    lines = [line for section in sections for line in section.splitlines() if re.match(r" {4}\S", line)]
    return [line.strip() for line in lines if not re.match(r" {4}[\w*.`, ]+(\(.*?\))?:(\s|$)", line)]


def test_public_names_say_what_they_take():
    found = {name: missing for name, value in public() if (missing := lacks(value))}
    assert found == {}


def test_sections_are_lists_of_entries():
    found = {name: lines for name, value in public() if (lines := stray(value))}
    assert found == {}


EXAMPLES = {name: text for name, value in public() if ">>>" in (text := document(value))}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_it_shows(name):
    test = doctest.DocTestParser().get_doctest(
        EXAMPLES[name], {"torch": torch, "openreg_ops": openreg_ops}, name, None, 0
    )
    said = []
    doctest.DocTestRunner().run(test, out=said.append)
    assert not said, "".join(said)


def test_what_people_use_most_has_an_example():
    assert len(EXAMPLES) >= 30


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_say_shapes_dtypes_errors_and_source(name):
    operator = getattr(openreg_ops, name)
    text = document(operator)
    schema = getattr(torch.ops.openreg, name).default._schema
    derived = name.endswith(("_backward", "_gradients"))
    assert "\nArgs:\n" in text
    assert ("\nReturns:\n" in text) == bool(schema.returns)
    assert re.search(r"float32|dtype|int8", text), "dtypes"
    assert re.search(r"`\[|shape", text), "shapes"
    assert re.search(r"[Dd]ifferentiable|[Gg]radient|derivative", text), "whether it is differentiable"
    takes_anything = any(name.startswith(each) for each in ("custom_autograd_fn", "scale_gradient"))
    assert "\nRaises:\n" in text or takes_anything
    assert (
        re.search(r"^Sources?: ", text, re.M)
        or derived
        or name in ("custom_abs_", "dequantize_rowwise", "kv_cache_update")
    )


@pytest.mark.parametrize(
    "name", [n for n in torch.openreg.__all__ if "memory" in n and not n.startswith(("set", "reset"))]
)
def test_memory_functions_say_their_unit(name):
    assert re.search(r"[Bb]ytes|percent|fraction|table|segments|keys of", document(getattr(torch.openreg, name)))
