"""The checker of custom operators."""

from openreg_tools.check.checker import check
from openreg_tools.check.report import Report
from openreg_tools.core.samples import Sample

__all__ = ["Report", "Sample", "check"]
