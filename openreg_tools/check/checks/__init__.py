"""The checks of `checker.check`: one function each, with a section in docs/checker.md.

A check passes by returning, with or without a note, and ends in any other way through fail(), warn(), refuse() or
skip(). The report shows the first line of its docstring.
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
    machine,
    programs,
    registration,
    state,
    streams,
    transforms,
    unbacked,
    values,
)

# In the order of the report.
CHECKS: dict[str, Callable[[Case], str | None]] = {
    check.__name__: check
    for check in (
        values.runs,
        values.schema,
        values.reference,
        values.opcheck_schema,
        values.opcheck_autograd_registration,
        values.opcheck_faketensor,
        values.opcheck_aot_dispatch_dynamic,
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
        unbacked.export_unbacked,
        fakes.fake_errors,
        registration.int_sizes,
        registration.defaults,
        registration.effects,
        transforms.functionalization,
        transforms.out,
        transforms.vmap,
        transforms.vmap_grad,
        transforms.autocast,
        distributed.dtensor,
        programs.export,
        programs.jit_trace,
        programs.jit_script,
        programs.copies,
        inputs.layouts,
        inputs.empty,
        inputs.zero_dim,
        inputs.large,
        inputs.sizes,
        inputs.large_strides,
        inputs.half_precision,
        streams.stream,
        streams.devices,
        streams.launch,
        machine.poison,
        machine.determinism,
        state.generator,
        state.state,
        state.threads,
        machine.overhead,
    )
}

# The checks that also apply to sparse and other tensors without strides.
ANY_LAYOUT = {"runs", "reference", "opcheck_faketensor", "backward", "jit_trace", "jit_script", "copies", "determinism",
              "generator", "threads", "poison", "overhead"}  # fmt: skip

# The checks that call the kernel with sizes, strides, dtypes or values that the author did not give.
UNUSUAL = {name for name, check in CHECKS.items() if check.__module__ == inputs.__name__}
UNUSUAL |= {"schema", "fake_layouts", "fake_dtypes", "fake_errors", "fake_numbers", "defaults"}

# The checks that take longer than a few hundredths of a second; `--only fast` leaves them out.
SLOW = {
    "opcheck_schema", "opcheck_autograd_registration", "opcheck_faketensor", "opcheck_aot_dispatch_dynamic", "forward_ad",
    "func_grad", "compile", "fake_dynamic", "fake_unbacked", "compile_unbacked", "export_unbacked", "vmap_grad", "dtensor",
    "export", "jit_trace", "jit_script", "large", "sizes", "large_strides", "half_precision", "stream", "devices", "launch",
    "determinism", "generator", "state", "threads", "overhead",
}  # fmt: skip
