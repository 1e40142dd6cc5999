"""What a solved lab shows: bytes equal to the formula, in a terminal of 80 columns."""

import io

import pytest
from rich.console import Console

from actmem_course.judge import rewards
from actmem_course.judge.outline import LAB_NAMES, load_lab, solutions_of
from tests.labs.judged import real_bench


def reward_of(name):
    rewards.NUM_STEPS = 2  # in this rank's own process; more steps show nothing new
    return rewards.reward_of(load_lab(name), real_bench(dict(solutions_of(name))))


@pytest.mark.parametrize("name", LAB_NAMES)
def test_bytes_equal_the_formula(pools, name):
    alone = load_lab(name).one_process
    for reward in [reward_of(name)] if alone else pools[2].run(reward_of, name):
        for measure in reward.measures:
            assert len(set(measure.values.values())) == 1 and len(measure.values) > 1, measure
        output = io.StringIO()
        reward.show(Console(file=output, width=80, highlight=False))
        text = output.getvalue()
        assert reward.what in " ".join(text.split()) and "…" not in text
