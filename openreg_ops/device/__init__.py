"""What ``torch.openreg`` is made of; device_module.py assembles it.

device_index.py  the index of a device given in any form; the other files import it
devices.py       which devices exist, and which is current
streams.py       streams, events and launch modes
memory.py        statistics, snapshots, limits and pools of device memory
graphs.py        work that is captured once and replayed; liveness.py finds inputs of a graph that are gone
usage.py         how busy a device is
sync_debug.py    set_sync_debug_mode
random.py        the generators' states and seeds
amp.py           what torch.autocast needs
faults.py        torch.openreg.faults
nvtx.py          torch.openreg.nvtx
cuda.py          what torch.cuda has besides, under the name cuda; cuda_types.py has its tensor types, and refusals.py
                 the error of what needs a real GPU
"""
