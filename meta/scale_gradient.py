"""scale_gradient: the identity, with a scaled gradient."""

from __future__ import annotations

from torch import Tensor

from openreg_ops.meta import op


@op.operator(identity=True, batch_first=True, inner=0)
def scale_gradient(x: Tensor, scale: float) -> Tensor:
    """A view of x whose gradient is `scale` times the output's; -1 makes it a gradient reversal layer.

    y = x,  grad_x = scale * grad_y

    Args:
        x: any shape, strides and dtype.
        scale: any number; 0 stops the gradient, though x still gets one, of zeros.
    Returns:
        A view of x. Writing to it writes to x; when both require a gradient, autograd rejects that write, as for every
        view that a custom function created.

    Differentiable any number of times, in both modes and under `torch.func`; the gradient is deliberately not the
    derivative. Runs unchanged on every device. Autocast leaves the dtype alone.
    Source: Ganin & Lempitsky 2015, arXiv:1409.7495, section 3.1.
    """
    return x.detach() + scale * (x - x.detach())


scale_gradient.samples(op.alike(1, -0.5))
