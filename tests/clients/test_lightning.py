"""lightning: Trainer and Fabric in each precision. "Lightning" in docs/integration.md says what these tests hold."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning")
integration = pytest.importorskip("openreg_ops.integrations.lightning")

CLOSE = {"32-true": 1e-5, "bf16-mixed": 2e-2, "16-mixed": 1e-5, "bf16-true": 5e-2, "16-true": 2e-2, "64-true": 1e-9}
DTYPE = {"32": torch.float32, "64": torch.float64, "bf16": torch.bfloat16, "16": torch.float16}


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.losses, self.seen = [], set()

    def training_step(self, batch, _):
        x, y = batch
        out = self.net(x)
        self.seen.add((out.dtype, out.device))
        loss = nn.functional.mse_loss(out, y.to(out.dtype))
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def data():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)


def train(folder, resume=None, epochs=2, **options):
    torch.manual_seed(0)
    model = Model()
    trainer = lightning.Trainer(
        max_epochs=epochs, logger=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
        default_root_dir=folder, **options,
    )  # fmt: skip
    trainer.fit(model, data(), ckpt_path=resume)
    return trainer, model


def by_hand(epochs, momentum=0.0, clip=None):
    """The losses of a plain loop in float16, as "Mixed precision" in docs/integration.md has it."""
    torch.manual_seed(0)
    net = Model().net.to("openreg")
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.01, momentum=momentum), torch.amp.GradScaler("openreg")
    losses = []
    for x, y in list(data()) * epochs:
        with torch.autocast("openreg", dtype=torch.float16):
            out = net(x.to("openreg"))
            loss = nn.functional.mse_loss(out, y.to("openreg", torch.float16))
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", CLOSE)
def test_trainer(precision, tmp_path):
    trainer, model = train(tmp_path / "device", accelerator="openreg", precision=precision)
    assert model.seen == {(DTYPE[precision.partition("-")[0]], torch.device("openreg:0"))}
    assert trainer.strategy.root_device == torch.device("openreg:0")
    if precision == "16-mixed":  # which Lightning does not have on the CPU
        expected = by_hand(2, momentum=0.9, clip=1.0)
    else:
        expected = train(tmp_path / "cpu", accelerator="cpu", precision=precision)[1].losses
    assert model.losses == pytest.approx(expected, rel=CLOSE[precision])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_checkpoint_resumes(precision, tmp_path):
    options = {"accelerator": "openreg", "precision": precision}
    _, whole = train(tmp_path / "whole", epochs=3, **options)
    trainer, first = train(tmp_path / "first", epochs=1, **options)
    saved = trainer.checkpoint_callback.best_model_path
    resumed, second = train(tmp_path / "second", epochs=3, resume=saved, **options)
    assert first.losses + second.losses == whole.losses  # bit for bit
    if precision == "16-mixed":
        assert torch.load(saved)["MixedPrecision"]["scale"] == resumed.precision_plugin.scaler.get_scale()
    assert Model.load_from_checkpoint(saved, map_location="openreg:1").device == torch.device("openreg:1")


@pytest.mark.parametrize(
    ("options", "index"),
    [({"devices": [1]}, 1), ({"devices": "1,"}, 1), ({"devices": 1}, 0), ({"strategy": "single_device"}, 0)],
    ids=str,
)
def test_devices(options, index, tmp_path):
    trainer, model = train(tmp_path, epochs=1, accelerator="openreg", **options)
    assert model.seen == {(torch.float32, torch.device("openreg", index))}


@pytest.mark.parametrize("devices", [3, [0, 0], [-2], ","], ids=str)
def test_devices_that_are_not_there(devices):
    with pytest.raises(
        ValueError, match="expected devices to name distinct openreg devices, of which there are 2, but got"
    ):
        lightning.Trainer(accelerator="openreg", devices=devices)


def test_auto_takes_the_device(tmp_path):
    trainer, _ = train(tmp_path, epochs=1)
    assert trainer.strategy.root_device == torch.device("openreg:0")
    assert lightning.Fabric().device == torch.device("openreg:0")


def test_the_cpu_stays_the_cpu(tmp_path):
    _, model = train(tmp_path, epochs=1, accelerator="cpu", precision="bf16-mixed")
    assert model.seen == {(torch.bfloat16, torch.device("cpu"))}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_fabric(precision):
    def losses(**options):
        torch.manual_seed(0)
        fabric = lightning.Fabric(**options)
        fabric.launch()
        model = Model().net
        seen = set()
        model[0].register_forward_hook(lambda module, inputs, out: seen.add((out.dtype, out.device.type)))
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
        result = []
        for x, y in fabric.setup_dataloaders(data()):
            out = model(x)
            loss = nn.functional.mse_loss(out, y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            result.append(loss.item())
        return result, seen

    actual, seen = losses(accelerator="openreg", precision=precision)
    assert seen == {(DTYPE[precision.partition("-")[0]], "openreg")}
    expected = by_hand(1) if precision == "16-mixed" else losses(accelerator="cpu", precision=precision)[0]
    assert actual == pytest.approx(expected, rel=2e-3 if precision == "16-mixed" else CLOSE[precision])


class Own(lightning.pytorch.accelerators.Accelerator):
    """An accelerator as a user writes one."""

    def setup_device(self, device):
        torch.openreg.set_device(device)

    def teardown(self):
        pass

    @staticmethod
    def parse_devices(devices):
        return [0]

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("openreg", index) for index in devices]

    @staticmethod
    def auto_device_count():
        return 1

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def name():
        return "own"


@pytest.mark.parametrize("plugin", [False, True])
def test_an_accelerator_of_the_user_needs_a_plugin_for_mixed_precision(plugin, tmp_path):
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.strategies import SingleDeviceStrategy

    strategy = SingleDeviceStrategy(device="openreg:1", accelerator=Own())
    if plugin:
        options = {"plugins": MixedPrecision("bf16-mixed", device="openreg")}
        _, model = train(tmp_path, epochs=1, strategy=strategy, **options)
    else:
        with pytest.warns(UserWarning, match="Disabling"):
            _, model = train(tmp_path, epochs=1, strategy=strategy, precision="bf16-mixed")
    assert model.seen == {(torch.bfloat16 if plugin else torch.float32, torch.device("openreg:1"))}


def test_a_lightning_that_it_does_not_fit():
    with pytest.raises(
        ImportError, match="to have _choose_auto_accelerator, _init_strategy, _check_and_init_precision"
    ):
        integration._adapt(type("Connector", (), {}), *[None] * 6)


def run(program, *arguments, **variables):
    done = subprocess.run(
        [sys.executable, "-P", program, *arguments], env={**os.environ, **variables}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_packages(tmp_path):
    """Without the import the name is rejected; with it, it works in either package, imported before or after."""
    program = tmp_path / "program.py"
    program.write_text(
        "import lightning.pytorch\n"
        "try:\n    lightning.Trainer(accelerator='openreg')\n"
        "except ValueError as error:\n    print(error)\n"
        "print(lightning.Trainer(logger=False).strategy.root_device)\n"
        "import openreg_ops.integrations.lightning\n"
        "import pytorch_lightning\n"
        "options = {'accelerator': 'openreg', 'precision': '16-mixed'}\n"
        "for made in (\n"
        "    lightning.Trainer(logger=False, **options), lightning.Fabric(**options),\n"
        "    pytorch_lightning.Trainer(logger=False, **options),\n"
        "    pytorch_lightning.Trainer(logger=False, accelerator='auto', precision='16-mixed'),\n"
        "):\n"
        "    precision = getattr(made.strategy, 'precision_plugin', None) or made.strategy.precision\n"
        "    print(type(made).__module__, made.strategy.root_device, precision.device, precision.scaler.is_enabled())\n"
        "import lightning_fabric\n"
        "print(lightning_fabric.Fabric(**options).device)\n"
    )
    lines = run(program).splitlines()
    assert "You selected an invalid accelerator name: `accelerator='openreg'`" in lines[0]
    assert lines[1] == "cpu"
    assert [line.split()[1:] for line in lines[2:6]] == [["openreg:0", "openreg", "True"]] * 4
    assert lines[6] == "openreg:0"


def test_data_parallel(tmp_path):
    """Two processes, each on its device: `devices=2` starts the script again."""
    program = tmp_path / "program.py"
    program.write_text(
        "import openreg_ops.integrations.lightning\n"
        "import lightning, sys, torch\n"
        "from pathlib import Path\n"
        "class Model(lightning.LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.net = torch.nn.Linear(8, 1)\n"
        "    def training_step(self, batch, _):\n"
        "        return self.net(batch).square().mean()\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
        "torch.manual_seed(0)\n"
        "model = Model()\n"
        "trainer = lightning.Trainer(accelerator='openreg', devices=2, precision='bf16-mixed', max_epochs=1,\n"
        "    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)\n"
        "trainer.fit(model, torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=16))\n"
        "text = f'{trainer.strategy.root_device} {model.net.weight.sum().item()}'\n"
        "(Path(__file__).parent / f'rank{trainer.global_rank}').write_text(text)\n"
    )
    run(program)
    ranks = [(tmp_path / f"rank{rank}").read_text().split() for rank in (0, 1)]
    assert [rank[0] for rank in ranks] == ["openreg:0", "openreg:1"]
    assert ranks[0][1] == ranks[1][1]  # the same weights
