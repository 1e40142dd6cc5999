"""No formula can change by one byte without a notebook that prints something else."""

import json
import subprocess
import sys
from fractions import Fraction

import pytest

from notebooks.source.build import NOTEBOOKS
from tests.notebooks.sites import Sites, instrument, step

#: Places that no notebook comes to, each with the test that would notice a change.
ELSEWHERE = {
    # A budget for microbatches that recompute nothing: nothing to choose, so nothing to show.
    "microbatches.capacity: count": "tests/formulas/test_microbatches.py",
    # How torch groups microbatches, where that is not Megatron's way; it needs torch's own number.
    "first_stage._per_round: microbatches_per_round": "tests/test_pipeline.py",
    # Which dtype gradients have: the notebooks print all states together.
    "states.gradient_bytes: {{2: '16-bit', 4: 'float32'}[each.bytes_per_parameter]: each.bytes_per_parameter * count "
    "for each in gradients}": "tests/test_main_grad.py",
}


@pytest.fixture(scope="module")
def found():
    """Run where nothing else is: it changes the formulas of its own process."""
    command = [sys.executable, "-m", "tests.notebooks.mutate", "--json"]
    done = subprocess.run(command, cwd=NOTEBOOKS.parent, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.nightly
def test_cells_print_what_is_stored_when_nothing_changes(found):
    assert not found["wrong"], "\n".join(found["wrong"])


@pytest.mark.nightly
def test_every_change_is_noticed(found):
    changes = found["changes"]
    assert len(changes) > 250
    assert [change for change, by in changes.items() if not by] == []


@pytest.mark.nightly
def test_every_place_is_computed_in_some_notebook_or_named_here(found):
    assert sorted(found["unreached"]) == sorted(ELSEWHERE)
    for path in ELSEWHERE.values():
        assert (NOTEBOOKS.parent / path).exists()


def test_the_smallest_step():
    assert step(7) == 8
    assert step(Fraction(1, 3)) == Fraction(1001, 3000)
    assert step(Fraction(0)) == Fraction(1, 1000)


CHOSEN = """
from actmem.formulas.activations import eq1, layer_rows
from actmem.models import TINY
from tests.notebooks.sites import Sites, instrument

def made():
    return [row.bytes for row in layer_rows(TINY)] + [eq1(TINY)]

before, sites = made(), Sites()
instrument(sites)
assert made() == before
changed = []
for sites.chosen in ("activations.layer_rows: Q · bytes", next(name for name in sites.reached if name.startswith("activations.eq1"))):
    changed.append([now - then for now, then in zip(made(), before)])
print(changed)
"""


def test_a_chosen_place_changes_by_one_and_the_others_stay():
    done = subprocess.run([sys.executable, "-c", CHOSEN], cwd=NOTEBOOKS.parent, capture_output=True, text=True)
    assert done.stdout.strip() == str([[0, 0, 1] + [0] * 13, [0] * 15 + [1]]), done.stderr
