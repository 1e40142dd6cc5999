"""Chapter 1's figures: every segment is a formula's number, and the titles count right."""

from dataclasses import replace

import pytest

from actmem.config import PAPER_MODELS
from actmem.formulas.activations import TABLE2
from actmem.formulas.stages import bytes_by_rank
from actmem.formulas.states import ADAM, parameter_counts
from actmem_course.figures import ch01_memory_wall as memory_wall


@pytest.mark.parametrize("method", memory_wall.METHODS)
@pytest.mark.parametrize("name", PAPER_MODELS)
def test_segments_are_the_fullest_stages_bytes(name, method):
    model, (row,) = PAPER_MODELS[name], [row for row in TABLE2 if row.name == method]
    parallel = replace(model.parallel, sequence_parallel=row.sequence_parallel)
    by_rank = bytes_by_rank(model.shape, parallel, row.recompute)
    count = sum(parameter_counts(model.shape, parallel).values())
    each = {state.term: state.bytes_per_parameter for state in ADAM["float32 gradients"]}
    assert memory_wall.gpu_bytes(model, method) == {
        "parameters": each["parameters"] * count,
        "gradients and optimizer": (sum(each.values()) - each["parameters"]) * count,
        "activations": by_rank[0],
    }
    assert by_rank[0] == max(by_rank), "the first stage is the one drawn because it holds most"
