"""`record` and the comparison of two traces: fingerprints, alignment, and the commands."""

import argparse
import copy
import json
import math
import os
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from processes import python
from torch import nn

from openreg_tools.compare import command as compare_command
from openreg_tools.compare import compare, mark, record, recording
from openreg_tools.compare.parting import Op, align, read
from openreg_tools.compare.recording import fingerprint
from openreg_tools.forms import Wrong

DEVICE = "openreg"


def evaluate(order=(0, 1, 2), device=DEVICE, extra=False, wrong=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).to(device)
    batches = [torch.randn(4, 6) for _ in range(3)]
    with torch.no_grad():
        for number in order:
            with mark("batch", number):
                x = batches[number].to(device)
                if extra:
                    x = x.flip(0).flip(0)
                y = model(x)
                if number == wrong:
                    y = y * 1.01
                else:
                    y = y * 1.0
                y.sum().item()


def traced(path, **options):
    device = options.get("device", DEVICE)
    with record(path, device=device) as recording:
        evaluate(**options)
    return recording


# ---- fingerprints ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_fingerprints_are_equal_where_values_are(dtype):
    x = (torch.randn(30, 40) * 3).to(dtype)
    for same in (x.t().contiguous().t().contiguous(), x.clone(), x.to(DEVICE).cpu()):
        assert fingerprint(same) == fingerprint(x)
    other = x.clone()
    other[17, 3] = ~other[17, 3] if dtype == torch.bool else other[17, 3] + 1
    assert fingerprint(other)[2] != fingerprint(x)[2]


def test_fingerprints_by_hand():
    dtype, shape, _, total, norm, largest, nans, infinities, samples = fingerprint(torch.tensor([3.0, -4.0]))
    assert (dtype, shape, total, norm, largest, nans, infinities) == ("float32", [2], -1.0, 5.0, 4.0, 0, 0)
    assert samples == [3.0, 3.0, 3.0, -4.0]
    assert fingerprint(torch.tensor([math.nan, math.inf, 2.0]))[3:8] == [2.0, 2.0, 2.0, 1, 1]
    assert fingerprint(torch.empty(0, 3))[1:4] == [[0, 3], 0, 0.0]


def test_large_fingerprints_depend_on_every_element_and_its_place():
    x = torch.arange(100_000.0)
    before = fingerprint(x)[2]
    for place in (0, 50_000, 99_999):
        y = x.clone()
        y[place] += 1
        assert fingerprint(y)[2] != before
    assert fingerprint(x.roll(1))[2] != before and fingerprint(x.flip(0))[2] != before


@pytest.mark.parametrize("columns", [256, 257, 512, 514])
def test_two_exchanges_in_large_tensors_do_not_cancel(columns):
    def with_ones_at(*places, sign):
        x = torch.full((40, columns), float(sign))
        for place in places:
            x[place] = 1.0
        return fingerprint(x)[2]

    for a, b, c in ((5, 9, (10, 100)), (5, 9, (11, 101)), (0, 39, (0, 255))):
        for sign in (-1, 3):
            aligned = with_ones_at((a, c[0]), (b, c[1]), sign=sign)
            assert aligned != with_ones_at((a, c[1]), (b, c[0]), sign=sign)


ODD = {
    "0-dim": lambda: torch.tensor(3.0),
    "empty": lambda: torch.ones(2, 0, 3),
    "one element of a column": lambda: torch.arange(2.0, 7.0).view(1, 5)[:, 0],
    "one element of any strides": lambda: torch.arange(2.0, 52.0).as_strided((1, 1), (7, 5)),
    "sizes of 1 with any stride": lambda: torch.arange(500.0).as_strided((3, 1, 2), (2, 100, 1), 4),
    "expanded": lambda: torch.ones(1).expand(3),
    "complex": lambda: torch.tensor([1 + 2j, 3 - 4j]),
    "complex half": lambda: torch.ones(3, dtype=torch.complex32),
    "conj": lambda: torch.tensor([[1 + 2j, 3 - 4j]])[:, 0].conj(),
    "neg": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "bool": lambda: torch.tensor([True, False]),
    "uint64": lambda: torch.tensor([2**63 + 1, 0], dtype=torch.uint64),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "nan and infinite": lambda: torch.tensor([float("nan"), float("inf")]),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors|quantized|ComplexHalf)")
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_odd_tensors_do_not_end_the_program(tmp_path, make):
    """The device and the host each have a line, with equal fingerprints."""
    lines = []
    for device in (DEVICE, "cpu"):
        with torch.device(device):
            try:
                x = make()
            except RuntimeError:
                continue  # the device does not have such tensors
            with record(tmp_path / device, device=device) as trace:
                x.clone()
        lines.append([op.prints for op in read(trace.path).ops if op.name == "aten::clone"])
    assert lines[0] and lines[0] == lines[-1]


def test_results_on_meta_are_not_read(tmp_path):
    x = torch.ones(3, device=DEVICE)
    with record(tmp_path / "a") as trace:
        x.to("meta")
    assert [op.prints for op in read(trace.path).ops] == [[]]


