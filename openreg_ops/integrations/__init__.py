"""Support for training frameworks that hard-code their devices: one module per framework, which you import.

    lightning.py     Trainer(accelerator="openreg") and Fabric(accelerator="openreg")
    accelerate.py    the default device, and Accelerator(mixed_precision="fp16")
    transformers.py  TrainingArguments(bf16=True) and TrainingArguments(fp16=True)

Importing openreg_ops imports none of these. docs/integration.md says what works without them.
"""
