"""Calls made from schemas: a sample of the conformance suite `schemas`, the checks themselves, and what they found.

A call that ends the process would end the tests, so garbage runs in the conformance tool's worker.
"""

from __future__ import annotations

import signal
import subprocess

import pytest
import torch
from processes import forking
from test_conformance import command

from openreg_tools.conformance import generate, generated_calls, schemas
from openreg_tools.conformance.command import dtypes_of, run_case
from openreg_tools.conformance.worker import Worker
from openreg_tools.core import attempts, from_schema, opinfo
from openreg_tools.core.known_arguments import SAMPLES
from openreg_tools.core.move import Move
from openreg_tools.core.samples import Sample

pytestmark = pytest.mark.conformance

# A kernel of every file under csrc/aten, and those that once failed.
OWN = (
    "lstm.input gru.data lstm_cell native_dropout max_pool2d selu abs.out _copy_from _local_scalar_dense as_strided view "
    "add.Tensor mm cat nll_loss_forward convolution_overrideable"
).split()
# Composites, stubs that they call, factories, lists and shared kernels.
LISTED = (
    "kaiser_window.beta kaiser_window.periodic hann_window.periodic _foreach_add.List linalg_svd unfold_backward "
    "index_put native_batch_norm scatter_add topk tril_indices logcumsumexp convolution_backward fft_rfft2 _coalesce.out "
    "_sparse_softmax.out crow_indices quantize_per_channel quantized_max_pool2d.out _transformer_encoder_layer_fwd"
).split()


@pytest.fixture(scope="module")
def worker():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forking())
        worker = Worker(command("--suites", "schemas", "--samples", "2", "--timeout", "120"))
        yield worker
        worker.stop()


def found(worker, name):
    record = run_case(worker, name, "float32")
    return record, [f"{f['check']}, sample {f['sample']} [{f['kind']}]: {f['message']}" for f in record["failures"]]


@pytest.mark.parametrize("name", OWN)
def test_own_kernels_survive_garbage(worker, name):
    record, failures = found(worker, f"aten::{name}")
    assert not failures and record["ran"]["garbage"] >= 20


@pytest.mark.parametrize(
    "name",
    "adamw_step_ dequantize_rowwise kv_cache_update_ grouped_linear custom_abs attention nms cross_entropy".split(),
)
def test_operators_of_the_suite_survive_garbage(worker, name):
    record, failures = found(worker, f"openreg::{name}")
    assert not failures and record["ran"]["garbage"] >= 20 and record["ran"]["freed"] >= 2


@pytest.mark.parametrize("name", LISTED)
def test_listed_operators_agree_with_the_cpu(worker, name):
    record, failures = found(worker, f"aten::{name}")
    assert not failures and record["ran"]["generated"]


def test_every_listed_operator_is_a_case():
    names = schemas.names("openreg")
    assert len(names) > 2500 and set(dtypes_of(["schemas"])) == set(names)
    for table in (schemas.REACHED_BY, schemas.NOT_CALLED, schemas.DIFFERENT, schemas.UNCOMPARED):
        assert set(table) <= set(names), set(table) - set(names)
    forms = {name for name in names if schemas.without_out(name) in schemas.NOT_CALLED}
    assert forms <= set(schemas.NOT_CALLED), "a form with out= of an operator that is not called"
    unlisted = {name for name in SAMPLES if name.startswith("aten::")} - set(names)
    assert set(SAMPLES) - unlisted <= set(generate.listed("openreg"))
    assert unlisted <= {schemas.without_out(name) for name in names if name.endswith("out")}
    assert set(schemas.HOST_ARGUMENTS) <= {name.partition(".")[0] for name in names}
    assert set(schemas.REACHED_BY.values()) <= set(opinfo.database())


@pytest.mark.filterwarnings("ignore")  # of operators that are deprecated
def test_the_cpu_accepts_the_known_arguments():
    for name in SAMPLES:
        if schemas.is_on_cpu(name):
            for call in schemas.accepted(name, 2):
                schemas.called(name, call, Move("cpu"))


