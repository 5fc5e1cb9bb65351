"""The acme device for PyTorch. Importing this package makes ``device="acme"`` work; ``import torch`` imports it. Rung 1.

Document: "Facilitating New Backend Integration by PrivateUse1", sections "Rename privateuse1 to a custom name for the new
backend" and "Generate methods and properties related to the new backend".
"""

import sys


def _autoload() -> None:
    """PyTorch calls this through the entry point in pyproject.toml; the import has done the work.

    It is defined before the imports below, because `import torch` may look it up at once.
    """


import torch  # noqa: E402

from torch_acme import _C, device  # noqa: E402

torch.utils.rename_privateuse1_backend("acme")
torch._register_device_module("acme", device)
torch.utils.generate_methods_for_privateuse1_backend(
    for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
)

from torch_acme import memory, meta, sharing  # noqa: E402, F401

device.memory = sys.modules["torch.acme.memory"] = memory


def _process_group(group, options):
    """Makes the c10d backend of csrc/distributed.cpp (rung 11)."""
    from torch.distributed import ProcessGroup

    # Before 2.15, DistributedDataParallel looks for a default backend, which a group with a plugin lacks. The group is a
    # local variable of the caller.
    if torch.__version__ < (2, 15) and (caller := sys._getframe(1).f_locals.get("pg")) is not None:
        caller._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    return _C.DistributedBackend(group.store, group.group_rank, group.group_size, group.timeout)


if torch.distributed.is_available():
    torch.distributed.Backend.register_backend("acmeccl", _process_group, extended_api=True, devices=["acme"])

__all__ = ["_C", "device", "meta"]
