"""transformers: the Trainer in each precision, device maps and generate(), on tiny random models.

"transformers" in docs/integration.md says what these tests hold.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("openreg_ops.integrations.transformers")


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def texts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 64, (12,), generator=generator) for _ in range(32)]


def language():
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for ids in texts()]


def classes():
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": int(ids[0] > 32)} for ids in texts()]


def train(model, data, folder, library=transformers, **options):
    """The trainer; the logged losses and what evaluate() says."""
    arguments = library.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, num_train_epochs=2, logging_steps=1, report_to=[],
        learning_rate=1e-3, disable_tqdm=True, save_strategy="epoch", **options,
    )  # fmt: skip
    trainer = library.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return trainer, [*losses, trainer.evaluate()["eval_loss"]]


@pytest.mark.parametrize(("make", "data"), [(gpt2, language), (bert, classes)], ids=["GPT-2", "BERT"])
def test_trainer(make, data, tmp_path, use):
    trainer, losses = train(make(), data(), tmp_path / "device")
    assert trainer.args.device.type == "openreg" and trainer.model.device.type == "openreg"
    assert losses[-1] < losses[0]
    trainer.train(resume_from_checkpoint=True)
    use("cpu")
    _, expected = train(make(), data(), tmp_path / "cpu")
    assert losses == pytest.approx(expected, rel=1e-3)


def lowest(model):
    """The dtypes that a layer of the model computes in."""
    seen = set()
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda module, inputs, out: seen.add(out.dtype))
    return seen


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_through_the_integration(precision, tmp_path, use):
    model = gpt2()
    seen = lowest(model)
    trainer, losses = train(model, language(), tmp_path / "device", integration, **{precision: True})
    assert seen == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert next(trainer.model.parameters()).dtype == torch.float32 and losses[-1] < losses[0]
    assert (trainer.accelerator.scaler is not None) == (precision == "fp16")
    use("cpu")
    _, expected = train(gpt2(), language(), tmp_path / "cpu", integration)
    assert losses == pytest.approx(expected, rel=2e-2)


def test_a_checkpoint_of_fp16_resumes(tmp_path):
    trainer, losses = train(gpt2(), language(), tmp_path, integration, fp16=True)
    again = integration.Trainer(model=gpt2(), args=trainer.args, train_dataset=language())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))  # after the first of two epochs
    assert [entry["loss"] for entry in again.state.log_history if "loss" in entry] == losses[:-1]
    assert again.accelerator.scaler.get_scale() == trainer.accelerator.scaler.get_scale()


def test_bf16_is_refused_by_a_list_of_vendors(tmp_path):
    with pytest.raises(ValueError, match="Your setup doesn't support bf16/gpu"):
        transformers.TrainingArguments(output_dir=str(tmp_path), bf16=True)


def test_fp16_is_refused_by_a_list_of_vendors(tmp_path):
    with pytest.raises(ValueError, match=r"fp16 mixed precision requires a device in .*\(not 'openreg'\)"):
        train(gpt2(), language(), tmp_path, fp16=True)


def test_bf16_by_the_environment(tmp_path, monkeypatch):
    """The workaround that needs no import."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    model = gpt2()
    seen = lowest(model)
    trainer, losses = train(model, language(), tmp_path)
    assert seen == {torch.bfloat16} and losses[-1] < losses[0]


def test_the_integration_refuses_both_precisions_and_leaves_the_cpu_alone(tmp_path, use):
    with pytest.raises(ValueError, match="at most one of"):
        integration.TrainingArguments(output_dir=str(tmp_path), bf16=True, fp16=True)
    use("cpu")
    with pytest.raises(ValueError, match="Your setup doesn't support bf16/gpu"):
        integration.TrainingArguments(output_dir=str(tmp_path), bf16=True)
    assert integration.TrainingArguments(output_dir=str(tmp_path), bf16=True, use_cpu=True).device.type == "cpu"


def test_the_integration_trains_on_the_cpu(tmp_path):
    """use_cpu=True holds although ACCELERATE_TORCH_DEVICE is set, and leaves it set."""
    arguments = integration.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=1)
    trainer = integration.Trainer(model=gpt2(), args=arguments, train_dataset=language())
    assert trainer.accelerator.device.type == arguments.device.type == "cpu"
    trainer.train()
    assert integration.TrainingArguments(output_dir=str(tmp_path), report_to=[]).device.type == "openreg"


@pytest.mark.parametrize("place", ["openreg", "openreg:1", {"": "openreg:1"}, 0, "auto"], ids=str)
def test_a_model_loads_onto_a_device_map(place, tmp_path):
    expected = gpt2()
    expected.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=place)
    wanted = {"auto": "cpu", "openreg": "openreg:0", "0": "openreg:0"}.get(str(place), "openreg:1")
    assert {str(p.device) for p in model.parameters()} == {wanted}
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids.to(wanted)).logits.cpu(), expected(ids).logits)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 20, "top_p": 0.9}, {"cache_implementation": "static"}],
    ids=["greedy", "beams", "sampled", "static cache"],
)
def test_generate(options):
    model = gpt2().eval()
    ids = torch.tensor([[5, 6, 7], [9, 10, 11]])

    def generate(device):
        torch.manual_seed(0)
        inputs = ids.to(device)
        out = model.to(device).generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=12, pad_token_id=0, **options
        )
        assert out.device.type == device
        return out.tolist()

    assert generate("openreg") == generate("cpu")  # the device's generator gives the CPU's numbers
