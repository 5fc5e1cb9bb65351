"""What a binary takes from libtorch, CPython and the C library, and which of it is stable: ``openreg-tools check --abi``.

binary.py reads the binary, shims.py has torch's stable C interface by release, declarations.py searches headers.
"""

from openreg_tools.abi.report import Report, audit

__all__ = ["Report", "audit"]
