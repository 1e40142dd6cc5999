"""Chapter 4: what a rank saves with sequence parallelism, a ring collective step by step, and QKV's backward pass."""

from collections.abc import Sequence

from actmem.config import ModelShape
from actmem.formulas.activations import eq2, eq4
from actmem.formulas.communication import PredictedCollective, activation_bytes
from actmem_course.figures.ch03_tensor_parallelism import Curve, lines_over_t, sizes_of_t
from actmem_course.figures.diagrams import EMPTY, Box, boxes, diagram, labels
from actmem_course.figures.marks import Drawing
from actmem_course.figures.operators import COMPLETE
from actmem_course.figures.sketch import Stroke, arrows
from actmem_course.figures.style import CARD, COMPARED, FILLS, GREEN, ORANGE, Fill
from actmem_course.figures.units import milliseconds, size_text
from actmem_course.others.ring import RingState, ring


def saved_lines(shape: ModelShape, tensor_parallel_size: int, with_sequence_parallelism: bool) -> Drawing:
    """Draw the bytes that a layer saves on one rank, over t: a line for tensor parallelism, and perhaps a second line.

    Args:
        shape: The layer's sizes.
        tensor_parallel_size: The t that the reader has chosen; the points at this t are larger.
        with_sequence_parallelism: Whether to add the second line, for tensor and sequence parallelism together.
    """
    t, ts = tensor_parallel_size, sizes_of_t(shape)
    curves = [Curve("TP", {size: eq2(shape, size) for size in ts}, COMPARED, "dash")]
    if with_sequence_parallelism:
        curves.append(Curve("TP + SP", {size: eq4(shape, size) for size in ts}, GREEN, "solid"))
    here = ", ".join(f"{size_text(curve.sizes[t])} with {curve.name}" for curve in reversed(curves))
    title = f"{f'Each of {t} ranks' if t > 1 else 'One rank'} saves {here}"
    drawing = lines_over_t(title, curves, f"at t = {t} a rank saves {here}", t, ts, (eq4(shape, ts[-1]), eq2(shape, 1)))
    drawing.layout["showlegend"] = True  # plotly leaves out the legend of a single line
    return drawing


_SOME, JUST_ADDED, OWN = Fill("#FBE5B5", ""), Fill(ORANGE, "x"), Fill(CARD, "")
#: The numbers of ranks whose rings are drawn.
RANKS = (2, 4, 8)

#: The collectives that are drawn.
KINDS = ("all-reduce", "reduce-scatter", "all-gather")


def steps_of_ring(kind: str, t: int) -> Sequence[int]:
    """Return the step numbers at which ``ring_step`` can draw a collective; 0 is before its first step.

    Args:
        kind: The collective: "all-reduce", "reduce-scatter" or "all-gather".
        t: How many ranks the ring has.
    """
    return range(len(ring(kind, t, 0)))


def ring_step(kind: str, tensor_parallel_size: int, step: int, payload_bytes: int) -> Drawing:
    """Draw a ring collective after one of its steps.

    There is a row for each rank and a column for each chunk of the tensor. A box shows how many ranks' values have been
    added up in the chunk so far. An arrow shows which chunk a rank has just sent to the next rank.

    Args:
        kind: The collective: "all-reduce", "reduce-scatter" or "all-gather".
        tensor_parallel_size: How many ranks the ring has.
        step: After how many steps, from ``steps_of_ring``; 0 is before the first step.
        payload_bytes: Bytes of the unsharded tensor.
    """
    states = ring(kind, tensor_parallel_size, payload_bytes)
    state = states[step]
    finding = f"each rank has sent {size_text(state.sent_bytes)};<br>{_finding(state, kind)}"
    where = f"step {step} of {len(states) - 1}" + (f", {state.phase}" if state.phase not in ("", kind) else "")
    alt = f"{kind.capitalize()} on a ring of {tensor_parallel_size} ranks, {where}: {finding.replace('<br>', ' ')}."
    return _drawn(state, f"{kind.capitalize()}, {where}: {finding}", alt, kind)


def _drawn(state: RingState, title: str, alt: str, kind: str) -> Drawing:
    t = len(state.held)
    drawn, words = [], []
    left, right, height = 0.2 * t, 0.27 * t, 0.72
    for chunk in range(t):
        words.append((left + chunk + 0.46, -0.3, f"chunk {chunk}" if t < 8 else str(chunk)))
    words.append((left + t + right / 2, -0.3, "sent"))
    for rank in range(t):
        words.append((left / 2, rank + height / 2, f"rank {rank}"))
        words.append((left + t + right / 2, rank + height / 2, size_text(state.sent_bytes)))
        drawn += [_box(state, rank, chunk, left + chunk, rank, height, kind) for chunk in range(t)]
    traces = [*boxes(drawn), *arrows(2.5, True, _strokes(state, left, height)), labels(words, 13)]
    return diagram(title, traces, alt, left + t + right, t + 0.1, 150 + 42 * t, top=-0.6)


