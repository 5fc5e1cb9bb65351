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
    @classmethod
    def _capabilities(cls) -> dict[str, Any]:
        """What @requires_capabilities asks for, from torch 2.15 on. A test that requires another one fails."""
        here, not_here = ("dtype.fp8", "dtype.bf16"), ("attention.flash_attention", "attention.mem_efficient_attention")
        return dict.fromkeys(here, lambda: True) | dict.fromkeys(not_here, lambda: False)

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
