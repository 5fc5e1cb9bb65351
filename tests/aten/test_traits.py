"""The table of traits: what is special about each operator."""

import re
from pathlib import Path

import torch

SOURCE = Path(__file__).parents[2] / "csrc/aten/traits/traits.cpp"
ROWS = {
    row.partition('"')[0]: row.partition("\n  };")[0] for row in SOURCE.read_text().split('\n      {"')[1:]
}  # the text of each row, by operator
KEYS = ("CPU", "SparseCPU", "SparseCsrCPU", "QuantizedCPU", "NestedTensorCPU")


def rows_for(op: str) -> list[str]:
    """The names under which an operator finds its row, the first that is there."""
    name, _, overload = op.partition(".")
    names = [name, name[:-1]] if name.endswith("_") else [name]
    return [each for name in names for each in ([f"{name}.{overload}", name] if overload else [name])]


def operators() -> dict[str, list[str]]:
    """The operators of each row, of those that the boxed kernel may run."""
    found = {name: [] for name in ROWS}
    for op in torch._C._dispatch_get_all_op_names():
        row = next((name for name in rows_for(op) if name in ROWS), None)
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        if row and (any(has(op, key) for key in KEYS) or "runs_on_aliases" in ROWS[row]):
            found[row].append(op)
    return found


def test_every_row_has_an_operator():
    assert len(ROWS) > 150 and list(ROWS) == sorted(ROWS)
    missing = {name for name, ops in operators().items() if not ops}
    assert missing <= {"aten::cholesky"}  # which PyTorch 2.15 does not have


def test_rows_name_arguments_that_operators_have():
    for name, ops in operators().items():
        lists = re.findall(r"\.contiguous = \{(.*?)\}", ROWS[name], re.DOTALL)
        named = {each for text in lists for each in re.findall(r'"(\w+)"', text)}
        named |= {each for each in re.findall(r'\.only_cpu_scalar = "(\w*)"', ROWS[name]) if each}
        schemas = [torch._C._get_schema(*(op.partition(".")[::2])) for op in ops]
        assert all(named <= {argument.name for argument in schema.arguments} for schema in schemas), name
