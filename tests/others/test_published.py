"""What others publish: calculators' numbers for table 2, layouts, the paper's own disagreements and larger microbatches."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmem.config import PAPER_MODELS, TINY, ConfigError, ModelShape
from actmem.formulas.activations import TABLE2, closed_form, eq1
from actmem.formulas.flops import layer_overhead
from actmem_course.bench.predictors import measure_calculators, runs_of_two_sizes, sequence_results
from actmem_course.others.calculators import CALCULATORS, calculator_bytes, calculator_sequence_bytes
from actmem_course.others.disagreements import disagreements
from actmem_course.others.published import LLAMA3_RUNS, NANOTRON_MODEL, llama3_choice, paper_choice, published_choices
from actmem_course.predicted.recomputation import batch_factor, break_even, fullest_bytes, throughput
from tests.shapes import shapes

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
    right = {name: sum(not r.difference_bytes for r in results if r.calculator == name) for name in PRINTED}
    assert right == {name: coefficients.count(None) for name, coefficients in PRINTED.items()}
    assert sorted(right.values()) == [0, 2, 3, 5]
    for row in TABLE2:
        counted = {result.counted_bytes for result in results if result.row == row.name}
        assert counted == {closed_form(row, PAPER_MODELS["22B"].shape, 8)}


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


def numbers(where, text):
    (found,) = [d for d in disagreements() if d.where == where and text in d.printed]
    return [round(float(value.value), 2) for value in found.ours]


def test_every_number():
    assert numbers("§4.3", "under 0.01%") == [0.57]
    assert numbers("§4.3", "175B 8, 530B 35") == [16, 70]
    assert numbers("§6.1, figure 7", "under 20%") == [16.14, 18.48, 20.24, 20.24]
    assert numbers("§6.1, figure 7", "full recomputation needs 10%") == [7.59, 8.7, 9.52, 9.52]
    assert numbers("§5 and eq. 8", "175B +2.7%, 530B +1.6%") == [0.9, 0.45, 0.55, 0.27]
    assert numbers("Table 5, HFU", "22B 43.7%") == [42.37, 51.85, 56.35, 56.51]
    assert numbers("§5", "+33.3%") == [22.81, 22.52, 22.4, 22.37]
    assert numbers("Appendix B, figure 9", "2.73 GB") == [2.73, 2.94, 0.34]
    assert numbers("Appendix B, figure 9", "r = p = 35") == [139, 10.86]
    assert numbers("Appendix C and table 5", "175B MFU 52.3% (+0.7)") == [51.6]
    assert len(disagreements()) == 10


def test_each_is_a_short_list():
    assert all(entry.why.endswith(".") for entry in disagreements())
    paper = "  paper: 22B: the bytes beside its layers are under 0.01%"
    assert str(disagreements()[0]).splitlines()[:3] == ["§4.3", paper, "  ours: 22B 0.57%"]


MODES = ("selective", "paper-selective", "full", "paper-full")


@given(shapes(), st.integers(2, 9), st.sampled_from(MODES))
def test_throughput_is_1_at_the_break_even(shape, layers, mode):
    deep = shape.with_sizes(num_layers=layers)
    assert throughput(deep, mode, break_even(deep, mode)) == 1


@given(shapes(), st.sampled_from(MODES))
def test_without_a_fixed_part_recomputation_only_costs(shape, mode):
    assert throughput(shape, mode, Fraction(0)) == 1 / (1 + layer_overhead(shape, mode))


@given(shapes())
def test_one_layer_needs_all_its_bytes_at_its_fullest(shape):
    assert [fullest_bytes(shape, mode) for mode in ("none", *MODES)] == [eq1(shape)] * 5


def test_nothing_breaks_even_where_nothing_is_freed():
    with pytest.raises(ConfigError, match="frees nothing"):
        break_even(TINY.with_sizes(num_layers=1), "full")


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_full_frees_more_and_breaks_even_later(name):
    shape = PAPER_MODELS[name].shape
    assert batch_factor(shape, "full") > batch_factor(shape, "selective") > 1
    assert break_even(shape, "full") > break_even(shape, "selective") > 0
