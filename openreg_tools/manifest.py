"""What a version of torch declares about its operators: schemas, which need a kernel, derivative formulas.

A manifest is read from three files that every torch ships, installed or in its wheel, without importing it:
RegistrationDeclarations.h (schemas; whether a backend must register a kernel), native_functions.yaml (structured
operators, keys) and derivatives.yaml. Those of 2.10.0 to 2.15.0 are in manifests/.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
import re
import zipfile
from pathlib import Path

from openreg_tools.core.options import Wrong

__all__ = ["Manifest", "Operator", "installed", "read", "save", "versions"]

SHIPPED = Path(__file__).parent / "manifests"
FILES = (
    "torch/include/ATen/RegistrationDeclarations.h",
    "torchgen/packaged/ATen/native/native_functions.yaml",
    "torchgen/packaged/autograd/derivatives.yaml",
    "torch/version.py",
)


# Operators that torch's lists require of a device, but that exist only for the kernels of one library or vendor;
# attention and depthwise convolution reach other devices as _scaled_dot_product_fused_attention_overrideable and
# convolution_overrideable.
_OF_A_LIBRARY = re.compile(
    "(^|_)(cudnn|miopen|mkldnn|mps|cslt|triton|sparse_semi_structured|spsolve|nested|mixed_dtypes_linear"
    "|(flash|efficient)_attention|mem_eff|conv_depthwise[23]d)(_|$)|^max_pool2d_backward$"
)
_LAYOUTS = {"SparseCPU", "SparseCsrCPU", "QuantizedCPU", "NestedTensorCPU", "MkldnnCPU"}


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator of the namespace aten."""

    schema: str  # "add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"
    kind: str  # "required", "elsewhere", "structured" (runs through `delegate`), "explicit" or "implicit" (composites)
    delegate: str = ""  # "add.out"
    derivative: str = ""  # its formulas, a line each

    def kind_at(self, key: str) -> str:
        """Its class for a dispatch key: an operator that is "elsewhere" for dense tensors is required for other
        layouts' keys."""
        layout = key.startswith(("Sparse", "Quantized", "Nested"))
        return "required" if layout and self.kind == "elsewhere" else self.kind


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Every operator of one version of torch, by its name without "aten::"."""

    torch: str
    operators: dict[str, Operator]

    def dict(self) -> dict:
        return {"torch": self.torch, "operators": {name: vars(op) for name, op in self.operators.items()}}

    @functools.cached_property
    def backward(self) -> dict[str, tuple[str, ...]]:
        """The operators for which a backend must register kernels so that each operator's derivative works, if any."""
        wanted: dict[str, list[str]] = {}
        for name, op in self.operators.items():
            if op.kind in ("required", "elsewhere", "structured") and "backward" in name.partition(".")[0]:
                wanted.setdefault(name.partition(".")[0], []).append(name)
        out = {}
        for name, op in self.operators.items():
            called = dict.fromkeys(word.removesuffix("_symint") for word in re.findall(r"\b(\w+)\(", op.derivative))
            if found := tuple(word for word in called if word in wanted):
                out[name] = found
        return out


def versions() -> list[str]:
    """The versions of torch whose manifests are included."""
    return sorted(path.name.removesuffix(".json.gz") for path in SHIPPED.glob("*.json.gz"))


def read(source: str) -> Manifest:
    """The manifest of a version that ships here ("2.13.0"), a saved one, a wheel, or an environment's folder.

    Raises:
        Wrong: `source` is none of these.
    """
    if source == "installed":
        return installed()
    path = Path(source)
    if not path.exists() and re.fullmatch(r"[\d.]+", source):  # "2.15.0", or "2.15" for its first
        path = min(SHIPPED.glob(f"{source}.*json.gz"), default=path)
    if not path.exists():
        raise Wrong(
            f"there is no {source}: expected a version that ships with this package ({', '.join(versions())}), `installed`, "
            "a saved manifest, a wheel of torch, or the folder of an environment"
        )
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return _parsed([_member(wheel, name, source) for name in FILES])
    if path.is_dir():
        for folder in (path, *path.glob("lib/python*/site-packages"), *path.glob("Lib/site-packages")):
            if (folder / FILES[0]).exists():
                return _parsed([(folder / name).read_text() for name in FILES])
        raise Wrong(f"there is no torch in {source}: {FILES[0]} is neither in it nor in its site-packages")
    try:
        data = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_text())
        fields = [field.name for field in dataclasses.fields(Operator)]
        operators = {name: Operator(*(op[field] for field in fields)) for name, op in data["operators"].items()}
        return Manifest(data["torch"], operators)
    except (ValueError, KeyError, TypeError) as error:
        raise Wrong(f"{source} is not a manifest: {error}; save one with drift --save") from error


def _member(wheel: zipfile.ZipFile, name: str, source: str) -> str:
    try:
        return wheel.read(name).decode()
    except KeyError:
        raise Wrong(f"{source} is not a wheel of torch: {name} is missing") from None


@functools.cache
def installed() -> Manifest:
    """The manifest of the running torch."""
    import torch

    return read(str(Path(torch.__file__).parents[1]))


def save(manifest: Manifest, path: Path) -> None:
    """Write a manifest, compressed where the name ends in .gz; the same manifest gives the same bytes."""
    text = json.dumps(manifest.dict(), separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text, 9, mtime=0) if path.suffix == ".gz" else text)


# ---- reading the files ----


def _parsed(texts: list[str]) -> Manifest:
    declarations, functions, derivatives, version = texts
    natives = _entries(functions, "func")
    formulas = _entries(derivatives, "name")
    operators = {}
    for line in declarations.splitlines():
        if '{"schema"' not in line:
            continue
        entry = json.loads(line[line.index('{"schema"') :])
        schema = entry["schema"].removeprefix("aten::")
        name = schema.partition("(")[0]
        native = dict(line.partition(": ")[::2] for line in natives.get(name, ()))
        delegate = native.get("structured_delegate", "")
        if entry["default"] == "False":
            kind = "elsewhere" if _elsewhere(name, natives.get(name, ())) else "required"
        elif delegate:
            kind = "structured"
        else:
            kind = "explicit" if entry["dispatch"] == "True" else "implicit"
        operators[name] = Operator(schema, kind, delegate, "\n".join(formulas.get(name, ())))
    found = re.search(r"__version__ = '([^'+]+)", version)
    return Manifest(found[1] if found else "unknown", operators)


def _elsewhere(name: str, native: list[str]) -> bool:
    """Returns true if a required operator does not concern a new backend's dense tensors."""
    keys = {key for line in native if line[0].isupper() for key in re.findall(r"\w+", line.partition(":")[0])}
    # The CPU's ufunc kernels are generated and listed under Generic.
    return bool(_OF_A_LIBRARY.search(name.partition(".")[0]) or keys & _LAYOUTS and not keys & {"CPU", "Generic"})


def _entries(text: str, key: str) -> dict[str, list[str]]:
    """The entries of a list in YAML, by operator name, as their lines without comments; enough for torch's files."""
    entries: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).rstrip()
        if line.startswith(f"- {key}: "):
            lines = entries.setdefault(line.removeprefix(f"- {key}: ").partition("(")[0], [])
        elif line.startswith(" "):
            lines.append(line.strip())
    return entries
