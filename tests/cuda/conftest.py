"""Tests of the device under the name cuda. `inside` has those that run in a process which gave it that name.

`OPENREG_DEVICE=cuda pytest tests/cuda/inside` runs them; test_inside.py does so in the suite.
"""

from openreg_ops.identity import identity

collect_ignore_glob = ["test_*.py"] if identity.name == "cuda" else ["inside/*"]
