"""Other people's libraries on the device; `pytest tests` leaves them out. See "Clients" in README.md."""

import pytest


@pytest.fixture(autouse=True)
def use(monkeypatch):
    """`use("cpu")`: accelerate, on which transformers stands, makes its next choice of a device anew."""
    state = pytest.importorskip("accelerate.state")

    def choose(device):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)

    choose("openreg")
    return choose
