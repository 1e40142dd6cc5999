"""What labs measured, as a figure in a page."""

from __future__ import annotations

from actmem_course.figures.marks import Drawing


def figure_html(drawing: Drawing) -> str:
    """A drawing as HTML that needs no network: plotly's own code is in it."""
    import plotly.graph_objects as go  # loaded only to write

    spec = drawing.spec()
    figure = go.Figure({"data": spec["data"], "layout": spec["layout"]})
    return figure.to_html(full_html=False, include_plotlyjs=True, config=spec["config"])
