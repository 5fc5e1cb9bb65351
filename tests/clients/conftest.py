"""Training frameworks on the device; `pytest tests` leaves them out. "Training frameworks" in docs/integration.md has them."""

import pytest


@pytest.fixture(autouse=True)
def use(monkeypatch):
    """`use("cpu")`: accelerate, which transformers uses, chooses a device again, from its environment variable."""
    state = pytest.importorskip("accelerate.state")

    def choose(device):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        if device is None:
            monkeypatch.delenv("ACCELERATE_TORCH_DEVICE")
        else:
            monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)

    choose("openreg")
    return choose
