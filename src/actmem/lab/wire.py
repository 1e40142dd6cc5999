"""What the ranks' sockets send for one exchange and for one layer, beside what the formulas say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from actmem.config import ModelShape
from actmem.formulas.communication import Exchange, wire_bytes
from actmem.formulas.gloo import gloo_header_bytes
from actmem.lab.communication import exchanges_by_formula
from actmem.lab.ranks import Ranks
from actmem.measure.layer import layer_input
from actmem.measure.wire import bytes_sent_by, can_count
from actmem.model.layer import TransformerLayer
from actmem.parallel.collectives import all_gather, all_reduce, reduce_scatter, torch_reduce_scatter
from actmem.parallel.groups import FORMS, TensorParallel, tensor_parallel

#: torch's own reduce-scatter, which over gloo is an all-reduce.
TORCHS = "torch's reduce-scatter"


@dataclass(frozen=True)
class Sent:
    """Bytes that all ranks together sent.

    predicted_bytes: data, as around a ring.  header_bytes: what gloo adds, predicted too.
    sent_bytes: what the sockets say.
    """

    name: str
    predicted_bytes: int
    header_bytes: int
    sent_bytes: int

    @property
    def exact(self) -> bool:
        return self.sent_bytes == self.predicted_bytes + self.header_bytes

    @property
    def difference(self) -> str:
        """What does not agree, in words."""
        return f"{self.name}: {self.predicted_bytes:,} + {self.header_bytes:,} bytes by formula, {self.sent_bytes:,} on the sockets"


def measure_sent(shape: ModelShape, ranks: Ranks, dtype: torch.dtype) -> list[Sent]:
    """Single exchanges of a layer's activations, then the whole layer, forward and backward.

    Empty where sockets can't be asked.  Every rank must call it, and gets the same.
    """
    if ranks.emulated or ranks.size == 1 or not can_count():
        return []
    tp = tensor_parallel(sequence_parallel=True)
    full = layer_input(shape, TensorParallel(), ranks.device, dtype).detach()
    shard = full[: shape.seq_length // ranks.size].contiguous()
    own_part = torch.empty_like(shard)

    def one(kind: str) -> list[Exchange]:
        return [Exchange(kind, "forward", "", ranks.size, full.numel() * dtype.itemsize)]

    found = [
        _sent("all-reduce", one("all-reduce"), lambda: all_reduce(full, tp), ranks),
        _sent("all-gather", one("all-gather"), lambda: all_gather(shard, tp), ranks),
        _sent("reduce-scatter", one("reduce-scatter"), lambda: reduce_scatter(full, tp), ranks),
        _sent(TORCHS, one("all-reduce"), lambda: torch_reduce_scatter(own_part, full), ranks),
    ]
    for name, options in FORMS.items():
        tp = tensor_parallel(**options)
        found.append(_sent(f"layer, {name}", exchanges_by_formula(shape, tp, dtype), _layer(shape, ranks, dtype, tp), ranks))
    return found


def _layer(shape: ModelShape, ranks: Ranks, dtype: torch.dtype, tp: TensorParallel) -> Callable[[], None]:
    """Forward and backward of one layer."""
    layer = TransformerLayer(shape, tp, device=ranks.device, dtype=dtype)
    x = layer_input(shape, tp, ranks.device, dtype)

    def run() -> None:
        y = layer(x)
        y.backward(y.detach())

    return run


def _sent(name: str, exchanges: Iterable[Exchange], run: Callable[[], object], ranks: Ranks) -> Sent:
    exchanges = list(exchanges)
    sent = sum(ranks.gather(bytes_sent_by(run)))
    headers = sum(map(gloo_header_bytes, exchanges))
    return Sent(name, ranks.size * wire_bytes(exchanges), ranks.size * headers, sent)
