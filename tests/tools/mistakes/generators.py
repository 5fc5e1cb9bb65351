"""It ignores its Generator argument, or draws from another generator too."""

from __future__ import annotations

import torch
from torch import Generator

from mistakes import Example, define, no_derivative, right, wrong

X = torch.rand(4, 6, generator=Generator().manual_seed(0)) + 0.25
SEEDED = (torch.Tag.nondeterministic_seeded,)
NOISE = "(Tensor x, float p=0.5, *, Generator? generator=None) -> Tensor"


def shaped(x, *rest, generator=None):
    return x.new_empty(x.shape)


def operator(schema, kernel, fake=shaped):
    return define(
        schema, kernel, fake, no_derivative, lambda ctx, inputs, output, keyword_only_inputs=None: None, tags=SEEDED
    )


def uniform(x, generator):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).uniform_(generator=generator)


@wrong(
    "generator",
    says="with equal generators as generator it gives different numbers: it draws from the global generator of",
)
def dropout_ignores_it():
    op = operator(
        "dropout_ignores_it" + NOISE, lambda x, p=0.5, *, generator=None: (x * (uniform(x, None) >= p)).contiguous()
    )
    return Example(op, [(X,)])


@wrong("generator", says="with any generator as generator it gives the same numbers")
def fixed_seed_of_its_own():
    def kernel(x, generator=None):
        return (x + uniform(x, Generator(x.device).manual_seed(0))).contiguous()

    return Example(operator("fixed_seed_of_its_own(Tensor x, Generator? generator=None) -> Tensor", kernel), [(X,)])


@wrong("generator")
def mask_of_another_generator():
    def kernel(x, p=0.5, *, generator=None):
        noise = uniform(x, generator)
        return (x * (torch.rand(x.shape, dtype=x.dtype, device=x.device) >= p) + noise).contiguous()

    return Example(operator("mask_of_another_generator" + NOISE, kernel), [(X, 0.25)])


@wrong(
    "generator",
    says="the state of the generator generator is the same after the call, so the next call gives the same numbers again",
)
def reads_the_seed_alone():
    def kernel(x, generator=None):
        if generator is None:
            return (x + uniform(x, None)).contiguous()
        return (x + uniform(x, Generator(x.device).manual_seed(generator.initial_seed()))).contiguous()

    return Example(operator("reads_the_seed_alone(Tensor x, Generator? generator) -> Tensor", kernel), [(X, None)])


@wrong("generator")
def a_seed_from_the_global_generator():
    def kernel(x, n, generator=None):
        seed = int(torch.randint(1 << 30, ()))
        rows = torch.multinomial(x, n, generator=Generator(x.device).manual_seed(seed))
        return rows

    op = operator("a_seed_from_the_global_generator(Tensor x, SymInt n, *, Generator? generator=None) -> Tensor", kernel,
                  lambda x, n, generator=None: x.new_empty((x.shape[0], n), dtype=torch.int64))  # fmt: skip
    return Example(op, [(X, 2)])


@right()
def dropout_with_a_generator():
    op = operator(
        "dropout_with_a_generator" + NOISE,
        lambda x, p=0.5, *, generator=None: (x * (uniform(x, generator) >= p)).contiguous(),
    )
    return Example(op, [(X,), (X, 0.0)])


@right(devices=("cpu",))
def dropout_with_an_explicit_one():
    op = operator(
        "dropout_with_an_explicit_one" + NOISE,
        lambda x, p=0.5, *, generator=None: (x * (uniform(x, generator) >= p)).contiguous(),
    )
    from openreg_tools.core.samples import Sample

    return Example(op, [Sample(X, 0.5, generator=Generator().manual_seed(5))])


@right(devices=("cpu",))
def sampling_with_an_explicit_one():
    op = operator("sampling_with_an_explicit_one(Tensor x, SymInt n, Generator generator) -> Tensor",
                  lambda x, n, generator: torch.multinomial(x, n, generator=generator),
                  lambda x, n, generator: x.new_empty((x.shape[0], n), dtype=torch.int64))  # fmt: skip
    return Example(op, [(X, 2, Generator().manual_seed(5))])


@right(devices=("cpu",))
def noise_with_an_explicit_one_in_place():
    op = define("noise_with_an_explicit_one_in_place(Tensor(a!) x, Generator? generator=None) -> ()",
                lambda x, generator=None: (x.add_(uniform(x, generator)), None)[1], lambda x, generator=None: None, tags=SEEDED)  # fmt: skip
    return Example(op, [(X, Generator().manual_seed(5))])


@right(devices=("openreg",))
def dropout_with_a_generator_of_the_device():
    op = operator(
        "dropout_with_a_generator_of_the_device" + NOISE,
        lambda x, p=0.5, *, generator=None: (x * (uniform(x, generator) >= p)).contiguous(),
    )
    from openreg_tools.core.samples import Sample

    return Example(op, [Sample(X, 0.5, generator=Generator("openreg").manual_seed(5))])
