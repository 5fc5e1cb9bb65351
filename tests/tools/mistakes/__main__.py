"""Prints which kinds of mistakes `check` finds, and which `torch.library.opcheck` finds."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch.utils._pytree import tree_leaves, tree_map

import mistakes
from openreg_ops.testing import check
from openreg_tools.core import child
from openreg_tools.core.samples import sample_of


def has_gradient(op: object, args: tuple, kwargs: dict) -> bool:
    """Returns true if a backward through the call works; opcheck then gets tensors that require a gradient."""
    try:
        outs = [x for x in tree_leaves(op(*args, **kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
        torch.autograd.backward(outs, [torch.ones_like(x) for x in outs])
    except Exception:
        return False
    return bool(outs)


def passes_opcheck(example: mistakes.Example) -> bool:
    """Returns true if opcheck finds nothing in any sample."""

    def given(value: object, grad: bool) -> object:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().clone().requires_grad_(grad and value.is_floating_point())

    for sample in map(sample_of, example.samples):
        grad = has_gradient(example.op, *tree_map(lambda x: given(x, True), (sample.args, sample.kwargs)))
        args, kwargs = tree_map(lambda x, grad=grad: given(x, grad), (sample.args, sample.kwargs))
        with contextlib.redirect_stdout(io.StringIO()):
            found = torch.library.opcheck(example.op, args, kwargs, raise_exception=False)
        if any(value != "SUCCESS" for value in found.values()):
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="where to run (default cpu); opcheck runs on the CPU")
    parser.add_argument("kinds", nargs="*", help="the kinds to try (default all)")
    arguments = parser.parse_args()
    operators = [operator for operator in mistakes.load() if not arguments.kinds or operator.kind in arguments.kinds]
    operators = [operator for operator in operators if arguments.device in operator.devices]
    print(f"{'':24}{'check finds':>14}{'passes':>10}{'opcheck finds':>16}{'passes':>10}", flush=True)
    complete, kinds = [0, 0, 0, 0], [0, 0, 0, 0]
    for kind in dict.fromkeys(operator.kind for operator in operators):
        counts = {(tool, bad): [0, 0] for tool in ("check", "opcheck") for bad in (True, False)}
        for operator in (operator for operator in operators if operator.kind == kind):
            print(f"{kind} {operator.name}", end="\r", file=sys.stderr, flush=True)
            example, bad = operator.make(), bool(operator.found_by)
            report = check(example.op, example.samples, arguments.device, **example.options)
            # A child: after a backward in this process, `check` could not use children.
            opcheck = next(child.answers(lambda answer, example=example: answer(passes_opcheck(example)), 300))
            for tool, passed in (("check", report.passed), ("opcheck", opcheck)):
                counts[tool, bad][0] += passed != bad
                counts[tool, bad][1] += 1
        cells = [counts[tool, bad] for tool in ("check", "opcheck") for bad in (True, False)]
        complete = [total + (of > 0 and good == of) for total, (good, of) in zip(complete, cells, strict=True)]
        kinds = [total + (of > 0) for total, (_, of) in zip(kinds, cells, strict=True)]
        texts = [f"{good} of {of}" if of else "-" for good, of in cells]
        print(f"{kind:24}{texts[0]:>14}{texts[1]:>10}{texts[2]:>16}{texts[3]:>10}", flush=True)
    texts = [f"{good} of {of}" for good, of in zip(complete, kinds, strict=True)]
    print(f"{'complete kinds':24}{texts[0]:>14}{texts[1]:>10}{texts[2]:>16}{texts[3]:>10}")


if __name__ == "__main__":
    main()
