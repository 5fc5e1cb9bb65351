"""What each openreg:: operator means: its signature with documentation, fake kernel and plain reference.

Every module here is imported, and every function in one that has the name of an operator is exported, so that a
new operator is listed nowhere.
"""

import importlib
import pkgutil
from types import FunctionType

import torch

__all__ = []

for _module in pkgutil.iter_modules(__path__):
    for _name, _value in vars(importlib.import_module(f"{__name__}.{_module.name}")).copy().items():
        if isinstance(_value, FunctionType) and hasattr(torch.ops.openreg, _name):
            globals()[_name] = _value
            __all__.append(_name)
__all__.sort()
