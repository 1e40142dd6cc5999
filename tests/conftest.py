"""Fixtures shared by all tests, and the order in which the test processes take them."""

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import settings

from tests.rank_pool import RankPool

# Other work on the machine makes a test slow, not wrong.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

# In the background of a shell Ctrl-C is ignored, also by all that tests start: labs that tests end by it would go on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: ``make test FAST=1``: tests that start one of these are skipped, each with that reason.
FAST = os.environ.get("FAST") == "1"
PROGRAMS = ("python", "torchrun", "chromium", "jupyter", "npm")
#: Two hosts need root and network namespaces, which not every machine gives, and a cut cable takes minutes to be
#: noticed.  So no run has them unless HOSTS=1 asks for it.
collect_ignore = [] if os.environ.get("HOSTS") == "1" else ["labs/test_two_hosts.py"]
#: What takes longest begins first, so that no test process is left alone with it in the end.
LONGEST = ("tests/notebooks", "tests/labs")


def pytest_collection_modifyitems(items):
    """Put the longest first, and note which tests plant a fault or hand over bad input: ``make report`` counts them."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    for item in items:
        item.user_properties += [("kind", kind) for kind in ("fault", "bad_input") if item.get_closest_marker(kind)]


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own(tmp_path_factory):
    """What labs note in the user's cache folder stays there: a test has no say in what a learner has passed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def pools(pools_of_the_run):
    """``pools[2].run(function, *args)``: ranks that stay alive, for the next file of tests too if few groups are left."""
    yield pools_of_the_run
    for pool in pools_of_the_run.values():
        pool.leave_few_threads()


@pytest.fixture(scope="session")
def pools_of_the_run():
    made = {size: RankPool(size) for size in (1, 2, 4)}
    yield made
    for pool in made.values():
        pool.stop()


@pytest.fixture(scope="session", autouse=True)
def no_further_program():
    """In the fast part, skip what starts another program; ranks of ``pools`` are no program of their own."""
    if not FAST:
        yield
        return
    start = subprocess.Popen.__init__

    def refuse(self, args, *others, **options):
        parts = [args] if isinstance(args, (str, os.PathLike)) else list(args)
        if any(Path(os.fsdecode(part)).name.startswith(PROGRAMS) for part in parts):
            self._child_created = False  # what its __del__ reads
            pytest.skip("starts a program: not in the fast part")
        start(self, args, *others, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", refuse)
        yield
