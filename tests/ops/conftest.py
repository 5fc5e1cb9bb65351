"""Fixtures of the operator tests; those of every test (poisoned memory, a seed) are in tests/conftest.py."""

import pytest


@pytest.fixture(params=["openreg:0", "openreg:1"])
def device(request):
    return request.param
