"""Chapter 5's figures: valid plotly, and their numbers are the formulas'."""

import pytest

from actmem.config import TINY, model_shape
from actmem.formulas.activations import CORE_ATTENTION_TERMS, layer_rows
from actmem.rows import total
from actmem_course.figures import ch05_recomputation as recomputation
from actmem_course.predicted.recomputation import fullest_bytes
from tests.drawings import assert_valid

# One training step as blocks: what is pushed is popped, and its fullest moment is the formula's.


STEP = model_shape("175B").with_sizes(num_layers=4)
MODES = ("none", "selective", "full")


@pytest.mark.parametrize("recompute", ("none", "full"))
@pytest.mark.parametrize("shape", [STEP, TINY], ids=["GPT-3", "tiny"])
def test_it_is_fullest_where_the_formula_says(shape, recompute):
    sizes = [moment.bytes for moment in recomputation.training_moments(shape, recompute)]
    assert max(sizes) == fullest_bytes(shape, recompute)
    assert sizes[0] == sizes[-1] == 0


@pytest.mark.parametrize("shape", [STEP, TINY], ids=["GPT-3", "tiny"])
def test_the_core_comes_back_when_what_came_after_it_is_freed(shape):
    """So the peak is below ``fullest_bytes``, which adds the core to layers that are still whole."""
    sizes = [moment.bytes for moment in recomputation.training_moments(shape, "selective")]
    left, rows = total(layer_rows(shape, recompute="selective")), layer_rows(shape)
    last = max(place for place, row in enumerate(rows) if row.term in CORE_ATTENTION_TERMS)
    assert max(sizes) == max(shape.num_layers * left, (shape.num_layers - 1) * left + total(rows[: last + 1]))
    assert max(sizes) < fullest_bytes(shape, "selective")


@pytest.mark.parametrize("recompute", MODES)
def test_after_forward_each_layer_holds_its_rows(recompute):
    moments = recomputation.training_moments(STEP, recompute)
    after_forward = [moment for moment in moments if moment.says.startswith("forward")][-1]
    assert all(rows == tuple(layer_rows(STEP, recompute=recompute)) for rows in after_forward.held)
    assert after_forward.bytes == STEP.num_layers * total(layer_rows(STEP, recompute=recompute))


def test_the_core_is_never_pushed_and_comes_back_one_layer_at_a_time():
    core = set(CORE_ATTENTION_TERMS)
    moments = recomputation.training_moments(STEP, "selective")
    with_core = [[core <= {row.term for row in rows} for rows in moment.held] for moment in moments]
    assert max(map(sum, with_core)) == 1 and sum(moment.again for moment in moments) == STEP.num_layers
    assert not any(any(one) for one, moment in zip(with_core, moments) if moment.says.startswith("forward"))


@pytest.mark.parametrize("recompute", MODES)
def test_the_step_shows_the_layer_at_work_and_all_bytes(recompute):
    moments = recomputation.training_moments(STEP, recompute)
    for number in range(0, len(moments), 7):
        picture, curve = recomputation.training_step(STEP, number, recompute)
        held = total(moments[number].held[moments[number].layer])
        assert_valid(picture)
        assert_valid(curve)
        assert f"{held:,} bytes" in picture.alt
        assert [size * 2**30 for size in curve.traces[0]["y"]] == pytest.approx([one.bytes for one in moments])
        assert curve.traces[2]["y"][1] == curve.traces[0]["y"][number]
