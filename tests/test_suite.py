"""Every operator of the suite passes the checker, with the sample inputs that its meta file gives."""

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from openreg_ops.meta import op
from openreg_ops.testing import check


def operators() -> set[str]:
    return {
        name.removeprefix("openreg::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("openreg::")
    }


def test_every_operator_has_samples():
    assert {name.partition(".")[0] for name in operators()} == set(op.SAMPLES)


def test_outputs_require_a_gradient_as_the_references_do():
    """For each tensor argument alone. Backward operators are let off: one that runs cannot know what its derivative is."""
    asked = 0
    for name, samples in op.SAMPLES.items():
        overload = getattr(torch.ops.openreg, name).default
        if overload._schema.is_mutable or name.endswith(("_backward", "_gradients")):
            continue
        for sample in samples("cpu", torch.float32):
            for i, x in enumerate(sample):
                if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
                    continue
                flags = []
                for where in ("openreg", "cpu"):
                    arguments = tree_map_only(torch.Tensor, lambda x, where=where: x.to(where), [*sample])
                    arguments[i].requires_grad_()
                    out = tree_leaves(overload(*arguments))
                    flags.append([y.requires_grad for y in out])
                assert flags[0] == flags[1], (name, i)
                asked += 1
    assert asked > 50


def test_none_for_a_tensor_is_named():
    x = torch.ones(2, 4, device="openreg")
    for where in ("openreg", "cpu"):
        with pytest.raises(RuntimeError, match="^swiglu: expected up to be a tensor, but got None"):
            torch.ops.openreg.swiglu(x.to(where), None)
        with pytest.raises(RuntimeError, match="^rms_norm: expected weight to be a tensor, but got None"):
            torch.ops.openreg.rms_norm(x.to(where), None)


@pytest.mark.parametrize("name", sorted(op.SAMPLES))
def test_operator_passes_every_check(name):
    report = check(f"openreg::{name}")
    assert report.device == "openreg" and report.of("pass")
    report.raise_if_failed()
