"""The drawn tables: whole numbers, aligned columns, a wrong line in red."""

import io
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from actmem_course.results import PaperEntry
from actmem_course.show.tables import disagreements_list, exact_table, flops_table, percent_table, ranks_table


def entry(model="1T", quantity="tensor", **fields):
    return PaperEntry("table2", model, quantity, "bytes", **fields)


def drawn(part, width=80, styles=False):
    console = Console(width=width, record=True, force_terminal=styles, file=io.StringIO())
    console.print(part, crop=False)
    return [text for line in console.export_text(styles=styles).splitlines() if (text := line.rstrip())]


RIGHT = entry(ours_formula=144_284_057_600, extra=2_621_440, measured=144_286_679_040)
WRONG = entry(model="22B", quantity="full", ours_formula=5, measured=6, note="2sbh", paper=4)


def test_a_table_for_each_model_below_its_heading():
    lines = drawn(exact_table("title", [RIGHT, WRONG], {"1T": "1T  a=160", "22B": "22B  a=64"}))
    assert [line for line in lines if line.startswith(("title", "1T", "22B"))] == ["title", "1T  a=160", "22B  a=64"]
    found = [line.split() for line in lines]
    assert ["tensor", "144,284,057,600", "2,621,440", "144,286,679,040", "0"] in found
    assert ["full", "5", "0", "6", "1"] in found and ["2sbh", "4"] in found


def test_a_wrong_line_is_red_and_a_right_one_is_not():
    red = "\x1b[1;31m"
    lines = drawn(exact_table("title", [RIGHT, WRONG], {}), styles=True)
    assert [red in line for line in lines if "tensor" in line or "full" in line] == [False, True]


def test_a_column_without_any_number_is_left_out():
    lines = drawn(percent_table("title", [entry(quantity="a", paper=39, ours_formula=38.776)]))
    assert [line.split() for line in lines if line and "─" not in line][1:] == [
        ["percent", "paper", "ours", "ours", "−", "paper"], ["a", "39", "38.78", "-0.22"],
    ]  # fmt: skip


def test_flops_in_peta_and_the_difference_in_ones():
    lines = drawn(flops_table("title", [entry(paper=2 * 10**15, ours_formula=10**15, measured=10**15 + 1)], {}))
    assert lines[-1].split() == ["tensor", "2.0000", "1.0000", "1.0000", "1"]


def test_ranks_with_and_without_a_measurement():
    ranks = [
        entry(quantity="rank 0", ours_formula=7, measured=7, pipeline_rank=0),
        entry(quantity="rank 1", ours_formula=5, pipeline_rank=1),
    ]
    lines = drawn(ranks_table("title", ranks, {0: 3, 1: 2}, {}))
    assert [line.split() for line in lines[-2:]] == [["rank", "0", "7", "0", "7", "0", "3"], ["rank", "1", "5", "2"]]


def test_disagreements_wrap_beside_their_labels():
    place: Any = SimpleNamespace(where="§4.3", printed="under 0.01%", ours=("22B 0.57%", "1T 2%"), why="a reason " * 20)
    lines = drawn(disagreements_list("title", [place]))
    assert lines[0] == "title" and lines[1:4] == ["§4.3", " paper under 0.01%", "  ours 22B 0.57%, 1T 2%"]
    assert all(line.startswith(" " * 7) and len(line) <= 80 for line in lines[4:])
