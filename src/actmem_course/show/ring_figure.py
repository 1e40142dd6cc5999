"""A ring exchange, one step at a time: who sends which chunk to whom, and the bytes sent so far."""

from __future__ import annotations

from collections.abc import Sequence

from actmem.formulas.ring import PHASES, RingState, ring
from actmem_course.show.boxes import Box, box_traces, diagram_layout, label_trace
from actmem_course.show.drawing import Drawing
from actmem_course.show.style import GREEN, INK, ORANGE, Fill, size_text

COMPLETE, _PARTIAL, JUST_ADDED, OWN = (
    Fill(GREEN, "", "#FFFFFF"),
    Fill("#FBE5B5", ""),
    Fill(ORANGE, "/"),
    Fill("#FFFFFF", ""),
)
#: The sizes of ring that are drawn.
RANKS = (2, 4, 8)


def steps_of_ring(tensor_parallel_size: int) -> Sequence[int]:
    """The steps of an all-reduce, 0 before the first."""
    return range(len(PHASES["all-reduce"]) * (tensor_parallel_size - 1) + 1)


def ring_step(tensor_parallel_size: int, step: int, payload_bytes: int) -> Drawing:
    """An all-reduce of ``payload_bytes`` after ``step`` of its ``steps_of_ring``.

    A row for each rank, a column for each chunk of the sequence; a box shows how many ranks' terms its sum has, an
    arrow which chunk a rank has just sent to the next.
    """
    t = tensor_parallel_size
    states = ring("all-reduce", t, payload_bytes)
    state = states[step]
    boxes, labels = [], []
    left, right, height = 0.2 * t, 0.27 * t, 0.72
    for chunk in range(t):
        labels.append((left + chunk + 0.46, -0.3, f"chunk {chunk}" if t < 8 else str(chunk)))
    labels.append((left + t + right / 2, -0.3, "sent"))
    for rank in range(t):
        labels.append((left / 2, rank + height / 2, f"rank {rank}"))
        labels.append((left + t + right / 2, rank + height / 2, size_text(state.sent_bytes)))
        boxes += [_box(state, rank, chunk, left + chunk, rank, height) for chunk in range(t)]
    return Drawing(
        [*box_traces(boxes), *_arrows(state, left, height), label_trace(labels, 13)],
        {
            **_shifted(diagram_layout(left + t + right, t + 0.1)),
            "title": {"text": _title(state, t, len(states) - 1)},
            "height": 150 + 42 * t,
        },
        f"Ring of {t} ranks after step {state.step} of {len(states) - 1}: {_finding(state, t)}; each rank has sent {state.sent_bytes:,} bytes.",
    )


def _box(state: RingState, rank: int, chunk: int, x: float, y: float, height: float) -> Box:
    t, held = len(state.held), state.held[rank][chunk]
    just = state.received[rank] == chunk
    if state.complete(rank, chunk):
        fill, text = COMPLETE, "Σ"
    elif just:
        fill, text = JUST_ADDED, f"{len(held)}/{t}"
    else:
        fill, text = (_PARTIAL if len(held) > 1 else OWN), f"{len(held)}/{t}"
    terms = " + ".join(str(term) for term in sorted(held))
    came = f", just came from rank {(rank - 1) % t}" if just else ""
    return Box(x, y, 0.92, height, fill, text, f"rank {rank}, chunk {chunk}: terms of ranks {terms}{came}")


def _arrows(state: RingState, left: float, height: float) -> list[dict]:
    """From each sender's box to the receiver's; the last rank's goes back to the first along the side of its column."""
    traces = []
    for receiver, chunk in enumerate(state.received):
        if chunk is None:
            continue
        sender = (receiver - 1) % len(state.held)
        if sender < receiver:
            x, y = [left + chunk + 0.76] * 2, [sender + 0.62 * height, receiver + 0.2 * height]
        else:
            side = left + chunk + 0.96
            x, y = [side, side], [sender + height / 2, receiver + height / 2]
        traces.append(
            {
                "type": "scatter", "mode": "lines+markers", "x": x, "y": y, "line": {"color": INK, "width": 2.5},
                "marker": {"symbol": "arrow", "angleref": "previous", "size": [0, 13], "color": INK, "opacity": 1},
                "name": f"chunk {chunk}, from rank {sender} to rank {receiver}", "hoverinfo": "name", "showlegend": False,
                "cliponaxis": False,
            }
        )  # fmt: skip
    return traces


def _title(state: RingState, t: int, last: int) -> str:
    where = f"Step {state.step} of {last}" + (f", {state.phase}" if state.phase else "")
    return f"{where}: each rank has sent {size_text(state.sent_bytes)};<br>{_finding(state, t)}"


def _finding(state: RingState, t: int) -> str:
    done = sum(state.complete(rank, chunk) for rank in range(t) for chunk in range(t))
    if state.step == 0:
        return "every rank has its own term of every chunk"
    if state.step < t - 1:
        return f"sums have {state.step + 1} of {t} terms"
    if state.step == t - 1:
        return "every rank has one finished chunk: a reduce-scatter"
    if state.step == 2 * (t - 1):
        return "every rank has all chunks: the all-gather is done"
    return f"{done} of {t * t} copies are finished"


def _shifted(layout: dict) -> dict:
    """Room for the names of the chunks above the first row."""
    height = layout["yaxis"]["range"][0]
    return {**layout, "yaxis": {**layout["yaxis"], "range": [height, -0.6]}}
