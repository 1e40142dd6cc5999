"""Chapter 4: which rank holds which shard, the ring collectives step by step, and what gathered inputs cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from actmem.config import ModelShape, Parallel
from actmem.formulas.activations import CORE_ATTENTION_TERMS, eq2, eq4, gathered_input_bytes, layer_rows
from actmem.rows import Row, total
from actmem_course.figures.ch03_tensor_parallelism import sizes_of_t
from actmem_course.figures.diagrams import EMPTY, Box, boxes, diagram, labels
from actmem_course.figures.marks import Drawing, chart, line, log_scale
from actmem_course.figures.style import BLUE, CARD, COMPARED, FILLS, GREEN, INK, ORANGE, Fill
from actmem_course.figures.terms import term_of
from actmem_course.figures.units import axis_unit, size_text, three_digits
from actmem_course.others.ring import PHASES, RingState, ring

TENSOR, SEQUENCE = "tensor parallel", "tensor + sequence parallel"
MODES = (TENSOR, SEQUENCE)

#: The collective between two tensors, after the one named: with tensor parallelism alone, with sequence parallelism.
_ENTER = ("f: nothing forward, all-reduce backward", "g: all-gather forward, reduce-scatter backward")
_LEAVE = ("f̄: all-reduce forward, nothing backward", "ḡ: reduce-scatter forward, all-gather backward")
EXCHANGES_AFTER = {
    "QKV projection input": _ENTER,
    "attention projection input": _LEAVE,
    "h→4h input": _ENTER,
    "4h→h input": _LEAVE,
}
_HEADS = ("Q", "K", "V", *CORE_ATTENTION_TERMS)
_LEFT, _RANKS, _RIGHT, _HIGH = 3.85, 4.85, 1.2, 0.78


def parts(shape: ModelShape, tensor_parallel_size: int, mode: str) -> list[tuple[Row, str]]:
    """The 15 tensors on one rank, and how the ranks share each: "" (every rank has all of it), "h", "heads" or "s".

    What tensor parallelism shards is sharded along h or by heads, the rest along s or not at all.
    """
    t = tensor_parallel_size
    alone = layer_rows(shape, Parallel(t))
    rows = layer_rows(shape, Parallel(t, mode == SEQUENCE))
    return [(row, _axis(row, before)) for row, before in zip(rows, alone, strict=True)]


def _axis(row: Row, with_tensor_parallelism: Row) -> str:
    if row.split_by == 1:
        return ""
    if with_tensor_parallelism.split_by == 1:
        return "s"
    return "heads" if row.term in _HEADS else "h"


def rank_parts(shape: ModelShape, tensor_parallel_size: int, mode: str) -> Drawing:
    """A line for each tensor, a frame for each rank with the part that it holds filled: along s downwards, along h
    to the right.
    """
    t, held = tensor_parallel_size, parts(shape, tensor_parallel_size, mode)
    column, right = _RANKS / t, _LEFT + _RANKS + _RIGHT / 2
    drawn: list[Box] = []
    names: list[tuple[float, float, str]] = []
    middle: list[tuple[float, float, str]] = [
        (_LEFT + (rank + 0.46) * column, -0.4, f"rank {rank}" if t < 8 else str(rank)) for rank in range(t)
    ]
    unit, unit_name = axis_unit(max(row.bytes for row, _ in held))
    middle.append((right, -0.4, unit_name))
    y = 0.0
    for row, axis in held:
        names.append((_LEFT - 0.12, y + _HIGH / 2, row.term))
        middle.append((right, y + _HIGH / 2, three_digits(row.bytes / unit)))
        for rank in range(t):
            drawn += _frame(row, axis, rank, t, _LEFT + rank * column, y, 0.92 * column)
        y += 1
        if row.term in EXCHANGES_AFTER:
            middle.append((_LEFT + _RANKS / 2, y + 0.3, f"<i>{EXCHANGES_AFTER[row.term][mode == SEQUENCE]}</i>"))
            y += 0.8
    copies = [row for row, axis in held if not axis]
    together = total(row for row, _ in held)
    finding = "each byte is on one rank only"
    if copies:
        finding = f"{len(copies)} of {len(held)} tensors are there {t} times over, {size_text(total(copies))} on each"
    finding = finding if t > 1 else "one rank has everything"
    return diagram(
        f"{mode.capitalize()}: each of {t} ranks keeps {size_text(together)};<br>{finding}",
        [*boxes(drawn), labels(names, 13, "middle left"), labels(middle, 12)],
        f"One layer across {t} ranks, {mode}: each rank keeps {together:,} bytes; {finding}. "
        + "; ".join(f"{row.term} {_cut_text(axis)}" for row, axis in held)
        + ".",
        _LEFT + _RANKS + _RIGHT, y, 660, top=-0.8,
    )  # fmt: skip


def _cut_text(axis: str) -> str:
    return {"": "whole", "heads": "cut by heads"}.get(axis, f"cut along {axis}")


def _frame(row: Row, axis: str, rank: int, t: int, x: float, y: float, width: float) -> list[Box]:
    fill = FILLS[term_of(row).kind]
    hover = f"<b>{row.term}</b> on rank {rank}: {_cut_text(axis)}, {row.bytes:,} B"
    if axis == "":
        return [Box(x, y, width, _HIGH, fill, "", hover)]
    frame = Box(x, y, width, _HIGH, EMPTY, "", hover)
    if axis == "s":
        return [frame, Box(x, y + rank * _HIGH / t, width, _HIGH / t, fill, "", hover)]
    return [frame, Box(x + rank * width / t, y, width / t, _HIGH, fill, "", hover)]


COMPLETE, _PARTIAL, JUST_ADDED, OWN = (Fill(GREEN, ""), Fill("#FBE5B5", ""), Fill(ORANGE, "x"), Fill(CARD, ""))
#: The sizes of ring that are drawn.
RANKS = (2, 4, 8)

#: The collective of each operator's forward.  Its backward is the forward of its conjugate.
FORWARD_EXCHANGE = {"f": None, "f̄": "all-reduce", "g": "all-gather", "ḡ": "reduce-scatter"}
CONJUGATE_OF = {"f": "f̄", "f̄": "f", "g": "ḡ", "ḡ": "g"}


def steps_of_operator(operator: str, tensor_parallel_size: int) -> Sequence[int]:
    """The moments of one operator's forward and backward."""
    return range(len(operator_states(operator, tensor_parallel_size, 0)))


