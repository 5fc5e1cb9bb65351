"""Groups of processes, which the tests of a file share; see tests/backend/workers.py."""

import pytest
from workers import Workers


@pytest.fixture(scope="module")
def two():
    with Workers(2) as workers:
        yield workers


@pytest.fixture(scope="module")
def four():
    with Workers(4) as workers:
        yield workers
