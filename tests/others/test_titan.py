"""torchtitan's bill: closed forms, what the table's differences say, and what it refuses."""

import pytest

from actmem.config import ConfigError
from actmem.llama_shape import LLAMA_MODELS
from actmem.plan.layout import Layout
from actmem.plan.planned_models import planned_model_of
from actmem.rows import total
from actmem_course.bench.measure_runs import predicted_seconds, titan_result
from actmem_course.others.published import TITAN_RUNS
from actmem_course.others.titan import titan_bill, titan_layer_rows

LLAMA = LLAMA_MODELS["llama3-8b"]


def test_a_selective_block_is_its_closed_form():
    h, k, f, a, tokens = 4096, 1024, 14336, 32, 16384
    closed = 2 * tokens * (4 * h + k + f) + 4 * tokens * a
    assert total(titan_layer_rows(LLAMA, tokens, 1, "selective")) == closed
    assert total(titan_layer_rows(LLAMA, tokens, 1, "full")) == 2 * tokens * h


def test_context_parallelism_leaves_a_ranks_bytes_as_they_are():
    bills = [
        titan_bill(LLAMA, Layout(8 // cp, context_parallel_size=cp, sequence_parallel=False), 32768 * cp, "full")
        for cp in (1, 2, 4, 8)
    ]
    assert len({bill.bytes for bill in bills}) == 1


def test_its_weights_are_the_planned_models():
    parts = titan_bill(LLAMA, Layout(1, sequence_parallel=False), 8192, "full").parts
    assert total(parts["weights"]) == 4 * planned_model_of("llama3-8b").num_parameters


def test_nothing_is_counted_that_was_not_reserved():
    results = [titan_result(run) for run in TITAN_RUNS]
    counted = [result for result in results if result.predicted_mib]
    assert len(counted) >= 7 and all(result.predicted_mib < result.printed_mib for result in counted)
    assert all(result.within_limit is None and result.note for result in results)


def test_what_it_refuses():
    with pytest.raises(ConfigError, match="pipeline_parallel_size: the table doesn't say"):
        titan_bill(LLAMA, Layout(1, 1, 2), 8192, "full")
    with pytest.raises(ConfigError, match="recompute: selective is read for one"):
        titan_layer_rows(LLAMA, 1024, 8, "selective")


def test_more_recomputation_takes_longer():
    model = planned_model_of("1t")
    sizes = {"tensor_parallel_size": 8, "pipeline_parallel_size": 64, "num_model_chunks": 1, "micro_batch_size": 1}
    times = [predicted_seconds(model, 512, "a100", 512, mode, **sizes) for mode in ("none", "selective", "full")]
    assert times == sorted(times) and times[0] < times[2] / 1.2
