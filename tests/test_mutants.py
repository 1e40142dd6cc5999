"""The rules that break the library: each finds places, changes one thing, and leaves text alone."""

import ast

import pytest

from tests import mutants
from tests.mutation_rules import ALWAYS, RULES, chosen, package_sites, sites_of

SITES = package_sites(mutants.PACKAGE)
CODE = b"""
def product(x, tp, *, seed: int = 3):
    \"\"\"1 + 2 is left alone.\"\"\"
    for each in range(len(x) - 1):
        if x.size < 4 and tp:
            x.check(each)
    if tp.low == tp.high:
        raise ValueError("a" + "b")
    return all_reduce(f"{x + 1}" if tp.low else (2 * x.mul_(tp) + x.sum(dtype=torch.int32)) // tp.size, tp)
"""
EXPECTED = {
    "collective dropped": {"(f'{x + 1}' if tp.low else (2 * x.mul_(tp) + x.sum(dtype=torch.int32)) // tp.size)"},
    "twins swapped": {"(tp.high)", "(tp.low)"},
    "other dtype": {"(torch.int64)"},
    "sign flipped": {"(len(x) + 1)", "(2 * x.mul_(tp) - x.sum(dtype=torch.int32))"},
    "term dropped": {"(len(x))", "(2 * x.mul_(tp))"},
    "factor dropped": {"(2)"},
    "divisor dropped": {"(2 * x.mul_(tp) + x.sum(dtype=torch.int32))"},
    "off by one": {"(2)", "(3)", "(4)", "(5)"},
    "boundary moved": {"(x.size <= 4)", "(tp.low != tp.high)"},
    "condition turned": {
        "(x.size < 4 or tp)",
        "((2 * x.mul_(tp) + x.sum(dtype=torch.int32)) // tp.size if tp.low else f'{x + 1}')",
    },
    "branch never taken": {"(False)"},
    "step skipped": {"(x)"},
    "call dropped": {"pass"},
}


@pytest.mark.parametrize("rule", RULES)
def test_what_each_rule_makes_of_a_function(rule):
    assert {site.after for site in sites_of("a.py", CODE) if site.rule == rule} == EXPECTED[rule]


def test_every_mutant_of_the_library_is_python_and_not_what_was_there():
    sources = {site.path: (mutants.PACKAGE / site.path).read_bytes() for site in SITES}
    for site in SITES[::23]:
        mutant = site.applied(sources[site.path])
        assert ast.dump(ast.parse(mutant)) != ast.dump(ast.parse(sources[site.path])), site.name


def test_eighty_are_chosen_and_those_that_are_always_tried_among_them():
    found = chosen(SITES, mutants.SEED)
    assert len({(site.path, site.start, site.rule, site.after) for site in found}) == 80
    assert set(ALWAYS) <= {(site.path, site.owner, site.rule) for site in found}
    assert len({site.path for site in found}) > 35


def test_what_is_left_out_is_there():
    assert [name for name in mutants.LEFT_OUT if not any(site.name.startswith(name) for site in SITES)] == []


def test_near_tests_begin_with_the_files_own():
    assert mutants.near_tests("formulas/ring.py")[0] == "tests/formulas/test_ring.py"
    assert "tests/bench/reproduce/test_paper_stage.py" in mutants.near_tests("measure/one_stage.py")


def test_what_is_stored_misses_four_at_most():
    tried = mutants.stored().get("tried", [])
    assert len([entry for entry in tried if not entry["caught"]]) <= 4 and len(tried) in (0, 80)
