"""The device in training frameworks that list the devices they know: one module per framework, imported by its user.

    lightning.py     Trainer(accelerator="openreg") and Fabric(accelerator="openreg")
    accelerate.py    the default device, and Accelerator(mixed_precision="fp16")
    transformers.py  TrainingArguments(bf16=True) and TrainingArguments(fp16=True)

Importing openreg_ops imports none of these. docs/integration.md says what works without them.
"""
