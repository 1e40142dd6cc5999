"""Published layouts beside the planner's: they stand, or a reason is given that says what they are without it."""

import pytest

from actmem.config import ConfigError
from actmem.models import PAPER_MODELS
from actmem_course.others.published import LLAMA3_RUNS
from actmem_course.others.published_choices import llama3_choice, paper_choice, published_choices


@pytest.fixture(scope="module")
def choices():
    return list(published_choices())


def test_what_was_published_stands_or_has_a_reason(choices):
    assert len(choices) == len(PAPER_MODELS) + len(LLAMA3_RUNS) + 8
    assert all(choice.stands != bool(choice.reason) for choice in choices)
    reasons = [choice.setting for choice in choices if choice.reason]
    assert [setting.partition(",")[0] for setting in reasons] == ["405B"] * len(LLAMA3_RUNS) + ["70B"]


@pytest.mark.parametrize("run", LLAMA3_RUNS, ids=str)
def test_llama_3_stands_where_chunks_divide_the_layers(run):
    even = llama3_choice(run, 128)
    assert even.stands and even.plan.layout.num_model_chunks > 1


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_full_recomputation_is_needless(name, choices):
    (choice,) = (choice for choice in choices if choice.setting == name)
    assert choice.plan.recompute == "selective" and choice.best.recompute in ("none", "selective")


def test_an_unknown_model():
    with pytest.raises(ConfigError, match="model: must be one of 22B, 175B, 530B, 1T, got 'GPT-5'"):
        paper_choice("GPT-5")
