"""accelerate: its training loop in each precision. "accelerate" in docs/integration.md says what these tests hold."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerate = pytest.importorskip("accelerate")
integration = pytest.importorskip("openreg_ops.integrations.accelerate")


def train(mixed_precision="no", make=None, **options):
    torch.manual_seed(0)
    make = make or accelerate.Accelerator
    accelerator = make(mixed_precision=mixed_precision, gradient_accumulation_steps=2, **options)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    dtypes = set()
    model[0].register_forward_hook(lambda module, inputs, out: dtypes.add(out.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return accelerator, model, losses, dtypes


def test_it_trains_as_on_the_cpu(use):
    accelerator, model, losses, _ = train()
    assert accelerator.device.type == "openreg" and next(model.parameters()).is_openreg
    use("cpu")
    assert losses == pytest.approx(train()[2], rel=1e-5)


def test_bf16(use):
    _, _, losses, dtypes = train("bf16")
    assert dtypes == {torch.bfloat16}
    use("cpu")
    assert losses == pytest.approx(train("bf16")[2], rel=2e-2)


def test_fp16_is_refused_by_a_list_of_vendors():
    with pytest.raises(ValueError, match=r"fp16 mixed precision requires a device in .*\(not 'openreg'\)"):
        accelerate.Accelerator(mixed_precision="fp16")


def test_fp16_through_the_integration(use):
    for scale in (128.0, 64.0):  # a second one in the process, with options of the scaler
        handlers = [accelerate.utils.GradScalerKwargs(init_scale=scale)]
        accelerator, model, losses, dtypes = train("fp16", integration.Accelerator, kwargs_handlers=handlers)
        assert accelerator.mixed_precision == "fp16" and accelerator.scaler.get_scale() == scale
        assert dtypes == {torch.float16} and next(model.parameters()).dtype == torch.float32
    use("cpu")
    assert losses == pytest.approx(train()[2], rel=1e-2)


def test_fp16_skips_a_step_whose_gradients_overflow():
    accelerator = integration.Accelerator(mixed_precision="fp16")
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before, scale = model.weight.detach().clone(), accelerator.scaler.get_scale()
    accelerator.backward(model(torch.full((1, 1), 60000.0, device="openreg")).sum() * 60000.0)
    optimizer.step()
    assert optimizer.step_was_skipped and model.weight.equal(before) and accelerator.scaler.get_scale() < scale


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_integration_leaves_other_precisions_and_devices_alone(precision, use):
    assert train(precision, integration.Accelerator)[0].scaler is None
    use("cpu")
    assert train("fp16", integration.Accelerator)[0].device.type == "cpu"


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_state_is_saved_and_loaded(precision, tmp_path):
    accelerator, model, _, _ = train(precision, integration.Accelerator)
    accelerator.save_state(tmp_path)
    before = [p.detach().clone() for p in model.parameters()]
    if accelerator.scaler:
        scale = accelerator.scaler.get_scale()
        accelerator.scaler.update(2.0)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    accelerator.load_state(tmp_path)
    assert all(a.equal(b) for a, b in zip(before, model.parameters(), strict=True))
    assert not accelerator.scaler or accelerator.scaler.get_scale() == scale


def test_without_the_environment_variable_it_takes_the_cpu(use):
    use(None)
    assert accelerate.Accelerator().device.type == "cpu"


def test_the_integration_comes_too_late_for_an_accelerator_on_the_cpu(use, monkeypatch):
    import importlib

    use("cpu")
    accelerate.Accelerator()
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE")
    with pytest.raises(RuntimeError, match="accelerate already runs on cpu; import this module before"):
        importlib.reload(integration)


def test_a_device_map_names_the_device():
    """dispatch_model, with a map of modules to devices."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    expected = model(torch.ones(2, 4))
    split = accelerate.dispatch_model(model, {"0": "openreg:0", "1": "openreg:1"}, main_device="openreg:0")
    assert [p.device.index for p in split.parameters()] == [0, 0, 1, 1]
    torch.testing.assert_close(split(torch.ones(2, 4)).cpu(), expected)


@pytest.mark.parametrize("second", ["openreg:1", "cpu", "disk"])
def test_a_checkpoint_is_loaded_to_the_devices_of_a_map(second, tmp_path):
    from safetensors.torch import save_file

    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    model = make()
    expected = model(torch.ones(2, 4))
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with accelerate.init_empty_weights():
        empty = make()
    loaded = accelerate.load_checkpoint_and_dispatch(
        empty, str(tmp_path / "model.safetensors"), {"0": "openreg:0", "1": second}, offload_folder=tmp_path / "offload"
    )
    assert loaded[0].weight.device == torch.device("openreg:0")
    torch.testing.assert_close(loaded(torch.ones(2, 4)).cpu(), expected)


def test_automatic_device_maps_take_the_cpu():
    assert set(accelerate.infer_auto_device_map(nn.Linear(4, 4)).values()) == {"cpu"}
    with pytest.raises(ValueError, match="Device openreg:0 is not recognized"):
        accelerate.utils.get_max_memory({"openreg:0": "1GB"})
