"""Measure what one pipeline rank saves for backward, with all its microbatches in flight, without the other ranks.

The rank runs on random activations in place of those that other ranks would send.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from actmem.layers.gpt import ModelPart
from actmem.ledger.measure_layer import layer_input, rows_by_term
from actmem.ledger.recorder import record
from actmem.rows import Row, merge


def measure_parts(parts: Sequence[ModelPart], actions: Iterable[tuple[str, int, int]]) -> list[Row]:
    """Run a pipeline rank's actions in order, and measure what is saved for backward after the last one.

    Args:
        parts: the rank's model chunks, in the order of their numbers.
        actions: tuples ``(kind, chunk, microbatch)`` in order, both numbers from 0.  Kind "F" runs the chunk's forward
            pass on a microbatch and keeps its autograd graph alive; "B" frees that graph, without running backward.

    Returns: the saved bytes, one Row for each term, summed over the microbatches in flight.
    """
    held: dict[tuple[int, int], tuple[Tensor, list[Row]]] = {}
    for kind, chunk, microbatch in actions:
        if kind == "B":
            del held[chunk, microbatch]
        else:
            with record(parts[chunk]) as ledger:
                output = run_part(parts[chunk])
            held[chunk, microbatch] = output, rows_by_term(ledger.saved)
    return merge(row for _, rows in held.values() for row in rows)


def run_part(part: ModelPart) -> Tensor:
    """Run one microbatch of random values through a model chunk of a pipeline rank.

    So the rank can be measured without other ranks.  The input is token ids if the chunk has the embedding; otherwise
    activations, in place of those that the stage before would send.

    Args:
        part: the model chunk.

    Returns: the chunk's output; or, if the chunk has the last layer, the loss on random targets.
    """
    sizes = part.shape.micro_batch_size, part.shape.seq_length
    ids = lambda: torch.randint(0, part.shape.vocab_size, sizes)  # noqa: E731
    y = part(ids() if part.is_first else layer_input(part.shape, part.tp, "cpu", torch.bfloat16))
    return part.loss(y, ids()) if part.is_last else y
