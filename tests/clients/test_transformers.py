"""transformers: the Trainer and generate() on tiny random models."""

import pytest
import torch

transformers = pytest.importorskip("transformers")


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


def train(model, data, folder, **options):
    """The trainer; the logged losses and what evaluate() says."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, num_train_epochs=2, logging_steps=1, report_to=[],
        learning_rate=1e-3, disable_tqdm=True, save_strategy="epoch", **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)
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
