"""Support for libraries that hard-code their devices: one module per library, which you import.

    lightning.py     Trainer(accelerator="openreg") and Fabric(accelerator="openreg")
    accelerate.py    the default device, and Accelerator(mixed_precision="fp16")
    transformers.py  TrainingArguments(bf16=True) and TrainingArguments(fp16=True)
    safetensors.py   load_file(path, device="openreg"), and what loads through it

Importing openreg_ops imports only the last, as soon as safetensors is imported. docs/integration.md says what works without them.
"""
