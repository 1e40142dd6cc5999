"""Measure one pipeline rank without the others: all forwards that it would have in flight, held at once.

For emulated ranks, whose neighbours send nothing: random activations replace those that would
arrive, and a backward only drops its graph.  The caller gives the order of the actions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from actmem.config import ModelShape
from actmem.layers.gpt import GPT
from actmem.measure.ledger import record
from actmem.measure.term_names import rows_by_term
from actmem.parallel.groups import TensorParallel
from actmem.recipes import Recompute
from actmem.rows import Row, merge


def measure_stage(
    shape: ModelShape,
    tp: TensorParallel,
    chunks: list[range],
    actions: Iterable[tuple[str, int, int]],
    *,
    recompute: Recompute | str = "none",
    whole: Collection[tuple[int, int]] = (),
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> list[Row]:
    """What one pipeline rank keeps after the last of ``actions``, one row for each term.

    chunks: the layers of each of this rank's model chunks.  actions: ``(kind, chunk,
    microbatch)`` in order; "F" runs the chunk's forward, with the loss if it has the model's last
    layer, and holds its graph; "B" drops that graph.  whole: ``(chunk, microbatch)`` pairs that keep
    everything, whatever ``recompute`` says (2205.05198 appendix C).
    """

    def parts_of(mode: Recompute | str) -> list[GPT]:
        return [GPT(shape, tp, layers=layers, recompute=mode, device=device, dtype=dtype) for layers in chunks]

    parts, whole_parts = parts_of(recompute), parts_of("none") if whole else []
    held: dict[tuple[int, int], tuple[Tensor, list[Row]]] = {}
    for kind, chunk, microbatch in actions:
        if kind == "B":
            del held[chunk, microbatch]
            continue
        part = (whole_parts if (chunk, microbatch) in whole else parts)[chunk]
        with record(part) as ledger:
            output = part(_stage_input(part, device, dtype))
            if part.is_last:
                output = part.loss(output, _token_ids(shape, device))
        held[chunk, microbatch] = output, rows_by_term(ledger.saved)
    return merge(row for _, rows in held.values() for row in rows)


def _stage_input(part: GPT, device: str, dtype: torch.dtype) -> Tensor:
    if part.is_first:
        return _token_ids(part.shape, device)
    s, b, h = part.shape.seq_length, part.shape.micro_batch_size, part.shape.hidden_size
    own = s // part.tp.size if part.tp.sequence_parallel else s
    return torch.randn(own, b, h, device=device, dtype=dtype, requires_grad=True)


def _token_ids(shape: ModelShape, device: str) -> Tensor:
    return torch.randint(0, shape.vocab_size, (shape.micro_batch_size, shape.seq_length), device=device)
