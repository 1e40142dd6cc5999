"""What today's layer keeps, term by term, in units of its input."""

from __future__ import annotations

from actmem.formulas.llama_terms import llama_rows
from actmem.llama_shape import LlamaShape
from actmem.rows import Row, total
from actmem_course.show.drawing import Axis, Drawing
from actmem_course.show.style import BLUE, GREEN, VERMILION, Fill, axis_end, size_text

_FILLS = {"norm": Fill(GREEN, "/"), "attention": Fill(BLUE, ""), "MLP": Fill(VERMILION, "x")}
_MLP = ("gate", "up", "down", "router", "chosen", "routing", "dispatch", "dispatched")


def llama_bars(shape: LlamaShape, recompute: str = "none") -> Drawing:
    """A bar for each term of ``llama_rows`` in forward order; the axis counts inputs of the layer, 2sbh bytes each."""
    rows = [row for row in llama_rows(shape, recompute=recompute) if row.bytes]
    once = 2 * shape.seq_length * shape.micro_batch_size * shape.hidden_size
    kept = total(rows)
    largest = axis_end(max(row.bytes for row in rows) / once)
    sizes = ", ".join(f"{row.term} {row.bytes:,}" for row in rows)
    sizes_of = f"s={shape.seq_length}, h={shape.hidden_size}, f={shape.ffn_hidden_size}, k={shape.num_key_value_heads}"
    axis = Axis("bytes kept, as multiples of the layer's input", largest, once)
    return Drawing(
        [_bar(row, once) for row in rows],
        {
            "title": {"text": f"At the floor the layer keeps {size_text(kept)}: {kept / once:.1f} times its input"},
            "height": 420,
            "bargap": 0.25,
            "showlegend": False,
            "xaxis": {"title": {"text": axis.title}, "range": [0, largest]},
            "yaxis": {"categoryorder": "array", "categoryarray": [row.term for row in rows][::-1], "automargin": True},
            "margin": {"t": 60},
        },
        f"Bars of what one layer keeps at {sizes_of}: {kept:,} bytes; {sizes}.",
        axis,
    )


def _bar(row: Row, once: int) -> dict:
    words = row.term.split()
    block = "norm" if words[0] == "norm" else "MLP" if words[0] in _MLP else "attention"
    return {
        "type": "bar",
        "orientation": "h",
        "name": row.term,
        "x": [row.bytes / once],
        "y": [row.term],
        "marker": _FILLS[block].marker(),
        "text": [size_text(row.bytes)],
        "textposition": "auto",
        "hovertemplate": f"<b>{row.term}</b>, {block}: {row.bytes:,} B<br>{row.source}<extra></extra>",
    }
