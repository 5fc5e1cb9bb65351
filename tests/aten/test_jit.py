"""TorchScript and boxed calls: models with openreg's operators traced, scripted, saved and loaded."""

import io

import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
ONE = torch.device("openreg:1")


class Block(torch.nn.Module):
    """Linear, rms_norm and swiglu, with a branch that depends on the data's size."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 8)
        self.weight = torch.nn.Parameter(torch.rand(8))

    def forward(self, x):
        y, _ = torch.ops.openreg.rms_norm(self.linear(x), self.weight, 1e-6)
        gate, up = y.chunk(2, -1)
        out = torch.ops.openreg.swiglu(gate, up)
        if x.size(0) > 2:
            out = out + x
        return out


COMPILE = {
    "trace": lambda model, x: torch.jit.trace(model, x),
    "script": lambda model, x: torch.jit.script(model),
    "frozen": lambda model, x: torch.jit.freeze(torch.jit.script(model.eval())),
    "for inference": lambda model, x: torch.jit.optimize_for_inference(torch.jit.script(model.eval())),
}


def again(module, **options):
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    return torch.jit.load(file, **options)


@pytest.mark.parametrize("how", COMPILE)
def test_equal_to_eager(how):
    model, x = Block().openreg(1), torch.randn(3, 4, device=ONE)
    compiled = COMPILE[how](model, x)
    expected = model(x)
    for _ in range(4):  # the profiling executor optimizes after some runs
        torch.testing.assert_close(compiled(x), expected)
    assert "openreg::rms_norm" in str(compiled.graph) and "openreg::swiglu" in str(compiled.graph)
    x = torch.randn(2, 4, device=ONE)
    if how != "trace":  # which has no branches
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("how", ["trace", "script"])
@pytest.mark.parametrize("to", [None, "openreg:0", ONE, "cpu"], ids=str)
def test_saved_and_loaded(how, to):
    model, x = Block().openreg(1), torch.randn(3, 4, device=ONE)
    loaded = again(COMPILE[how](model, x), map_location=to)
    device = torch.device(to or ONE)
    assert {p.device for p in loaded.parameters()} == {device}
    torch.testing.assert_close(loaded(x.to(device)).cpu(), model(x).cpu())


def test_devices_generators_and_autocast_in_scripts():
    @torch.jit.script
    def on_its_device(x: torch.Tensor):
        made = torch.ones([3], device=x.device) + torch.zeros([3], device="openreg:1").to(x.device)
        return made, x.device.type, torch.rand([3], device=x.device)

    torch.manual_seed(5)
    made, kind, drawn = on_its_device(torch.ones(1, device=ONE))
    torch.manual_seed(5)
    assert made.device == ONE and kind == "openreg" and drawn.equal(torch.rand(3, device=ONE))

    model, x = torch.jit.script(Block().openreg()), torch.randn(3, 4, device="openreg")
    with torch.autocast("openreg", dtype=torch.bfloat16):
        assert torch.mm(x, x.t()).dtype == torch.bfloat16
    assert model(x).dtype == torch.float32


# ---- boxed calls: arguments in a list, as TorchScript and the dispatcher's fallbacks pass them ----

# The operator's arguments, and the call that C++ makes with arguments of their own types.
BOXED = {
    "aten::add": (lambda x: (x, x), torch.add),
    "aten::cat": (lambda x: ([x, x], 1), torch.cat),
    "aten::dropout": (lambda x: (x, 0.5, True), torch.dropout),
    "aten::split": (lambda x: (x, 2), torch._VF.split),
    "aten::max": (lambda x: (x, 1), torch.max),
    "aten::native_layer_norm": (lambda x: (x, [4], x[0], None, 1e-5), torch.native_layer_norm),
}


def flat(out):
    return [out] if isinstance(out, torch.Tensor) else list(out)


@pytest.mark.parametrize("name", BOXED)
def test_boxed_and_unboxed_calls_agree(name):
    arguments, unboxed = BOXED[name]
    x = torch.randn(3, 4, device=ONE)
    boxed, _ = torch._C._jit_get_operation(name)
    torch.manual_seed(1)
    got = flat(boxed(*arguments(x)))
    torch.manual_seed(1)
    for a, b in zip(got, flat(unboxed(*arguments(x))), strict=True):
        assert a.device == ONE and a.equal(b)


KERNELS = {
    "custom_abs": lambda x: (x,),
    "rms_norm": lambda x: (x, x[0], 1e-6),
    "swiglu": lambda x: (x, x),
    "nms": lambda x: (x.abs(), x[:, 0], 0.5),
    "grouped_linear": lambda x: (x, [x[:2], x[1:]], [], torch.tensor([1, 2], device=x.device)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_take_boxed_calls(name):
    x = torch.randn(3, 4, device=ONE)
    operator = getattr(torch.ops.openreg, name).default
    direct = operator._op_dk(torch._C.DispatchKey.PrivateUse1, *KERNELS[name](x))
    for a, b in zip(flat(direct), flat(operator(*KERNELS[name](x))), strict=True):
        assert a.device == ONE and a.equal(b)