def test_what_cannot_be_read_is_left_out_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "fingerprint", lambda x: x.no_such_thing)
    with pytest.warns(UserWarning, match="the trace has no line for") as found:
        with record(tmp_path / "a"):
            y = torch.ones(3, device=DEVICE)
            assert (y + y + y).tolist() == [3.0] * 3
    (said,) = [str(each.message) for each in found if "aten::add" in str(each.message)]
    assert "aten::add.Tensor, whose result cannot be read: AttributeError: " in said and "no_such_thing" in said


# ---- traces ----


def test_two_runs_of_one_program_are_equal(tmp_path):
    a, b = traced(tmp_path / "a"), traced(tmp_path / "b")
    assert a.operators == b.operators > 20
    parting = compare(a.path, b.path)
    assert parting.first is None and parting.first_bits is None and not parting.only_a and not parting.only_b
    assert "The runs do not part." in parting.report()
    parting.assert_close()
    lines = a.path.read_text().splitlines()
    assert all(len(line) <= 1024 for line in lines) and len("\n".join(lines)) < 1024 * a.operators


def test_long_lists_take_no_more(tmp_path):
    with record(tmp_path / "a") as recording:
        torch._foreach_add([torch.ones(2, 3, device=DEVICE) for _ in range(300)], 1.0)
    assert max(len(line) for line in recording.path.read_text().splitlines()) <= 1024


def test_arguments_of_many_dimensions_are_listed_while_they_fit(tmp_path):
    """A line names the first of them, as many as it has room for."""
    many = [(1,) * 60 for _ in range(6)]
    with record(tmp_path / "a") as recording:
        torch.cat([torch.ones(shape, device=DEVICE) for shape in many])
    lines = recording.path.read_text().splitlines()
    (line,) = [line for line in map(json.loads, lines) if len(line.get("i", ())) > 1]
    assert 2 <= len(line["i"]) < 6 and all(shape == [1] * 60 for _, shape in line["i"])
    assert max(map(len, lines)) <= 1024


def test_fingerprints_of_lists(tmp_path):
    """They depend on every element, every shape, and the order; also where the dtypes differ or a value is NaN."""

    def prints(*tensors):
        with record(tmp_path / "a"):
            torch._foreach_add([t.to(DEVICE) for t in tensors], 0)
        (found,) = read(tmp_path / "a").ops[-1].prints
        return found

    five = [torch.arange(6.0).view(2, 3) + i for i in range(5)]
    dtype, shape, digest, total, _, largest, nans, *_ = prints(*five)
    assert (dtype, shape, total, largest, nans) == ("float32", [5], 5 * 15 + 6 * 10, 9.0, 0)
    assert prints(*five)[2] == digest
    changed = [t.clone() for t in five]
    changed[3][1, 2] += 1
    others = (changed, five[::-1], [*five[:4], five[4].view(3, 2)], [*five[:4], five[4].double()])
    assert len({digest, *(prints(*each)[2] for each in others)}) == 5
    assert prints(*five[:4], torch.full((2, 3), math.nan))[6] == 6


def test_where_they_part(tmp_path):
    a, b = traced(tmp_path / "a"), traced(tmp_path / "b", wrong=1)
    parting = compare(a.path, b.path)
    first = parting.first
    assert (
        first.a.name == "aten::mul.Tensor" and first.a.label == "batch=1" and "test_compare_traces.py" in first.a.line
    )
    assert first.relative == pytest.approx(0.01, rel=0.1)
    assert parting.ranked[0].a.name == "aten::mul.Tensor" and "The runs part at" in parting.report()
    with pytest.raises(AssertionError, match="The runs part at"):
        parting.assert_close()
    with pytest.raises(ValueError, match="keeps no inputs"):
        parting.write_test("unused")
    assert (
        json.loads(json.dumps(parting.dict()))["first"]["operator"] == "aten::mul.Tensor" and "<svg" in parting.html()
    )


def test_a_difference_within_the_tolerance_is_not_called_equal(tmp_path):
    for name, value in (("a", 1.0), ("b", 1.0 + 2**-23)):
        x = torch.full((3,), value, device=DEVICE)
        with record(tmp_path / name):
            x * 3
    parting = compare(tmp_path / "a", tmp_path / "b")
    assert not parting.parted and parting.first_bits.a.name == "aten::mul.Tensor"
    report = parting.report()
    assert "The runs do not part beyond the tolerance." in report and "Bits differ first at" in report
    parting.assert_close()


def test_a_byte_flipped_in_a_copy(tmp_path):
    a = traced(tmp_path / "a")
    with torch.openreg.faults.inject("copy", after=6) as fault:
        b = traced(tmp_path / "b")
    parting = compare(a.path, b.path)
    assert fault.struck == 1 and parting.first.a.name == "aten::_to_copy" and parting.first.a.label == "batch=0"


