"""The formula for one layer's peak against the measured one, to the byte: every mode, TP, TP + SP, two dtypes."""

import pytest
import torch

from actmem.config import ConfigError, ModelShape, Parallel
from actmem.formulas.activations import layer_extra_rows, layer_rows
from actmem.formulas.layer_peak import layer_moments, layer_peak_rows
from actmem.measure.emulate import emulated_rank
from actmem.measure.parts import measure_layer_peak
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.recipes import RECOMPUTE_MODES
from actmem.rows import total
from tests.tiers import covering

#: Shapes whose peaks lie in different places: a long sequence, wide, many heads, next to nothing.
SHAPES = {
    "even": ModelShape(16, 2, 32, 4),
    "long": ModelShape(128, 2, 8, 8),
    "wide": ModelShape(4, 1, 64, 4),
    "many heads": ModelShape(16, 1, 64, 64),
    "odd batch": ModelShape(8, 5, 8, 2),
    "tiny": ModelShape(2, 1, 4, 2),
    "long and narrow": ModelShape(64, 3, 4, 2),
}
RANKS = {"one rank": (1, False), "TP": (2, False), "TP + SP": (2, True), "TP + SP on 4": (4, True)}


def maxima(curve):
    """The values of a curve from which it falls."""
    steps = [a for a, b in zip(curve, [*curve[1:], -1]) if a != b]
    rising = [True, *(b > a for a, b in zip(steps, steps[1:]))]
    return [value for value, up, after in zip(steps, rising, [*rising[1:], False]) if up and not after]


def measured(shape, ranks, recompute, dtype):
    size, sequence_parallel = ranks
    with emulated_rank(size):
        tp = tensor_parallel(sequence_parallel=sequence_parallel) if size > 1 else TensorParallel()
        return measure_layer_peak(shape, tp, recompute, dtype=dtype)


@pytest.mark.parametrize(
    ("shape", "recompute", "ranks", "dtype"),
    covering(SHAPES, RECOMPUTE_MODES, RANKS, [torch.bfloat16, torch.float32]),
    ids=str,
)
def test_the_peak_is_as_predicted(shape, recompute, ranks, dtype):
    size, sequence_parallel = RANKS[ranks]
    shape = SHAPES[shape]
    if shape.num_attention_heads % size or (sequence_parallel and shape.seq_length % size):
        with pytest.raises(ConfigError, match="must be divisible"):
            layer_peak_rows(shape, Parallel(size, sequence_parallel), recompute)
        return
    bill = measured(shape, (size, sequence_parallel), recompute, dtype)
    predicted = layer_peak_rows(shape, Parallel(size, sequence_parallel), recompute, dtype.itemsize)
    assert total(predicted) == bill.peak_bytes == sum(row.bytes for row in bill.peak)
    kinds = {name: sum(row.bytes for row in predicted if row.term.startswith(name)) for name in ("weights",)}
    assert kinds["weights"] == bill.by_kind()["weight"]


@pytest.mark.parametrize(
    ("recompute", "ranks"), covering(RECOMPUTE_MODES, ["one rank", "TP", "TP + SP"], of=1), ids=str
)
def test_every_smaller_peak_is_as_predicted_too(recompute, ranks):
    shape, (size, sequence_parallel) = SHAPES["even"], RANKS[ranks]
    curve = measured(shape, (size, sequence_parallel), recompute, torch.bfloat16).curve
    moments = layer_moments(shape, Parallel(size, sequence_parallel), recompute)
    predicted = iter([total(rows) for _, rows in moments])
    # In order: each search goes on from where the last one ended.
    missing = [value for value in maxima(curve) if value not in predicted]
    assert len(maxima(curve)) > 20 and not missing


@pytest.mark.parametrize("recompute", RECOMPUTE_MODES)
def test_between_the_passes_it_is_what_the_layer_keeps(recompute):
    shape = SHAPES["even"]
    moments = dict(layer_moments(shape, recompute=recompute))
    between = {row.term: row.bytes for row in moments["backward of the next layer"]}
    outside = between.pop("weights") + between.pop("gradient of the layer's output")
    kept = layer_rows(shape, recompute=recompute) + layer_extra_rows(shape, recompute=recompute)
    assert outside > 0 and between == {row.term: row.bytes for row in kept}


def test_real_tensors_have_the_same_peak():
    shape = SHAPES["even"]
    for recompute in RECOMPUTE_MODES:
        assert measure_layer_peak(shape, recompute=recompute).peak_bytes == total(
            layer_peak_rows(shape, recompute=recompute)
        )


def test_a_set_of_terms_is_refused():
    with pytest.raises(ConfigError, match="not for a set of terms"):
        layer_peak_rows(SHAPES["even"], recompute=["GeLU input"])  # type: ignore[arg-type]
