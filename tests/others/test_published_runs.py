"""Published peaks beside what the planner predicts of them."""

from dataclasses import replace

import pytest
from measure_published import predictions

from actmem_course.others.published_runs import published_runs

RUNS = published_runs()


def test_a_run_is_predicted_or_left_out_with_a_reason():
    for run in RUNS:
        assert bool(run.left_out) == (not run.command) == (run.predicted_bytes is None), run.name
        assert run.published_bytes > 0 and run.source and run.kind in ("allocated", "reserved", "nvidia-smi")


def test_a_difference_above_three_percent_has_a_cause():
    assert not [run.name for run in RUNS if abs(run.difference_percent or 0) > 3 and not run.why]


def test_the_difference_is_in_percent_of_the_published_peak():
    run = replace(RUNS[0], kind="allocated", published_bytes=200, plan_bytes=190, reserved_bytes=210)
    assert run.difference_percent == pytest.approx(-5) and replace(run, plan_bytes=None).difference_percent is None
    assert replace(run, kind="reserved").difference_percent == pytest.approx(5)


@pytest.mark.nightly
def test_the_predictions_are_what_the_commands_say():
    pytest.importorskip("transformers")
    assert predictions(RUNS) == {run.name: (run.plan_bytes, run.reserved_bytes) for run in RUNS if run.command}
