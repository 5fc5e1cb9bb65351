"""Programs saved and loaded: torch.export, the C++ wrapper, AOTInductor packages, and caches across processes."""

import copy
import inspect
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from graphs import on, run_and_get_code
from processes import python
from torch._inductor import config
from torch.testing import assert_close

import openreg_ops
from openreg_ops.meta import op

pytestmark = pytest.mark.compiles


class Model(nn.Module):
    """A matrix product, generated kernels, operators of the suite, of ATen by its schema, a convolution, and a scalar on
    the CPU."""

    def __init__(self):
        super().__init__()
        self.linear, self.convolution = nn.Linear(16, 32), nn.Conv1d(1, 2, 3)
        self.weight = nn.Parameter(torch.ones(32))
        self.register_buffer("offset", torch.randn(32))
        self.scale = torch.tensor(3.0)  # no buffer: it stays on the CPU

    def forward(self, x):
        y = openreg_ops.rms_norm(F.gelu(self.linear(x)), self.weight)[0] * self.scale + self.offset
        target = torch.zeros(y.shape[0], dtype=torch.long, device=y.device)
        loss = openreg_ops.cross_entropy(y, target, reduction="none")[0]
        return loss, torch.sort(self.convolution(x.unsqueeze(1)).sum((1, 2)))[0]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model().to("openreg").eval().requires_grad_(False)


@pytest.fixture(scope="module")
def program(model):
    batch = torch.export.Dim("batch", min=2, max=100)
    return torch.export.export(model, (torch.randn(8, 16, device="openreg"),), dynamic_shapes=({0: batch},))


@pytest.fixture(scope="module")
def package(program, tmp_path_factory):
    return torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path_factory.mktemp("package") / "model.pt2")
    )


@pytest.fixture
def expected(model, tmp_path):
    """A file with an input of another batch size, and what the model makes of it."""
    x = torch.randn(13, 16)
    torch.save((x, on("cpu", model(x.to("openreg")))), tmp_path / "expected")
    return tmp_path / "expected"


