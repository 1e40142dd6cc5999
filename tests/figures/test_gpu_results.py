"""What a GPU measured: bars are the file's numbers, and where memory ran out there are words and no bar."""

import json

import pytest

from actmem_course.figures import gpu_results as gpu
from actmem_course.figures.units import GIB
from tests.drawings import assert_valid

LIMIT = 80 * GIB


def rung(name, predicted, peak=None, out_of_memory="", budget=LIMIT, **more):
    return {
        "name": name, "predicted_bytes": predicted, "peak_bytes": peak, "out_of_memory": out_of_memory,
        "budget_bytes": budget, **more,
    }  # fmt: skip


def wall(*rows):
    return {"wall": list(rows), "machine": {"device": "NVIDIA T4"}}


OUT = rung("b", 90 * GIB, out_of_memory="the first step: tried to allocate 1 GiB")
FITS = rung(
    "c", 40 * GIB, 41 * GIB, unbilled={"workspaces": GIB // 2}, static_bytes=30 * GIB,
    curve=[[0, 30 * GIB], [5, 41 * GIB], [9, 31 * GIB]],
)  # fmt: skip
WALL = wall(
    rung("a", 500 * GIB, out_of_memory="building the model: tried"), OUT,
    rung("b, all of this card", 90 * GIB, 91 * GIB, budget=140 * GIB, unbilled={"workspaces": 0}), FITS,
)  # fmt: skip


@pytest.mark.parametrize(
    "draw, step",
    [
        (gpu.wall_bars, "wall"), (gpu.step_curve, "wall"), (gpu.table4_bars, "table4"), (gpu.strangers_bars, "strangers"),
    ],
)  # fmt: skip
def test_each_drawing_is_valid_of_the_results_that_are_there(draw, step):
    assert_valid(draw(gpu.newest(step)))


def beside(drawing):
    """The words after the bars, a part after the other."""
    return [note["text"].strip() for note in drawing.layout["annotations"] if note.get("xref") != "paper"]


def test_the_walls_bars_are_the_bytes_and_words_stand_where_memory_ran_out():
    drawing = gpu.wall_bars(WALL)
    assert_valid(drawing)
    predicted, measured, limit = drawing.traces
    assert [value * drawing.axis.unit for value in predicted["x"]] == [0, 90 * GIB, 40 * GIB]
    assert [value * drawing.axis.unit for value in measured["x"]] == [0, 0, 41 * GIB]
    assert beside(drawing) == [
        "500 GiB, beyond this axis", "90.0 GiB", "40.0 GiB",
        "out of memory while building the model", "out of memory in step 1, needs 91.0 GiB", "41.0 GiB",
    ]  # fmt: skip
    assert limit["x"][0] * drawing.axis.unit == LIMIT


def test_what_the_prediction_lacks_is_named_or_said_to_be_unexplained():
    fold = gpu.wall_remainder(WALL)
    assert fold.line == "Measured is 1.11% to 2.50% more than predicted"
    assert "in the same run: workspaces." in fold.details and "1.00 GiB (b), 512 MiB (c)" in fold.details


def test_the_newest_file_that_has_a_step_is_taken(tmp_path):
    with pytest.raises(FileNotFoundError, match="no GPU's results"):
        gpu.newest("wall", tmp_path)
    whole, killed = {"name": "a", "curve": [[0, 1]]}, {"name": "a", "curve": None}
    for name, date, rows in (("a", "2", [killed, whole]), ("b", "1", [whole]), ("c", "3", []), ("d", "4", [killed])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"date": date, "wall": rows}))
    assert gpu.newest("wall", tmp_path)["date"] == "2"
