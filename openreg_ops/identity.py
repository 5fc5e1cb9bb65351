"""What PyTorch knows the device by. csrc/backend/identity names it."""

from __future__ import annotations

from typing import NamedTuple

from openreg_ops import _C

__all__ = ["identity"]


class Identity(NamedTuple):
    """The names of the device, and the dispatch key of each layout and layer, as in "PrivateUse1"."""

    name: str  #: in ``torch.device(name)``
    module: str  #: ``torch.<module>``
    type: int  #: a `c10::DeviceType`
    dense: str
    sparse: str
    sparse_csr: str
    quantized: str
    nested: str
    autograd: str
    autocast: str


identity = Identity(**_C.identity())