def test_batches_in_another_order(tmp_path):
    a, b = traced(tmp_path / "a"), traced(tmp_path / "b", order=(2, 0, 1))
    parting = compare(a.path, b.path)
    assert parting.first is None and not parting.only_a and not parting.only_b
    assert any(x.index != y.index for x, y in parting.pairs)


def test_devices_and_operators_that_one_run_has_more(tmp_path):
    """The CPU runs no copies to the device; the other flips twice."""
    a, b = traced(tmp_path / "a", device="cpu"), traced(tmp_path / "b", extra=True)
    parting = compare(a.path, b.path)
    assert parting.first is None, parting.report()
    assert {op.name for op in parting.only_b} == {"aten::_to_copy", "aten::flip"}
    assert sum(x is not None and y is not None for x, y in parting.pairs) >= 18


def test_alignment_by_hand():
    op = lambda i, name: Op(i, name, "", "", "", "", "forward", [], [["float32", [1], 0]])  # noqa: E731
    a, b = ([op(i, name) for i, name in enumerate(names)] for names in ("abcdefg", "abxxcdfg"))
    shown = "".join(f"{x.name if x else '-'}{y.name if y else '-'} " for x, y in align(a, b))
    assert shown == "aa bb -x -x cc dd e- ff gg "


def test_backward_in_place_and_values(tmp_path):
    with record(tmp_path / "a", values=True) as recording:
        x = torch.ones(3, device=DEVICE, requires_grad=True)
        (x * x).sum().backward()
        with torch.no_grad():
            x.add_(1)
    ops = read(recording.path).ops
    assert any(op.phase == "backward" and op.node == "MulBackward0" for op in ops)
    assert ops[-1].name == "aten::add_.Tensor" and ops[-1].prints[0][3] == 6.0
    (saved,) = torch.load(tmp_path / "a.values" / f"{len(ops) - 1}.pt")
    assert saved.tolist() == [2.0, 2.0, 2.0]


