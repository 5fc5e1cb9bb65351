"""The fake kernel, batching rule or derivative lacks an argument that has a default."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from mistakes import LIBRARY, Example, define, right, without_gradient, wrong


@wrong("defaults", says="in a call with eps=… the fake kernel raised TypeError")
def fake_lacks_eps():
    @custom_op("mistakes::fake_lacks_eps", mutates_args=())
    def fake_lacks_eps(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return (x / (x.abs().amax(-1, keepdim=True) + eps) * weight).contiguous()

    fake_lacks_eps.register_fake(lambda x, weight: x.new_empty(torch.broadcast_shapes(x.shape, weight.shape),
                                                               dtype=torch.result_type(x, weight)))  # fmt: skip
    return Example(fake_lacks_eps, [(torch.rand(4, 6), torch.rand(6))])


@wrong("defaults")
def rule_lacks_axis():
    def rule(info, in_dims, x):
        return op(x.movedim(in_dims[0], 0)), 0

    def kernel(x, axis=-1, *, reverse=False):
        return (x.flip(axis) if reverse else x).cumsum(axis).contiguous()

    op = without_gradient("rule_lacks_axis(Tensor x, int axis=-1, *, bool reverse=False) -> Tensor", kernel,
                          lambda x, axis=-1, *, reverse=False: kernel(x, axis), vmap=rule)  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])


@wrong("defaults")
def function_lacks_scale():
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, shift):
            with torch._C._AutoDispatchBelowAutograd():
                return op(x, shift)

        @staticmethod
        def backward(ctx, g):
            return g, None

    def kernel(x, shift=0.0, scale=1.0):
        return (x * scale + shift).contiguous()

    op = define("function_lacks_scale(Tensor x, float shift=0., float scale=1.) -> Tensor", kernel,
                lambda x, shift=0.0, scale=1.0: x.new_empty(x.shape))  # fmt: skip
    LIBRARY.impl("function_lacks_scale", lambda x, shift=0.0: Function.apply(x, shift), "Autograd")
    return Example(op, [(torch.rand(4, 6),), (torch.rand(4, 6), 0.5)])


@wrong("defaults", says="in a call with keepdim=True, output 0 has shape [4, 1], but the fake kernel says [4]")
def fake_ignores_keepdim():
    def kernel(x, keepdim=False):
        return x.amax(-1, keepdim=keepdim)

    op = without_gradient("fake_ignores_keepdim(Tensor x, bool keepdim=False) -> Tensor", kernel,
                          lambda x, keepdim=False: kernel(x))  # fmt: skip
    return Example(op, [(torch.rand(4, 6),)])


@wrong("backward", "compile", "autograd_registration")
def setup_lacks_keywords():
    @custom_op("mistakes::setup_lacks_keywords", mutates_args=())
    def setup_lacks_keywords(x: Tensor, *, scale: float = 2.0) -> Tensor:
        return (x * scale).contiguous()

    setup_lacks_keywords.register_fake(lambda x, *, scale=2.0: x.new_empty(x.shape))

    def setup(ctx, inputs, output):  # the mistake: keyword_only_inputs
        ctx.scale = 2.0

    setup_lacks_keywords.register_autograd(lambda ctx, g: g * ctx.scale, setup_context=setup)
    return Example(setup_lacks_keywords, [(torch.rand(4, 6),)])


@wrong("defaults", says="with scale=1.5, its gradient is not the derivative")
def backward_lacks_scale():
    @custom_op("mistakes::backward_lacks_scale", mutates_args=())
    def backward_lacks_scale(x: Tensor, scale: float = 2.0) -> Tensor:
        return (x * scale).contiguous()

    backward_lacks_scale.register_fake(lambda x, scale=2.0: x.new_empty(x.shape))
    backward_lacks_scale.register_autograd(lambda ctx, g: (g * 2.0, None))
    return Example(backward_lacks_scale, [(torch.rand(4, 6),)])


@right()
def all_take_them():
    def kernel(x, weight=None, eps=1e-6, *, bias=None, mode="sum"):
        if mode not in ("sum", "mean"):
            raise ValueError("mode must be sum or mean")
        total = x.sum(-1) if mode == "sum" else x.mean(-1)
        return (total + eps + (0 if bias is None else bias)).contiguous()

    def fake(x, weight=None, eps=1e-6, *, bias=None, mode="sum"):
        return kernel(x, weight, eps, bias=bias, mode=mode)

    schema = (
        'all_take_them(Tensor x, Tensor? weight=None, float eps=1e-06, *, float? bias=None, str mode="sum") -> Tensor'
    )
    op = without_gradient(schema, kernel, fake)
    return Example(op, [(torch.rand(4, 6),), (torch.rand(4, 6), None, 0.5)])


@right()
def takes_any():
    @custom_op("mistakes::takes_any", mutates_args=())
    def takes_any(x: Tensor, groups: int = 1, causal: bool = False) -> Tensor:
        return (x.view(groups, -1, x.shape[-1]).cumsum(1).view(x.shape) if causal else x * groups).contiguous()

    takes_any.register_fake(lambda x, *rest: x.new_empty(x.shape))
    takes_any.register_vmap(
        lambda info, in_dims, x, *rest: (torch.stack([takes_any(y, *rest) for y in x.unbind(in_dims[0])]), 0)
    )
    return Example(takes_any, [(torch.rand(4, 6),), (torch.rand(4, 6), 2, True)])


@right()
def keywords_in_setup():
    @custom_op("mistakes::keywords_in_setup", mutates_args=())
    def keywords_in_setup(x: Tensor, shift: float = 0.0, *, scale: float = 2.0) -> Tensor:
        return (x * scale + shift).contiguous()

    keywords_in_setup.register_fake(lambda x, shift=0.0, *, scale=2.0: x.new_empty(x.shape))

    def setup(ctx, inputs, keyword_only_inputs, output):
        ctx.scale = keyword_only_inputs["scale"]

    keywords_in_setup.register_autograd(lambda ctx, g: (g * ctx.scale, None), setup_context=setup)
    return Example(keywords_in_setup, [(torch.rand(4, 6),)])
