"""What a solved lab shows: bytes equal to the formula, in a terminal of 80 columns and as a page."""

import io

import pytest
from rich.console import Console

from actmem_course.judge import reward as form
from actmem_course.judge import rewards
from actmem_course.judge.outline import LAB_NAMES, load_lab, solutions_of
from tests.labs.judged import real_bench


def reward_of(name):
    # In this rank's own process; more steps and rounds show nothing new.
    rewards._FEWEST_STEPS = rewards._MOST_STEPS = 3
    form._SECONDS, form._FEWEST_ROUNDS = 0.0, 1
    return load_lab(name).reward(real_bench(dict(solutions_of(name))))


@pytest.mark.parametrize("name", LAB_NAMES)
def test_bytes_equal_the_formula(pools, name, tmp_path):
    alone = load_lab(name).one_process
    for reward in [reward_of(name)] if alone else pools[2].run(reward_of, name):
        counted = [measure for measure in reward.measures if measure.unit != "ms"]
        assert counted and all(len(set(m.values.values())) == 1 and len(m.values) > 1 for m in counted), counted
        output = io.StringIO()
        reward.show(Console(file=output, width=80, highlight=False))
        text = output.getvalue()
        assert reward.what in " ".join(text.split()) and "…" not in text
    reward.write_html(tmp_path / "page.html")
    assert reward.measures[0].name in (tmp_path / "page.html").read_text()
