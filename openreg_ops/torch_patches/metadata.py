"""A tensor's metadata (see Note [Metadata] in csrc/backend/serialization.cpp) stays with its deep copies and fake tensors.

PyTorch rebuilds a tensor from its storage in ``copy.deepcopy``, and makes a fake tensor from sizes, without the metadata.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorConverter

from openreg_ops import _C
from openreg_ops.identity import identity
from openreg_ops.torch_patches.import_hooks import after_import

__all__ = ["register"]


def register() -> None:
    """Install the patches."""
    torch.Tensor.__deepcopy__ = _keeping_metadata(torch.Tensor.__deepcopy__, of=0)
    FakeTensorConverter.from_real_tensor = _keeping_metadata(FakeTensorConverter.from_real_tensor, of=2)
    after_import("torch._dynamo.eval_frame", lambda: _keep_from_dynamo(FakeTensorConverter.from_real_tensor))


def _keeping_metadata(original: Any, of: int) -> Any:
    """A function whose result gets the metadata of its argument number `of`."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        made, source = original(*args, **kwargs), args[of]
        if source.device.type == identity.name and isinstance(made, torch.Tensor):
            _C.copy_metadata(source, made)
        return made

    return function


def _keep_from_dynamo(function: Any) -> None:
    """Let Dynamo run the function as it is, as it does with the functions of PyTorch that it replaces."""
    sys.modules["torch._dynamo.eval_frame"].skip_code(function.__code__)
