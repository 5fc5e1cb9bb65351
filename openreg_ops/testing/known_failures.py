"""What an openreg:: operator is known to do differently, each with a cause that you can check."""

from __future__ import annotations

_HALVED = (
    "backward passes half of the gradient on, on purpose: the operator shows a gradient that is not the derivative"
)

_STRAIGHT_THROUGH = "the gradient is a straight-through estimator's, on purpose: it counts rounding as the identity"
_LINEAR = "the straight-through estimator's gradient is linear in the incoming one alone, on purpose"

# Checks that an operator fails, on some processors at least. The report has a note if one of them passes.
OPERATORS: dict[str, dict[str, str]] = {
    "openreg::custom_autograd_fn_returns_self": {
        "gradcheck": _HALVED,
        "schema": "it has the schema of PyTorch's in-tree OpenReg, which declares no view; the operator that declares "
        "one is custom_autograd_fn_aliasing",
    },
    "openreg::custom_autograd_fn_aliasing": {"gradcheck": _HALVED},
    "openreg::fake_quantize": {"gradcheck": _STRAIGHT_THROUGH, "gradgradcheck": _LINEAR},
    "openreg::fake_quantize_backward": {"backward": _LINEAR},
    "openreg::scale_gradient": {"gradcheck": "the gradient is scaled, on purpose: that is what the operator is for"},
    "openreg::linear_cross_entropy_gradients": {
        "large": "the reference is what differs: over 87,381 rows eager's float32 product is wrong by 3e-4 of the "
        "largest element, the operator's by 3e-6, both against float64",
    },
}

# Operators that accept damaged arguments that their CPU kernel rejects, or vice versa: the check "garbage" skips the
# comparison.
DIFFERENT: dict[str, str] = {
    "openreg::adamw_step_": "a beta that makes the bias correction 0 is an error of Python's division on the CPU",
    "openreg::adamw_step_.tensor_lr": "as adamw_step_",
    "openreg::attention_backward": "a logsumexp that does not match: NaN in query or key is lost where it is finite",
    "openreg::grouped_linear_backward": "bool[3] of another length is refused before the kernel in C++ only",
    "openreg::linear_cross_entropy_gradients": "as grouped_linear_backward",
}
