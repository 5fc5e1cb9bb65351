"""`python -m openreg_ops bench` under the name of what it measures; --help lists its options."""

import sys

from openreg_ops.__main__ import main

if __name__ == "__main__":
    sys.argv.insert(1, "bench")
    sys.exit(main())
