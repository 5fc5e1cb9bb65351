"""What the tests of compiled graphs share."""

import contextlib
import re
from unittest.mock import patch

import torch
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map


def on(device, values):
    """The tensors among `values` on `device`."""
    return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, values)


@contextlib.contextmanager
def uncached():
    """Graphs are compiled again."""
    torch._dynamo.reset()
    FakeTensorMode.cache_clear()
    with config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


class _Generated(Exception):
    pass


def source(function, *args):
    """What Inductor generates for the inference of `function`, without compiling it."""
    codes = []

    def compile_to_module(graph):
        codes.append(graph.codegen()[0].value)
        raise _Generated

    with (
        uncached(),
        patch.object(GraphLowering, "compile_to_module", compile_to_module),
        torch.no_grad(),
    ):
        try:
            torch.compile(function, fullgraph=True)(*args)
        except Exception as error:
            if not codes:
                raise error
    return codes


def kernels(code):
    """The kernels in generated code, without the part that launches them: as CPU Inductor writes them.

    And without the lines about a division by zero, which differ; see Note [Integer division] in codegen.py.
    """
    from openreg_ops.inductor import codegen  # loads Inductor

    found = re.findall(r"async_compile\.cpp_pybinding\(.*?r'''(.*?)'''\)", "\n".join(code), re.S)
    kernels = []
    for kernel in found:
        for ours in (codegen.MUTEX, codegen.LOCK, codegen.POINT, codegen.UNPOINT):
            kernel = kernel.replace(ours, "")
        body = kernel.split('\nextern "C" void openreg_launch')[0].strip()
        kernels.append(body.replace("static void  kernel_body(", 'extern "C"  void  kernel('))
    return kernels


def calls(code):
    """How often generated code calls its own kernels, and the other operators that it calls."""
    code = "\n".join(code)
    body = code[code.index("def call(self, args)") :]
    own = len(re.findall(r"^\s+cpp_fused\w*\(", body, re.M))
    return own, re.findall(r"(?:extern_kernels|torch\.ops\.\w+)\.[\w.]+", body)


@contextlib.contextmanager
def without(name):
    """Inductor without one of our adaptations, and without what it has cached."""
    import torch._inductor.compile_fx  # noqa: F401  registers the device

    from openreg_ops.inductor import adapt

    each = adapt.ADAPTATIONS[name]
    adapted = each.make(each.original)
    each.put(each.original)
    try:
        with uncached():
            yield
    finally:
        each.put(adapted)


__all__ = ["calls", "kernels", "on", "run_and_get_code", "source", "uncached", "without"]
