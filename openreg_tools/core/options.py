"""The command line: types of options, what an unknown name was meant to be, and the parser of the commands.

`Wrong` is the error of a request that cannot be fulfilled as it is. A command raises it, and `run` prints its sentence
and exits with 2. Imports nothing of torch, so that `info` runs without it.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.metadata
import keyword
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

__all__ = [
    "Wrong",
    "check_name",
    "count",
    "duration",
    "file",
    "named",
    "nothing_matches",
    "regex",
    "run",
    "search_here",
    "split",
    "unknown",
]


class Wrong(Exception):  # noqa: N818 -- the request is wrong, in one sentence
    pass


# ---- the types of options ----


def regex(text: str) -> str:
    """A regular expression, as the type of an option."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None
    return text


def file(text: str) -> str:
    """A file that can be written, or -, as the type of an option."""
    path = Path(text)
    if text == "-":
        return text
    if not text:
        raise argparse.ArgumentTypeError("expected the name of a file, but got ''")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent} to write {path.name} to; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} is not writable; name another file")
    return text


def count(text: str) -> int:
    """A number above 0, as the type of an option."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a number above 0, but got {text!r}")
    return int(text)


def duration(text: str) -> float:
    """Seconds above 0, as the type of an option."""
    try:
        if 0 < (found := float(text)) < math.inf:
            return found
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected seconds above 0, but got {text!r}")


def split(words: Iterable[str]) -> list[str]:
    """The names in the words of an option, separated by commas or spaces."""
    return [name for word in words for name in word.replace(",", " ").split()]


# ---- names that do not exist ----

_FEW = 12


def unknown(kind: str, name: str, names: Iterable[str], all_names: str = "--help lists all") -> str:
    """The sentence for a name that is not one of `names`: the name that was probably meant, or all of a few.

    Args:
        kind: what it names, such as "check".
        all_names: where all names are, if there are too many for a sentence.
    """
    names = list(names)
    if close := _closest(name, names):
        return f"unknown {kind} {name!r}; did you mean {close!r}?" + f" ({all_names})" * bool(all_names)
    if len(names) <= _FEW:
        return f"unknown {kind} {name!r}; available: {', '.join(names) or 'none'}"
    return f"unknown {kind} {name!r}" + f"; {all_names}" * bool(all_names)


def _closest(name: str, names: list[str]) -> str:
    """The name that was probably meant, "" if none is close; two operators are not close by a common namespace alone."""
    last = name.rpartition("::")[2]
    for close in difflib.get_close_matches(name, names, 3, 0.7):
        if difflib.get_close_matches(last, [close.rpartition("::")[2]], 1, 0.6):
            return close
    return ""


def nothing_matches(pattern: str, names: Iterable[str]) -> str:
    """The sentence for a regular expression that fits none of `names`: the name that was probably meant, if one is close."""
    names = list(names)
    close = difflib.get_close_matches(pattern, [*names, *(name.rpartition("::")[2] for name in names)], 1, 0.8)
    return f"nothing matches --ops {pattern!r}" + (f"; did you mean {close[0]!r}?" if close else "")


# Words that are reserved in C++ but not in Python.
_CPP_WORDS = """alignas alignof and_eq asm auto bitand bitor bool case catch char char8_t char16_t char32_t co_await
co_return co_yield compl concept const const_cast consteval constexpr constinit decltype default delete do double
dynamic_cast enum explicit export extern false float friend goto inline int long mutable namespace new noexcept not_eq
nullptr operator or_eq private protected public register reinterpret_cast requires restrict short signed sizeof static
static_assert static_cast struct switch template this thread_local throw true typedef typeid typename union unsigned
using virtual void volatile wchar_t xor xor_eq""".split()


def check_name(name: str) -> None:
    """Raise Wrong if code in Python and C++ cannot use this name."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise Wrong(f"expected a name of lower-case words with underscores between, such as my_name, but got {name!r}")
    if keyword.iskeyword(name) or name in _CPP_WORDS:
        raise Wrong(f"{name} is a reserved word in Python or C++; choose another name")