def test_a_file_that_was_cut_off(tmp_path):
    a = traced(tmp_path / "a")
    text = a.path.read_text()
    (tmp_path / "b").write_text(text[: len(text) // 2])
    parting = compare(a.path, tmp_path / "b")
    assert parting.b.truncated and parting.first is None and parting.only_a
    assert "is cut off: read up to operator" in " ".join(parting.report().split())
    with pytest.raises(AssertionError, match=r"is\s+cut\s+off"):
        parting.assert_close()


def test_a_file_that_is_damaged(tmp_path):
    a = traced(tmp_path / "a")
    lines = a.path.read_text().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if '"o"' in line)
    lines[number] = lines[number].replace('"', "'")
    (tmp_path / "b").write_text("".join(lines))
    parting = compare(a.path, tmp_path / "b")
    assert parting.parted and f"damaged in line {number + 1}: read up" in " ".join(parting.report().split())


def of_an_operator(change):
    """Changes the last operator's line."""

    def changed(lines):
        number = max(i for i, line in enumerate(lines) if '"o"' in line)
        words = json.loads(lines[number])
        change(words)
        return [*lines[:number], json.dumps(words) + "\n", *lines[number + 1 :]]

    return changed


@pytest.mark.parametrize(
    "change",
    [
        of_an_operator(lambda words: words.update(r=3)),
        of_an_operator(lambda words: words.update(r=[3])),
        of_an_operator(lambda words: words["r"][0].pop()),
        of_an_operator(lambda words: words["r"][0].append(0)),
        of_an_operator(lambda words: words["r"][0].__setitem__(3, None)),
        of_an_operator(lambda words: words["r"][0].__setitem__(1, "ab")),
        of_an_operator(lambda words: words["r"][0].__setitem__(8, 1.0)),
        of_an_operator(lambda words: words.update(i=[["float32", ["x"]]])),
        of_an_operator(lambda words: words.update(i=[3])),
        lambda lines: [*lines[:-1], json.dumps({"end": json.loads(lines[-1])["end"] + 1}) + "\n"],
        lambda lines: [*lines, lines[-1]],
        lambda lines: [*lines[:2], lines[-1], *lines[2:]],
    ],
)  # fmt: skip
def test_a_file_with_a_line_that_record_does_not_write(tmp_path, change):
    a = traced(tmp_path / "a")
    (tmp_path / "b").write_text("".join(change(a.path.read_text().splitlines(keepends=True))))
    parting = compare(a.path, tmp_path / "b")
    assert parting.b.truncated and parting.parted and parting.first is None


# ---- random numbers from two generators ----


def drops_layers(device, host=None, seeds=False, wrong=False):
    """A program that drops layers by numbers of the CPU, and elements by numbers of the device."""
    torch.manual_seed(0)
    x = torch.ones(64, device=device)
    if wrong and device != "cpu":
        x += 1
    for _ in range(4):
        x = x * 1.5
        if seeds:
            torch.manual_seed(2)
        keep = torch.rand(1, generator=host).item() > 0.1
        if seeds:
            torch.manual_seed(1)
        if keep:
            x = x * torch.rand_like(x)
    return x.sum().item()


def traces_of(tmp_path, **options):
    for name, device in (("a", "cpu"), ("b", DEVICE)):
        host = torch.Generator().manual_seed(5) if options.get("own") else None
        with record(tmp_path / name, device=device, name="drops.py"):
            drops_layers(device, host, options.get("seeds", False), options.get("wrong", False))
    return tmp_path / "a", tmp_path / "b"


def test_traces_of_two_generators(tmp_path):
    """The runs part, and the report says why, in either order."""
    traces = traces_of(tmp_path)
    for pair in (traces, traces[::-1]):
        parting = compare(*pair)
        said = " ".join(parting.report().split())
        assert parting.parted and parting.dict()["generators"] == parting.generators() and parting.generators() in said
        assert f"{traces[1]} has random numbers from two generators: the CPU's, first at " in said
        assert "(aten::rand.generator), and openreg's, first at " in said and "(aten::rand_like)" in said
        assert f"{traces[0]} draws both from one generator" in said and "`compare --against cpu drops.py`" in said
        assert parting.generators()[:23] in parting.html()


@pytest.mark.parametrize(
    "options", [{"own": True}, {"seeds": True}, {"wrong": True}], ids=lambda each: next(iter(each))
)
def test_traces_without_a_second_generator(tmp_path, options):
    """A generator of the program's own, a seed between the two, and a difference before the first draw."""
    parting = compare(*traces_of(tmp_path, **options))
    assert not parting.generators() and "generators" not in parting.report()
    assert parting.parted == ("wrong" in options), parting.report()


@pytest.mark.parametrize("options", [{}, {"own": True}, {"seeds": True}], ids=str)
def test_a_program_of_two_generators(options):
    """Under compare, both devices have the same numbers, and a note says that a run on the CPU has others."""
    host = torch.Generator().manual_seed(5) if "own" in options else None
    with compare(device=DEVICE) as result:
        drops_layers(DEVICE, host, "seeds" in options)
    notes = [note for note in result.notes if "two generators" in note]
    assert result.first is None and len(notes) == (not options), result.report()
    if notes:
        assert "(aten::rand.generator), and openreg's, first at " in notes[0] and "no fault of openreg" in notes[0]


def test_attention_without_dropout_draws_nothing(tmp_path):
    """Its operator may draw, and another device has nothing to compare with."""
    torch.manual_seed(0)
    x = torch.rand(1, 1, 4, 8).to(DEVICE)
    with record(tmp_path / "a") as recording:
        torch.rand(1)
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
    assert read(recording.path).draws is None
    with record(tmp_path / "b") as recording:
        torch.rand_like(x)
    index, host, device = read(recording.path).draws if read(recording.path).draws else (0, "", "")
    assert (index, host, device) == (0, "", "")  # the CPU's draw was before the recording


# ---- damaged traces ----


def small_trace(path):
    """A trace of a forward and a backward in a module, with a label, a thread, a number, a result of no elements, and
    random numbers from two generators."""
    with record(path, name="small.py") as recording:
        model = nn.Linear(2, 2).to(DEVICE)
        with mark("batch", 1):
            model(torch.ones(3, 2, device=DEVICE)).sum().backward()
        thread = threading.Thread(target=lambda: torch.ones(2, device=DEVICE) + 1)
        thread.start()
        thread.join()
        torch.ones(0, device=DEVICE).add(1)
        torch.rand(1, device=DEVICE).item()
    return recording.path


# Values of another type, or that overflow where they are used.
VALUES = (
    None, True, -1, 2**63, 10**400, 1.5, math.nan, math.inf, "", "ab", "\ud800", "\x1b[31m", [], [[]], [-1], ["a", 1],
    [2**62, 2**62], [0, 10**400], {}, {"end": 1},
)  # fmt: skip


def places(value, path=()):
    """The path of every value in JSON."""
    yield path
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(each, (*path, key))


def put(value, path, new):
    """A copy with another value at a path."""
    if not path:
        return new
    copied = copy.copy(value)
    copied[path[0]] = put(value[path[0]], path[1:], new)
    return copied


def mutations(lines):
    """Every line without its end, with other values, twice, not at all, and with others around it: as bytes."""
    for i, line in enumerate(lines):
        before, after = lines[:i], lines[i + 1 :]
        words = json.loads(line)
        for new in (
            b"", line[: len(line) // 3], line[: 2 * len(line) // 3], b"[" * 100_000, b'{"s":' * 100_000, b"\xff\xfe" + line,
            line.replace(b'"', b"'"), line + line, b"9" * 5000, b"\0", b"null", b'"end"', b'["end"]', b"[]", b"{}",
        ):  # fmt: skip
            yield i, new[:40], [*before, new, *after]
        yield i, "deleted", [*before, *after]
        yield i, "twice", [*before, line, line, *after]
        yield i, "last", [*before, *after, line]
        yield i, "first", [line, *before, *after]
        for path in places(words):
            for new in VALUES:
                yield i, (path, new), [*before, json.dumps(put(words, path, new)).encode(), *after]
        if isinstance(words, dict):
            for key in words:
                rest = {name: value for name, value in words.items() if name != key}
                yield i, f"without {key}", [*before, json.dumps(rest).encode(), *after]


def test_no_damage_raises(tmp_path):
    """Whatever a trace holds, compare reports it, or says which file it cannot read."""
    path = small_trace(tmp_path / "a")
    lines = path.read_bytes().splitlines()
    kinds = {json.dumps(sorted(json.loads(line))) for line in lines}
    # Lines of the same kind are read alike: the header, a text, an operator of a thread, the generators and the end.
    chosen = [
        0,
        1,
        *(next(i for i, line in enumerate(lines) if key in line) for key in (b'"t"', b'"g"')),
        len(lines) - 1,
    ]
    assert len(kinds) >= 5 and len(lines) > 10
    refused = damaged = equal = 0
    for i, what, mutated in mutations(lines):
        if i not in chosen:
            continue
        (tmp_path / "b").write_bytes(b"\n".join([*mutated, b""]))
        try:
            parting = compare(tmp_path / "b", tmp_path / "a")
            parting.text().encode(), json.dumps(parting.dict())
            if parting.first_bits is not None:
                parting.html().encode()
        except Wrong as error:
            assert str(tmp_path / "b") in str(error) and "\n" not in str(error)
            refused += 1
        except Exception as error:
            raise AssertionError(f"line {i + 1}, {what}: {type(error).__name__}: {error}") from error
        else:
            damaged += parting.a.truncated
            equal += not parting.parted
    assert refused > 100 and damaged > 300 and equal < damaged, (refused, damaged, equal)


@pytest.mark.parametrize(
    "change, status, said",
    [
        (lambda lines: [*lines[:3], "[" * 100_000, *lines[3:]], 1, "is damaged in line 4: read up to operator"),
        (lambda lines: [lines[0].replace('"version": 6', '"version": [6]'), *lines[1:]], 2, "is not a header"),
        (lambda lines: [lines[0].replace('"world": 1', '"world": "1"'), *lines[1:]], 2, "is damaged in line 1: "),
        (lambda lines: [re.sub('^{"s".*', '{"s": []}', line) for line in lines], 1, "is damaged in line 2: read up to"),
    ],
)
def test_compare_command_of_a_damaged_trace(tmp_path, capsys, change, status, said):
    path = small_trace(tmp_path / "a")
    (tmp_path / "b").write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    parser = argparse.ArgumentParser()
    compare_command.add_arguments(parser)
    arguments = parser.parse_args([str(tmp_path / "a"), str(tmp_path / "b")])
    try:
        assert compare_command.main(arguments) == status == 1
        said_there = capsys.readouterr().out
    except Wrong as error:
        assert status == 2
        said_there = str(error)
    assert said in " ".join(said_there.split()) and str(tmp_path / "b") in said_there


def remove(recording):
    shutil.rmtree(recording.path.parent)


def close(recording):
    recording._file.close()


def close_descriptor(recording):
    os.close(recording._file.fileno())


def replace(recording):
    recording.path.unlink()
    recording.path.write_text("another")


def remove_values(recording):
    shutil.rmtree(f"{recording.path}.values")


@pytest.mark.parametrize("damage", [remove, close, close_descriptor, replace, remove_values])
def test_a_file_that_can_no_longer_be_written(tmp_path, capfd, damage):
    """The program goes on, and the trace is incomplete."""
    (tmp_path / "there").mkdir()
    with record(tmp_path / "there" / "a", values=damage is remove_values) as recording:
        x = torch.ones(3, device=DEVICE) + 1
        damage(recording)
        for _ in range(3):
            x = x + 1
    assert x.tolist() == [5.0] * 3
    assert recording.incomplete.startswith(f"{recording.path} is incomplete, it ends after ")
    assert f"record: {recording.incomplete}\n" in capfd.readouterr().err
    if damage in (close, close_descriptor, remove_values):
        assert read(recording.path).truncated


def test_a_full_disk(capfd):
    for values in (False, True):
        with record("/dev/full", values=values) as recording:
            x = torch.ones(3, device=DEVICE) + 1
        expected = "is incomplete, it ends after 0 operators: [Errno 28] No space left on device"
        if values:
            expected = "cannot be written: Not a directory"  # /dev/full.values cannot be made
        assert x.tolist() == [2.0] * 3
        assert recording.incomplete.startswith("/dev/full ") and (values or recording.incomplete.endswith(expected))
        assert recording.incomplete in capfd.readouterr().err and not recording.operators


def test_a_folder_that_is_gone_before_the_first_operator(tmp_path):
    (tmp_path / "there").mkdir()
    with record(tmp_path / "there" / "a") as recording:
        shutil.rmtree(tmp_path / "there")
        assert (torch.ones(3, device=DEVICE) + 1).tolist() == [2.0] * 3
    assert recording.incomplete.endswith("cannot be written: No such file or directory") and not recording.is_open


def test_a_program_that_changes_its_folder(tmp_path, monkeypatch):
    """A relative path means the folder at the start, also for the results."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with record("a", values=True) as recording:
        os.chdir("elsewhere")
        torch.ones(3, device=DEVICE) + 1
    assert not recording.incomplete and str(recording.path) == "a"
    assert not read(tmp_path / "a").truncated and len(list((tmp_path / "a.values").iterdir())) == recording.operators


def test_names_that_are_not_unicode(tmp_path):
    """A program's file may have such a name."""
    name = os.fsdecode(b"caf\xe9.py")
    with record(tmp_path / "a", name=name, device="cpu") as recording, mark("file", name):
        torch.ones(3) + 1
    parting = compare(recording.path, recording.path)
    assert not parting.parted and r"caf\udce9.py" in parting.text().encode().decode()


@pytest.mark.processes
def test_record_command_on_a_full_disk(tmp_path):
    (tmp_path / "full.py").write_text(
        "import resource, torch\n"
        "x = torch.ones(3, device='openreg') + 1\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "for i in range(100): x = x + 1\n"
        "print('finished')\n"
    )
    status, out, err = command(tmp_path, "record", "--out", "a", "full.py")
    assert status == 1 and out == "finished\n", err
    found = re.search(r"record: a is incomplete, it ends after (\d+) operators: \[Errno 27\] File too large\n$", err)
    assert found and 5 < int(found[1]) < 100, err
    status, out, _ = command(tmp_path, "compare", "a", "a")
    assert status == 1 and f"a is cut off: read up to operator {found[1]}" in out


@pytest.mark.parametrize("ends", ["sys.exit(0)", "os._exit(0)", "os.abort()"])
def test_a_process_that_the_program_forks(tmp_path, ends):
    """It records nothing, and the trace goes on without it."""
    (tmp_path / "forks.py").write_text(f"""
import os, sys, torch
x = torch.ones(3) + 1
if not os.fork():
    x * 5
    {ends}
os.wait()
x * 7
""")
    done = python("-m", "openreg_tools", "record", "--out", tmp_path / "a", "--device", "cpu", tmp_path / "forks.py")
    trace = read(tmp_path / "a")
    names = ["aten::ones", "aten::add.Tensor", "aten::mul.Tensor"]
    assert not trace.truncated and [op.name for op in trace.ops] == names, done.stderr
    assert done.returncode == 0 and done.stderr.endswith(f"record: 3 operators in {tmp_path / 'a'}\n")
    assert trace.ops[-1].prints[0][5] == 14.0


def test_processes_forked_while_a_thread_is_recorded(tmp_path):
    """None waits for a lock that the thread held."""
    (tmp_path / "forks.py").write_text("""
import atexit, os, sys, threading, torch
def work():
    x = torch.ones(1 << 20)
    while not stop:
        x.add_(1)
stop, thread = False, threading.Thread(target=work)
thread.start()
for _ in range(20):
    if not os.fork():
        atexit.register(os._exit, 0)  # torch's own end takes long
        sys.exit(0)
    os.wait()
stop = True
""")
    done = python("-m", "openreg_tools", "record", "--out", tmp_path / "a", "--device", "cpu", tmp_path / "forks.py", timeout=100)  # fmt: skip
    assert done.returncode == 0 and not read(tmp_path / "a").truncated, done.stderr


@pytest.mark.parametrize(
    "a, b, words",
    [("a", "b", "a has the ranks 0, 1 and b has the rank 2"), ("a", "c", "c is not a run of several ranks")],
)
def test_runs_without_a_common_rank(tmp_path, a, b, words):
    for path in ("a.rank0", "a.rank1", "b.rank2", "c"):
        traced(tmp_path / path)
    done = python("-m", "openreg_tools", "compare", tmp_path / a, tmp_path / b)
    assert done.returncode == 2 and words in done.stderr.replace(f"{tmp_path}/", "")


@pytest.mark.parametrize("of_a, of_b, alone", [((0, 1), (0,), "a.rank1"), ((0, 10), (0, 3, 10), "b.rank3")], ids=str)
def test_a_rank_without_a_counterpart(tmp_path, of_a, of_b, alone):
    for path in (*(f"a.rank{rank}" for rank in of_a), *(f"b.rank{rank}" for rank in of_b)):
        traced(tmp_path / path)
    done = python("-m", "openreg_tools", "compare", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 1 and "The runs do not part." in done.stdout
    assert done.stderr == f"compare: {tmp_path / alone} has no counterpart, so this rank is not compared\n"


def test_a_rank_that_parts_is_shown_before_one_that_is_not_complete(tmp_path):
    for path in ("a.rank0", "a.rank1", "b.rank0"):
        traced(tmp_path / path)
    with record(tmp_path / "b.rank1"):
        evaluate(wrong=1)
    cut = tmp_path / "b.rank0"
    cut.write_text(cut.read_text().rpartition('{"o"')[0])
    done = python("-m", "openreg_tools", "compare", tmp_path / "a", tmp_path / "b")
    assert done.returncode == 1 and "The runs part at" in done.stdout
    assert "rank 0 is not complete" in done.stdout and "rank 1 parts at operator" in done.stdout


def test_a_program_that_crashes_leaves_its_lines(tmp_path):
    path = tmp_path / "a"
    code = f"""
import os, torch
from openreg_tools.compare import record
with record({str(path)!r}):
    x = torch.ones(3, device="openreg") + 1
    os._exit(1)
"""
    assert python("-c", code).returncode == 1
    trace = read(path)
    assert trace.ops[-1].name == "aten::add.Tensor" and trace.truncated and not trace.damaged


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "its first line is not a header"), ("hello\n", "its first line is not a header"), ("[1]\n", "not a header"),
        ('{"kind": "other", "version": 1}\n', "a trace of 'other', not of"),
        ('{"kind": "openreg_tools.compare", "version": 9}\n', "update openreg_tools"),
        ('{"kind": "openreg_tools.compare", "version": 1}\n', "is of version 1, .*: record it again"),
    ],
)  # fmt: skip
def test_what_is_not_a_trace(tmp_path, text, message):
    (tmp_path / "a").write_text(text)
    with pytest.raises(Wrong, match=message):
        read(tmp_path / "a")


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(Wrong, match="cannot be read: No such file"):
        read(tmp_path / "nothing")
    with pytest.raises(Wrong, match="there is no folder"):
        record(tmp_path / "no" / "a").__enter__()


