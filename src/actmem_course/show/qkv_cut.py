"""Why the rows of the QKV weight are ordered head by head: what t equal blocks of them hold."""

from __future__ import annotations

from actmem.config import check_divides
from actmem_course.show.boxes import EMPTY, Box, box_traces, diagram_layout, label_trace
from actmem_course.show.drawing import Drawing
from actmem_course.show.style import FILLS

BY_HEAD, BY_KIND = "head by head", "all Q, then all K, then all V"
ROW_ORDERS = (BY_HEAD, BY_KIND)


def blocks(order: str, num_attention_heads: int) -> list[tuple[str, int]]:
    """The 3a blocks of h/a rows, top to bottom: (Q, K or V, head)."""
    a = num_attention_heads
    if order == BY_HEAD:
        return [(kind, head) for head in range(a) for kind in "QKV"]
    return [(kind, head) for kind in "QKV" for head in range(a)]


def shares(order: str, num_attention_heads: int, tensor_parallel_size: int) -> list[list[tuple[str, int]]]:
    """The blocks of each rank when the rows are cut into t equal parts.  ConfigError if t does not divide a."""
    each = 3 * check_divides("num_attention_heads", num_attention_heads, "tensor_parallel_size", tensor_parallel_size)
    every = blocks(order, num_attention_heads)
    return [every[rank * each : (rank + 1) * each] for rank in range(tensor_parallel_size)]


def complete_heads(share: list[tuple[str, int]]) -> set[int]:
    """Heads of which a share has all three of Q, K and V: those whose attention it can compute alone."""
    return {head for _, head in share if all((kind, head) in share for kind in "QKV")}


def qkv_cut(tensor_parallel_size: int, order: str = BY_HEAD, num_attention_heads: int = 8) -> Drawing:
    """A line for each rank with the blocks it holds; filled where the rank has the head's Q, K and V."""
    a, t = num_attention_heads, tensor_parallel_size
    parts = shares(order, a, t)
    boxes, labels, width, height = [], [], 1.0, 0.7
    margin = 0.16 * 3 * a / t  # where the ranks' names stand
    for rank, share in enumerate(parts):
        whole = complete_heads(share)
        labels.append((0.45 * margin, rank + height / 2, f"rank {rank}"))
        for place, (kind, head) in enumerate(share):
            fill = FILLS["Q, K, V"] if head in whole else EMPTY
            say = "has Q, K and V of this head" if head in whole else "lacks a part of this head"
            boxes.append(
                Box(
                    margin + place * width,
                    rank,
                    width,
                    height,
                    fill,
                    f"{kind}{head}",
                    f"{kind} of head {head}: rank {rank} {say}",
                )
            )
    alone = sum(len(complete_heads(share)) for share in parts)
    finding = (
        f"each rank attends with its {a // t} heads alone"
        if alone == a
        else f"{alone} of {a} heads can be computed without an exchange"
    )
    return Drawing(
        [*box_traces(boxes, 12 if 3 * a // t <= 12 else 10), label_trace(labels)],
        {
            **diagram_layout(margin + 3 * a / t + 0.05, t + 0.1),
            "title": {"text": f"Rows of the QKV weight {order}:<br>{finding}"},
            "height": 130 + 45 * t,
        },
        f"The {3 * a} blocks of the QKV weight, {order}, cut into {t} equal parts: {finding}.",
    )
