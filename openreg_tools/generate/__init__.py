"""Generated inputs: hypothesis makes calls, child processes compare a device with the CPU, and failures are shrunk.

`search` draws cases and shrinks them, in the parent, which does not touch the device. `child` runs one case. A case is
a JSON object: an operator, the index of one of its base calls, and the changes to that call (`changes`).
"""
