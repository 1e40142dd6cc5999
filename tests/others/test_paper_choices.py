"""The paper's plans beside the planner's best, in wider and wider searches."""

from functools import cache

import pytest

from actmem.config import ConfigError
from actmem.models import PAPER_MODELS
from actmem_course.others.paper_choices import SEARCHES, paper_choice

CODE, ZERO_1, ZERO, ELEMENTWISE = SEARCHES
choice_of = cache(paper_choice)


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_within_5_percent_of_what_the_papers_code_could_run_and_full_recomputation_is_needless(name):
    choice = choice_of(name)
    assert 0 <= choice.behind(CODE) <= 0.05
    assert choice.plan.recompute == "selective" and choice.best[CODE].recompute in ("none", "selective")


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_a_wider_search_finds_no_slower_plan(name):
    choice = choice_of(name)
    behind = [choice.behind(search) for search in SEARCHES]
    assert behind == sorted(behind)
    assert all(choice.best[search].layout.zero_stage in stages for search, (_, stages) in SEARCHES.items())


def test_what_hides_behind_computation():
    assert all(choice_of(name).hidden_seconds(CODE) == 0 for name in PAPER_MODELS)
    # Without that assumption the paper's plans would be the faster ones.
    for name in ("22B", "175B"):
        choice = choice_of(name)
        assert choice.behind(ZERO) > 0
        assert choice.best[ZERO].seconds.total + choice.hidden_seconds(ZERO) > choice.plan.seconds.total


def test_an_unknown_model():
    with pytest.raises(ConfigError, match="model: must be one of 22B, 175B, 530B, 1T, got 'GPT-5'"):
        paper_choice("GPT-5")
