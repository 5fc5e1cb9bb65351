"""torch.compile for the device: Dynamo's device interface, and Inductor's C++ kernels run on device memory.

Users need nothing of it but `decompositions`. Importing this package loads neither Dynamo nor Inductor (two seconds):
the parts register themselves when PyTorch loads those.

    registration.py  which part registers itself when PyTorch loads which module
    backend.py       torch.compile(backend="openreg")
    dynamo.py        what Dynamo asks a device: streams, events, current device
    operators.py     what becomes of custom operators
    codegen.py       what Inductor generates for the device: kernels that go through launch(), and the wrappers
    graphs.py        mode="reduce-overhead": compiled graphs as replays of device graphs
    higher_order.py  operators that take functions, such as flex_attention
    convolution.py   the strides of a convolution's result in graphs
    adapt.py         where Inductor's own code must be adapted, one function each, pinned to versions of torch
"""

from __future__ import annotations

# The operators that Inductor takes apart, with their backward, and fuses with what stands around them; of the others,
# and in eager mode, the device's own kernel runs. May be changed at any time, for the graphs compiled from then on;
# "rms_norm" may be added, another name is an error. The default is what is faster:
# `python -m openreg_ops bench compiled --only decompositions`.
decompositions: set[str] = {"rotary_embedding", "swiglu"}
