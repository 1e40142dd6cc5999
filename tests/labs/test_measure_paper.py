"""The whole paper as a user starts it: tables, JSON, exit codes, bad input in one line."""

import json
import sys

import pytest
from measure_paper import SECTIONS

from actmem.rows import Row
from actmem_course.lab_tools import paper_models
from actmem_course.others.disagreements import disagreements
from tests.labs.in_process import lab_module, shown_in_80_columns

SCRIPT = "measure_paper.py"


@pytest.mark.nightly
def test_everything_for_one_model(tmp_path):
    path = tmp_path / "results.json"
    shown = shown_in_80_columns(SCRIPT, "--model", "22B", "--json", path)

    results = json.loads(path.read_text(encoding="utf-8"))
    assert {result["section"] for result in results} == set(SECTIONS) - {"figure9"}  # 22B has one stage
    measured = [result for result in results if result["measured"] is not None]
    assert len(measured) > 20 and all(result["difference"] == 0 and result["exact"] for result in measured)
    assert len([r for r in results if r["section"] == "disagreements"]) == sum(len(d.ours) for d in disagreements())

    verdict = shown.splitlines()[-1]
    assert verdict == f"{len(measured)} of {len(measured)} measured numbers equal their formulas exactly"


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("section", "first", "verdict"),
    [
        ("figure1", "figure1, 22B, activations, baseline: off by 1\nsecret: measured 1 B, not predicted\n", "1 of 5"),
        ("figure7", "figure7, 22B, tensor: off by 1\nsecret: measured 1 B, not predicted\n", "0 of 9"),
    ],
)
def test_a_difference_is_exit_code_1(monkeypatch, capsys, section, first, verdict):
    monkeypatch.setattr(sys, "argv", [SCRIPT, "--model", "22B", "--section", section])
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(paper_models, "measure_paper_stage", one_byte_more)
    assert lab_module(SCRIPT).main() == 1
    out = capsys.readouterr().out
    assert first in out and f"\n{verdict} measured numbers equal" in out


def test_sections_without_a_measurement(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [SCRIPT, "--section", "disagreements", "--section", "table4"])
    monkeypatch.delenv("RANK", raising=False)
    assert lab_module(SCRIPT).main() == 0
    assert "\nnothing in these sections is measured\n" in capsys.readouterr().out


def one_byte_more(stage):
    return [*stage.rows(), *stage.extra_rows(), Row("secret", 1)]
