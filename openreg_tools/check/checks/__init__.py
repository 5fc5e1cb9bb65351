"""The checks: one function each. CONTRIBUTING.md lists what a new one needs.

A check passes by returning, with or without a note, and ends in any other way through `Case.fail`, `Case.warn`, refuse(),
limit() or skip(). The report shows the first line of its docstring.
"""

from __future__ import annotations

from collections.abc import Callable

from openreg_tools.check.case import Case
from openreg_tools.check.checks import (
    derivatives,
    distributed,
    fakes,
    gradients,
    inputs,
    registration,
    results,
    sizes,
    state,
    streams,
    transforms,
    unbacked,
    writes,
)

# All checks, in the order of the report.
CHECKS: dict[str, Callable[[Case], str | None]] = {
    check.__name__: check
    for check in (
        results.runs,
        writes.schema,
        results.reference,
        derivatives.autograd_registration,
        derivatives.backward,
        derivatives.gradcheck,
        derivatives.gradgradcheck,
        derivatives.forward_ad,
        derivatives.func_grad,
        gradients.gradient_layouts,
        gradients.frozen_arguments,
        gradients.broadcast_gradients,
        gradients.saved_tensors,
        fakes.compile,
        fakes.fake_layouts,
        fakes.fake_dtypes,
        fakes.fake_dynamic,
        registration.fake_numbers,
        unbacked.fake_unbacked,
        unbacked.compile_unbacked,
        fakes.fake_errors,
        registration.int_sizes,
        registration.defaults,
        registration.effects,
        transforms.out,
        transforms.vmap,
        transforms.vmap_grad,
        transforms.autocast,
        distributed.dtensor,
        inputs.layouts,
        inputs.empty,
        inputs.zero_dim,
        inputs.large,
        sizes.sizes,
        inputs.large_strides,
        sizes.half_precision,
        streams.stream,
        streams.devices,
        results.poison,
        results.determinism,
        state.generator,
        state.state,
        state.threads,
    )
}

# The checks that also apply to sparse and other tensors without strides.
ANY_LAYOUT = {"runs", "reference", "backward", "determinism", "generator", "threads", "poison"}

# The checks that call the kernel with sizes, strides, dtypes or values that the author did not give.
UNUSUAL = {"layouts", "empty", "zero_dim", "large", "sizes", "large_strides", "half_precision", "schema", "fake_layouts",
           "fake_dtypes", "fake_errors", "fake_numbers", "defaults"}  # fmt: skip

# The checks that take longer than a few hundredths of a second; `--only fast` leaves them out.
SLOW = {"forward_ad", "func_grad", "compile", "fake_dynamic", "fake_unbacked", "compile_unbacked",
        "vmap_grad", "dtensor", "large", "sizes", "large_strides", "half_precision", "stream", "devices",
        "determinism", "generator", "state", "threads"}  # fmt: skip

# Which part of an operator a check tests, in the order in which a report names one check for a cause. A check that is
# not listed tests what no other does.
PARTS = {
    "kernel": (
        "runs schema state threads generator determinism poison stream devices layouts sizes large_strides empty zero_dim "
        "large half_precision reference"
    ).split(),
    "backward": (
        "saved_tensors backward gradcheck frozen_arguments broadcast_gradients gradient_layouts gradgradcheck forward_ad "
        "func_grad autograd_registration"
    ).split(),
    "fake kernel": "fake_layouts fake_errors fake_dtypes fake_dynamic fake_numbers fake_unbacked".split(),
    # These run several parts, so they also fail where one of the parts is wrong.
    "program": "compile compile_unbacked vmap vmap_grad dtensor".split(),
}