def test_numbers_are_compared_by_value(tmp_path):
    def run(path, value):
        with record(path) as recording:
            torch.full((3,), value, device=DEVICE).sum().item()
        return recording.path

    a, b = run(tmp_path / "a", 1.0), run(tmp_path / "b", 2.0)
    parting = compare(a, b)
    assert not parting.only_a and not parting.only_b and parting.pairs[-1][0].name == "aten::_local_scalar_dense"
    assert parting.pairs[-1][0].prints[0][:2] == ["float64", []] and parting.pairs[-1][0].prints[0][3] == 3.0
    assert not compare(a, a).parted


def test_runs_without_a_common_operator_part(tmp_path):
    for name, function in (("a", torch.neg), ("b", torch.abs)):
        x = torch.ones(3, device=DEVICE)
        with record(tmp_path / name):
            function(x)
    parting = compare(tmp_path / "a", tmp_path / "b")
    assert parting.parted and parting.first is None and "have no operator in common" in str(parting)
    with pytest.raises(AssertionError, match="no operator in common"):
        parting.assert_close()


def test_operators_correspond_within_their_thread(tmp_path):
    weight = torch.ones(8, 8, device=DEVICE)

    def work(i, gates, order):
        gates[i].wait(30)
        torch.full((8, 8), float(i + 1), device=DEVICE) @ weight
        gates[order[order.index(i) + 1]].set() if i != order[-1] else None

    def run(path, order):
        gates = [threading.Event() for _ in order]
        threads = [threading.Thread(target=work, args=(i, gates, order)) for i in range(3)]
        with record(path):
            [thread.start() for thread in threads]
            gates[order[0]].set()
            [thread.join() for thread in threads]
        return path

    parting = compare(run(tmp_path / "a", [0, 1, 2]), run(tmp_path / "b", [2, 0, 1]))
    assert len(parting.pairs) == 6 and not parting.parted and not parting.first_bits and not parting.only_a


