"""The figure of published runs shows their numbers, and the tables fit a terminal."""

import pytest
from rich.console import Console

from actmem_course.bench.measure_runs import measure_runs
from actmem_course.show.measured import runs_figure
from actmem_course.show.tables import parts_table, runs_table

RESULTS = [result for result in measure_runs() if result.framework == "nanotron"]


def test_the_figure_is_plotly_and_its_points_are_the_runs():
    drawing = runs_figure(RESULTS)
    points = drawing.traces[1]
    assert [1024 * x for x in points["x"]] == pytest.approx([r.printed_mib for r in RESULTS])
    assert [1024 * y for y in points["y"]] == pytest.approx([r.predicted_mib for r in RESULTS])
    assert drawing.traces[2]["y"] == [r.difference_percent for r in RESULTS]


def test_the_tables_say_each_run_and_each_part():
    console = Console(width=80, record=True)
    console.print(runs_table(RESULTS), parts_table(RESULTS))
    text = console.export_text()
    assert all(f"{r.predicted_mib:,.2f}" in text for r in RESULTS)
    assert all(part in text for r in RESULTS for part in r.parts_bytes)


def test_parts_add_up_to_the_peak():
    for r in RESULTS:
        assert sum(r.parts_bytes.values()) / 2**20 == pytest.approx(r.predicted_mib)