def named(text: str) -> Any:
    """The object that ``MODULE:NAME`` names; NAME may have dots.

    Raises:
        Wrong: there is no such module or attribute, or importing the module fails.
    """
    module, _, path = text.partition(":")
    if not module or not path:
        raise Wrong(f"expected MODULE:NAME, but got {text!r}")
    found = _imported(module)
    for part in path.split("."):
        if not hasattr(found, part):
            of = module if found is sys.modules.get(module) else f"{module}:{path.partition(f'.{part}')[0]}"
            public = {name: value for name, value in _attributes(found).items() if not name.startswith("_")}
            if close := difflib.get_close_matches(part, public, 1):
                raise Wrong(f"{of} has no attribute {part!r}; did you mean {close[0]!r}?")
            operators = ", ".join(name for name, value in public.items() if _is_operator(value))
            remedy = f"operators in it: {operators}" if operators else "define it there, or name another"
            raise Wrong(f"{of} has no attribute {part!r}; {remedy}")
        found = getattr(found, part)
    return found


def search_here() -> None:
    """Let imports find modules in the current folder, which `python -P` and installed commands leave out."""
    if "" not in sys.path and "." not in sys.path:
        sys.path.append("")  # last, so that an installed package wins


def _imported(name: str) -> Any:
    search_here()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise Wrong(f"importing {name} failed: {error}") from error
        raise Wrong(f"there is no module {name} in the current folder or on the path") from error
    except Exception as error:
        raise Wrong(f"importing {name} failed: {type(error).__name__}: {error}") from error


def _attributes(value: Any) -> Mapping[str, Any]:
    return vars(value) if hasattr(value, "__dict__") else {}


def _is_operator(value: Any) -> bool:
    return type(value).__name__ in ("CustomOpDef", "OpOverload", "OpOverloadPacket")


# ---- the parser ----


class _Parser(argparse.ArgumentParser):
    """A parser whose error for an unknown option prints the usage of the command that got it."""

    def error(self, message: str) -> NoReturn:
        super().error(message.replace("the following arguments are required:", "missing argument:"))

    def unknown(self, word: str) -> NoReturn:
        option = word.partition("=")[0]
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        self.error(unknown("option", option, [name for name in self._option_string_actions if name != option]))


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} is not installed: it is on the path only"


def run(commands: Mapping[str, tuple[str, str]], program: str, description: str, package: str) -> int:
    """Parse the command line and run the command that it names; returns the exit status.

    Args:
        commands: for each name, a module with ``add_arguments(parser)`` and ``main(arguments) -> exit status``, which is
            imported if the command is chosen, and a description.
        program: what the usage calls the program.
        package: the installed package whose version ``--version`` prints.
    """
    parser = _Parser(prog=program, description=description)
    parser.add_argument("--version", action="version", version=_version(package))
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    completes = "_ARGCOMPLETE" in os.environ  # the shell asks argcomplete what may follow
    words = os.environ.get("COMP_LINE", "").split()[1:] if completes else sys.argv[1:]
    chosen = next((word for word in words if not word.startswith("-")), None)
    if chosen is not None and chosen not in commands and not completes:
        parser.error(unknown("command", chosen, commands))
    parsers = {}
    for name, (module, text) in commands.items():
        parsers[name] = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == chosen:
            importlib.import_module(module).add_arguments(parsers[name])
    if completes:
        import argcomplete

        argcomplete.autocomplete(parser)  # ends the process
    arguments, rest = parser.parse_known_args(words)
    if rest:
        parsers[arguments.command].unknown(rest[0])
    try:
        return importlib.import_module(commands[arguments.command][0]).main(arguments)
    except Wrong as error:
        print(f"{arguments.command}: {str(error).removeprefix(f'{arguments.command}: ')}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
