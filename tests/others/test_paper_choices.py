"""The paper's plans beside the planner's best, in wider and wider searches."""

from functools import cache

import pytest

from actmem.config import ConfigError
from actmem.models import PAPER_MODELS
from actmem.plan.step_time import MODEL_ERROR
from actmem_course.others.paper_choices import SEARCHES, paper_choice

CODE = next(iter(SEARCHES))
choice_of = cache(paper_choice)


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_as_near_as_times_are_right_of_what_the_papers_code_could_run_and_full_recomputation_is_needless(name):
    choice = choice_of(name)
    assert 0 <= choice.behind(CODE) <= MODEL_ERROR
    assert choice.plan.recompute == "selective" and choice.best[CODE].recompute in ("none", "selective")


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_a_wider_search_finds_no_slower_plan(name):
    choice = choice_of(name)
    behind = [choice.behind(search) for search in SEARCHES]
    assert behind == sorted(behind)
    assert all(choice.best[search].layout.zero_stage in stages for search, (_, stages) in SEARCHES.items())


def test_what_hides_behind_computation():
    # Data-parallel exchanges that hide are most of what stages 2 and 3 send, and without pipelines all of it.
    for name in PAPER_MODELS:
        choice = choice_of(name)
        assert all(choice.hidden_seconds(search) == choice.best[search].seconds.hidden > 0 for search in SEARCHES)


def test_an_unknown_model():
    with pytest.raises(ConfigError, match="model: must be one of 22B, 175B, 530B, 1T, got 'GPT-5'"):
        paper_choice("GPT-5")
