"""Reads an ELF library with pyelftools: the symbols that it imports from other libraries, and their versions."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openreg_tools.forms import Wrong

__all__ = ["Binary", "demangled"]

# The kind of a file that is not ELF, by its first bytes.
_OTHER = {
    b"MZ": "a Windows library (PE)",
    b"\xcf\xfa\xed\xfe": "a macOS library (Mach-O)",
    b"\xce\xfa\xed\xfe": "a macOS library (Mach-O)",
    b"\xca\xfe\xba\xbe": "a macOS library (Mach-O)",
    b"!<arch>": "a static library",
    b"PK\x03\x04": "a wheel or another archive; unzip it and name the library in it",
}


class Binary:
    """One shared library.

    Raises:
        Wrong: `path` is not a file, or not a shared library of Linux (ELF).
    """

    def __init__(self, path: Path) -> None:
        try:
            from elftools.elf.elffile import ELFFile
        except ImportError as error:
            raise Wrong(f"reading a binary needs pyelftools: pip install 'openreg_tools[abi]' ({error})") from None
        if not path.is_file():
            raise Wrong(f"{path} is {'a folder' if path.is_dir() else 'not there'}: expected a library such as _C.so")
        try:
            stream = path.open("rb")
        except OSError as error:
            raise Wrong(f"{path} cannot be read: {error.strerror}") from None
        begin = stream.read(8)
        stream.seek(0)
        self.path = path
        if not begin.startswith(b"\x7fELF"):
            kind = next((kind for magic, kind in _OTHER.items() if begin.startswith(magic)), "of another kind")
            stream.close()
            raise Wrong(f"{path} is {kind}: expected a shared library of Linux (ELF)")
        try:
            self._elf = ELFFile(stream)
            self._symbols: Any = self._elf.get_section_by_name(".dynsym")
        except Exception as error:  # pyelftools lets errors of struct and of its own parser through
            stream.close()
            raise Wrong(f"{path} cannot be read as ELF, it may be cut off: {error or type(error).__name__}") from None
        if self._elf["e_type"] != "ET_DYN" or self._symbols is None:
            stream.close()
            raise Wrong(f"{path} is an ELF file without dynamic symbols: expected a linked shared library")

    def taken(self) -> Iterator[tuple[str, str]]:
        """The symbols that other libraries must provide, each with its version ("GLIBC_2.14"), or "" without one."""
        versions = self._elf.get_section_by_name(".gnu.version")
        names = {aux["vna_other"]: aux.name for aux in self._needed()}
        try:
            for i, symbol in enumerate(self._symbols.iter_symbols()):
                if symbol["st_shndx"] == "SHN_UNDEF" and symbol.name:
                    index = versions.get_symbol(i)["ndx"] if versions else 0
                    yield symbol.name, names.get(index & 0x7FFF, "") if isinstance(index, int) else ""
        except Exception as error:
            raise Wrong(f"{self.path}: its symbols cannot be read: {error or type(error).__name__}") from None

    def _needed(self) -> Iterator[Any]:
        if needed := self._elf.get_section_by_name(".gnu.version_r"):
            for _, versions in needed.iter_versions():
                yield from versions

    def floors(self) -> dict[str, str]:
        """The highest version of each kind that it needs: {"GLIBC": "2.34", "GLIBCXX": "3.4.30", …}."""
        floors: dict[str, str] = {}
        for aux in self._needed():
            name = {"GLIBC_ABI_DT_RELR": "GLIBC_2.36"}.get(aux.name, aux.name)  # the first version with these
            if found := re.fullmatch(r"(GLIBC|GLIBCXX|CXXABI)_(\d+(?:\.\d+)*)", name):
                floors[found[1]] = max(found[2], floors.get(found[1], "0"), key=numbers)
        return floors

    def exports(self, name: str) -> bool:
        """Whether it exports this symbol, according to its hash table."""
        symbol = self._hashes and self._hashes.get_symbol(name)
        return bool(symbol) and symbol["st_shndx"] != "SHN_UNDEF"

    @functools.cached_property
    def _hashes(self) -> Any:
        return self._elf.get_section_by_name(".gnu.hash") or self._elf.get_section_by_name(".hash")


def numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu as (2, 13, 0)."""
    return tuple(int(part) for part in re.match(r"[\d.]*\d|", version)[0].split(".") if part)


@functools.cache
def _demangle() -> Any:
    try:
        function = ctypes.CDLL("libstdc++.so.6")["__cxa_demangle"]
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    return function


def demangled(name: str) -> str:
    """A demangled C++ symbol; the symbol itself if it is not C++."""
    if not name.startswith("_Z") or _demangle() is None:
        return name
    status = ctypes.c_int()
    address = _demangle()(name.encode(), None, None, ctypes.byref(status))
    if not address:
        return name
    text = ctypes.string_at(address).decode()
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(address)
    return text.replace(
        "std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >", "std::string"
    )
