"""Measure a part of a model by itself: one layer, or one pipeline rank with all that it has in flight.

For real ranks, and for emulated ones whose neighbours send nothing: random activations replace those that would arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from actmem.config import ModelShape
from actmem.layers.context import ContextParallel
from actmem.layers.experts import Routing
from actmem.layers.gpt import GPT
from actmem.layers.llama import LlamaLayer
from actmem.layers.transformer import TransformerLayer
from actmem.llama_shape import LlamaShape
from actmem.main_grad import MainWeights, gradient_of, use_main_gradients
from actmem.measure.census import LiveStorages, census
from actmem.measure.ledger import record
from actmem.measure.term_names import rows_by_term
from actmem.measure.tools import storages_of
from actmem.measure.whole_step import StepBill, watch_step
from actmem.parallel.groups import TensorParallel
from actmem.recipes import Recompute
from actmem.rows import Row, merge, total

Chunk = TypeVar("Chunk", bound=nn.Module)


class LedgerMismatch(RuntimeError):
    """The ledger and the census disagree: hooks can't see something that is kept."""


def layer_input(shape: ModelShape | LlamaShape, tp: TensorParallel, device: str, dtype: torch.dtype) -> Tensor:
    """A random input for one layer: ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism."""
    s = shape.seq_length // tp.sequence_parts
    sizes = (s, shape.micro_batch_size, shape.hidden_size)
    return torch.randn(sizes, device=device, dtype=dtype, requires_grad=True)


def layer_rows_of(layer: nn.Module, x: Tensor) -> list[Row]:
    """What ``layer(x)`` keeps for backward, as rows by the formulas' terms."""
    with record(layer) as ledger:
        y = layer(x)
    del y
    return rows_by_term(ledger.saved)


