"""Whatever a rank makes of the ranks' parts is named by something that makes the same numbers; what is right, by nothing."""

import pytest
import torch

from actmem_course.judge.collective_outcomes import SUM, everything_made, explain_parts, made_of
from actmem_course.judge.compare import close, times
from actmem_course.judge.verdict import Fault

ADVICE = Fault("", "all-reduce with SUM", "They are terms")


def parts_of(t, *sizes):
    torch.manual_seed(7)
    return [torch.randn(*sizes, dtype=torch.float64) for _ in range(t)]


@pytest.mark.parametrize(("t", "sizes", "every"), [(2, (4, 2, 6), 3), (2, (4, 6), 2), (4, (8, 4), 9)])
def test_everything_made_is_named(t, sizes, every):
    parts, rank = parts_of(t, *sizes), t - 1
    known = {made.words: made for made in everything_made(parts)}
    assert len(known) > 30
    for number, made in enumerate([*known.values()][::every]):
        value = made.make(parts, rank)
        words, first = made_of(value, parts, rank)[0]
        assert words == first.words and close(first.make(parts, rank), value), made.words
        ratio = (t, 1 / t, -1.0, 0.3)[number % 4]
        words, first = made_of(ratio * value, parts, rank)[0]
        assert words == f"{times(ratio, t)} {first.words}", made.words
        assert close(first.make(parts, rank), value), made.words


def test_a_finding_says_what_it_is_then_what_it_should_be_then_the_repair():
    parts = parts_of(2, 4, 3, 5)
    (said, *_) = explain_parts(sum(parts) / 2, parts, 1, SUM, ADVICE)
    sum_of = "the sum over the ranks"
    assert (said.symptom, said.repair) == (f"is 1/t (here 1/2) of {sum_of}", "all-reduce with SUM")
    assert said.cause == f"it should be {sum_of}. They are terms"
    returned = explain_parts(parts[1], parts, 1, SUM, ADVICE, ran="the all-reduce")[0]
    assert returned.cause.endswith("the all-reduce ran, but what is returned is not its result")


@pytest.mark.parametrize(
    "found",
    [torch.full((4, 3, 5), torch.nan), torch.zeros(4, 3, 5), torch.ones(()), torch.ones(0), torch.ones(4, 3, 5).bool(), torch.ones(4, 3, 5)],
    ids=["nan", "zero", "a number", "empty", "bool", "ones"],
)  # fmt: skip
def test_what_comes_of_no_part_is_named_by_nothing(found):
    assert explain_parts(found, parts_of(4, 4, 3, 5), 2, SUM, ADVICE) == []


def test_one_rank_has_nothing_to_collective():
    parts = parts_of(1, 4, 3, 5)
    assert made_of(parts[0], parts, 0) == []
