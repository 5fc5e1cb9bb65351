"""What Dynamo remembers of torch's functions."""

from __future__ import annotations

import sys

__all__ = ["forget_replaced"]


def forget_replaced() -> None:
    """Let Dynamo look up torch's functions again, after functions that stood in their places are gone.

    Its rules are made at the first compilation and find functions by identity.
    """
    if rules := sys.modules.get("torch._dynamo.trace_rules"):
        rules.clear_lru_cache()
    if functions := sys.modules.get("torch._dynamo.variables.torch"):
        functions.TorchInGraphFunctionVariable._get_handlers.cache_clear()