def measure_layer(
    shape: ModelShape,
    tp: TensorParallel = TensorParallel(),
    recompute: Recompute | str = "none",
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> list[Row]:
    """What one layer keeps on this rank: the ledger's rows, confirmed by the census.

    Runs the layer's forward twice.  Raises LedgerMismatch if the two counts disagree.
    """
    layer = TransformerLayer(shape, tp, recompute=recompute, device=device, dtype=dtype)
    return _confirmed(layer, lambda: layer_input(shape, tp, device, dtype))


def measure_llama(
    shape: LlamaShape,
    tp: TensorParallel = TensorParallel(),
    recompute: Recompute | str = "none",
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    routing: Routing = "even",
    context: ContextParallel = ContextParallel(),
) -> list[Row]:
    """The same for one of today's layers.  routing: of its experts, without their router's scores by default."""
    layer = LlamaLayer(shape, tp, recompute=recompute, routing=routing, context=context, device=device, dtype=dtype)
    own = shape.with_sizes(seq_length=layer.seq_length)
    return _confirmed(layer, lambda: layer_input(own, tp, device, dtype))


def _confirmed(layer: nn.Module, make_input: Callable[[], Tensor]) -> list[Row]:
    rows = layer_rows_of(layer, make_input())
    counted = census(layer, make_input)
    if counted != total(rows):
        raise LedgerMismatch(f"the ledger holds {total(rows):,} B, the census {counted:,} B")
    return rows


def measure_layer_peak(
    shape: ModelShape,
    tp: TensorParallel = TensorParallel(),
    recompute: Recompute | str = "none",
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> StepBill:
    """The bill of one layer's forward and backward, as between two others.

    Its input is the caller's, and so is the gradient of its input at the end.  The gradient of its
    output comes when backward begins, and goes when nothing reads it any more.
    """
    layer = TransformerLayer(shape, tp, recompute=recompute, device=device, dtype=dtype)
    x = layer_input(shape, tp, device, dtype)
    with watch_step(layer, None, x) as bill:
        run_between_others(layer, x)
    return bill


def run_between_others(layer: nn.Module, x: Tensor) -> None:
    """One layer's forward and backward.  The gradient of its output comes when backward begins."""
    end = _NextLayer.apply(layer(x))
    end.backward(end.detach())


class _NextLayer(torch.autograd.Function):
    """Holds nothing, and gives back a gradient."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        ctx.shape = y.shape
        return y.new_empty(0)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.new_empty(ctx.shape)


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

    chunks: the layers of each of this rank's model chunks.  actions, whole: see ``measure_parts``
    (2205.05198 appendix C).
    """

    def parts_of(mode: Recompute | str) -> list[GPT]:
        return [GPT(shape, tp, layers=layers, recompute=mode, device=device, dtype=dtype) for layers in chunks]

    run = lambda part: _forward(part, _arrives(part, device, dtype))  # noqa: E731
    return measure_parts(parts_of(recompute), parts_of("none") if whole else [], actions, run, whole)


def measure_parts(
    parts: Sequence[Chunk],
    whole_parts: Sequence[Chunk],
    actions: Iterable[tuple[str, int, int]],
    run: Callable[[Chunk], Tensor],
    whole: Collection[tuple[int, int]] = (),
) -> list[Row]:
    """What one rank's model chunks, ``parts``, keep after the last of ``actions``, one row for each term.

    actions: ``(kind, chunk, microbatch)`` in order; "F" runs the chunk's forward by ``run``, and holds its graph; "B" drops
    that graph.  whole: ``(chunk, microbatch)`` pairs that ``whole_parts`` run.
    """
    held: dict[tuple[int, int], tuple[Tensor, list[Row]]] = {}
    for kind, chunk, microbatch in actions:
        if kind == "B":
            del held[chunk, microbatch]
            continue
        part = (whole_parts if (chunk, microbatch) in whole else parts)[chunk]
        with record(part) as ledger:
            output = run(part)
        held[chunk, microbatch] = output, rows_by_term(ledger.saved)
    return merge(row for _, rows in held.values() for row in rows)


def measure_stage_peak(
    shape: ModelShape,
    tp: TensorParallel,
    layers: range,
    num_microbatches: int,
    *,
    recompute: Recompute | str = "none",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[int, int]:
    """Bytes held after ``num_microbatches`` forward passes, and the most during the backward pass of the first.

    Without weights, main gradients and buffers.  A stage's output is freed once it is sent (2205.05198
    appendix B).  For one chunk on an emulated rank.
    """
    part = GPT(shape, tp, layers=layers, recompute=recompute, dtype=dtype)
    arrives = lambda: _arrives(part, "cpu", dtype)  # noqa: E731
    return measure_part_peak(part, arrives, lambda x: _forward(part, x), part.is_last, num_microbatches)


def measure_part_peak(
    part: nn.Module,
    arrives: Callable[[], Tensor],
    forward: Callable[[Tensor], Tensor],
    is_last: bool,
    num_microbatches: int = 1,
) -> tuple[int, int]:
    """As ``measure_stage_peak``, for any part of a model.  arrives: makes its input.  forward: its output, or the loss if is_last."""
    use_main_gradients(part)
    alive = LiveStorages([*part.parameters(), *map(gradient_of, part.parameters()), *part.buffers()])
    outputs: list[Tensor] = []
    with alive:
        for _ in range(num_microbatches):
            y = forward(arrives())
            if not is_last:
                y.untyped_storage().resize_(0)
            outputs.append(y)
            del y
        kept = alive.bytes
        first = outputs.pop(0)
        gradient = None if is_last else torch.empty_like(first)
        alive.peak_bytes = 0
        first.backward(gradient)
    return kept, alive.peak_bytes


def _arrives(part: GPT, device: str, dtype: torch.dtype) -> Tensor:
    return _token_ids(part.shape, device) if part.is_first else layer_input(part.shape, part.tp, device, dtype)


def _forward(part: GPT, x: Tensor) -> Tensor:
    """The part's output, or the loss if it has the model's last layer."""
    y = part(x)
    return part.loss(y, _token_ids(part.shape, str(y.device))) if part.is_last else y


def _token_ids(shape: ModelShape, device: str) -> Tensor:
    return torch.randint(0, shape.vocab_size, (shape.micro_batch_size, shape.seq_length), device=device)


def measure_states(parts: Sequence[nn.Module]) -> list[Row]:
    """What a stage holds besides activations, one row a kind: the storages that stay after one step of Adam on float32 copies.

    Gradients are those that the step started from, whatever they hold: only their bytes count.
    """
    groups: dict[str, list[Tensor]] = {}
    for part in parts:
        weights = MainWeights(part)
        optimizer = torch.optim.AdamW(weights.parameters())
        weights.step(optimizer)
        groups.setdefault("parameters", []).extend(part.parameters())
        gradients = [gradient_of(parameter) for parameter in part.parameters()]
        groups.setdefault("gradients", []).extend(grad for grad in gradients if grad is not None)
        groups.setdefault("float32 parameters", []).extend(weights.parameters())
        for name, key in (("Adam first moment", "exp_avg"), ("Adam second moment", "exp_avg_sq")):
            groups.setdefault(name, []).extend(state[key] for state in optimizer.state.values())
    return [
        Row(name, sum(storage.nbytes() for storage in storages_of(*tensors)), source="storages alive after a step")
        for name, tensors in groups.items()
    ]
