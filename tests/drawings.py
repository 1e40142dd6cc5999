"""What holds of every drawing."""

from unicodedata import combining

import plotly.graph_objects as go

from actmem_course.figures.marks import Drawing


def assert_valid(drawing: Drawing) -> None:
    """plotly knows every property, the title fits, and the words are one line."""
    spec = drawing.spec()
    go.Figure(data=spec["data"], layout=spec["layout"])
    title = drawing.layout["title"]["text"]
    # A bar above a letter is a character of its own, and takes no room.
    widths = [sum(not combining(letter) for letter in line) for line in title.split("<br>")]
    assert max(widths) <= 75, title  # at 700 pixels more is cut
    assert "\n" not in drawing.alt and drawing.alt.endswith("."), drawing.alt
