"""What public calculators print for table 2: right in 0 to 5 of its 6 rows, wrong where and by what is said."""

from fractions import Fraction

import pytest

from actmem.config import ConfigError, ModelShape
from actmem.formulas.activations import TABLE2, closed_form
from actmem.models import PAPER_MODELS
from actmem_course.bench.predictors import measure_calculators, runs_of_two_sizes, sequence_results
from actmem_course.others.calculators import CALCULATORS, calculator_bytes, calculator_sequence_bytes
from actmem_course.others.published import NANOTRON_MODEL

#: Coefficients of sbh that each prints for t = 8 in the order of table 2, with 5as/h = c; None: as the paper.
PRINTED = {
    "playbook": [None, None, lambda c: Fraction(34, 8) + c, None, None, None],
    "cookbook": [None, lambda c: 34 + c, None, lambda c: 34, None, lambda c: 34],
    "Megatron-LM": [lambda c: 34, lambda c: 13, lambda c: 13, None, None, lambda c: 13],
    "llm-analysis": [
        lambda c: 33 + c, lambda c: 12 + c / 8, lambda c: (33 + c) / 8, lambda c: 12, lambda c: Fraction(33, 8), lambda c: Fraction(2, 8),
    ],
}  # fmt: skip


@pytest.mark.parametrize("model", PAPER_MODELS)
@pytest.mark.parametrize("calculator", CALCULATORS, ids=lambda calculator: calculator.name)
def test_what_is_printed_for_table_2(calculator, model):
    shape = PAPER_MODELS[model].shape
    a, b, h, s = shape.letters()
    scores = Fraction(5 * a * s, h)
    for row, coefficient in zip(TABLE2, PRINTED[calculator.name], strict=True):
        paper = closed_form(row, shape, 8)
        expected = paper if coefficient is None else s * b * h * coefficient(scores)
        assert calculator_bytes(calculator, row, shape, 8) == expected, row.name
        assert coefficient is None or expected != paper


def test_each_row_beside_the_counted_bytes():
    results = measure_calculators()
    assert [result.row for result in results] == len(CALCULATORS) * [row.name for row in TABLE2]
    right = {
        name: sum(result.difference_bytes == 0 for result in results if result.calculator == name) for name in PRINTED
    }
    assert right == {name: coefficients.count(None) for name, coefficients in PRINTED.items()}
    assert sorted(right.values()) == [0, 2, 3, 5]
    for row, of_row in ((row.name, [r for r in results if r.row == row.name]) for row in TABLE2):
        assert {r.counted_bytes for r in of_row} == {
            closed_form(next(r for r in TABLE2 if r.name == row), PAPER_MODELS["22B"].shape, 8)
        }


def test_one_more_sequence_on_gpus_is_a_third_more_than_any_calculator_says_and_as_ours_says():
    small, large = runs_of_two_sizes()
    assert (small.gpus, small.dp, small.tp, small.pp) == (large.gpus, large.dp, large.tp, large.pp)
    *others, ours = sequence_results()
    assert [result.calculator for result in others] == [calculator.name for calculator in CALCULATORS]
    assert all(result.difference_percent < -30 for result in others)
    assert abs(ours.difference_percent) < 0.05


def test_a_layer_that_t_ranks_cannot_share():
    with pytest.raises(ConfigError, match="num_attention_heads"):
        calculator_bytes(CALCULATORS[0], TABLE2[1], ModelShape(8, 2, 16, 4), 3)
    with pytest.raises(ConfigError, match="seq_length"):
        calculator_sequence_bytes(CALCULATORS[0], NANOTRON_MODEL, 0, 1)
