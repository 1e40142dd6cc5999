"""Memory that others logged: the pairs' formulas, the first screen's two equalities, and the lab as a user starts it."""

import json

from actmem_course.others import logged_pairs
from actmem_course.others.logged_pairs import BLOCK_BYTES, MOST_NUMBERS, LoggedPair
from tests.labs.in_process import lab_module, shown_in_80_columns

S, B, H, A = 1024, 4, 512, 8


def test_a100s_logged_one_layer_recomputation_and_interleaving_as_the_paper_has_them():
    """34sbh + 5as²b + 16sb; for 12 layers all of that but 2sbh; 9 layers in flight for 3, and six blocks of one number."""
    layer = 34 * S * B * H + 5 * A * S**2 * B + 16 * S * B
    one, twelve, in_flight, *_ = logged_pairs.logged_pairs()
    assert one.logged_bytes == one.formula_bytes == layer == 239_140_864
    assert twelve.logged_bytes == twelve.formula_bytes == 12 * (layer - 2 * S * B * H) == 2_819_358_720
    assert in_flight.formula_bytes == 6 * layer - 3 * 2 * S * B * H
    assert in_flight.apart_bytes == 6 * BLOCK_BYTES


def test_a_pair_that_is_further_apart_is_not_explained():
    def pair(apart):
        return LoggedPair("x", "a100", "", "", logged_pairs.term_bytes()["sbh"] - apart, {"sbh": 1})

    assert pair(0).explained and pair(MOST_NUMBERS * BLOCK_BYTES).explained and pair(-BLOCK_BYTES).explained
    assert not pair((MOST_NUMBERS + 1) * BLOCK_BYTES).explained and not pair(BLOCK_BYTES // 2).explained


def test_the_lab_prints_and_writes_all(tmp_path):
    path = tmp_path / "runs.json"
    shown = shown_in_80_columns("measure_runs.py", "--json", path)
    assert shown.count("239,140,864") == 2 and shown.count("2,819,358,720") == 2
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [pair["apart_bytes"] for pair in found["pairs"]][:2] == [0, 0]
    assert len(found["runs"]) == 18 and "18 of 18 runs within 0.1%" in shown


def test_a_pair_that_no_formula_explains_is_exit_code_1(monkeypatch, capsys):
    lab = lab_module("measure_runs.py")
    wrong = LoggedPair("x", "a100", "", "", 2**20, {})
    monkeypatch.setattr(lab, "logged_pairs", lambda: [wrong])
    monkeypatch.setattr("sys.argv", ["measure_runs.py"])
    assert lab.main.__wrapped__() == 1
    assert "0 of 1 pairs equal to the byte, 0 up to" in capsys.readouterr().out
