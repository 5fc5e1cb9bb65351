"""The acme device for PyTorch. Importing this package makes ``device="acme"`` work; ``import torch`` imports it. Rung 1.

Document: "Facilitating New Backend Integration by PrivateUse1", sections "Rename privateuse1 to a custom name for the new
backend" and "Generate methods and properties related to the new backend".
"""


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

from torch_acme import distributed, inductor, memory, meta, sharing  # noqa: E402

device.memory = memory
sharing.register()
distributed.register()
inductor.register()

__all__ = ["_C", "device", "meta"]
