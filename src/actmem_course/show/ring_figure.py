"""A ring exchange, one step at a time: who sends which chunk to whom, and the bytes sent so far.

Of an all-reduce by itself, and of each operator of tensor and sequence parallelism, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actmem.formulas.ring import PHASES, RingState, ring
from actmem_course.show.boxes import EMPTY, Box, box_traces, diagram_layout, label_trace
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

#: What each operator's forward exchanges.  Its backward is the forward of its conjugate.
FORWARD_EXCHANGE = {"f": None, "f̄": "all-reduce", "g": "all-gather", "ḡ": "reduce-scatter"}
CONJUGATE_OF = {"f": "f̄", "f̄": "f", "g": "ḡ", "ḡ": "g"}


def ring_step(tensor_parallel_size: int, step: int, payload_bytes: int) -> Drawing:
    """An all-reduce of ``payload_bytes`` after ``step`` of its 2(t − 1) steps.

    A row for each rank, a column for each chunk of the sequence; a box shows how many ranks' terms its sum has, an
    arrow which chunk a rank has just sent to the next.
    """
    states = ring("all-reduce", tensor_parallel_size, payload_bytes)
    state, t = states[step], tensor_parallel_size
    return _drawn(
        state,
        _title(state, "all-reduce", len(states) - 1),
        f"Ring of {t} ranks {_after(state, 'all-reduce', len(states) - 1)}",
    )


def steps_of_operator(operator: str, tensor_parallel_size: int) -> Sequence[int]:
    """The moments of one operator's forward and backward."""
    return range(len(operator_states(operator, tensor_parallel_size, 0)))


def operator_states(
    operator: str, tensor_parallel_size: int, payload_bytes: int
) -> list[tuple[str, str | None, RingState]]:
    """Forward's states, then backward's, each with its pass and its exchange; one alone where nothing is sent.

    operator: a key of FORWARD_EXCHANGE.  Backward's bytes come on top of forward's.
    """
    found: list[tuple[str, str | None, RingState]] = []
    for pass_, kind in (
        ("forward", FORWARD_EXCHANGE[operator]),
        ("backward", FORWARD_EXCHANGE[CONJUGATE_OF[operator]]),
    ):
        before = found[-1][2].sent_bytes if found else 0
        # Without an exchange every rank has the whole tensor, and passes it on as it is.
        states = ring(kind, tensor_parallel_size, payload_bytes) if kind else [
            replace(ring("all-reduce", tensor_parallel_size, payload_bytes)[-1], step=0, phase="", received=(None,) * tensor_parallel_size, sent_bytes=0)
        ]  # fmt: skip
        found += [(pass_, kind, replace(state, sent_bytes=before + state.sent_bytes)) for state in states]
    return found


def operator_ring(operator: str, tensor_parallel_size: int, moment: int, payload_bytes: int) -> Drawing:
    """f, f̄, g or ḡ on a ring, at one of its ``steps_of_operator``: its forward, then its conjugate's exchange in backward."""
    moments = operator_states(operator, tensor_parallel_size, payload_bytes)
    pass_, kind, state = moments[moment]
    who = f"{operator}, {pass_}" + (f" (= {CONJUGATE_OF[operator]})" if pass_ == "backward" else "")
    last = max(one.step for one_pass, _, one in moments if one_pass == pass_)
    if kind is None:
        title = f"{who}: nothing is sent;<br>every rank passes on what it has"
        return _drawn(state, title, f"{who}: nothing is sent; each rank has sent {state.sent_bytes:,} bytes.", kind)
    title = f"{who}. {_title(state, kind, last)}"
    return _drawn(state, title, f"{who}, on a ring of {tensor_parallel_size} ranks {_after(state, kind, last)}", kind)


def _drawn(state: RingState, title: str, alt: str, kind: str | None = "all-reduce") -> Drawing:
    t = len(state.held)
    boxes, labels = [], []
    left, right, height = 0.2 * t, 0.27 * t, 0.72
    for chunk in range(t):
        labels.append((left + chunk + 0.46, -0.3, f"chunk {chunk}" if t < 8 else str(chunk)))
    labels.append((left + t + right / 2, -0.3, "sent"))
    for rank in range(t):
        labels.append((left / 2, rank + height / 2, f"rank {rank}"))
        labels.append((left + t + right / 2, rank + height / 2, size_text(state.sent_bytes)))
        boxes += [_box(state, rank, chunk, left + chunk, rank, height, _sums(kind)) for chunk in range(t)]
    return Drawing(
        [*box_traces(boxes), *_arrows(state, left, height), label_trace(labels, 13)],
        {**_shifted(diagram_layout(left + t + right, t + 0.1)), "title": {"text": title}, "height": 150 + 42 * t},
        alt,
    )


def _sums(kind: str | None) -> bool:
    """Whether an exchange adds anything up."""
    return kind is not None and "reduce-scatter" in PHASES[kind]


def _box(state: RingState, rank: int, chunk: int, x: float, y: float, height: float, sums: bool) -> Box:
    t, held = len(state.held), state.held[rank][chunk]
    just = state.received[rank] == chunk
    came = f", just came from rank {(rank - 1) % t}" if just else ""
    if not held:
        return Box(x, y, 0.92, height, EMPTY, "", f"rank {rank} has no chunk {chunk}")
    if not sums:
        fill = JUST_ADDED if just else COMPLETE
        return Box(x, y, 0.92, height, fill, str(chunk), f"rank {rank} has chunk {chunk}{came}")
    if state.complete(rank, chunk):
        fill, text = COMPLETE, "Σ"
    elif just:
        fill, text = JUST_ADDED, f"{len(held)}/{t}"
    else:
        fill, text = (_PARTIAL if len(held) > 1 else OWN), f"{len(held)}/{t}"
    terms = " + ".join(str(term) for term in sorted(held))
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


def _after(state: RingState, kind: str, last: int) -> str:
    return f"after step {state.step} of {last}: {_finding(state, kind)}; each rank has sent {state.sent_bytes:,} bytes."


def _title(state: RingState, kind: str, last: int) -> str:
    where = f"Step {state.step} of {last}" + (f", {state.phase}" if state.phase else "")
    return f"{where}: each rank has sent {size_text(state.sent_bytes)};<br>{_finding(state, kind)}"


def _finding(state: RingState, kind: str) -> str:
    t = len(state.held)
    done = sum(state.complete(rank, chunk) for rank in range(t) for chunk in range(t))
    if not _sums(kind):
        return f"every rank has {state.step + 1} of {t} chunks" + (": an all-gather" if done == t * t else "")
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
