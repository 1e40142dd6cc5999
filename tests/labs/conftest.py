"""Labs are started by a Python that has loaded torch already."""

import sys

import pytest

from tests.forked_python import shared

#: Test files whose labs may be forked.  The others ask what becomes of processes: there the parent must be the parent.
FORKED = (
    "test_copies", "test_course", "test_files", "test_judge_command", "test_measure_communication", "test_measure_gpu",
    "test_measure_paper", "test_measure_parity", "test_measure_peers", "test_measure_pipeline", "test_measure_runs", "test_measure_speed",
    "test_measure_table2", "test_measure_today", "test_stuck",
)  # fmt: skip


@pytest.fixture(scope="session")
def forked_python():
    return shared() if sys.platform == "linux" else sys.executable  # it reads /proc


@pytest.fixture(scope="module", autouse=True)
def what_starts_labs(request):
    """``sys.executable`` while a file's tests run."""
    if request.path.stem not in FORKED:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", request.getfixturevalue("forked_python"))
        yield
