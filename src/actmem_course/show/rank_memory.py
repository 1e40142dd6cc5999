"""Figure 9: what every pipeline rank holds, with and without freeing the outputs it has sent."""

from __future__ import annotations

from actmem.config import ModelShape, Parallel
from actmem.formulas.first_stage import embeddings_in_flight
from actmem.formulas.stage_terms import bytes_by_rank
from actmem_course.show.drawing import Drawing
from actmem_course.show.style import BLUE, GIB, VERMILION, size_text


def rank_memory(shape: ModelShape, parallel: Parallel, num_microbatches: int, recompute: str = "selective") -> Drawing:
    """Two lines over the pipeline ranks.  Raises ConfigError where the sizes do not fit."""
    freed, held = (
        bytes_by_rank(shape, parallel, recompute, num_microbatches, free_outputs=free) for free in (True, False)
    )
    p, m = parallel.pipeline_parallel_size, parallel.num_model_chunks
    masks = embeddings_in_flight(parallel, num_microbatches)
    saved = held[0] - freed[0]
    return Drawing(
        [
            _line("outputs stay until backward", held, VERMILION, "dash", "diamond"),
            _line("outputs freed once sent", freed, BLUE, "solid", "circle"),
        ],
        {
            "title": {
                "text": f"p = {p}, m = {m}: freeing outputs saves {size_text(saved)} on rank 0,<br>which also holds {masks} dropout masks of the embedding"
            },
            "xaxis": {"title": {"text": "pipeline rank"}, "range": [-0.03 * p - 0.2, p - 1 + 0.03 * p + 0.2]},
            "yaxis": {"title": {"text": "activations of one GPU, GiB"}, "range": [0, 1.08 * max(held) / GIB]},
            "height": 440,
        },
        f"Lines over {p} pipeline ranks with {m} chunks each, {recompute} recomputation: freed, rank 0 holds {freed[0]:,} bytes, rank 1 "
        f"{freed[1]:,}, rank {p - 1} {freed[-1]:,}; outputs that stay add {saved:,} bytes on rank 0.",
    )


def _line(name: str, sizes: list[int], colour: str, dash: str, symbol: str) -> dict:
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": list(range(len(sizes))),
        "y": [size / GIB for size in sizes],
        "customdata": [f"{size:,} B = {size_text(size)}" for size in sizes],
        "line": {"color": colour, "width": 2.5, "dash": dash},
        "marker": {"color": colour, "size": 7, "symbol": symbol},
        "hovertemplate": f"<b>rank %{{x}}</b>, {name}<br>%{{customdata}}<extra></extra>",
    }
