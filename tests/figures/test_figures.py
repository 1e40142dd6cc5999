"""Figures at the ends of what they can show; test_kinds.py draws those of the chapters, wherever their controls stand."""

from collections.abc import Callable

import plotly.graph_objects as go
import pytest

from actmem.config import PAPER_MODELS, TINY, ModelShape, Parallel, model_shape
from actmem.formulas.schedule import one_forward_one_backward
from actmem_course.figures import ch01_memory_wall as memory_wall
from actmem_course.figures import ch03_tensor_parallelism as tensor_parallel
from actmem_course.figures import ch04_sequence_parallelism as sequence_parallel
from actmem_course.figures import ch05_recomputation as recomputation
from actmem_course.figures import ch06_pipeline as schedules
from actmem_course.figures import ch07_time as times
from actmem_course.figures import ch08_todays_layer as today
from actmem_course.figures import ch09_your_model as planned
from actmem_course.figures import ch10_the_loss as ends
from actmem_course.figures import ch11_adapters as adapters
from actmem_course.figures import ch12_long_sequences as long_sequences
from actmem_course.figures import ch13_experts as experts
from actmem_course.figures import ch14_allocator_and_eight_bits as allocator
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.gpu_results import newest
from actmem_course.figures.operators import operators
from actmem_more.llama_shape import LLAMA_MODELS
from tests.drawings import assert_valid

LLAMA = LLAMA_MODELS["llama3-8b"]
GPT3, SMALL = model_shape("175B"), model_shape("22B")
LONG = ModelShape(16384, 1, 1024, 8, num_layers=8)
LARGE = SMALL.with_sizes(seq_length=16384, micro_batch_size=8)
CUT, STEP = Parallel(8, True), GPT3.with_sizes(num_layers=4)
PAYLOAD = 2 * 2048 * 12288
RANK = {"pipeline_rank": 0, "predicted_bytes": 9, "extra_bytes": 0, "samples": [{"kept_bytes": n} for n in (9, 0)]}
#: A function that draws, and the arguments of each of its figures.
DRAWN: dict[Callable, list[tuple]] = {
    bar_chart: [
        ("One part", {"": {"a": 3 << 30, "b": 5}}, "bytes"),
        ("Two parts beside each other", {"one": {"a": 0.5, "b": 2}, "two": {"b": 1.25}}, "time", "ms", True),
    ],
    memory_wall.crossover_lines: [(GPT3.with_sizes(seq_length=s),) for s in (128, 2048, 16384)],
    memory_wall.memory_wall: [*((method,) for method in memory_wall.METHODS), ("tensor", False)],
    tensor_parallel.mlp_shards: [(t, order) for order in tensor_parallel.ORDERS for t in (1, 4, 8)],
    tensor_parallel.qkv_shards: [(t, order) for order in tensor_parallel.ROW_ORDERS for t in (1, 2, 8)],
    tensor_parallel.floor_lines: [(GPT3, t) for t in (1, 8, 32)],
    operators: [(("f", "f̄"), GPT3), (("g", "ḡ"), GPT3)],
    sequence_parallel.saved_lines: [(GPT3, 8, False), (GPT3, 2, True)],
    sequence_parallel.ring_step: [
        (kind, t, step, PAYLOAD)
        for kind in sequence_parallel.KINDS
        for t in (2, 8)
        for step in sequence_parallel.steps_of_ring(kind, t)
    ],
    sequence_parallel.backward_timeline: [(GPT3, 8), (TINY, 2)],
    recomputation.recompute_trade: [(GPT3,), (LONG,), (TINY,)],
    recomputation.memory_ladder: [(2048, 8), (512, 1)],
    schedules.pipeline_schedule: [
        *((GPT3, schedules.with_pipeline(CUT, p, m), n) for p, m, n in ((1, 1, 1), (2, 1, 3), (4, 3, 8), (2, 4, 2))),
        (TINY, Parallel(1, False, 2, 2), 4),
    ],
    schedules.moving_window_chart: [(GPT3, schedules.with_pipeline(CUT, 4, 1), 9, 20 * 2**30)],
    schedules.measured_schedule: [(one_forward_one_backward(1, 1), [RANK])],
    times.roofline: [(SMALL, CUT), (TINY, Parallel()), (LARGE, Parallel())],
    times.table4_bars: [()],
    times.batch_payoff: [(GPT3, 40), (LONG, 40), (TINY, 40)],
    ends.loss_bars: [(LLAMA.with_sizes(seq_length=131072), 1, "full"), (LLAMA, 8)],
    adapters.frozen_layer: [(LLAMA, weights) for weights in adapters.UNREAD],
    adapters.adapter_bars: [(LLAMA, "q and v", 16), (LLAMA, "all linears", 256, "float32", True)],
    long_sequences.input_on_the_host: [(LLAMA,)],
    long_sequences.layer_at_work: [(LLAMA,), (LLAMA, 1024)],
    long_sequences.shared_sequence: [(LLAMA, way) for way in ("gather", "ring", "ulysses")],
    long_sequences.long_bars: [(LLAMA.with_sizes(seq_length=2**k),) for k in (13, 17, 20)],
    allocator.eight_bit_bars: [(LLAMA,), (LLAMA.with_sizes(seq_length=131072), allocator.IN_16_BITS)],
    allocator.memory_map: [
        (moment, segments, order) for moment in (1, 6, 18) for segments in allocator.SEGMENTS for order in allocator.ORDERS
    ],
    allocator.growing_batches: [(newest("allocator"),), ({},)],
    experts.experts: [(LLAMA_MODELS["qwen3-30b-a3b"], routing) for routing in experts.ROUTINGS],
    experts.latent_layer: [(terms,) for terms in experts.RECOMPUTED],
    experts.routed_bars: [(LLAMA_MODELS["qwen3-30b-a3b"], 8), (LLAMA_MODELS["mixtral-8x7b"], 1, ("balanced",))],
    today.frontier_figure: [(model.shape,) for model in PAPER_MODELS.values()],
    planned.changes_in_order: [()],
    planned.code_bars: [(LLAMA,), (LLAMA, planned.WRITTEN)],
    planned.code_picture: [(LLAMA, planned.WRITTEN), (LLAMA, planned.CHANGED)],
}  # fmt: skip


def name_of(draw):
    return draw.__name__


@pytest.mark.by_day(37)
@pytest.mark.parametrize("draw", DRAWN, ids=name_of)
def test_plotly_knows_every_property_and_the_words_fit(draw):
    for arguments in DRAWN[draw]:
        assert_valid(draw(*arguments))


def test_a_fingerprint_changes_with_the_drawing_only_whatever_plotly_does_with_it(tmp_path):
    drawing = memory_wall.memory_wall()
    spec = drawing.spec()
    go.Figure(spec["data"], spec["layout"]).write_html(tmp_path / "page.html", config=spec["config"])
    assert memory_wall.memory_wall().fingerprint() == drawing.fingerprint()
    assert memory_wall.memory_wall("full").fingerprint() != drawing.fingerprint()
