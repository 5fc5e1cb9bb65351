"""What each openreg:: operator means: its documented mathematics, checks, fake kernel, batching rule and samples.

Every module here is imported, and the operators in them are exported, so that a new one is listed nowhere.
"""

import importlib
import pkgutil

from openreg_ops.meta.op import OPERATORS

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
globals().update(OPERATORS)
__all__ = sorted(OPERATORS)
