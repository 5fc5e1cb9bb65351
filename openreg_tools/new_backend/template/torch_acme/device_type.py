"""The device in PyTorch's own test files: ``TORCH_TEST_DEVICES=.../torch_acme/device_type.py python test_torch.py``.

Rung 12. Document: "Extending dispatcher for a new backend in C++", section "Testing your backend against native PyTorch
backends". exclusions.txt lists what does not run.
"""

from pathlib import Path
from typing import Any

from torch.testing._internal import common_device_type
from torch.testing._internal.common_device_type import PrivateUse1TestBase

import torch_acme

LINES = Path(torch_acme.__file__).with_name("exclusions.txt").read_text().splitlines()
EXCLUDED = {tuple(words[:2]) for line in LINES if (words := line.partition("#")[0].split())}  # class and name


class AcmeTestBase(PrivateUse1TestBase):
    # torch 2.15 runs a test only on devices that declare what it requires. Before, there are no such classes.
    if hasattr(common_device_type, "HardwareClassification"):
        hardware_classification = common_device_type.HardwareClassification.ACCELERATOR
    if hasattr(common_device_type, "Capability"):
        capabilities = frozenset(common_device_type.Capability)

    @classmethod
    def instantiate_test(cls, name: str, test: Any, *, generic_cls: Any = None) -> None:
        before = set(vars(cls))
        super().instantiate_test(name, test, generic_cls=generic_cls)
        for made in set(vars(cls)) - before:
            if generic_cls and not EXCLUDED.isdisjoint((generic_cls.__name__, word) for word in (name, made, "*")):
                delattr(cls, made)


def install() -> None:
    """Make AcmeTestBase what instantiate_device_type_tests() uses for the device."""
    bases = common_device_type.device_type_test_bases
    bases[:] = [base for base in bases if not issubclass(base, PrivateUse1TestBase)] + [AcmeTestBase]


TEST_CLASS = AcmeTestBase
if __name__ == "<run_path>":  # TORCH_TEST_DEVICES runs this file so, and adds TEST_CLASS itself
    install()
    common_device_type.device_type_test_bases.remove(TEST_CLASS)