def operator_states(
    operator: str, tensor_parallel_size: int, payload_bytes: int
) -> list[tuple[str, str | None, RingState]]:
    """Forward's states, then backward's, each with its pass and its collective; one alone where nothing is sent.

    operator: a key of FORWARD_EXCHANGE.  Backward's bytes come on top of forward's.
    """
    found: list[tuple[str, str | None, RingState]] = []
    for pass_, kind in (
        ("forward", FORWARD_EXCHANGE[operator]),
        ("backward", FORWARD_EXCHANGE[CONJUGATE_OF[operator]]),
    ):
        before = found[-1][2].sent_bytes if found else 0
        # Without a collective every rank has the whole tensor, and passes it on as it is.
        states = ring(kind or "all-reduce", tensor_parallel_size, payload_bytes)
        if not kind:
            nothing = (None,) * tensor_parallel_size
            states = [replace(states[-1], step=0, phase="", received=nothing, sent_bytes=0)]
        found += [(pass_, kind, replace(state, sent_bytes=before + state.sent_bytes)) for state in states]
    return found


def operator_ring(operator: str, tensor_parallel_size: int, moment: int, payload_bytes: int) -> Drawing:
    """f, f̄, g or ḡ on a ring, at one of its ``steps_of_operator``: its forward, then its conjugate's collective in
    backward.

    A row for each rank, a column for each chunk of the sequence; a box shows how many ranks' terms its sum has, an
    arrow which chunk a rank has just sent to the next.
    """
    moments = operator_states(operator, tensor_parallel_size, payload_bytes)
    pass_, kind, state = moments[moment]
    who = f"{operator}, {pass_}" + (f" (= {CONJUGATE_OF[operator]})" if pass_ == "backward" else "")
    last = max(one.step for one_pass, _, one in moments if one_pass == pass_)
    before = max((one.sent_bytes for one_pass, _, one in moments if one_pass != pass_), default=0)
    of_forward = before if pass_ == "backward" else 0
    sent = f"each has sent {size_text(state.sent_bytes - of_forward)}"
    in_all = f"{size_text(state.sent_bytes)} in all; " if of_forward else ""
    if kind is None:
        alt = f"{who}: {in_all}{sent}."
        return _drawn(state, f"{who}: nothing is sent;<br>every rank passes on what it has", alt, kind)
    where, finding = f"step {state.step} of {last}" + (f", {state.phase}" if state.phase else ""), _finding(state, kind)
    alt = f"{who}, on a ring of {tensor_parallel_size} ranks, {where}: {in_all}{finding}; {sent}."
    return _drawn(state, f"{who}. {where.capitalize()}: {sent};<br>{in_all}{finding}", alt, kind)


