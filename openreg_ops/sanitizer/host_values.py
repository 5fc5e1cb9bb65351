"""Host values that a graph holds as constants: where a captured operator's numbers came from, to read them again."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

__all__ = ["Place", "hyperparameters", "numbers", "places"]

_GONE = object()
_FRAMES = 12  # how far up to look for a number: a user's line, a module's call and forward, a functional, an operator


class Place(NamedTuple):
    """An expression that can be evaluated again: a global variable, or an attribute of an object that is still alive."""

    text: str
    of: int  # the identity of the module or object
    value: Any
    look: Callable[[], Any]

    def now(self) -> Any:
        """Its current value, or `value` if it can no longer be read."""
        found = self.look()
        return found if type(found) in (int, float, tuple) else self.value


def _step(value: Any, key: str, is_item: bool) -> Any:
    """`value.key` or `value[key]`, if that runs no code of the program."""
    if is_item:
        try:
            return value[key] if type(value) in (dict, list, tuple) else _GONE
        except LookupError:
            return _GONE
    if isinstance(value, types.ModuleType):
        return vars(value).get(key, _GONE)
    if isinstance(value, torch.nn.Module) and key in value._modules:
        return value._modules[key]
    try:
        found = inspect.getattr_static(value, key)
    except AttributeError:
        return _GONE
    if inspect.ismemberdescriptor(found):  # of __slots__
        return getattr(value, key, _GONE)
    return _GONE if hasattr(type(found), "__get__") else found


def _path(node: ast.expr) -> tuple[str, list[tuple[Any, bool]]] | None:
    """A name and the attributes and constant subscripts that follow it."""
    steps: list[tuple[Any, bool]] = []
    while True:
        if isinstance(node, ast.Name):
            return node.id, steps[::-1]
        if isinstance(node, ast.Attribute):
            steps.append((node.attr, False))
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            steps.append((node.slice.value, True))
        else:
            return None
        node = node.value


@functools.lru_cache(maxsize=64)
def _expressions(filename: str) -> dict[tuple[int, ...], ast.AST]:
    """The calls and arithmetic expressions of a source file, by position."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return {}
    kinds = (ast.Call, ast.BinOp, ast.AugAssign)
    return {
        (each.lineno, each.end_lineno, each.col_offset, each.end_col_offset): each
        for each in ast.walk(tree)
        if isinstance(each, kinds)
    }


def _operands(frame: types.FrameType) -> Iterator[ast.expr]:
    """The operands of the call or arithmetic expression that a frame is evaluating."""
    instruction = frame.f_lasti // 2
    for i, position in enumerate(frame.f_code.co_positions()):
        if i == instruction:
            node = _expressions(frame.f_code.co_filename).get(position)
            if isinstance(node, ast.BinOp):
                yield from (node.left, node.right)
            elif isinstance(node, ast.AugAssign):
                yield node.value
            elif isinstance(node, ast.Call):
                yield from (*node.args, *(each.value for each in node.keywords))
            return


def _local(frame: types.FrameType, name: str) -> Any:
    """A local variable. Before Python 3.13, reading `f_locals` leaves a copy of all locals in the frame: empty it."""
    values = frame.f_locals
    found = values.get(name, _GONE)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(values) is dict and sys.getrefcount(values) <= 3:
        values.clear()  # only the frame, this function and getrefcount() refer to it
    return found


def _root(frame: types.FrameType, name: str, alone: bool) -> tuple[int, Callable[[], Any]] | None:
    """The owner of a variable and how to read it; None if the program may reuse the variable for something else."""
    code = frame.f_code
    if code.co_flags & inspect.CO_OPTIMIZED and name not in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        module = sys.modules.get(frame.f_globals.get("__name__", ""))
        if module is not None and vars(module) is frame.f_globals:
            return id(module), lambda: vars(module).get(name, _GONE)
        return None
    if alone or (value := _local(frame, name)) is _GONE:
        return None
    try:
        ref = weakref.ref(value)
    except TypeError:
        return None
    return id(value), lambda: _GONE if (found := ref()) is None else found


def _look(root: Callable[[], Any], steps: list[tuple[Any, bool]], sign: int) -> Any:
    value = root()
    for key, is_item in steps:
        if value is _GONE:
            return value
        value = _step(value, key, is_item)
    return sign * value if type(value) in (int, float) else _GONE


def places(frame: types.FrameType | None, wanted: list[int | float]) -> Iterator[Place]:
    """Where the numbers that reach an operator come from: operands, in the active calls, that have one of the values."""
    for _ in range(_FRAMES):
        if frame is None:
            return
        for operand in _operands(frame):
            sign = 1
            if isinstance(operand, ast.UnaryOp) and isinstance(operand.op, ast.USub):
                operand, sign = operand.operand, -1
            path = _path(operand)
            if path is None:
                continue
            name, steps = path
            if (root := _root(frame, name, not steps)) is None:
                continue
            look = functools.partial(_look, root[1], steps, sign)
            value = look()
            if type(value) in (int, float) and any(value == each for each in wanted):
                yield Place(ast.unparse(operand), root[0], value, look)
        frame = frame.f_back


def numbers(schema: torch.FunctionSchema, args: Any, kwargs: Any) -> list[int | float]:
    """The numbers among an operator's arguments, except sizes and dimensions."""
    found: list[int | float] = []
    for i, argument in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if not any(kind in str(argument.type) for kind in ("number", "Scalar", "float", "Tensor")):
            continue
        found += [
            each for each in (value if isinstance(value, (list, tuple)) else [value]) if type(each) in (int, float)
        ]
    return found


def hyperparameters(optimizer: torch.optim.Optimizer) -> Iterator[Place]:
    """The numbers in an optimizer's parameter groups, which its step reads on the host."""
    ref = weakref.ref(optimizer)

    def look(index: int, key: str) -> Any:
        alive = ref()
        return _GONE if alive is None or index >= len(alive.param_groups) else alive.param_groups[index].get(key, _GONE)

    for index, group in enumerate(optimizer.param_groups):
        for key in optimizer.defaults:
            value = group.get(key)
            if type(value) in (int, float) or (type(value) is tuple and all(type(x) in (int, float) for x in value)):
                yield Place(
                    f"param_groups[{index}][{key!r}] of {type(optimizer).__name__}",
                    id(optimizer),
                    value,
                    functools.partial(look, index, key),
                )
