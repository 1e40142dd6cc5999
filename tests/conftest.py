"""Fixtures shared by all tests."""

import pytest
from hypothesis import settings

from tests.rank_pool import RankPool

# Other work on the machine makes a test slow, not wrong.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_collection_modifyitems(items):
    """Note in pytest's own results which tests plant a fault or hand over bad input: ``make report`` counts them."""
    for item in items:
        item.user_properties += [("kind", kind) for kind in ("fault", "bad_input") if item.get_closest_marker(kind)]


@pytest.fixture(scope="session")
def pools():
    """``pools[2].run(function, *args)``: ranks that stay alive for the whole test run."""
    made = {size: RankPool(size) for size in (1, 2, 4)}
    yield made
    for pool in made.values():
        pool.stop()
