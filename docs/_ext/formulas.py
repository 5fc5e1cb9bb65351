"""Mathematics of the site: formulas of docstrings as LaTeX, and LaTeX as MathML, which browsers draw without a script."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

__all__ = ["block", "setup"]

EQUATION = re.compile(r"(?<![\w.`(])((?:^\w+, )?\w+(?:\[\w+\]|\(\w+\))?) = (?=\S)")
GREEK = {"eps": r"\varepsilon", "beta1": r"\beta_1", "beta2": r"\beta_2", "sigma": r"\sigma", "delta": r"\delta"}
SUM, PRODUCT, POWER = range(3)  # how tightly the parts of an expression hold together


def _command(name: str, *arguments: str) -> str:
    return f"\\{name}" + "".join("{" + argument + "}" for argument in arguments)


def _name(name: str) -> str:
    return GREEK.get(name) or (name if len(name) == 1 else _command("text", name))


def _parts(node: ast.expr) -> tuple[str, int]:
    """LaTeX, and how tightly it holds together."""
    match node:
        case ast.Name(id=name):
            return _name(name), POWER
        case ast.Constant(value=value):
            return str(value), POWER
        case ast.Attribute(value=value, attr="T" | "mT"):
            return _latex(value, POWER) + r"^{\top}", PRODUCT
        case ast.Subscript(value=value, slice=index):
            return _latex(value, POWER) + "_{" + _latex(index) + "}", POWER
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return "-" + _latex(operand, PRODUCT), SUM
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            return f"{_latex(left)} = {_latex(right)}", SUM
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _command("frac", _latex(left), _latex(right)), PRODUCT
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=0.5))):
            return _command("frac", "1", _command("sqrt", _latex(left))), PRODUCT
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _latex(left, POWER) + "^{" + _latex(right) + "}", PRODUCT
        case ast.BinOp(left=left, op=ast.Mult() | ast.MatMult() as op, right=right):
            sign = r" \cdot " if isinstance(op, ast.Mult) else r"\,"
            return _latex(left, PRODUCT) + sign + _latex(right, PRODUCT), PRODUCT
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            plus = isinstance(op, ast.Add)
            return _latex(left) + (" + " if plus else " - ") + _latex(right, SUM if plus else PRODUCT), SUM
        case ast.Call(func=ast.Name(id="abs"), args=[argument]):
            return f"|{_latex(argument)}|", POWER
        case ast.Call(func=ast.Name(id="sqrt"), args=[argument]):
            return _command("sqrt", _latex(argument)), POWER
        case ast.Call(func=ast.Name(id="where"), args=[condition, yes, no]):
            rows = rf"{_latex(yes)} & \text{{where }} {_latex(condition)} \\ {_latex(no)} & \text{{elsewhere}}"
            return rf"\begin{{cases}}{rows}\end{{cases}}", SUM
        case ast.Call(func=ast.Name(id=name), args=arguments):
            inside = ", ".join(map(_latex, arguments))
            return _command("operatorname", name) + _around(inside), POWER
    raise ValueError(f"formulas.py has no LaTeX for {ast.unparse(node)}; add a case to _parts")


def _latex(node: ast.expr, needed: int = SUM) -> str:
    """LaTeX in parentheses if it holds together less tightly than needed."""
    text, tightness = _parts(node)
    return text if tightness >= needed else _around(text)


def _around(text: str) -> str:
    """LaTeX in parentheses, which grow only around a fraction."""
    return rf"\left({text}\right)" if r"\frac" in text else f"({text})"


def _is_expression(text: str) -> bool:
    try:
        return not isinstance(ast.parse(text, mode="eval").body, ast.Tuple | ast.BoolOp | ast.IfExp)
    except SyntaxError:
        return False


def _split(text: str) -> list[tuple[str, str]]:
    """The words of a text, and its equations as LaTeX with & before the sign, in their order."""
    parts, position = [], 0
    while match := EQUATION.search(text, position):
        rest = text[match.end() :]
        ends = [
            found.start() for found in re.finditer(r"[,:;.]?(?= |$)", rest) if _is_expression(rest[: found.start()])
        ]
        if not ends:
            raise ValueError(f"formulas.py: no formula after {match[0]!r} in {text!r}; write what Python can parse")
        left = ", ".join(_latex(ast.parse(name, mode="eval").body) for name in match[1].split(", "))
        right = _latex(ast.parse(rest[: max(ends)], mode="eval").body)
        parts += [("words", text[position : match.start()]), ("math", f"{left} &= {right}")]
        position = match.end() + max(ends)
    return [part for part in [*parts, ("words", text[position:])] if part[1]]


def block(rows: list[str], words: Callable[[str], str]) -> list[str]:
    """A paragraph with formulas as reStructuredText: a row that begins with an equation is displayed, another is text."""
    out: list[str] = []
    shown: list[str] = []
    for row in [*re.split(r"\n(?! )", "\n".join(rows)), ""]:  # an indented row continues the one before
        parts = _split(" ".join(row.split("\n")))
        if parts and parts[0][0] == "math":
            for kind, text in parts:
                if kind == "math":
                    shown.append(text)
                elif text.strip(" ,;"):
                    shown[-1] += r"\quad" + _command("text", text.strip(" ,;"))
            continue
        if shown:
            if len(shown) == 1:  # has nothing to be aligned with
                shown[0] = shown[0].replace("&=", "=")
            out += ["", ".. math::", "", *(f"   {text} \\\\" for text in shown[:-1]), f"   {shown[-1]}", ""]
            shown = []
        out.append(
            "".join(words(text) if kind == "words" else f":math:`{text.replace('&', '')}`" for kind, text in parts)
        )
    return out


def _inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _displayed(translator: Any, node: nodes.math_block) -> None:
    text = tex2mathml(node.astext(), as_block=True)
    translator.body += [translator.starttag(node, "div", CLASS="math"), text, "</div>\n"]
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (_inline, None), (_displayed, None))
    return {"parallel_read_safe": True}
