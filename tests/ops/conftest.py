"""Fixtures of the operator tests; tests/conftest.py has the fixtures of every test (poisoned memory, a seed)."""

import pytest
from kit import DEVICE, OTHER


@pytest.fixture(params=[DEVICE, OTHER])
def device(request):
    return request.param
