"""Whatever a rank makes of the ranks' parts is named by something that makes the same numbers; what is right, by nothing."""

import pytest
import torch
import torch.distributed as dist

from actmem_course.judge.collective_outcomes import OPERATORS, SUM, everything_made, explain_parts, made_of
from actmem_course.judge.compare import close, times
from actmem_course.judge.solutions import lab2_tensor_parallel as lab2
from actmem_course.judge.solutions import lab3_sequence_parallel as lab3
from actmem_course.judge.verdict import Fault
from actmem_course.judge.virtual import VirtualRanks

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_named_by_its_dtype(dtype):
    parts = parts_of(4, 4, 3, 5)
    rounded = sum(parts).to(dtype).to(torch.float64)
    (said,) = explain_parts(rounded, parts, 0, SUM, ADVICE)
    assert said.symptom.endswith(f"which are those of {str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize(
    "found",
    [torch.full((4, 3, 5), torch.nan), torch.zeros(4, 3, 5), torch.ones(()), torch.ones(0), torch.ones(4, 3, 5).bool(), torch.ones(4, 3, 5)],
    ids=["nan", "zero", "a number", "empty", "bool", "ones"],
)  # fmt: skip
def test_what_comes_of_no_part_is_named_by_nothing(found):
    assert explain_parts(found, parts_of(4, 4, 3, 5), 2, SUM, ADVICE) == []


def test_one_rank_has_nothing_to_exchange():
    parts = parts_of(1, 4, 3, 5)
    assert made_of(parts[0], parts, 0) == []


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_our_operators_are_what_their_two_passes_make(operator, t):
    parts = parts_of(t, 8, 3, 5)
    upstream = [torch.randn_like(operator.forward.make(parts, rank)) for rank in range(t)]
    ours = getattr(lab2 if operator.name in ("f", "f_bar") else lab3, operator.name)

    def run(rank):
        x = parts[rank.number].clone().requires_grad_()
        result = ours(x, dist.group.WORLD)
        result.backward(upstream[rank.number])
        return result.detach(), x.grad

    for rank, (result, gradient) in enumerate(VirtualRanks(t).run(run)):
        torch.testing.assert_close(result, operator.forward.make(parts, rank))
        torch.testing.assert_close(gradient, operator.backward.make(upstream, rank))
