"""torch.compile for the device: Dynamo's device interface, and Inductor's C++ kernels running on device memory.

Users need only `decompositions`. Importing this package loads neither Dynamo nor Inductor (two seconds):
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

# The operators that Inductor decomposes, with their backward, and fuses with the code around them. The others, and all
# of them in eager mode, run the device's own kernel. You may change it at any time; it applies to graphs compiled from
# then on. You may add "rms_norm"; any other name is an error. The default is the faster choice:
# `make bench ARGS="compiled --only decompositions"`.
decompositions: set[str] = {"rotary_embedding", "swiglu"}
