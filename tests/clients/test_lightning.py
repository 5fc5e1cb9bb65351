"""lightning: Fabric's loop on the device. Its Trainer takes an accelerator of its own list or an Accelerator object."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning")


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Openreg(lightning.pytorch.accelerators.Accelerator):
    """Lightning knows the accelerators of its own list; any other is such a class, written for it."""

    def setup_device(self, device):
        torch.openreg.set_device(device)

    def teardown(self):
        torch.openreg.empty_cache()

    @staticmethod
    def parse_devices(devices):
        return list(range(devices)) if isinstance(devices, int) else devices

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("openreg", index) for index in devices]

    @staticmethod
    def auto_device_count():
        return torch.openreg.device_count()

    @staticmethod
    def is_available():
        return torch.openreg.is_available()

    @staticmethod
    def name():
        return "openreg"

    def get_device_stats(self, device):
        return torch.openreg.memory_stats(device)


def train(folder, **options):
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    model = Model()
    trainer = lightning.Trainer(
        max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
        default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16))
    return trainer, model


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_trainer(precision, tmp_path):
    from lightning.pytorch.strategies import SingleDeviceStrategy

    strategy = SingleDeviceStrategy(device="openreg:1", accelerator=Openreg())
    trainer, model = train(tmp_path / "device", strategy=strategy, precision=precision)
    assert trainer.strategy.root_device == torch.device("openreg:1")
    _, expected = train(tmp_path / "cpu", accelerator="cpu", precision=precision)
    assert model.losses == pytest.approx(expected.losses, rel=1e-5 if precision == "32-true" else 2e-2)
