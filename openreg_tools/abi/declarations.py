"""Where torch's and Python's headers declare a symbol, and its replacement in torch's stable interface."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

__all__ = ["operator", "path_of", "python_header", "replacement", "torch_headers"]

_TOKENS = re.compile(
    r"namespace\s+(?P<namespace>[\w:]*)\s*\{"
    r"|\b(?:class|struct|union|enum\s+class|enum)\s+(?:[A-Z][A-Z0-9_]*(?:\([^)]*\))?\s+|alignas\([^)]*\)\s*)*"
    r"(?P<type>\w+)(?:\s+final)?\s*(?::[^;{}()]*)?\{"
    r"|extern\s+\"C\"\s*(?P<extern>\{)"
    r"|(?P<operator>operator\s*(?:\(\)|\[\]|[^\w\s(]+))(?=\s*\()"
    r"|(?P<name>~?\b[A-Za-z_]\w*)(?=\s*[(;=\[])"
    r"|(?P<open>\{)|(?P<close>\})"
)
_NOISE = re.compile(r"//[^\n]*|/\*.*?\*/|(?<!extern )\"(?:\\.|[^\"\\\n])*\"|^[ \t]*#(?:\\\n|[^\n])*", re.S | re.M)
# Declares a variable that holds the kernels of one of ATen's functions.
_STUB = re.compile(r"DECLARE_DISPATCH\((?:(?!DECLARE_DISPATCH).)*?,\s*(\w+)\s*\)(?!\s*[,)])", re.S)

# Prefixes of names, and what to write instead so that a binary works with other releases too.
_REPLACEMENTS = (
    (r"c10::(detail::torch|Error|ValueError|IndexError|TypeError|NotImplementedError|Warning|warn)",
     "STD_TORCH_CHECK of torch/headeronly/util/Exception.h"),
    (r"torch::(Library|CppFunction|detail::TorchLibraryInit|jit::parseSchema)|c10::(FunctionSchema|Dispatcher|OperatorH)",
     "STABLE_TORCH_LIBRARY of torch/csrc/stable/library.h"),
    (r"torch::autograd::", "torch.library.register_autograd, in Python"),
    (r"THP|torch::(PyTypeError|utils|python)|pybind11",
     "an operator, STABLE_TORCH_LIBRARY of torch/csrc/stable/library.h, instead of a Python function"),
    (r"at::(internal::|parallel_for|get_num_threads)", "torch::stable::parallel_for of torch/csrc/stable/ops.h"),
    (r"(at::(Tensor|TensorBase)|c10::(TensorImpl|UndefinedTensorImpl|StorageImpl|intrusive_ptr))\b",
     "torch::stable::Tensor of torch/csrc/stable/tensor.h"),
)  # fmt: skip


def replacement(name: str) -> str:
    """What to write instead of a C++ name ("c10::Error::what"), or ""."""
    return next((text for pattern, text in _REPLACEMENTS if re.match(pattern, name)), "")


def path_of(text: str) -> tuple[str, ...]:
    """The parts of the name in a demangled symbol, without template and function arguments."""
    text = re.sub(
        r"^(vtable|VTT|typeinfo|typeinfo name|guard variable|construction vtable) for |^\S+ thunk to ", "", text
    )
    text = text.replace("(anonymous namespace)", "_").replace("[abi:cxx11]", "")
    operator = re.search(r"operator(\(\)|\[\]|<<|>>|->|<=>|[<>]=?|[^\w\s(]+| new| delete| [\w:]+)(?=[(<]|$)", text)
    end = f"operator{operator[1]}" if operator else ""
    if operator:
        text = text[: operator.start()] + "operator"
    depth, kept = 0, ""
    for letter in text:
        if letter == "(" and depth == 0:
            break
        depth += (letter == "<") - (letter == ">")
        kept += letter if depth == 0 and letter != ">" else ""
    parts = kept.split()[-1].split("::") if kept.split() else []
    return tuple([*parts[:-1], end] if operator else parts)


def torch_headers(paths: Iterable[tuple[str, ...]], include: Path) -> dict[tuple[str, ...], str]:
    """The header that declares each name, or the class that it is a member of, if one is found.

    This tracks namespaces, classes and braces without a compiler, so it misses declarations made by other macros than
    DECLARE_DISPATCH.
    """
    paths = [path for path in paths if path]
    wanted = {path[:n] for path in paths for n in range(min(2, len(path)), len(path) + 1)}
    if not wanted:
        return {}
    words = "|".join(re.escape(word) for word in {path[-1] for path in wanted})
    some = re.compile(rf"(?<!\w)({words})(?!\w)")
    found: dict[tuple[str, ...], list[str]] = {}
    for folder in ("c10", "ATen", "torch", "caffe2"):
        for path in sorted((include / folder).rglob("*.h")):
            header = str(path.relative_to(include))
            if header.startswith("ATen/ops/") or not some.search(text := path.read_text(errors="replace")):
                continue
            for name in _declares(text):
                if name in wanted and header not in found.setdefault(name, []):
                    found[name].append(header)

    def header(path: tuple[str, ...]) -> str:
        name = next((path[:n] for n in range(len(path), 0, -1) if path[:n] in found), ())
        # Several headers have a function's name if it is also called or overloaded; often one of them is named after
        # it.
        named = [each for each in found.get(name, ()) if Path(each).stem.lower() in {part.lower() for part in path}]
        return (named or found.get(name) or [""])[0]

    return {path: where for path in paths if (where := header(path) or _of_key(path, include))}


def _of_key(path: tuple[str, ...], include: Path) -> str:
    """The header of a per-dispatch-key function, such as at::cpu::add or at::native::add_, or of a structured operator, such
    as at::meta::structured_add_Tensor.
    """
    if len(path) < 3 or path[0] != "at":
        return ""
    name = re.sub(r"(_outf?)?(_symint)?(_outf?)?$", "", path[2])
    words = name.removeprefix("structured_").split("_")
    if words == name.split("_"):  # a function; in place, its name ends with _
        names, ends = [name, name.removesuffix("_")] if len(path) == 3 else [], ("_dispatch", "")
    else:  # the name of the operator, then of its overload
        names, ends = ["_".join(words[:n]) for n in range(len(words), 0, -1)], ("",)
    files = (f"ATen/ops/{each}_{path[1]}{end}.h" for each in names for end in ends)
    return next((file for file in files if (include / file).exists()), "")


def _declares(text: str) -> Iterable[tuple[str, ...]]:
    """The names that a header declares, as parts: classes and enumerations with a body, functions and variables."""
    scopes: list[tuple[str, ...] | None] = []  # what each open brace adds to a name; None inside a function
    for token in _TOKENS.finditer(_STUB.sub(r"extern int \1;", _NOISE.sub(" ", text))):
        inside = tuple(part for scope in scopes for part in scope or ())
        function = None in scopes
        match token.lastgroup:
            case "namespace":
                scopes.append(tuple(part for part in (token["namespace"] or "_").split("::") if part != "inline"))
            case "type":
                scopes.append(None if function else (token["type"],))
                if not function:
                    yield (*inside, token["type"])
            case "extern":
                scopes.append(())
            case "open":
                scopes.append(None)
            case "close":
                if scopes:
                    scopes.pop()
            case kind if not function:
                yield (*inside, re.sub(r"\s", "", token[kind]))


def operator(name: str, include: Path) -> tuple[str, str, str, str] | None:
    """For a struct in at::_ops, such as `add_Tensor`: the operator, its overload, the header of its function, the
    function.

    None if the installed torch does not have it.
    """
    for end in range(len(name), 0, -1):
        path = include / f"ATen/ops/{name[:end]}_ops.h"
        if name[end - 1] != "_" and path.exists() and (body := re.search(
            rf'struct TORCH_API {name} \{{.*?\bname = "(.*?)".*?overload_name = "(.*?)"', path.read_text(), re.S
        )):  # fmt: skip
            header, function = path.name.removesuffix("_ops.h"), body[1].removeprefix("aten::")
            return body[1], body[2], f"ATen/ops/{header}.h", f"at::{function}"
    return None


def python_header(names: Iterable[str], include: Path) -> dict[str, str]:
    """The CPython header that declares each name, if it is installed."""
    wanted, found = set(names), {}
    for path in sorted(include.rglob("*.h"), key=lambda path: ("internal" in path.parts, len(path.parts), path)):
        text = path.read_text(errors="replace") if wanted else ""
        for name in [each for each in wanted if each in text and re.search(rf"PyAPI_\w+\([^;]*\b{each}\b", text)]:
            found[name] = str(path.relative_to(include))
            wanted.discard(name)
    return found
