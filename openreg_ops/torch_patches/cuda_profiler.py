"""``ProfilerActivity.CUDA`` in a PyTorch without CUDA, whose profiler knows the device's plugin as PrivateUse1's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import ProfilerActivity, profiler

__all__ = ["register"]


def _with_plugin(original: Callable[..., Any]) -> Callable[..., Any]:
    def function(config: Any, activities: set[ProfilerActivity], *rest: Any, **options: Any) -> Any:
        ours = {ProfilerActivity.CUDA: ProfilerActivity.PrivateUse1}
        return original(config, {ours.get(activity, activity) for activity in activities}, *rest, **options)

    return function


def register() -> None:
    """Install the patches."""
    supported = torch.autograd._supported_activities

    def with_cuda() -> set[ProfilerActivity]:
        return supported() | {ProfilerActivity.CUDA}

    torch.autograd._supported_activities = profiler._supported_activities = with_cuda
    profiler._prepare_profiler = _with_plugin(profiler._prepare_profiler)
    profiler._enable_profiler = _with_plugin(profiler._enable_profiler)
