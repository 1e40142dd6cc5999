"""Measure a part of a model by itself: one layer, or one pipeline rank with all that it has in flight.

For real ranks, and for emulated ones whose neighbours send nothing: random activations replace those that would arrive.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from actmem.config import ModelShape
from actmem.layers.gpt import GPT
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.census import LiveStorages, census
from actmem.ledger.recorder import SavedTensor, record
from actmem.ledger.savers import kept_as
from actmem.ledger.tools import storages_of
from actmem.main_grad import MainWeights, gradient_of, use_main_gradients
from actmem.parallel import linear, vocab
from actmem.parallel.groups import TensorParallel
from actmem.recipes import Recompute
from actmem.rows import Row, merge, total
from actmem_more.context import ContextParallel
from actmem_more.experts import Routing
from actmem_more.llama import LlamaLayer, LlamaStage
from actmem_more.llama_shape import LlamaShape
from actmem_more.store import HostMemory

#: Layers name their tensors as they make them (``drop.Terms``).  What follows names the rest: what a ledger sees of the ends,
#: of a checkpoint, and of a linear whose input autocast converts, or the plain form gathers, before it is kept.  By the
#: running module, the operation and the argument; never by size, because two different tensors can have the same size.
_LINEARS = ("linear", linear.FUNCTIONS["column_parallel"].__name__)
_LOOKUP, _CROSS_ENTROPY = (vocab.FUNCTIONS[name].__name__ for name in ("lookup", "cross_entropy"))
_LINEAR_TERMS = {
    "qkv": "QKV projection input", "projection": "attention projection input", "up": "h→4h input", "down": "4h→h input",
    "output": "output layer input",
}  # fmt: skip


class LedgerMismatch(RuntimeError):
    """The ledger and the census disagree: hooks can't see something that is kept."""


def layer_input(shape: ModelShape | LlamaShape, tp: TensorParallel, device: str, dtype: torch.dtype) -> Tensor:
    """A random input for one layer: ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism."""
    s = shape.seq_length // tp.sequence_parts
    sizes = (s, shape.micro_batch_size, shape.hidden_size)
    return torch.randn(sizes, device=device, dtype=dtype, requires_grad=True)


def term_name(saved: SavedTensor) -> str:
    """The term that formulas use for this tensor; one without a rule keeps the ledger's own name, so it shows as not predicted."""
    op, last = saved.op, saved.module.rsplit(".", 1)[-1]
    term = saved.term or kept_as(op, saved.argument)
    if term == "log-sum-exp" and not saved.dtype.is_floating_point:
        return "attention seed"  # of a GPU's kernel, and its offset
    if term:
        return term
    if op == _CROSS_ENTROPY:
        return "target ids" if saved.argument else "logits (float32)"
    if op == _LOOKUP:
        return "token ids"
    if op in _LINEARS and last in _LINEAR_TERMS:
        return _LINEAR_TERMS[last]
    if saved.kind == "generator state":
        return "random-number state"
    return saved.name


def rows_by_term(saved: Iterable[SavedTensor]) -> list[Row]:
    """One row for each saved tensor, named as in the formulas."""
    return [Row(term_name(t), t.bytes, source=f"{t.module or 'layer'}: {t.op}, {t.line}") for t in saved]


def layer_rows_of(layer: nn.Module, x: Tensor) -> list[Row]:
    """What ``layer(x)`` keeps for backward, as rows by the formulas' terms."""
    with record(layer) as ledger:
        y = layer(x)
    del y
    return rows_by_term(ledger.saved)


def measure_layer(
    shape: ModelShape | LlamaShape,
    tp: TensorParallel = TensorParallel(),
    recompute: Recompute | str = "none",
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    routing: Routing = "even",
    context: ContextParallel = ContextParallel(),
) -> list[Row]:
    """What one layer keeps on this rank: the ledger's rows, confirmed by the census.

    routing, context: of a Llama's layer; its experts run without their router's scores by default.  Runs the layer's
    forward twice.  Raises LedgerMismatch if the two counts disagree.
    """
    layer: TransformerLayer | LlamaLayer
    if isinstance(shape, ModelShape):
        layer = TransformerLayer(shape, tp, recompute=recompute, device=device, dtype=dtype)
    else:
        layer = LlamaLayer(shape, tp, recompute=recompute, routing=routing, context=context, device=device, dtype=dtype)
        shape = shape.with_sizes(seq_length=layer.seq_length)
    make_input = partial(layer_input, shape, tp, device, dtype)
    rows = layer_rows_of(layer, make_input())
    if (counted := census(layer, make_input)) != total(rows):
        raise LedgerMismatch(f"the ledger holds {total(rows):,} B, the census {counted:,} B")
    return rows


