"""Plant a fault in each rung of the package that `new-backend` writes, and see whether the ladder names rung and file.

    python tests/tools/ladder_faults.py FOLDER [RUNG...]

FOLDER gets the package. It builds against the installed torch, 30 s for each fault in C++, and a run of the rungs up to the
fault takes up to two minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from openreg_tools.new_backend.command import write

# For each rung: a file, a text in it and what replaces the text.
FAULTS = {
    1: ("torch_acme/device.py", "device_count, current_device = _C.device_count, _C.current_device",
        "device_count, current_device = _C.device_count, lambda: 7"),
    2: ("csrc/operators.cpp", "acme_copy(&element, View(self).data,", "acme_copy(&element, self.storage().data(),"),
    3: ("csrc/operators.cpp", "        if (neg) source = source._neg_view();\n", ""),
    4: ("csrc/fallback.cpp", '  fallback(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), stack);\n',
        '  fallback(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), stack);\n'
        "  if (!backward) stack->back() = stack->back().toTensor().neg();\n"),
    5: ("csrc/device.cpp", "    thread_streams.at(static_cast<size_t>(stream.device_index())) = stream.id();\n", ""),
    6: ("csrc/generator.cpp", "    std::memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);\n", ""),
    7: ("csrc/autocast.cpp", "  AT_FORALL_FP32(FLOAT32)\n", ""),
    8: ("torch_acme/sharing.py", "reduction.register(torch.UntypedStorage, _reduce)\n", ""),
    9: ("csrc/profiler.cpp", "    acme_profile(&collect);\n", ""),
    10: ("torch_acme/inductor.py", "({type_})acme_local(a.{name})", "a.{name}"),
    11: ("csrc/distributed.cpp", "to.copy_(all.amax(0))", "to.copy_(all.amin(0))"),
    # Sizes that PyTorch's samples have, and the programs of the other rungs do not.
    12: ("csrc/fallback.cpp", "      device = value.toTensor().device().index();\n",
         "{\n      device = value.toTensor().device().index();\n      const auto sizes = value.toTensor().sizes();\n"
         '      TORCH_CHECK(sizes.empty() || (sizes[0] != 20 && (sizes.size() != 3 || sizes[0] != 5)), "not these");\n    }\n'),
}  # fmt: skip


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess:
    """Run a command in the package's folder, with its modules."""
    paths = [str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def build(folder: Path) -> None:
    """Build the package in place, with its entry point."""
    done = run(sys.executable, "setup.py", "egg_info", "build_ext", "--inplace", folder=folder)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])


def climb(folder: Path, rungs: int) -> dict:
    """The report of the first rungs."""
    words = ["ladder", "--import", "torch_acme", "--device", "acme", "--rungs", str(rungs), "--json", "-"]
    done = run(sys.executable, "-P", "-m", "openreg_tools", *words, folder=folder)
    return json.loads(done.stdout)


def main(folder: Path, rungs: list[int]) -> int:
    """0 if every fault is blamed."""
    write("acme", folder)
    build(folder)
    wrong = 0
    for rung in rungs or FAULTS:
        name, text, replaced = FAULTS[rung]
        file = folder / name
        before = file.read_text()
        assert before.count(text) == 1, f"{name} has {before.count(text)} times: {text}"
        file.write_text(before.replace(text, replaced))
        build(folder)  # also what the fault before has changed
        first = climb(folder, rung)["first"] or {}
        file.write_text(before)
        found = (first.get("rung"), first.get("file")) == (rung, name)
        wrong += not found
        print(f"rung {rung:2} {name}: {'found' if found else 'NOT FOUND'}: {first.get('rung')} {first.get('file')} "
              f"{first.get('name')}: {first.get('said', '')[:200]}", flush=True)  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).absolute(), [int(word) for word in sys.argv[2:]]))
