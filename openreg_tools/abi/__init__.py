"""What a binary uses of libtorch, CPython and the C library, and how much is stable: ``openreg-tools check --abi``.

binary.py reads the binary, shims.py lists torch's stable C interface by release, declarations.py searches headers.
"""

from openreg_tools.abi.report import Report, audit

__all__ = ["Report", "audit"]