def run_between_others(layer: nn.Module, x: Tensor) -> None:
    """One layer's forward and backward, as between two others.

    The gradient of its output comes when backward begins, and goes when nothing reads it any more.
    """
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
    recompute: Recompute | str = "none",
) -> list[Row]:
    """What one pipeline rank of the paper's model keeps after the last of ``actions``, one row for each term.

    chunks: the layers of each of this rank's model chunks.  actions: see ``measure_parts``.
    """
    parts = [GPT(shape, tp, layers=layers, recompute=recompute, dtype=torch.bfloat16) for layers in chunks]
    return measure_parts(parts, [], actions)


def measure_parts(
    parts: Sequence[GPT | LlamaStage],
    whole_parts: Sequence[GPT | LlamaStage],
    actions: Iterable[tuple[str, int, int]],
    whole: Collection[tuple[int, int]] = (),
) -> list[Row]:
    """What one rank's model chunks, ``parts``, keep after the last of ``actions``, one row for each term.

    actions: ``(kind, chunk, microbatch)`` in order; "F" runs the chunk's forward, and holds its graph; "B" drops
    that graph.  whole: ``(chunk, microbatch)`` pairs that ``whole_parts`` run (2205.05198 appendix C).
    """
    held: dict[tuple[int, int], tuple[Tensor, list[Row]]] = {}
    for kind, chunk, microbatch in actions:
        if kind == "B":
            del held[chunk, microbatch]
            continue
        part = (whole_parts if (chunk, microbatch) in whole else parts)[chunk]
        with record(part) as ledger:
            output = run_part(part)
        held[chunk, microbatch] = output, rows_by_term(ledger.saved)
    return merge(row for _, rows in held.values() for row in rows)


def measure_part_peak(part: GPT | LlamaStage) -> tuple[int, int]:
    """Bytes held after the forward pass of one microbatch, and the most during its backward pass.

    Without weights, main gradients, buffers and copies on the host.  A stage's output is freed once it is sent (2205.05198
    appendix B).  For one chunk on an emulated rank.
    """
    use_main_gradients(part)
    alive = LiveStorages([*part.parameters(), *map(gradient_of, part.parameters()), *part.buffers()])
    with alive:
        y = run_part(part)
        if not part.is_last:
            y.untyped_storage().resize_(0)
        alive.ignore([memory.copies() for memory in _host_memories(part)])
        kept = alive.bytes
        gradient = None if part.is_last else torch.empty_like(y)
        alive.peak_bytes = 0
        y.backward(gradient)
    return kept, alive.peak_bytes


def _host_memories(part: nn.Module) -> set[HostMemory]:
    stored = [store for layer in part.modules() for store in getattr(layer, "stores", {}).values()]
    return {store for store in stored if isinstance(store, HostMemory)}


def run_part(part: GPT | LlamaStage) -> Tensor:
    """The part's output for random input, or the loss if it has the model's last layer."""
    sizes = part.shape.micro_batch_size, part.shape.seq_length
    ids = lambda: torch.randint(0, part.shape.vocab_size, sizes)  # noqa: E731
    y = part(ids() if part.is_first else layer_input(part.shape, part.tp, "cpu", torch.bfloat16))
    return part.loss(y, ids()) if part.is_last else y


def measure_states(parts: Sequence[nn.Module]) -> list[Row]:
    """What a stage holds besides activations, one row a kind: the storages that stay after one step of Adam on float32 copies.

    Gradients are those that the step started from, whatever they hold: only their bytes count.
    """
    held: list[dict[str, list]] = []
    for part in parts:
        weights = MainWeights(part)
        optimizer = torch.optim.AdamW(weights.parameters())
        weights.step(optimizer)
        states = {
            "parameters": part.parameters(),
            "gradients": map(gradient_of, part.parameters()),
            "float32 parameters": weights.parameters(),
            "Adam first moment": (state["exp_avg"] for state in optimizer.state.values()),
            "Adam second moment": (state["exp_avg_sq"] for state in optimizer.state.values()),
        }
        held.append({name: list(tensors) for name, tensors in states.items()})
    rows = []
    for name in held[0]:
        storages = storages_of(*(tensor for part in held for tensor in part[name]))
        rows.append(Row(name, sum(s.nbytes() for s in storages), source="storages alive after a step"))
    return rows
