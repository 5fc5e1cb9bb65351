"""It returns nothing and declares no write, so a compiler drops its calls."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from mistakes import LIBRARY, Example, right, wrong

SEEN: list[float] = []


@wrong("effects", says="it returns nothing, and its schema says that it writes nothing, so compilers remove its calls")
def record():
    @custom_op("mistakes::record", mutates_args=())
    def record(x: Tensor) -> None:
        SEEN.append(1)

    record.register_fake(lambda x: None)
    return Example(record, [(torch.rand(4, 6),)])


@wrong("effects")
def log_step():
    LIBRARY.define("log_step(Tensor loss, str name, int step=0) -> ()")
    LIBRARY.impl("log_step", lambda loss, name, step=0: SEEN.append(float(loss)), "CompositeExplicitAutograd")
    torch.library.register_fake("mistakes::log_step", lambda loss, name, step=0: None, lib=LIBRARY)
    return Example(torch.ops.mistakes.log_step.default, [(torch.tensor(2.0), "loss"), (torch.tensor(1.0), "loss", 3)])


@wrong("effects")
def send_all():
    @custom_op("mistakes::send_all", mutates_args=())
    def send_all(tensors: list[Tensor], rank: int) -> None:
        SEEN.extend(float(x.sum()) for x in tensors)

    send_all.register_fake(lambda tensors, rank: None)
    return Example(send_all, [([torch.rand(4), torch.rand(3, 2)], 1)])


@right()
def registered():
    @custom_op("mistakes::registered", mutates_args=())
    def registered(x: Tensor) -> None:
        SEEN.append(1)

    registered.register_fake(lambda x: None)
    torch.library._register_effectful_op("mistakes::registered", torch._library.effects.EffectType.ORDERED)
    return Example(registered, [(torch.rand(4, 6),)])


@right()
def has_side_effect():
    @custom_op("mistakes::has_side_effect", mutates_args=())
    def has_side_effect(x: Tensor) -> None:
        SEEN.append(1)

    has_side_effect.register_fake(lambda x: None)
    torch.fx.node.has_side_effect(has_side_effect._opoverload)
    return Example(has_side_effect, [(torch.rand(4, 6),)])


@right()
def unknown_writes():
    @custom_op("mistakes::unknown_writes", mutates_args="unknown")
    def unknown_writes(x: Tensor, y: Tensor) -> None:
        x.add_(1)

    unknown_writes.register_fake(lambda x, y: None)
    return Example(unknown_writes, [(torch.arange(24).view(4, 6), torch.arange(3))])


@right()
def fills():
    @custom_op("mistakes::fills", mutates_args=("out",))
    def fills(x: Tensor, out: Tensor) -> None:
        out.copy_(x * 2)

    fills.register_fake(lambda x, out: None)
    return Example(fills, [(torch.arange(24).view(4, 6), torch.zeros(4, 6, dtype=torch.int64))])
