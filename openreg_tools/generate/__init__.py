"""Generated inputs: calls made by hypothesis, on a device against the CPU, in child processes, shrunk to a small case.

`search` draws cases and shrinks them, in the parent, which does not touch the device. `child` runs one case. A case is
a JSON object: an operator, the number of one of its base calls, and the changes to that call (`changes`).
"""
