"""Measure a part of a model by itself: one pipeline rank with all in flight.

Random activations replace those that would arrive, so one emulated rank of many can be measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from actmem.layers.gpt import ModelPart
from actmem.ledger.measure_layer import layer_input, rows_by_term
from actmem.ledger.recorder import record
from actmem.rows import Row, merge


def measure_parts(parts: Sequence[ModelPart], actions: Iterable[tuple[str, int, int]]) -> list[Row]:
    """What one rank's model chunks, ``parts``, keep after the last of ``actions``, one row for each term.

    actions: ``(kind, chunk, microbatch)`` in order; "F" runs the chunk's forward, and holds its graph; "B" drops
    that graph.
    """
    held: dict[tuple[int, int], tuple[Tensor, list[Row]]] = {}
    for kind, chunk, microbatch in actions:
        if kind == "B":
            del held[chunk, microbatch]
            continue
        part = parts[chunk]
        with record(part) as ledger:
            output = run_part(part)
        held[chunk, microbatch] = output, rows_by_term(ledger.saved)
    return merge(row for _, rows in held.values() for row in rows)


def run_part(part: ModelPart) -> Tensor:
    """The part's output for random input, or the loss if it has the model's last layer."""
    sizes = part.shape.micro_batch_size, part.shape.seq_length
    ids = lambda: torch.randint(0, part.shape.vocab_size, sizes)  # noqa: E731
    y = part(ids() if part.is_first else layer_input(part.shape, part.tp, "cpu", torch.bfloat16))
    return part.loss(y, ids()) if part.is_last else y
