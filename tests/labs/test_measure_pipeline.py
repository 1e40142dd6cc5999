"""measure_pipeline: every rank exact, on grids of ranks.  Chapter 6 starts it as a user does."""

import pytest

from tests.labs.in_process import lab_results

SCRIPT = "measure_pipeline.py"


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("arguments", "in_flight"),
    [
        (["--pipeline", 4, "--microbatches", 5, "--free-outputs"], [4, 3, 2, 1]),
        (["--pipeline", 2, "--tensor", 2, "--chunks", 2, "--recompute", "selective"], [5, 5, 3, 3]),
        (["--pipeline", 2, "--tensor", 2, "--no-sequence-parallel", "--dtype", "float32"], [2, 2, 1, 1]),
    ],
)
def test_every_rank_exact(arguments, in_flight, pools):
    results = lab_results(pools[4], SCRIPT, *arguments)
    assert [r["measured_in_flight"] for r in results] == in_flight
    for r in results:
        assert r["exact"] and r["difference_bytes"] == 0 and r["order_as_drawn"]
        assert r["measured_bytes"] == r["predicted_bytes"] + r["extra_bytes"]
        assert max(sample["kept_bytes"] for sample in r["samples"]) == r["measured_bytes"]
        assert r["samples"][-1]["kept_bytes"] == 0
