"""The hook of the pytest plugin, for plugins that find more about a device."""

from __future__ import annotations

import pytest

from openreg_tools.core.blocks import Block

__all__ = ["pytest_device_page"]


@pytest.hookspec
def pytest_device_page() -> list[Block]:  # type: ignore[empty-body]
    """What the page of --device-html begins with: problems that the plugin found."""