def _box(state: RingState, rank: int, chunk: int, x: float, y: float, height: float, kind: str) -> Box:
    t, held = len(state.held), state.held[rank][chunk]
    just = state.received[rank] == chunk
    came = f", just came from rank {(rank - 1) % t}" if just else ""
    if not held:
        return Box(x, y, 0.92, height, EMPTY, "", f"rank {rank} has no chunk {chunk}")
    if kind == "all-gather":
        fill = JUST_ADDED if just else COMPLETE
        return Box(x, y, 0.92, height, fill, str(chunk), f"rank {rank} has chunk {chunk}{came}")
    if state.complete(rank, chunk):
        fill, text = COMPLETE, "Σ"
    elif just:
        fill, text = JUST_ADDED, f"{len(held)}/{t}"
    else:
        fill, text = (_SOME if len(held) > 1 else OWN), f"{len(held)}/{t}"
    terms = " + ".join(str(term) for term in sorted(held))
    return Box(x, y, 0.92, height, fill, text, f"rank {rank}, chunk {chunk}: terms of ranks {terms}{came}")


def _strokes(state: RingState, left: float, height: float) -> list[Stroke]:
    """Return arrows from each sender's box to the receiver's.

    The last rank's arrow goes back to the first rank beside its column.
    """
    strokes: list[Stroke] = []
    for receiver, chunk in enumerate(state.received):
        if chunk is None:
            continue
        sender = (receiver - 1) % len(state.held)
        if sender < receiver:
            x, start, end = left + chunk + 0.76, sender + 0.62 * height, receiver + 0.2 * height
        else:
            x, start, end = left + chunk + 0.96, sender + height / 2, receiver + height / 2
        strokes.append(([x, x], [start, end]))
    return strokes


def _finding(state: RingState, kind: str) -> str:
    t = len(state.held)
    if state.step < t - 1 and kind != "all-gather":
        return f"sums have {state.step + 1} of {t} terms"
    finished = sum(state.complete(0, chunk) for chunk in range(t))
    return f"every rank has {finished} of {t} finished chunks"


#: An A100's peak rates: of matmuls in 16 bits (2205.05198 table 5), and of NVLink in each direction.
FLOPS_PER_SECOND, BYTES_PER_SECOND = 312e12, 300e9


def qkv_backward_seconds(shape: ModelShape, tensor_parallel_size: int) -> tuple[float, float]:
    """Predict the times of the QKV projection's backward pass on one rank, at an A100's peak rates.

    The pass has two matmuls (dX and dA) and two collectives (an all-gather and a reduce-scatter), equally long each.

    Args:
        shape: The layer's sizes.
        tensor_parallel_size: t.

    Returns: the seconds of one matmul, and the seconds of one collective.
    """
    _, b, h, s = shape.letters()
    t = tensor_parallel_size
    half = PredictedCollective("all-gather", "backward", t, activation_bytes(shape, 2))
    return 2 * s * b * h * (3 * h // t) / FLOPS_PER_SECOND, half.wire_bytes / BYTES_PER_SECOND


def backward_timeline(shape: ModelShape, tensor_parallel_size: int) -> Drawing:
    """Draw the QKV projection's backward pass on one rank, to scale: two matmuls, each above a collective it overlaps.

    The arrows show what waits for what: the matmul for the weight's gradient waits for the gathered X, and the
    reduce-scatter waits for dX.

    Args:
        shape: The layer's sizes.
        tensor_parallel_size: t.
    """
    matmul, half = qkv_backward_seconds(shape, tensor_parallel_size)
    takes = [f"{milliseconds(seconds)} ms" for seconds in (matmul, half)]
    left, high, links = 0.4 * matmul, 0.8, 1.6
    drawn: list[Box] = []
    lanes = [(left / 2, high / 2, "matmuls"), (left / 2, links + high / 2, "links")]
    names = []
    parts = (("dX = dY Aᵀ", "gather X again"), ("dA = Xᵀ dY", "reduce-scatter dX"))
    for x, (computed, sent) in zip((left, left + matmul), parts):
        drawn.append(Box(x, 0, matmul, high, FILLS["backward"], f"{computed}, {takes[0]}"))
        drawn.append(Box(x, links, half, high, FILLS["communication buffers"], "", f"{sent}, {takes[1]}"))
        names.append((x, links + high + 0.35, f"{sent}, {takes[1]}"))
    gathered_x: Stroke = ([left + half, left + matmul], [links, high])
    gradient_to_reduce: Stroke = ([left + matmul, left + matmul], [high, links])
    waits = arrows(2.5, True, [gathered_x, gradient_to_reduce])
    finding = (
        "each collective hides behind a matmul" if half <= matmul else "the collectives take longer than the matmuls"
    )
    return diagram(
        f"QKV's backward pass on one of {tensor_parallel_size} ranks, computed at an A100's ideal rates:<br>{finding}",
        [*boxes(drawn), *waits, labels(lanes, 13), labels(names, 13, "middle right")],
        f"A time line of the QKV projection's backward pass on one of {tensor_parallel_size} ranks: the input's "
        f"gradient takes {takes[0]} while X is gathered again in {takes[1]}; the weight's gradient takes {takes[0]} "
        f"while the input's is reduced and scattered in {takes[1]}; {finding}.",
        left + 2.02 * matmul, links + high + 0.6, 230, top=-0.2,
    )  # fmt: skip