def test_the_form_without_out():
    assert schemas.without_out("aten::add.out") == "aten::add.Tensor"
    assert schemas.without_out("aten::add_.Tensor") == "aten::add.Tensor"
    assert schemas.without_out("aten::sparse_coo_tensor.size_out") == "aten::sparse_coo_tensor.size"
    assert not schemas.is_on_cpu("aten::batch_norm_stats.out") and schemas.is_on_cpu("aten::_coalesce.out")


def test_an_out_form_that_the_cpu_does_not_have():
    report = generated_calls.check("aten::batch_norm_stats.out", "openreg", 2)
    assert report.ran["generated"] >= 2 and not report.failures and not report.notes["only refused calls"]


def test_equal_numbers_give_equal_arguments():
    first, second = (from_schema.call("aten::addmm", 7) for _ in range(2))
    assert repr(first) == repr(second) and torch.equal(first.args[0], second.args[0])
    damaged = [repr(from_schema.garbage("aten::addmm", first, k)) for k in range(40)]
    assert damaged == [repr(from_schema.garbage("aten::addmm", first, k)) for k in range(40)]
    assert len(set(damaged)) > 20


# A type, an argument, and values of the type that an operator may not expect.
DAMAGE = {
    "int": (5, {"-1", "0", "1", "99", "2147483648", "-9223372036854775808", "9223372036854775807", "None"}),
    "SymInt": (5, {"-1", "0", "9223372036854775807"}),
    "int?": (5, {"-2", "1000", "None"}),
    "int[]": ([5, 5], {"[]", "[5]", "[5, 5, 5]", "[99, 5]", "[5, -1]", "None"}),
    "int[2]": ([5, 5], {"[]", "[5]", "[5, 5, 5]", "[99, 5]", "[5, -1]"}),
    "float": (5.0, {"nan", "inf", "-inf", "-1.0", "0.0", "5e-324", "1e+308"}),
    "float[]": ([5.0], {"[]", "[nan]", "[5.0, 5.0]"}),
    "Scalar": (5, {"nan", "inf", "1j", "True", "-1", "1e+308", "-9223372036854775808"}),
    "bool": (True, {"False", "None"}),
    "bool[2]": ([True, True], {"[]", "[True]", "[False, True]", "[True, False]"}),
    "str": ("good", {"''", "'garbage'", repr("\0")}),
    "ScalarType": (torch.float64, {"99", "-1", "torch.bool", "torch.qint8", "torch.complex64"}),
    "Layout": (torch.strided, {"99", "-1", "torch.sparse_coo", "torch.sparse_csr"}),
    "MemoryFormat": (torch.contiguous_format, {"99", "-1", "torch.channels_last", "torch.preserve_format"}),
    "Device": (torch.device("openreg"), {"device(type='cpu')", "device(type='meta')"}),
}


def test_arguments_of_every_type_are_damaged():
    library = torch.library.Library("damaged", "FRAGMENT")
    library.define(f"types({', '.join(f'{type_} a{i}' for i, type_ in enumerate(DAMAGE))}) -> ()")
    good = Sample(*(value for value, _ in DAMAGE.values()))
    seen = {type_: set() for type_ in DAMAGE}
    for k in range(3000):
        changes = 0
        damaged = from_schema.garbage("damaged::types", good, k)
        for type_, was, value in zip(DAMAGE, good.args, damaged.args, strict=True):
            seen[type_] |= {repr(value)} - {repr(was)}
            changes += value is not was
        assert changes <= 3
    assert {type_: missing for type_, (_, bad) in DAMAGE.items() if (missing := bad - seen[type_])} == {}


@pytest.mark.parametrize("name, outs", [("aten::add.out", ["out"]), ("aten::max.dim_max", ["max", "max_values"])])
def test_out_tensors_have_the_dtype_of_the_inputs_or_another(name, outs):
    made = [from_schema.call(name, k) for k in range(150)]
    for out in outs:
        dtypes = [(call.args[0].dtype, call.kwargs[out].dtype) for call in made]
        assert {torch.float64, torch.int64, torch.bfloat16} <= {dtype for _, dtype in dtypes}
        same = sum(dtype == given for given, dtype in dtypes if given != torch.float32)
        assert 0.2 < same / sum(given != torch.float32 for given, _ in dtypes) < 0.9


