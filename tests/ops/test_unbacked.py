"""Data-dependent sizes: operators that take them among others. test_every_operator.py has each by itself."""

import pytest
import torch
from kit import NAME

from openreg_ops.testing import check

CHECKS = ["fake_unbacked", "compile_unbacked"]


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_behind_nonzero(interleaved):
    """Positions that a mask keeps, with heads after them, compiled and differentiated."""

    def program(x, cos, sin, mask):
        kept = mask.nonzero().squeeze(1)
        cos, sin = (table[kept].unsqueeze(-2) for table in (cos, sin))
        return torch.ops.openreg.rotary_embedding(x[:, kept], cos, sin, interleaved)

    x = torch.randn(2, 5, 3, 6, device=NAME, requires_grad=True)
    cos, sin = (torch.randn(5, 3, device=NAME, requires_grad=True) for _ in range(2))
    mask = torch.tensor([True, False, True, True, False], device=NAME)
    outs = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for run in (program, torch.compile(program, backend="aot_eager", fullgraph=True)):
            y = run(x, cos, sin, mask)
            outs.append([y, *torch.autograd.grad(y.square().sum(), (x, cos, sin))])
    torch.testing.assert_close(outs[1], outs[0])
    assert outs[0][0].shape == (2, 3, 3, 6)


def test_an_operator_that_branches_on_a_size():
    """The checks say which expression it asks for, in each way of tracing."""
    with torch.library._scoped_library("unbacked", "FRAGMENT") as library:
        library.define("pair(Tensor x, Tensor y) -> Tensor")
        library.impl("pair", lambda x, y: x + y, "CPU")

        def fake(x, y):
            if x.shape[0] != y.shape[0]:
                raise RuntimeError("pair: expected as many rows")
            return torch.empty_like(x)

        torch.library.register_fake("unbacked::pair", fake, lib=library)
        report = check("unbacked::pair", [(torch.randn(4, 6), torch.randn(4, 6))], "cpu", only=CHECKS)
        assert [result.check for result in report.of("warn")] == ["fake_unbacked"]
        assert (
            "with an unbacked dimension 0 of x, in the fake kernel it asks for a size" in report.of("warn")[0].sentence
        )
        report = check("unbacked::pair", [(torch.randn(4, 6), torch.randn(4, 6))], "cpu", only=CHECKS[1:])
        assert report.passed and not report.of("warn"), str(report)  # there, equal sizes are one symbol