def run(code, *args, **environment):
    done = python("-c", code, *map(str, args), **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.fast
def test_a_program_is_saved_and_loaded(model, program, tmp_path):
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    x = torch.randn(13, 16, device="openreg")
    assert_close(loaded(x), model(x))


@pytest.mark.slow
def test_the_cpp_wrapper(model):
    """One call from Python; launches, order and results are the same as with the Python wrapper."""
    model, x = copy.deepcopy(model).to("openreg:1"), torch.randn(8, 16, device="openreg:1")
    with config.patch(cpp_wrapper=True):
        graph = torch.compile(model, fullgraph=True)
        result, code = run_and_get_code(graph, x)
    assert "inductor_entry_impl" in code[0] and "aoti_torch_openreg_addmm_out" in code[0]
    assert_close(result, model(x))
    with torch.openreg.launch_mode("async"), torch.openreg.device(1):
        torch.openreg._sleep(20_000_000)
        assert_close(graph(x), model(x))


@pytest.mark.slow
def test_a_package_runs_in_a_process_of_its_own(package, expected):
    """Another batch size, another device, the weights in device memory, no compiler loaded."""
    code = (
        "import sys, torch, openreg_ops\n"
        "x, expected = torch.load(sys.argv[2])\n"
        "for device in (0, 1):\n"
        "    before = torch.openreg.memory_allocated(device)\n"
        "    model = torch._inductor.aoti_load_package(sys.argv[1], device_index=device)\n"
        "    assert torch.openreg.memory_allocated(device) - before >= 4 * (16 * 32 + 32 + 32 + 32 + 6 + 2)\n"
        "    launches = openreg_ops._C.launch_count()\n"
        "    results = model(x.to(f'openreg:{device}'))\n"
        "    assert openreg_ops._C.launch_count() > launches\n"
        "    assert all(result.device.index == device for result in results)\n"
        "    torch.testing.assert_close([result.cpu() for result in results], list(expected))\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules\n"
    )
    run(code, package, expected)


ISOLATED = """
import sys, torch, openreg_ops
from torch.nn.attention.flex_attention import flex_attention
assert torch.openreg.isolation_mode() == "strict"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
model, x = model.to("openreg"), torch.randn(700, 8).to("openreg")

def gradients(function):
    model.zero_grad()
    loss = function(x).softmax(-1).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

scalar = torch.tensor(3.0)  # host memory, which a kernel may read
for mode in ("inline", "async", "sync"):
    torch._dynamo.reset()
    with torch.openreg.launch_mode(mode):
        torch.testing.assert_close(gradients(torch.compile(model)), gradients(model), rtol=1e-4, atol=1e-4)
        graph = torch.compile(lambda x: (x * scalar).sum(0) + torch.rand(8, device=x.device))
        assert (graph(x).cpu() - 3 * x.cpu().sum(0) < 1.01).all()
q = torch.randn(1, 2, 64, 16).to("openreg")
expected = torch.nn.functional.scaled_dot_product_attention(*[q.cpu()] * 3)
torch.testing.assert_close(torch.compile(flex_attention)(q, q, q).cpu(), expected)
x, expected = torch.load(sys.argv[2])
package = torch._inductor.aoti_load_package(sys.argv[1])
torch.testing.assert_close([y.cpu() for y in package(x.to("openreg"))], list(expected))
print("right", flush=True)

import ctypes
y = graph(torch.ones(700, 8, device="openreg"))  # what a generated kernel wrote is closed to the host again
ctypes.string_at(y.data_ptr(), 4)
"""


@pytest.mark.slow
def test_strict_isolation(package, expected, tmp_path):
    """Kernels of the Python wrapper, a template's and a package's may touch device memory, in each mode; the host not."""
    environment = {"OPENREG_ISOLATION": "strict", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = python("-c", ISOLATED, package, expected, dynamo=True, **environment)
    assert done.stdout.strip() == "right", done.stderr[-3000:]
    assert done.returncode < 0 and "openreg: the host read device memory" in done.stderr


def test_a_package_refuses_a_tensor_of_another_device(package):
    with pytest.raises(RuntimeError, match="API call failed|same device"):
        torch._inductor.aoti_load_package(package)(torch.randn(4, 16))


@pytest.mark.slow
def test_weights_are_replaced(tmp_path):
    """By tensors that the caller keeps; the runtime cannot copy them."""
    linear = nn.Linear(16, 16).to("openreg").requires_grad_(False)  # a bias of 4 would be part of the code
    x = torch.randn(2, 16, device="openreg")
    package = torch._inductor.aoti_compile_and_package(
        torch.export.export(linear, (x,)),
        package_path=str(tmp_path / "linear.pt2"),
        inductor_configs={"aot_inductor.package_constants_in_so": False},
    )
    model = torch._inductor.aoti_load_package(package)
    weights = {name: torch.randn_like(weight) for name, weight in linear.state_dict().items()}
    with pytest.raises(RuntimeError, match="load_constants cannot copy .* pass user_managed=True and keep the tensors"):
        model.load_constants(weights, check_full_update=True)
    model.load_constants(weights, check_full_update=True, user_managed=True)
    linear.load_state_dict(weights)
    assert_close(model(x), linear(x))


CACHED = """
import torch, openreg_ops
from torch._dynamo.utils import counters

def compile():
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        torch.compile(lambda x: x.sin() + 1)(torch.ones(4, device="openreg"))
    hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    print(int(hits > 0), counters["inductor"]["fxgraph_cache_miss"])

compile()
from openreg_ops.inductor import codegen
codegen._source_digest = lambda: "another code generator"
compile()
"""


@pytest.mark.slow
def test_compiled_graphs_are_cached_until_our_code_generator_changes(tmp_path):
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    cache["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "1"
    assert run(CACHED, **cache).split() == ["0", "1", "0", "1"]
    assert run(CACHED, **cache).split() == ["1", "0", "1", "0"]


def test_the_identity_of_cached_graphs_covers_every_file_of_meta(monkeypatch, tmp_path):
    """One more byte in any of them, including a helper, or a new file, changes the identity."""
    from openreg_ops.inductor import codegen

    names = {path.name for path in Path(codegen.meta.__file__).parent.glob("*.py")}
    assert {"__init__.py", "op.py", "swiglu.py", "rms_norm.py"} <= names
    for name in names:
        shutil.copyfile(Path(codegen.meta.__file__).parent / name, tmp_path / name)
    digest = codegen._source_digest.__wrapped__
    before = digest()
    monkeypatch.setattr(codegen.meta, "__file__", str(tmp_path / "__init__.py"))
    assert digest() == before
    for name in [*sorted(names), "new_operator.py"]:
        with open(tmp_path / name, "a") as file:
            file.write("#")
        assert digest() != before, name
        before = digest()


def test_cached_graphs_know_the_code_that_made_them(monkeypatch):
    """The code generator's and the references' sources; changing any byte changes the identity."""
    from openreg_ops.inductor import codegen  # loads Inductor

    sources = codegen._sources()
    for code in (codegen.as_body, op.reference_of("swiglu")):
        (path,) = (path for path in sources if path.samefile(inspect.getfile(code)))
        others = [source for source in sources if source != path]
        digests = set()
        for files in (sources, others):
            monkeypatch.setattr(codegen, "_sources", lambda files=files: files)
            digests.add(codegen._source_digest.__wrapped__())
        assert len(digests) == 2


@pytest.mark.slow
def test_the_example_in_cpp_runs(package):
    example = Path(__file__).parents[2] / "examples" / "run_package.py"
    output = python(example, package)
    assert output.returncode == 0, output.stderr
    assert "openreg:0" in output.stdout
