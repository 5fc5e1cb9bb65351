"""Fixtures of the operator tests; tests/conftest.py has the fixtures of every test (poisoned memory, a seed)."""

import pytest


@pytest.fixture(params=["openreg:0", "openreg:1"])
def device(request):
    return request.param