def test_arguments_recorded_from_opinfo():
    (call, *_) = opinfo.calls_of(torch.ops.aten.convolution_backward.default, "nn.functional.conv2d")
    assert schemas.called("aten::convolution_backward", call, Move("cpu"))[0]


@pytest.mark.parametrize(
    "key, errors",
    [("CPU", []), ("CompositeExplicitAutograd", ["no error"] * 3)],
    ids=["refused there too", "accepted there"],
)
def test_calls_that_the_cpu_refuses(key, errors):
    """The device has to refuse them too. With a kernel that every device but the CPU uses, it accepts them."""

    def refuses(x, n):
        raise RuntimeError("expected another call")

    name, at = f"refuses_{key}", []
    library = torch.library.Library("test_schemas", "FRAGMENT")
    try:
        library.define(f"{name}(Tensor x, int n) -> Tensor")
        library.impl(name, refuses, "CPU")
        if key != "CPU":
            library.impl(name, lambda x, n: x + n, key)
        report = generated_calls.check(f"test_schemas::{name}", "openreg", 3, ("generated",), at.append)
    finally:
        library._destroy()
    assert report.ran["generated"] == 3 and report.notes["only refused calls"] == 1
    assert [where for where in at if where.endswith("device")] == [f"generated, sample {i}, device" for i in range(3)]
    assert [failure.kind for failure in report.failures] == errors


def test_a_call_that_ends_or_hangs_its_process_costs_one_attempt():
    def attempt(i):
        if i == 1:
            signal.raise_signal(signal.SIGSEGV)
        if i == 3:
            raise ValueError("no\nsecond line")
        if i == 4:
            signal.pause()

    outcomes = dict(attempts.attempts(6, attempt, seconds=2))
    assert [outcomes[i].kind for i in range(6)] == ["returned", "crashed", "returned", "raised", "hung", "returned"]
    assert outcomes[1].message == "signal 11: Fatal Python error: Segmentation fault"
    assert outcomes[3].message == "ValueError: no"
    enough = attempts.attempts(9, lambda i: 1 / (1 - i % 2), enough=3)
    assert [outcome.kind for _, outcome in enough] == ["returned", "raised", "returned", "raised", "returned"]
    hung = attempts.attempts(9, lambda i: signal.pause(), enough=1, seconds=0.2)
    assert [outcome.kind for _, outcome in hung] == ["hung"] * 3


# ---- what the checks found ----


def test_item_of_a_tensor_without_memory():
    x = torch.ones(1, device="openreg")
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="^_local_scalar_dense: expected a tensor with memory"):
        x.item()


def test_a_lazy_conjugation_of_slots():
    k, cache, slots = torch.ones(1, 2, 3), torch.ones(8, 2, 3), torch.zeros(1, dtype=torch.complex64).conj()
    with pytest.raises(RuntimeError, match="expected slots of int32 or int64, but got complex64"):
        torch.ops.openreg.kv_cache_update_(cache, cache.clone(), k, k, slots)


def test_sizes_that_lie_on_the_host():
    layer = torch.ao.nn.quantized.dynamic.LSTM(3, 5)
    packed, state = (
        torch.nn.utils.rnn.pack_padded_sequence(torch.rand(4, 2, 3), torch.tensor([4, 3])),
        torch.zeros(1, 2, 5),
    )
    expected, _ = layer(packed, (state, state))
    there = state.to("openreg")
    actual, _ = layer(packed.to("openreg"), (there, there))
    assert torch.equal(actual.data.cpu(), expected.data) and not actual.batch_sizes.is_openreg
    padded, sizes = torch.rand(2, 2, 3), torch.tensor([[2, 3], [1, 3]])
    nested = torch._nested_from_padded(padded.to("openreg"), sizes)
    for row, unpadded in zip(nested.unbind(), torch._nested_from_padded(padded, sizes).unbind(), strict=True):
        assert torch.equal(row.cpu(), unpadded)
