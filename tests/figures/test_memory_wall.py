"""Chapter 1's figures, and the front door: every segment is a formula's number, and the titles count right."""

import itertools
from dataclasses import replace

import pytest

from actmem.config import PAPER_MODELS, model_shape
from actmem.formulas.activations import TABLE2, crossover_seq_length
from actmem.formulas.first_stage import bytes_by_rank
from actmem.formulas.states import ADAM, parameter_counts
from actmem_course.figures import ch01_memory_wall as memory_wall
from actmem_course.others.paper import A100_BYTES

CHOICES = list(itertools.product(memory_wall.PARALLELISM, memory_wall.RECOMPUTATION))


@pytest.mark.parametrize("method", memory_wall.METHODS)
@pytest.mark.parametrize("name", PAPER_MODELS)
def test_segments_are_the_fullest_stages_bytes(name, method):
    model, (row,) = PAPER_MODELS[name], [row for row in TABLE2 if row.name == method]
    parallel = replace(model.parallel, sequence_parallel=row.sequence_parallel)
    by_rank = bytes_by_rank(model.shape, parallel, row.recompute)
    count = sum(parameter_counts(model.shape, parallel).values())
    each = {state.term: state.bytes_per_parameter for state in ADAM["float32 gradients"]}
    assert memory_wall.gpu_bytes(model, *memory_wall.METHODS[method]) == {
        "parameters": each["parameters"] * count,
        "gradients and optimizer": (sum(each.values()) - each["parameters"]) * count,
        "activations": by_rank[0],
    }
    assert by_rank[0] == max(by_rank), "the first stage is the one drawn because it holds most"


@pytest.mark.parametrize("method, words", [
    ("tensor", "Tensor parallelism alone:"),
    ("tensor+sequence", "Tensor and sequence parallelism:"),
    ("tensor+sequence+selective", "Tensor and sequence parallelism, selective recomputation:"),
    ("full", "Tensor parallelism, full recomputation:"),
])  # fmt: skip
def test_the_wall_says_its_method(method, words):
    assert memory_wall.memory_wall(method).layout["title"]["text"].startswith(words)


@pytest.mark.parametrize("chosen", CHOICES)
def test_the_front_doors_bars_are_the_bytes_and_no_method_adds_any(chosen):
    drawing = memory_wall.front_door("175B", *chosen)
    for trace in drawing.traces[: len(memory_wall.PARTS_OF_GPU)]:
        for name, value in zip(trace["y"], trace["x"], strict=True):
            assert value * drawing.axis.unit == memory_wall.gpu_bytes(PAPER_MODELS[name], *chosen)[trace["name"]]
    sizes = {name: sum(memory_wall.gpu_bytes(model, *chosen).values()) for name, model in PAPER_MODELS.items()}
    assert ("it fits" in drawing.layout["title"]["text"]) == (sizes["175B"] <= A100_BYTES)
    parallelism, recompute = chosen
    further = [(other, recompute) for other in memory_wall.PARALLELISM[memory_wall.PARALLELISM.index(parallelism) :]]
    further += [
        (parallelism, other) for other in memory_wall.RECOMPUTATION[memory_wall.RECOMPUTATION.index(recompute) :]
    ]
    for more in further:
        assert all(
            sum(memory_wall.gpu_bytes(model, *more).values()) <= sizes[name] for name, model in PAPER_MODELS.items()
        )


def test_the_two_lines_cross_where_the_formula_says():
    gpt3 = model_shape("175B")
    rest, core = (dict(zip(trace["x"], trace["y"])) for trace in memory_wall.crossover_lines(gpt3).traces[:2])
    cross = crossover_seq_length(gpt3.hidden_size, gpt3.num_attention_heads)
    assert [core[s] > rest[s] for s in memory_wall.LENGTHS] == [s > cross for s in memory_wall.LENGTHS]
    assert rest[2048] * 2**30 == 34 * 2048 * 12288 and core[2048] * 2**30 == 5 * 96 * 2048**2


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_the_crossovers_title_names_the_larger_part(name):
    for s, first in ((128, "all the rest holds"), (16384, "the attention core holds")):
        assert first in memory_wall.crossover_lines(model_shape(name).with_sizes(seq_length=s)).layout["title"]["text"]