def test_threads_write_whole_lines(tmp_path):
    x = torch.ones(64, device=DEVICE)

    def work(_):
        for _ in range(30):
            x + 1

    with record(tmp_path / "a") as recording, ThreadPoolExecutor(4) as executor:
        [*executor.map(work, range(4))]
    assert recording.operators == 120
    trace = read(tmp_path / "a")
    assert len(trace.ops) == 120 and not trace.truncated


def test_marks():
    from openreg_tools.compare.recording import _labels

    mark("epoch", 1)
    with mark("epoch", 2), mark("batch", 3):
        assert _labels == {"epoch": 2, "batch": 3}
    assert _labels == {"epoch": 1}
    _labels.clear()


def test_debug_mode(tmp_path):
    debug_mode = pytest.importorskip("torch.utils._debug_mode", reason="this torch has no DebugMode")

    def logged(factor):
        with debug_mode.DebugMode() as mode, mode.log_tensor_hashes(hash_fn="norm"):
            x = torch.ones(4, device=DEVICE) * 2
            (x * factor).sum()
        return mode

    assert compare(logged(1.0), logged(1.0)).first is None
    first = compare(logged(1.0), logged(1.5)).first
    assert first.a.name == "aten::mul.Tensor" and "norm 8 and 12" in first.what


