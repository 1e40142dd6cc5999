"""Fixtures shared by all tests."""

import gc
import os
import signal
import threading

import pytest
from hypothesis import settings

from tests.tiers import *  # noqa: F403

# Other work on the machine makes a test slow, not wrong.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# In the background of a shell Ctrl-C is ignored, also by all that tests start: labs that tests end by it would go on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: Two hosts need root and network namespaces, which not every machine gives, and a cut cable takes minutes to be
#: noticed.  So no run has them unless HOSTS=1 asks for it.
collect_ignore = [] if os.environ.get("HOSTS") == "1" else ["labs/test_two_hosts.py"]


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory):
    """What labs note in the user's cache folder stays there: a test has no say in what a learner has passed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def only_new_objects():
    """A file's tests meet what they make themselves, not the million objects that are there before.

    The ledger looks at every object that the garbage collector has, and that in turn takes seconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def pools(pools_of_the_run):
    """``pools[2].run(function, *args)``: ranks that stay alive, for the next file of tests too if few groups are left."""
    yield pools_of_the_run
    for pool in pools_of_the_run.values():
        pool.leave_few_threads()


@pytest.fixture(scope="session")
def pools_of_the_run():
    from tests.rank_pool import RankPool  # loads torch, which pytest-xdist's first process never needs

    made = {size: RankPool(size) for size in (1, 2, 4)}
    yield made
    for pool in made.values():
        pool.stop()
