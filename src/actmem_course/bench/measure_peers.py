"""Our layer compared with torch's and Megatron's: same sizes, same modes, in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from actmem.config import ModelShape, Parallel
from actmem.formulas.activations import layer_extra_rows
from actmem.layers.attention import causal_mask
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.parts import layer_input
from actmem.parallel.groups import TensorParallel
from actmem.rows import total
from actmem_course.bench.hold import Held, Runner, hold
from actmem_course.bench.measure_speed import group_of
from actmem_course.bench.peers import PeerUnavailable
from actmem_course.bench.peers.megatron import megatron_layer
from actmem_course.bench.peers.plain import dtensor_layer, fsdp_layer, our_reduce_scatter
from actmem_course.bench.race import Race, Work, race
from actmem_course.ranks import Ranks
from actmem_course.results import PeerLine

OURS = "ours"
PEER_MODES = ("none", "selective", "elementwise", "full")
PEERS = {"DTensor": dtensor_layer, "megatron-core": megatron_layer, "FSDP2": fsdp_layer}
#: Appended to a peer's name: it ran with our reduce-scatter.
SAME_EXCHANGE = ", our exchange"

NOTES = {
    "DTensor": "torch's ColwiseParallel, RowwiseParallel and SequenceParallel, with torch.utils.checkpoint; under sequence "
    "parallelism it keeps the gathered inputs whole, 30/t + 4 in place of 34/t",
    "megatron-core": "its local specification, softmax in the activations' dtype; on a CPU F.dropout keeps masks in the activations' "
    "dtype, on a GPU of 1 byte: what is more is the last line of its bytes; elementwise: recompute_modules core_attn, layernorm and mlp, "
    "which runs the MLP's products again",
    "FSDP2": "cuts weights and batch, not the layer: each rank runs whole sequences of its own; its time and bytes are compared "
    "per sequence",
}
#: Printed if ranks exchange over gloo.
OVER_GLOO = (
    "its reduce-scatter over gloo sends only what is kept; the others use torch's as shipped, an all-reduce that forgets the "
    "rest, and ours where the line says so. On GPUs all use NCCL's"
)


class _WithMask(nn.Module):
    """Our layer with a causal mask made once, as peers have it and as layers of one model share it."""

    def __init__(self, layer: TransformerLayer, mask: Tensor):
        super().__init__()
        self.layer = layer
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.mask)


def build(
    name: str, shape: ModelShape, tp: TensorParallel, mode: str, device: str, dtype: torch.dtype, p: float = 0.1
) -> nn.Module:
    """The layer of one peer, or ours.  Raises PeerUnavailable, or whatever the peer raises."""
    if name == OURS:
        layer = TransformerLayer(shape, tp, recompute=mode, p=p, device=device, dtype=dtype)
        return _WithMask(layer, causal_mask(shape.seq_length, device))
    return PEERS[name](shape, tp, mode, p=p, device=device, dtype=dtype)


def runner_of(
    name: str, shape: ModelShape, ranks: Ranks, mode: str, dtype: torch.dtype, sequence_parallel: bool = True
) -> Runner:
    """A peer's layer and its input: a shard of one microbatch, or for FSDP2 whole sequences of its own."""
    tp = group_of(sequence_parallel)
    leaf = layer_input(shape, tp, ranks.device, dtype)
    if name == "FSDP2":
        shape = shape.with_sizes(micro_batch_size=_own_sequences(shape, ranks))
        leaf = layer_input(shape, TensorParallel(), ranks.device, dtype)
    return Runner(build(name, shape, tp, mode, ranks.device, dtype), leaf)


def _own_sequences(shape: ModelShape, ranks: Ranks) -> int:
    """How many sequences each rank runs under FSDP2: its part of the microbatch, at least 1."""
    return max(1, shape.micro_batch_size // ranks.size)


def measure_peers(
    shape: ModelShape,
    ranks: Ranks,
    dtype: torch.dtype,
    *,
    rounds: int,
    peers: Sequence[str] = tuple(PEERS),
    modes: Sequence[str] = PEER_MODES,
    sequence_parallel: bool = True,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[PeerLine]:
    """A line for each mode and layer, ours first.  Every rank must call it.

    All modes of all layers take turns in every round, so that modes can be compared too.  Peers that reduce-scatter over
    gloo run as shipped, and once more with our reduce-scatter.
    """
    over_gloo = sequence_parallel and ranks.device == "cpu" and ranks.size > 1 and not ranks.emulated
    ours = partial(our_reduce_scatter, group_of(sequence_parallel))
    work: dict[tuple[str, str], Work] = {}
    held: dict[tuple[str, str], Held | str] = {}  # or why it is missing
    for mode, name in product(modes, (OURS, *peers)):
        on_progress(f"building {name}, recompute: {mode}")
        try:
            runner = runner_of(name, shape, ranks, mode, dtype, sequence_parallel)
            held[mode, name] = hold(runner)
        except Exception as error:
            if name == OURS:
                raise
            held[mode, name] = _reason(error)
            continue
        work[mode, name] = runner.work()
        if over_gloo and name in ("DTensor", "megatron-core"):
            same = mode, name + SAME_EXCHANGE
            work[same], held[same] = runner.work().under(ours), held[mode, name]
    found = race(
        work, (modes[0], OURS), ranks, rounds=rounds,
        on_round=lambda n: on_progress(f"timing {len(work)} layers in turns: round {n} of {rounds + 2}"),
    )  # fmt: skip
    return [
        PeerLine(*key, one) if isinstance(one, str) else _line(*key, found, one, shape, ranks)
        for key, one in held.items()
    ]


def table2_units(shape: ModelShape, ranks: Ranks, mode: str, sequence_parallel: bool = True) -> float:
    """Bytes that our layer holds in 16 bits, counted, without what the paper leaves out; in sbh/t."""
    tp = group_of(sequence_parallel)
    held = hold(runner_of(OURS, shape, ranks, mode, torch.bfloat16, sequence_parallel)).held_bytes
    rows = layer_extra_rows(shape, Parallel(tp.size, sequence_parallel), mode, 2, ranks.device)
    extra = total([row for row in rows if row.term != "causal mask"])  # a buffer here, which all layers share
    a, b, h, s = shape.letters()
    return (held - extra) * tp.size / (s * b * h)


def _reason(error: Exception) -> str:
    first = str(error).strip().partition("\n")[0]
    return first if isinstance(error, PeerUnavailable) else f"{type(error).__name__}: {first}"


def _line(mode: str, name: str, found: Race, held: Held, shape: ModelShape, ranks: Ranks) -> PeerLine:
    key, without, selective = (mode, name), ("none", name), ("selective", name)
    b = shape.micro_batch_size
    sequences = ranks.size * _own_sequences(shape, ranks) if name == "FSDP2" else b
    beside = mode == "elementwise" and selective in found.samples
    return PeerLine(
        mode=mode,
        name=name,
        **found.medians(key),
        ours=None if name == OURS else found.over((mode, OURS), key, factor=sequences / b),
        over=found.over(key, without) if mode != "none" and without in found.samples else None,
        over_selective=found.over(key, selective) if beside else None,
        noise=found.noise,
        sequences=sequences,
        **vars(held),
    )
