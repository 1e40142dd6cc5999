"""The stored tapes of the planner's models say what a stage recorded afresh does, at sizes drawn at random."""

import random
from fractions import Fraction

import pytest

from actmem.config import PAPER_MODELS, Parallel
from actmem_course.figures.gpu_results import newest
from actmem_tools.plan.planned_models import PlannedGPT
from actmem_tools.plan.search import rank_bill
from actmem_tools.tape.evaluate import Formula, Free, Make, Tape, packed, sizes_of, unpacked, used_in, with_sizes
from actmem_tools.tape.solver import draw_sizes
from actmem_tools.tape.stage_tapes import StagePart, families, stage_part, stage_part_of, stored_tape, transient
from tests.tape.stages import as_on_gpus, families_to_record, gpt_events, totals

#: One of each kind; the others at night.
SAMPLE = {
    ("gpt", "layer selective sequence"),
    ("gpt", "whole tensor"),
    ("gpt", "layer elementwise alone cuda"),
    ("llama", "layer elementwise sequence qk"),
    ("llama", "layer full tensor context"),
    ("llama", "last sequence"),
    ("experts", "layer none sequence experts"),
}
STORED = sorted((family, name) for family, tapes in families().items() for name in tapes["tapes"])


def numbers(part: StagePart) -> list:
    """All that a part says, but not at which step."""
    moments = [part.before, part.at, part.after, part.held]
    of_part = [part.kept_bytes, part.gradient_bytes, part.forward_flops, part.backward_flops]
    return of_part + [(moment.bytes, moment.made) for moment in moments]


@pytest.mark.parametrize(
    ("family", "name"), [pytest.param(*each, marks=[pytest.mark.nightly] * (each not in SAMPLE)) for each in STORED]
)
def test_a_stored_tape_is_what_runs(family, name):
    _, events_of, letters, rules = families_to_record()[family]
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for fixed in ({}, {"b": 1}, {"b": 1, "k": 1} if "k" in letters else {}):
        sizes = draw_sizes(letters, rules, rng, fixed)
        events = events_of(name.removesuffix(" cuda"), sizes)
        if name.endswith(" cuda"):
            events = as_on_gpus(events)
        stored = stage_part(family, name, tuple(sizes[letter] for letter in families()[family]["letters"]))
        fresh = stage_part_of(events, {size: size for event in events for size in sizes_of(event)})
        assert numbers(stored) == numbers(fresh)


def test_every_part_is_stored():
    names = {(family, name) for family in families() for name in families_to_record()[family][0]}
    assert {(family, name.removesuffix(" cuda")) for family, name in STORED} == names


def test_totals_say_what_the_whole_tape_says():
    def record(sizes):
        return gpt_events("layer none tensor", sizes)

    events = record({"s": 24, "b": 2, "a": 2, "d": 4, "v": 5, "t": 3})
    values = sorted({size for event in events for size in sizes_of(event)})
    numbered = [with_sizes(event, map(values.index, sizes_of(event))) for event in events]
    formulas: list[Formula] = [((Fraction(size), ()),) for size in values]
    whole = Tape((), formulas, {(): numbered})
    by_itself, summed = (
        numbers(stage_part_of(tape.variants[()], tape.values(range(len(tape.formulas)), {})))
        for tape in (whole, totals(whole))
    )
    assert by_itself == summed
    assert unpacked(packed({"it": totals(whole)}), "it") == totals(whole)


def with_kernels_memory(events):
    """As on a GPU, where softmax's backward multiplies gradient and output into memory of its own."""
    for event in events:
        yield event
        if isinstance(event, Make) and event.name.endswith(": _softmax_backward_data"):
            yield from (Make(-1, event.bytes, "gradient times output"), Free(-1))


@pytest.mark.parametrize("recompute", ["selective", "elementwise"])
def test_what_a_bill_lacks_of_a_gpus_peak_is_the_memory_of_softmaxs_kernel(recompute):
    shape = PAPER_MODELS["22B"].shape
    layout, model = Parallel(8, True, micro_batch_size=shape.micro_batch_size), PlannedGPT("22B", shape)
    [row] = (row for row in newest("wall")["wall"] if row["name"] == f"tensor+sequence+{recompute}")
    assert row["predicted_bytes"] == rank_bill(model, layout, recompute, 1, 0).bytes
    layer, ends = (model.part(layout.layer_axes, what) for what in (f"layer {recompute}", "whole"))
    a, b, h, s = shape.letters()
    tape = stored_tape("gpt", f"layer {recompute} sequence cuda")
    at = dict(zip(tape.letters, (s, b, a // 8, h // a, model.own_vocabulary(layout), 8), strict=True))
    events = list(with_kernels_memory(tape.variants[tape.ones(at)]))
    on_gpu = stage_part_of(events, tape.values(used_in(events), at))
    peaks = [transient(part, ends, True, True, shape.num_layers).bytes for part in (layer, on_gpu)]
    assert peaks[1] - peaks[0] == 116 * 2**20
    left = row["peak_bytes"] - row["predicted_bytes"] - sum(row["unbilled"].values()) - (peaks[1] - peaks[0])
    assert 0 <= left < 2**10  # tensors in blocks of 512 bytes
