"""The stored tapes of the planner's models say what a stage recorded afresh does, at sizes drawn at random."""

import random
from fractions import Fraction

import pytest

from actmem_tools.tape.evaluate import Formula, Tape, packed, sizes_of, unpacked, with_sizes
from actmem_tools.tape.solver import draw_sizes
from actmem_tools.tape.stage_tapes import StagePart, families, stage_part, stage_part_of
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
