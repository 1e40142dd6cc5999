"""The bars of today's layer are its formulas' rows."""

import plotly.graph_objects as go
import pytest

from actmem.formulas.llama_terms import llama_rows
from actmem.llama_shape import LLAMA_MODELS, TINY_LLAMA
from actmem.rows import total
from actmem_course.show.today import llama_bars


@pytest.mark.parametrize("recompute", ["none", "elementwise"])
@pytest.mark.parametrize("shape", [TINY_LLAMA, *LLAMA_MODELS.values()])
def test_bars_add_up_and_plotly_knows_them(shape, recompute):
    drawing, rows = llama_bars(shape, recompute), llama_rows(shape, recompute=recompute)
    once = 2 * shape.seq_length * shape.micro_batch_size * shape.hidden_size
    assert sum(trace["x"][0] for trace in drawing.traces) * once == pytest.approx(total(rows))
    assert [trace["name"] for trace in drawing.traces] == [row.term for row in rows]
    assert f"{total(rows):,} bytes" in drawing.alt and drawing.alt.endswith(".")
    assert len(drawing.layout["title"]["text"]) <= 75
    assert max(trace["x"][0] for trace in drawing.traces) <= drawing.axis.end
    spec = drawing.spec()
    go.Figure(data=spec["data"], layout=spec["layout"])
