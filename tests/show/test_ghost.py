"""What a slider leaves in place: the axis, and marks where the bars ended before."""

import pytest

from actmem.formulas.activations import layer_rows
from actmem.models import model_shape
from actmem.rows import total
from actmem_course.show.controls import BEFORE, after
from actmem_course.show.layer import layer_bars
from actmem_course.show.times import days_bars, utilisation_bars

GPT3 = model_shape("175B")


def bars(s):
    shape = GPT3.with_sizes(seq_length=s)
    return layer_bars(layer_rows(shape), shape)


def marks(drawing):
    return [trace for trace in drawing.traces if trace["name"] == BEFORE]


def bytes_drawn(drawing):
    unit = drawing.axis.unit
    return sum(value * unit for trace in drawing.traces if trace["type"] == "bar" for value in trace["x"] if value)


@pytest.mark.parametrize("before, now", [(2048, 1024), (2048, 1920), (1024, 2048), (8192, 256), (256, 8192)])
def test_bytes_stay_bytes_on_every_axis(before, now):
    drawn = after(bars(before), bars(now))
    assert bytes_drawn(drawn) == pytest.approx(total(layer_rows(GPT3.with_sizes(seq_length=now))))
    (mark,) = marks(drawn)
    assert sum(mark["x"]) * drawn.axis.unit == pytest.approx(total(layer_rows(GPT3.with_sizes(seq_length=before))))
    assert drawn.layout["xaxis"]["range"] == [0, drawn.axis.end]


def test_the_axis_stays_while_bars_fit_it_and_are_long_enough():
    first = bars(2048)
    assert after(first, bars(1024)).axis == first.axis != bars(1024).axis
    assert after(first, bars(8192)).axis == bars(8192).axis  # too long
    assert after(bars(8192), bars(256)).axis == bars(256).axis  # too short
    # as long as the reader goes on, not for one move only
    assert after(after(first, bars(1792)), bars(1024)).axis == first.axis


def test_nothing_is_marked_where_nothing_moved():
    assert marks(after(bars(2048), bars(2048))) == []


def test_bars_side_by_side_keep_their_axis_and_have_no_marks():
    drawn = after(days_bars(300), days_bars(200))
    assert drawn.axis == days_bars(300).axis and marks(drawn) == []


def test_a_figure_whose_axis_never_changes_stays_as_it_is():
    assert after(utilisation_bars(), utilisation_bars()) == utilisation_bars()
