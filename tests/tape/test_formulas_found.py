"""The formulas that the solver finds for sizes whose rule is known, tried at sizes that it has not seen."""

import pytest

from actmem.tape.evaluate import Event, Make
from actmem.tape.solver import solve

RULES = {
    "one product": lambda s, b, c: 34 * s * b,
    "a sum": lambda s, b, c: 4 * s * b + 2 * s * s,
    "causal chunks, with a half": lambda s, b, c: s * s * (4 * c - 1) // 2,
    "what c ranks gather": lambda s, b, c: 2 * s * b * c,
}


@pytest.mark.parametrize("name", RULES)
def test_it_holds_far_from_the_runs(name):
    def record(sizes: dict[str, int]) -> list[Event]:
        return [Make(0, RULES[name](**sizes), "kept")]

    tape = solve(record, "sbc", {"s": (2, ())}, may_be_one=())
    for sizes in ({"s": 8192, "b": 3, "c": 16}, {"s": 2 * 101, "b": 103, "c": 107}):
        assert tape.events(sizes) == record(sizes)
