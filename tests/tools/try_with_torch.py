"""Try openreg_tools with other versions of torch: ``python tests/tools/try_with_torch.py 2.10.0 2.15.0``.

Each version is installed in a temporary environment (with CUDA, as PyPI has it: gigabytes, minutes), the tools from this
checkout, and every command is run once on the CPU and on a backend in Python. ``--here`` takes the torch that is installed,
and ``--device cuda`` uses another device in place of the CPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "openreg_tools"
FILES = {
    "mine.py": """
import torch

@torch.library.custom_op("mine::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2

@halve.register_fake
def _(x):
    return torch.empty_like(x)

halve.register_autograd(lambda context, gradient: gradient / 2)
halve.register_vmap(lambda info, dims, x: (halve(x), dims[0]))
""",
    "toy.py": """
import torch

torch.utils.rename_privateuse1_backend("toy")
library = torch.library.Library("aten", "IMPL")
library.impl("relu", lambda x: x, "PrivateUse1")
""",
    "program.py": """
import sys
import torch

device = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8, device=device)).square().mean()
    loss.backward()
    optimizer.step()
print(loss.item())
""",
    "test_it.py": """
import torch

def test_it(device, openreg_check, request):
    assert torch.ones(2, device=device).device.type == request.config.getoption("--device")
    openreg_check("aten::neg", [(torch.ones(2, 3, device=device),)], only=["runs", "reference", "schema"])
""",
}
COMMANDS = [
    "-m openreg_tools info",
    "-m openreg_tools check mine:halve --input f32[3,4] --device DEVICE --quiet",
    "-m openreg_tools operators --device DEVICE --ops ^aten::(add|relu)",
    "-m openreg_tools operators --import toy --device toy --ops ^aten::(add|relu)",
    "-m openreg_tools explain relu --device DEVICE --input f32[3]",
    "-m openreg_tools explain relu --import toy",
    "-m openreg_tools trace --device DEVICE program.py DEVICE",
    "-m openreg_tools drift 2.10 installed --import toy --device toy",
    "-m openreg_tools conformance --device DEVICE --ops ^(mul|add|aten::relu|nn.ReLU|optim.SGD)$ --dtypes float32 --jobs 1",
    "-m pytest -q -p no:cacheprovider --device DEVICE test_it.py",
]
NOT_ON_THE_CPU = ["-m openreg_tools compare --device DEVICE --against cpu program.py -- DEVICE"]


def run(python: str, device: str) -> list[str]:
    """Run every command on the device; those that fail, with the end of what they said."""
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name, text in FILES.items():
            (Path(folder) / name).write_text(text)
        commands = COMMANDS + NOT_ON_THE_CPU * (device != "cpu")
        for command in (each.replace("DEVICE", device) for each in commands):
            autoload = "0" if device == "cpu" or "toy" in command else "1"
            environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
            done = subprocess.run(
                [python, *command.split()], cwd=folder, env=environment, capture_output=True, text=True
            )
            # 1 says that a registration breaks, or that `info` found something; a traceback is our mistake.
            fine = done.returncode == 0 or (done.returncode == 1 and {"drift", "info"} & set(command.split()))
            print(f"  {'ok' if fine and 'Traceback' not in done.stderr else 'FAILED':8}{command}", flush=True)
            if not fine or "Traceback" in done.stderr:
                failed.append(f"{command}: status {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--here", action="store_true", help="the environment of this Python")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    failed = []
    if options.here:
        failed += run(sys.executable, options.device)
    for version in options.versions:
        print(f"torch {version}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            pip = [f"{folder}/bin/pip", "install", "-q"]
            subprocess.run([*pip, f"torch=={version}", "pytest", "expecttest", str(TOOLS)], check=True)
            failed += run(f"{folder}/bin/python", options.device)
    print("", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
