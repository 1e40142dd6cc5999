"""What the paper leaves out: sizes, and a reason on every row."""

from hypothesis import given
from hypothesis import strategies as st

from actmem.config import Parallel
from actmem.formulas.activations import RNG_STATE_BYTES, layer_extra_rows
from actmem.models import TINY
from actmem.recipes import RECOMPUTE_MODES
from actmem.rows import by_term, extra_rows
from tests.formulas.cuts import layer_cuts

DEVICES = st.sampled_from(["cpu", "cuda"])


@given(layer_cuts(), st.sampled_from(RECOMPUTE_MODES), st.sampled_from([2, 4, 8]), DEVICES)
def test_every_row_has_a_reason(cut, recompute, e, device):
    shape, parallel = cut
    rows = layer_extra_rows(shape, parallel, recompute, e, device)
    assert rows and extra_rows(rows) == rows


@given(layer_cuts(), st.sampled_from([2, 4, 8]), DEVICES)
def test_statistics_are_two_numbers_a_token(cut, e, device):
    shape, parallel = cut
    terms = by_term(layer_extra_rows(shape, parallel, "none", e, device))
    tokens = shape.seq_length * shape.micro_batch_size
    if parallel.sequence_parallel:
        tokens //= parallel.tensor_parallel_size
    number = {"cpu": e, "cuda": max(e, 4)}[device]
    assert terms["layer-norm 1 statistics"] == terms["layer-norm 2 statistics"] == 2 * tokens * number
    assert set(terms) == {"layer-norm 1 statistics", "layer-norm 2 statistics"}


def test_masks_and_random_number_states_come_with_recomputation():
    for device, size in RNG_STATE_BYTES.items():
        selective = by_term(layer_extra_rows(TINY, Parallel(2), "selective", device_type=device))
        full = by_term(layer_extra_rows(TINY, Parallel(2), "full", device_type=device))
        assert selective["random-number state"] == size
        assert selective["causal mask"] == TINY.seq_length**2
        assert full == {"random-number state": 2 * size}
