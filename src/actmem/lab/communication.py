"""What ranks exchange in one layer: counted against the formula, timed, and how much of it backward hides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from actmem.config import ModelShape, Parallel
from actmem.formulas.communication import Exchange, counts, layer_exchanges, wire_bytes
from actmem.lab.race import Race, Runner, race_of
from actmem.lab.ranks import Ranks
from actmem.lab.speed import group_of
from actmem.measure.clock import Work
from actmem.measure.comms import Collective, count_collectives
from actmem.measure.layer import layer_input
from actmem.measure.overlap import without_overlap
from actmem.measure.spread import is_real
from actmem.model.layer import TransformerLayer
from actmem.parallel.collectives import all_gather, all_reduce, reduce_scatter
from actmem.parallel.groups import FORMS, TensorParallel, tensor_parallel


@dataclass(frozen=True)
class Counted:
    """Exchanges of one layer, forward and backward, on this rank: by formula, and seen.

    Kinds with their numbers; payload_bytes of all together, wire_bytes as a ring would send.
    """

    name: str
    recompute: str
    predicted: dict[str, int]
    measured: dict[str, int]
    predicted_payload_bytes: int
    measured_payload_bytes: int
    predicted_wire_bytes: int
    measured_wire_bytes: int

    @property
    def exact(self) -> bool:
        return (
            self.predicted == self.measured
            and self.predicted_payload_bytes == self.measured_payload_bytes
            and self.predicted_wire_bytes == self.measured_wire_bytes
        )

    @property
    def difference(self) -> str:
        """What does not agree, in words."""
        return f"{self.name}, {self.recompute}: by formula {self.predicted}, counted {self.measured}"


@dataclass(frozen=True)
class Compared:
    """Two ways to do the same, timed in turns: the second's seconds over the first's.

    is_real: False if that cannot be told from 1.  hidden: of the exchanges' own time, the share
    that overlap takes off backward; None where it says nothing.
    """

    first: str
    second: str
    first_seconds: float
    second_seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    is_real: bool
    noise: float
    hidden: float | None = None


_COUNTED_MODES = ("none", "selective", "full", "paper-full")


def count_exchanges(shape: ModelShape, ranks: Ranks, dtype: torch.dtype) -> list[Counted]:
    """Count the collectives of one layer in every form and mode.  Every rank must call it."""
    found = []
    for name, options in FORMS.items():
        for recompute in _COUNTED_MODES:
            tp = tensor_parallel(**options)
            layer = TransformerLayer(shape, tp, recompute=recompute, device=ranks.device, dtype=dtype)
            x = layer_input(shape, tp, ranks.device, dtype)
            with count_collectives() as seen:
                y = layer(x)
                y.backward(y.detach())
            by_formula = exchanges_by_formula(shape, tp, dtype, recompute)
            really = exchanges_of(seen.collectives, ranks.size)
            found.append(
                Counted(
                    name, recompute, counts(by_formula), counts(really), _payload(by_formula), _payload(really),
                    wire_bytes(by_formula), wire_bytes(really),
                )
            )  # fmt: skip
    return found


def exchanges_by_formula(shape: ModelShape, tp: TensorParallel, dtype: torch.dtype, recompute: str = "none") -> list[Exchange]:
    """What one layer exchanges, forward and backward, in the form that ``tp`` has."""
    parallel = Parallel(tp.size, tp.sequence_parallel)
    return layer_exchanges(shape, parallel, recompute, dtype.itemsize, keep_gathered_input=tp.keep_gathered_input)


def exchanges_of(collectives: list[Collective], ranks: int) -> list[Exchange]:
    """What was seen, in the words of the formula."""
    return [
        Exchange(kind, "measured", "", ranks, payload, count) for (kind, payload), count in Counter((c.kind, c.payload_bytes) for c in collectives).items()
    ]


def _payload(exchanges: list[Exchange]) -> int:
    return sum(exchange.count * exchange.payload_bytes for exchange in exchanges)


def compare_collectives(
    shape: ModelShape, ranks: Ranks, dtype: torch.dtype, *, rounds: int, on_round: Callable[[int], None] = lambda n: None
) -> Compared:
    """Time one all-reduce of a layer's activations against a reduce-scatter and an all-gather of the same."""
    tp = group_of(ranks, sequence_parallel=True)
    x = layer_input(shape, TensorParallel(), ranks.device, dtype).detach()
    work = {
        "all-reduce": _exchange(lambda: all_reduce(x, tp)),
        "reduce-scatter, all-gather": _exchange(lambda: all_gather(reduce_scatter(x, tp), tp)),
    }
    return _compared(race_of(work, "all-reduce", ranks, rounds=rounds, on_round=on_round), *work)


def compare_overlap(
    shape: ModelShape,
    ranks: Ranks,
    dtype: torch.dtype,
    *,
    sequence_parallel: bool,
    rounds: int,
    on_round: Callable[[int], None] = lambda n: None,
) -> Compared:
    """Time backward of one layer as it is against one that waits for each exchange at once."""
    tp = group_of(ranks, sequence_parallel)
    layer = TransformerLayer(shape, tp, device=ranks.device, dtype=dtype)
    runner = Runner(layer, layer_input(shape, tp, ranks.device, dtype))
    plain = runner.work()

    def waiting(output: Tensor) -> None:
        with without_overlap():
            plain.backward(output)

    full = layer_input(shape, TensorParallel(), ranks.device, dtype).detach()
    shard = full[: shape.seq_length // ranks.size].contiguous()
    alone = (lambda: (all_gather(shard, tp), reduce_scatter(full, tp))) if sequence_parallel else (lambda: all_reduce(full, tp))
    work = {
        "with overlap": plain,
        "without": Work(plain.forward, waiting, plain.finish),
        # Both column-parallel linears have these in backward; as the last entry it is no part of the ratio.
        "exchanges alone": _exchange(lambda: (alone(), alone())),
    }
    found = race_of(work, "with overlap", ranks, rounds=rounds, on_round=on_round, part="backward_seconds")
    compared = _compared(found, "with overlap", "without", part="backward_seconds")
    saved = compared.second_seconds - compared.first_seconds
    hidden = saved / found.spread("exchanges alone", "forward_seconds").median if compared.is_real else None
    return Compared(**{**vars(compared), "hidden": hidden})


def _exchange(run: Callable[[], object]) -> Work:
    """A collective as a candidate: all of it is forward."""
    return Work(run, lambda _: None)


def _compared(found: Race, first: str, second: str, part: str = "forward_seconds") -> Compared:
    ratio = found.ratio(second, first, part)
    return Compared(
        first, second, found.spread(first, part).median, found.spread(second, part).median,
        ratio.median, ratio.low, ratio.high, is_real(ratio, found.noise), found.noise,
    )  # fmt: skip