# ---- the commands ----

PROGRAM = """
import sys, torch
from openreg_tools.compare import mark
if "raise" in sys.argv:
    raise KeyError("the program's own")
torch.manual_seed(0)
for i in [int(word) for word in sys.argv[1:]] or [0, 1]:
    mark("batch", i)
    x = torch.full((3, 3), float(i)).to("openreg")
    print((x @ x).sum().item())
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "exit.py").write_text("raise SystemExit('bye')")
    return tmp_path


def command(folder, *words, **environment):
    done = python("-m", "openreg_tools", *words, cwd=folder, TORCH_DEVICE_BACKEND_AUTOLOAD="1", **environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.processes
def test_the_command_on_a_program(folder):
    status, out, err = command(
        folder,
        "compare",
        "--device",
        "openreg",
        "--against",
        "cpu",
        "--html",
        "page.html",
        "program.py",
        "5",
        "7",
    )
    assert status == 0, err
    assert "675.0" in out and "1323.0" in out and "Nothing differs" in out  # 9 * 3 * 25, of its own arguments
    assert "<html" in (folder / "page.html").read_text()
    status, out, err = command(
        folder, "compare", "--json", "-", "--test", "test_it.py", "program.py", OPENREG_FAULTS="copy:after=1"
    )
    assert status == 1 and json.loads(out)["first"]["operator"] == "aten::_to_copy" and "27.0" in err
    assert "def test_aten__to_copy" in (folder / "test_it.py").read_text()


@pytest.mark.processes
def test_the_commands_on_traces(folder):
    for name, words in (("a", ("1", "2")), ("b", ("2", "1")), ("c", ("1", "3"))):
        status, _, err = command(folder, "record", "--out", name, "program.py", *words)
        assert status == 0 and "operators in" in err, err
    assert command(folder, "compare", "a", "b")[0] == 0
    status, out, _ = command(folder, "compare", "--json", "-", "a", "b")
    assert status == 0 and json.loads(out)["first"] is None
    status, out, _ = command(folder, "compare", "a", "c")
    assert status == 0 and "only in a" in out  # another batch, and nothing to compare it with


@pytest.mark.processes
@pytest.mark.parametrize(
    "words, status, message",
    [
        (("compare", "nothing.py"), 2, "compare: there is no file nothing.py"),
        (("compare", "nothing", "program.py"), 2, "compare: nothing cannot be read: No such file"),
        (("compare", "a"), 2, "compare: expected a script (.py) or two traces, but got a"),
        (("trace", "program.py", "5", "--html", "x.html"), 2, "trace: put --html before program.py, because"),
        (("trace", "program.py", "--top=5"), 2, "if --top is the program's own, write program.py -- --top=5"),
        (("compare", "program.py", "--against", "cpu"), 2, "compare: put --against before program.py, because"),
        (("record", "program.py", "--out", "t"), 2, "record: put --out before program.py, because"),
        (("compare", "a", "b", "--top", "5"), 2, "compare: put --top before a"),
        (("record", "program.py"), 2, "record: a trace is a file; name it with --out"),
        (("compare", "--against", "openreg", "program.py"), 2, "compare: expected two devices, but both are openreg"),
        (("compare", "--tolerance", "mm", "program.py"), 2, "expected OPERATOR=ULPS, such as 'aten::mm=32', but got 'mm'"),
        (("compare", "program.py", "raise"), 1, "KeyError: \"the program's own\""),
        (("record", "--out", "t", "program.py", "raise"), 1, "KeyError"),
        (("compare", "--against", "meta", "program.py", "1"), 2, "compare: tensors on meta have no values to compare"),
        (("compare", "--html", "/proc/x", "program.py", "1", "2"), 2, "compare: /proc/x cannot be written"),
        (("compare", "--top", "0", "program.py"), 2, "expected a number above 0, but got '0'"),
        (("record", "--out", "/proc/x", "program.py", "1", "2"), 2, "record: /proc/x cannot be written"),
        (("trace", "--chrome", "/proc/x", "program.py", "1", "2"), 2, "trace: /proc/x cannot be written"),
        (("compare", "exit.py"), 1, "bye"),
        (("record", "--out", "t", "nothing.py"), 2, "record: there is no file nothing.py"),
        (("record", "--out", "no/t", "program.py"), 2, "there is no folder no"),
    ],
)  # fmt: skip
def test_wrong_requests_get_a_sentence(folder, words, status, message):
    got, _, err = command(folder, *words)
    assert got == status and message in err, err


@pytest.mark.processes
@pytest.mark.parametrize("tool", [("trace",), ("compare",), ("record", "--out", "t")], ids=" ".join)
def test_what_follows_the_program_is_its_own(folder, tool):
    """Options of the tool stand before the program; behind --, they are the program's."""
    (folder / "own.py").write_text("import sys; print(sys.argv)")
    for words, seen in (
        (("--epochs", "3", "-h"), ["--epochs", "3", "-h"]),
        (("--", "--device", "x", "--", "y"), ["--device", "x", "--", "y"]),
        (("a", "--", "--import=x"), ["a", "--", "--import=x"]),
    ):
        status, out, err = command(folder, *tool, "own.py", *words)
        assert str(["own.py", *seen]) in out, err
