"""``python -m openreg_ops check MODULE:OP``: the checker on the command line."""

from __future__ import annotations

import argparse
import ast
import faulthandler
import importlib
import re
import sys
from typing import Any

import torch

from openreg_ops.testing.checker import Sample, check
from openreg_ops.testing.checks import CHECKS
from openreg_ops.tools import dispatch, forms
from openreg_ops.tools.forms import Wrong

DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "c64": torch.complex64, "c128": torch.complex128, "b8": torch.bool, "u8": torch.uint8,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", help="MODULE:NAME (an operator, or what custom_op returned), or ns::name")
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE",
                        help="import it first: for an operator given as ns::name")  # fmt: skip
    parser.add_argument("--samples", metavar="MODULE:FUNCTION", help="a function of (device, dtype) that gives samples")
    parser.add_argument("--input", action="append", default=[], metavar="ARGUMENTS",
                        help="one sample, such as 'f32[3,4], f32[4], eps=1e-5'; may be repeated")  # fmt: skip
    parser.add_argument("--reference", metavar="MODULE:FUNCTION", help="a plain function of the same arguments")
    parser.add_argument("--device", help="where to run (default: where the samples are)")
    parser.add_argument("--dtype", default="float32", help="of samples that are made (default float32)")
    parser.add_argument("--only", nargs="+", default=[], metavar="CHECK", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--skip", nargs="+", default=[], metavar="CHECK")
    forms.add_arguments(parser)
    parser.add_argument("--verbose", action="store_true", help="say too why checks were skipped, and what passed")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def main(arguments: argparse.Namespace) -> int:
    """0 if nothing failed, 1 if something did, 2 if what was asked for is wrong."""
    if "" not in sys.path and "." not in sys.path:
        sys.path.insert(0, "")  # python -P leaves it out, and my_module is most likely here
    if not faulthandler.is_enabled():
        faulthandler.enable()  # an operator that crashes the process says in which check
    live = sys.stderr.isatty()

    def progress(where: str) -> None:
        if not arguments.quiet:
            print(f"\r{where:<60.60}" if live else where, end="" if live else "\n", file=sys.stderr, flush=True)

    try:
        report = check(
            *_asked(arguments), arguments.device, dtype=_dtype(arguments.dtype), only=_names(arguments.only),
            skip=_names(arguments.skip), reference=_named(arguments.reference) if arguments.reference else None,
            progress=progress,
        )  # fmt: skip
    except (Wrong, ValueError) as error:
        print(f"check: {error}", file=sys.stderr)
        return 2
    finally:
        if live and not arguments.quiet:
            print(f"\r{'':60}\r", end="", file=sys.stderr)
    forms.write(report, arguments, verbose=arguments.verbose)
    return 0 if report.passed else 1


def _names(given: list[str]) -> list[str]:
    """What stands between commas too."""
    return [name for each in given for name in each.split(",") if name]


def _asked(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The operator and the samples."""
    for module in arguments.modules:
        _module(module)
    by_name = "::" in arguments.op or ":" not in arguments.op
    op = arguments.op if by_name else _named(arguments.op)
    if arguments.samples and arguments.input:
        raise Wrong("give --samples or --input, not both")
    if arguments.samples:
        return op, _named(arguments.samples)
    return op, [parse(text) for text in arguments.input] or None


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise Wrong(f"importing {name} failed: {error}") from error
        raise Wrong(f"there is no module {name} in the current folder or on the path") from error
    except Exception as error:
        raise Wrong(f"importing {name} failed: {type(error).__name__}: {error}") from error


def _named(text: str) -> Any:
    """What ``module:name.name`` stands for."""
    module_name, _, path = text.partition(":")
    if not path:
        raise Wrong(f"expected MODULE:NAME, but got {text!r}")
    found = _module(module_name)
    for part in path.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_")] if hasattr(found, "__dict__") else []
            raise Wrong(f"{module_name} has no {path}" + (f"; it has {', '.join(public[:20])}" if public else ""))
        found = getattr(found, part)
    return found


def _dtype(text: str) -> torch.dtype:
    dtype = DTYPES.get(text) or getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise Wrong(f"there is no dtype {text!r}; short names are {', '.join(DTYPES)}")
    return dtype


# ---- inputs as text ----

_TENSOR = re.compile(r"([a-z]+\d+)\[([\d, ]*)\](?:@\(([\d, ]*)\))?(?:@([a-z_\d]+(?::\d+)?))?$")


def parse(text: str, device: str = "cpu") -> Sample:
    """A sample from ``f32[3,4]@openreg, bf16[4]@(2), [f32[2], f32[2]], 1e-5, dim=-1``.

    A tensor is its dtype and shape, with ``@(strides)`` where they matter and ``@device`` where it is not on `device`;
    everything else is a Python literal.
    """
    numbers = torch.Generator().manual_seed(0)
    args, kwargs = [], {}
    for piece in _split(text):
        name, equals, value = piece.partition("=")
        if equals and name.strip().isidentifier():
            kwargs[name.strip()] = _value(value.strip(), numbers, device)
        else:
            args.append(_value(piece, numbers, device))
    return Sample(*args, **kwargs)


def _split(text: str) -> list[str]:
    """At the commas that stand in no bracket and no string."""
    pieces, depth, quote, current = [], 0, "", ""
    for character in text:
        quote = "" if character == quote else character if not quote and character in "'\"" else quote
        depth += 0 if quote else (character in "[(") - (character in "])")
        if character == "," and not depth and not quote:
            pieces.append(current.strip())
            current = ""
        else:
            current += character
    return [piece for piece in [*pieces, current.strip()] if piece]


def _tensor(match: re.Match[str], numbers: torch.Generator, device: str) -> torch.Tensor:
    place = torch.device(match[4] or device)
    dispatch.usable(str(place))
    shape = [int(size) for size in match[2].split(",") if size.strip()]
    dtype = _dtype(match[1])
    if dtype.is_floating_point or dtype.is_complex:
        x = torch.randn(shape, generator=numbers, dtype=torch.float64).to(dtype)
    else:
        x = torch.randint(0, 2 if dtype == torch.bool else 4, shape, generator=numbers).to(dtype)
    if match[3] is None:
        return x.to(place)
    strides = [int(stride) for stride in match[3].split(",") if stride.strip()]
    if len(strides) != len(shape):
        raise Wrong(f"{match[0]}: there are {len(strides)} strides for {len(shape)} dimensions")
    return torch.empty_strided(shape, strides, dtype=dtype, device=place).copy_(x)


def _value(text: str, numbers: torch.Generator, device: str) -> Any:
    if match := _TENSOR.match(text):
        try:
            return _tensor(match, numbers, device)
        except RuntimeError as error:  # no such device, no memory
            raise Wrong(f"{text}: {str(error).splitlines()[0]}") from None
    if text.startswith("[") and text.endswith("]") and any(_TENSOR.match(piece) for piece in _split(text[1:-1])):
        return [_value(piece, numbers, device) for piece in _split(text[1:-1])]
    if text.startswith("torch.") and hasattr(torch, text.removeprefix("torch.")):
        return getattr(torch, text.removeprefix("torch."))
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text, text))
    except (ValueError, SyntaxError) as error:
        raise Wrong(f"{text!r} is neither a tensor such as f32[3,4] nor a Python literal") from error
