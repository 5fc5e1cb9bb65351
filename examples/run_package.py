"""Build examples/run_package.cpp and run a compiled model with it: no Python runs while the model runs.

    python examples/run_package.py [PACKAGE.pt2]

Without a package, it first compiles a small model into one. The model gets one input, ones of shape [5, 16] on
openreg:0.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

import openreg_ops


def compile_model(path: Path) -> Path:
    """A linear layer and a GELU, for any batch."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.GELU()).to("openreg").eval()
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(model, (torch.randn(8, 16, device="openreg"),), dynamic_shapes=({0: batch},))
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    return path


def build(program: Path) -> Path:
    """Compile the C++ program against the installed torch and this Python."""
    directory, version = sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("LDVERSION")
    includes = [*include_paths(), sysconfig.get_path("include")]
    libraries = [*library_paths(), directory]
    subprocess.run(
        [
            *("c++", "-std=c++20", "-O1", str(Path(__file__).with_suffix(".cpp")), "-o", str(program)),
            *(f"-I{path}" for path in includes),
            *(f for path in libraries for f in (f"-L{path}", f"-Wl,-rpath,{path}")),
            *("-Wl,--no-as-needed", "-ltorch_cpu", "-ltorch", "-lc10", f"-lpython{version}"),
        ],
        check=True,
    )
    return program


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        package = Path(sys.argv[1]) if len(sys.argv) > 1 else compile_model(Path(directory, "model.pt2"))
        program = build(Path(directory, "run_package"))
        # The embedded interpreter finds what this one finds, including an editable install, which is not on any path.
        found = [str(Path(openreg_ops.__file__).parents[1]), *sys.path]
        path = os.pathsep.join(folder for folder in found if folder)
        return subprocess.run([str(program), str(package)], env={**os.environ, "PYTHONPATH": path}).returncode


if __name__ == "__main__":
    sys.exit(main())
