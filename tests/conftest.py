"""Fixtures shared by all tests."""

import pytest

from tests.rank_pool import RankPool


@pytest.fixture(scope="session")
def pools():
    """``pools[2].run(function, *args)``: ranks that live as long as the test run."""
    made = {size: RankPool(size) for size in (2, 4)}
    yield made
    for pool in made.values():
        pool.stop()
