"""What each openreg:: operator means: its documented mathematics, checks, fake kernel, batching rule and samples.

This package imports every module here and exports its operators, so you do not have to list a new one anywhere.
"""

import importlib
import pkgutil

from openreg_ops.meta.op import OPERATORS

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
globals().update(OPERATORS)
__all__ = sorted(OPERATORS)
