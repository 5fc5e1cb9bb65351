"""Device/CPU time of small and large operators and of a training step: `python benchmarks/small_operators.py --help`."""

import sys

from openreg_ops.tools.bench import main

if __name__ == "__main__":
    sys.exit(main())
