"""Figures at the ends of what they can show; test_kinds.py draws those of the chapters, wherever their controls stand."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest

from actmem.config import PAPER_MODELS, TINY, ModelShape, Parallel, model_shape
from actmem.formulas.activations import layer_extra_rows, layer_rows
from actmem.formulas.schedule import one_forward_one_backward
from actmem_course.figures import ch01_memory_wall as memory_wall
from actmem_course.figures import ch02_counting_bytes as layer
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
from actmem_course.figures.bars import bar_chart
from actmem_more.llama_shape import LLAMA_MODELS
from tests.drawings import assert_valid

LLAMA = LLAMA_MODELS["llama3-8b"]
GPT3, SMALL, MT = model_shape("175B"), model_shape("22B"), PAPER_MODELS["530B"]
LONG = ModelShape(16384, 1, 1024, 8, num_layers=8)
LARGE = SMALL.with_sizes(seq_length=16384, micro_batch_size=8)
CUT, STEP = Parallel(8, True), GPT3.with_sizes(num_layers=4)
PAYLOAD = 2 * 2048 * 12288
RIGHT = dict(zip(layer.keep_controls(), map(layer.kept_by, layer.operations()), strict=True))
EMPTY = dict.fromkeys(RIGHT, layer.NO_ANSWER)
RANK = {"pipeline_rank": 0, "predicted_bytes": 9, "extra_bytes": 0, "samples": [{"kept_bytes": n} for n in (9, 0)]}
#: A function that draws, and the arguments of each of its figures.
DRAWN: dict[Callable, list[tuple]] = {
    layer.layer_bars: [
        (layer_rows(GPT3), GPT3), (layer_rows(TINY) + layer_extra_rows(TINY), TINY),
        (layer_rows(GPT3, CUT, "selective"), GPT3), (layer_rows(GPT3, recompute="full"), GPT3),
    ],
    bar_chart: [
        ("One part", {"": {"a": 3 << 30, "b": 5}}, "bytes"),
        ("Two parts beside each other", {"one": {"a": 0.5, "b": 2}, "two": {"b": 1.25}}, "time", "ms", True),
    ],
    layer.layer_drawing: [(layer_rows(TINY), TINY, step) for step in range(1, 16)],
    partial(layer.keep_game, GPT3, **EMPTY): [()],
    partial(layer.keep_game, TINY, **RIGHT): [()],
    memory_wall.crossover_lines: [(GPT3.with_sizes(seq_length=s),) for s in (128, 2048, 16384)],
    memory_wall.memory_wall: [(method,) for method in memory_wall.METHODS],
    memory_wall.front_door: [("175B", *methods) for methods in itertools.product(memory_wall.PARALLELISM, memory_wall.RECOMPUTATION)],
    tensor_parallel.mlp_cut: [(t, order) for order in tensor_parallel.ORDERS for t in (1, 4, 8)],
    tensor_parallel.qkv_cut: [(t, order) for order in tensor_parallel.ROW_ORDERS for t in (1, 2, 8)],
    tensor_parallel.floor_lines: [(GPT3, t) for t in (1, 8, 32)],
    tensor_parallel.floor_bars: [(GPT3, t) for t in (1, 8, 32)],
    sequence_parallel.operator_ring: [
        (operator, t, moment, PAYLOAD)
        for operator in sequence_parallel.FORWARD_EXCHANGE
        for t in (2, 8)
        for moment in range(len(sequence_parallel.operator_states(operator, t, PAYLOAD)))
    ],
    sequence_parallel.rank_parts: [(GPT3, t, mode) for mode in sequence_parallel.MODES for t in (1, 2, 4, 8)],
    sequence_parallel.gathered_lines: [(GPT3, t) for t in (1, 8, 32)],
    recomputation.recompute_trade: [(GPT3,), (LONG,), (TINY,)],
    recomputation.rebuild_price: [(GPT3,), (LONG,), (TINY,)],
    recomputation.batch_payoff: [(GPT3, 40), (LONG, 40), (TINY, 40)],
    recomputation.memory_ladder: [(2048, 8), (512, 1)],
    recomputation.step_timeline: [(STEP, moment, mode) for mode in ("none", "selective", "full") for moment in (0, 20)],
    schedules.pipeline_schedule: [
        *((GPT3, schedules.with_pipeline(CUT, p, m), n) for p, m, n in ((1, 1, 1), (2, 1, 3), (4, 3, 8), (2, 4, 2))),
        (GPT3, schedules.with_pipeline(CUT, 4, 1), 8, 7), (TINY, Parallel(1, False, 2, 2), 4),
    ],
    schedules.moving_window_chart: [(GPT3, schedules.with_pipeline(CUT, 4, 1), 9, 20 * 2**30)],
    schedules.rank_memory: [(MT.shape, MT.parallel, 280), (MT.shape, schedules.with_pipeline(MT.parallel, 35, 1), 280)],
    schedules.measured_schedule: [(one_forward_one_backward(1, 1), [RANK])],
    times.roofline: [(SMALL, CUT), (TINY, Parallel()), (LARGE, Parallel())],
    times.least_times: [(SMALL, CUT), (TINY, Parallel()), (LARGE, Parallel())],
    times.utilisation_bars: [()],
    times.table4_bars: [()],
    times.days_bars: [(20,), (1000,)],
    ends.loss_bars: [(LLAMA.with_sizes(seq_length=131072), 1, "full"), (LLAMA, 8)],
    adapters.adapter_bars: [(LLAMA, "q and v", 16), (LLAMA, "all linears", 256, "float32", True)],
    long_sequences.long_bars: [(LLAMA.with_sizes(seq_length=2**k),) for k in (13, 17, 20)],
    long_sequences.eight_bit_bars: [(LLAMA,), (LLAMA.with_sizes(seq_length=131072),)],
    long_sequences.memory_map: [(moment, segments) for moment in (1, 6, 15) for segments in long_sequences.SEGMENTS],
    long_sequences.reserved_lines: [(order,) for order in long_sequences.BATCH_ORDERS],
    today.saved_today: [(LLAMA, CUT)],
    experts.routed_bars: [(LLAMA_MODELS["qwen3-30b-a3b"], 8), (LLAMA_MODELS["mixtral-8x7b"], 1, ("even",))],
    today.frontier_figure: [(model.shape,) for model in PAPER_MODELS.values()],
    planned.first_aid: [()],
    planned.code_bars: [(LLAMA,), (LLAMA, planned.WRITTEN)],
    planned.code_picture: [(LLAMA, planned.WRITTEN), (LLAMA, planned.CHANGED)],
}  # fmt: skip


def test_interleaving_names_what_chunks_buy_and_cost():
    idle, held = schedules.interleaving(GPT3, schedules.with_pipeline(CUT, 8, 1), 16, (1, 2, 3, 4))
    assert "from 30% to 10%" in idle.layout["title"]["text"]
    assert "m = 2 44% more, with m = 4 22%" in held.layout["title"]["text"]


def name_of(draw):
    return getattr(draw, "func", draw).__name__


@pytest.mark.by_day(37)
@pytest.mark.parametrize("draw", DRAWN, ids=name_of)
def test_plotly_knows_every_property_and_the_words_fit(draw):
    for arguments in DRAWN[draw]:
        assert_valid(draw(*arguments))
