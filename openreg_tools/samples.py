"""The old name of `openreg_tools.core.samples`, until nothing imports it."""

from openreg_tools.core.samples import *  # noqa: F403
