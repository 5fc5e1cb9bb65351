"""``python -m openreg_tools COMMAND``: the tools of openreg_ops without its device.

A process has one backend of the name PrivateUse1. To point the tools at another one, openreg_ops must not register its
own, nor need it be built; ``python -m openreg_ops`` starts this by itself for ``--import other --device other``.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import types


def main() -> int:
    folders = list(importlib.util.find_spec("openreg_ops").submodule_search_locations)
    if sys.argv[1:2] == ["info"]:  # which says why openreg_ops itself cannot be imported
        runpy.run_path(os.path.join(folders[0], "tools", "info.py"), run_name="__main__")
        return 0
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # worker processes too
    package = types.ModuleType("openreg_ops", "The package without its device.")
    package.__path__ = folders
    sys.modules["openreg_ops"] = package
    from openreg_ops import __main__

    return __main__.main()


if __name__ == "__main__":
    sys.exit(main())
