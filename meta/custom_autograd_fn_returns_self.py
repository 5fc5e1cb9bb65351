"""custom_autograd_fn_returns_self: the identity, with half the gradient."""

from __future__ import annotations

from torch import Tensor

from openreg_ops.meta import op


@op.operator(identity=True, batch_first=True, inner=0)
def custom_autograd_fn_returns_self(input: Tensor) -> Tensor:
    """The input itself; its gradient is half of the output's.

    y = input,  grad_input = 0.5 * grad_y

    Args:
        input: any shape, strides and dtype.
    Returns:
        A tensor that shares input's memory. Writing to it writes to input; when both input and the output
        require a gradient, autograd rejects that write, as for every view that a custom function created.

    Differentiable any number of times, in both modes and under `torch.func`; the gradient is deliberately not the
    derivative. Runs unchanged on every device. Autocast leaves the dtype alone.
    Source: PyTorch's in-tree OpenReg, where it shows an autograd function whose forward returns its input.
    """
    return 0.5 * input + 0.5 * input.detach()


custom_autograd_fn_returns_self.samples(op.alike(1))