def _drawn(state: RingState, title: str, alt: str, kind: str | None) -> Drawing:
    t = len(state.held)
    drawn, said = [], []
    left, right, height = 0.2 * t, 0.27 * t, 0.72
    for chunk in range(t):
        said.append((left + chunk + 0.46, -0.3, f"chunk {chunk}" if t < 8 else str(chunk)))
    said.append((left + t + right / 2, -0.3, "sent"))
    for rank in range(t):
        said.append((left / 2, rank + height / 2, f"rank {rank}"))
        said.append((left + t + right / 2, rank + height / 2, size_text(state.sent_bytes)))
        drawn += [_box(state, rank, chunk, left + chunk, rank, height, _sums(kind)) for chunk in range(t)]
    traces = [*boxes(drawn), *_arrows(state, left, height), labels(said, 13)]
    return diagram(title, traces, alt, left + t + right, t + 0.1, 150 + 42 * t, top=-0.6)


def _sums(kind: str | None) -> bool:
    """Whether a collective adds anything up."""
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
    head = {"symbol": "arrow", "angleref": "previous", "size": [0, 13], "color": INK, "opacity": 1}
    for receiver, chunk in enumerate(state.received):
        if chunk is None:
            continue
        sender = (receiver - 1) % len(state.held)
        if sender < receiver:
            x, y = [left + chunk + 0.76] * 2, [sender + 0.62 * height, receiver + 0.2 * height]
        else:
            x, y = [left + chunk + 0.96] * 2, [sender + height / 2, receiver + height / 2]
        name = f"chunk {chunk}, from rank {sender} to rank {receiver}"
        more: dict[str, Any] = {"hoverinfo": "name", "showlegend": False, "cliponaxis": False}
        traces.append(line(name, x, y, INK, width=2.5, mode="lines+markers", marker=head, **more))
    return traces


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


GATHERED_FORMS = (
    "tensor parallel, 10 + 24/t",
    "sequence parallel by plain autograd, 4 + 30/t",
    "sequence parallel, 34/t",
)


def coefficients(shape: ModelShape, tensor_parallel_size: int) -> dict[str, float]:
    """Bytes of one layer on one rank divided by sbh, the core's 5as/(ht) left out because all three have it."""
    a, b, h, s = shape.letters()
    t = tensor_parallel_size
    core = 5 * a * s * s * b // t
    sizes = (eq2(shape, t), eq4(shape, t) + gathered_input_bytes(shape, t), eq4(shape, t))
    return {form: (size - core) / (s * b * h) for form, size in zip(GATHERED_FORMS, sizes)}


def gathered_lines(shape: ModelShape, tensor_parallel_size: int) -> Drawing:
    """Three ways to share a layer over t, both axes logarithmic: an even split is a straight line, a floor bends it."""
    t, ts = tensor_parallel_size, sizes_of_t(shape)
    kept = {size: coefficients(shape, size) for size in ts}
    floor, plain, shard = (three_digits(kept[t][form]) for form in GATHERED_FORMS)
    looks = zip(GATHERED_FORMS, (COMPARED, BLUE, GREEN), ("dash", "dot", "solid"), ("diamond", "square", "circle"))
    sizes = [14 if size == t else 6 for size in ts]
    traces = [
        line(
            form, ts, [kept[size][form] for size in ts], colour, f"<b>{form}</b><br>t = %{{x}}: %{{y:.3g}} sbh", dash,
            symbol=symbol, size=sizes,
        )
        for form, colour, dash, symbol in looks
    ]  # fmt: skip
    return chart(
        f"At t = {t}: {floor} sbh with the floor, {plain} by plain autograd,<br>{shard} if each rank keeps "
        "only its shard",
        traces,
        f"Lines over t: at t = {t} one layer without its attention core keeps {floor} sbh bytes with tensor "
        "parallelism, "
        f"{plain} with sequence parallelism by plain autograd, {shard} where each rank keeps its shard and "
        "gathers again.",
        height=400,
        xaxis=log_scale("ranks that share the layer, t", ts, map(str, ts)),
        yaxis=log_scale("one layer without the core, × sbh", [1, 2, 5, 10, 20, 50], exponentformat="none"),
    )
