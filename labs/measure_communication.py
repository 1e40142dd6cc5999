"""torchrun --nproc-per-node 2 labs/measure_communication.py

The collectives of one transformer layer (2205.05198 section 4.2). First their kinds, numbers and bytes in every mode,
by formula and counted. Then the time and bus bandwidth of each kind at several sizes, to compare an all-reduce with a
reduce-scatter and an all-gather of the same bytes. Last how much of the collectives' time in backward the matmuls hide:
backward is timed with and without overlap.
Exit code 0 if every count agrees with the formula, 1 if any does not, 2 on wrong use.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from measure_parity import FORMS
from measure_speed import speed_shape
from rich.table import Table

from actmem.config import ModelShape, Parallel, check_layer
from actmem.formulas.communication import PredictedCollective, counts, layer_collectives, wire_bytes
from actmem.ledger.comms import Collective, count_collectives
from actmem.ledger.measure_layer import layer_input
from actmem.ledger.storages import replaced
from actmem.parallel import linear
from actmem.parallel.collectives import all_gather, all_reduce, reduce_scatter
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem_course.figures.text import overhead_text
from actmem_course.figures.units import milliseconds, size_text
from actmem_course.lab_tools import options
from actmem_course.lab_tools.held_bytes import layer_runner
from actmem_course.lab_tools.machine import clock_name
from actmem_course.lab_tools.output import WRONG, gather_rows, screen_of, write_rows
from actmem_course.lab_tools.tables import numbers, red_if, table, two_lines
from actmem_course.lab_tools.timing import Work, time_in_turns
from actmem_course.process import lab
from actmem_course.ranks import Ranks, check_ranks, ranks

COUNTED_MODES = ("none", "selective", "full", "paper-full")
KINDS = ("all-reduce", "all-gather", "reduce-scatter")
#: Bytes of the whole tensor of which the bandwidth is measured, in float32; a collective alone is over in no time, so
#: each is run at least so often.
SIZES = {"cpu": (2**16, 2**20, 2**22), "cuda": (2**20, 2**23, 2**26)}
LEAST_ROUNDS = 10


@lab
def main() -> int:
    parser = options.timing_parser("measure_communication.py", __doc__ or "")
    args = parser.parse_args()
    with parser.refusing():
        size = check_ranks(args, parser.prog, "json")
        dtype = options.check_timing(args)
        if args.emulate is None:
            shape = speed_shape(args, size, dtype)
        else:  # an emulated rank needs no memory: it only counts
            shape = options.shape_from(args)
            check_layer(shape, Parallel(size, sequence_parallel=True))

    with ranks(args) as here:
        screen = screen_of(here.rank)
        place = (shape, here, getattr(torch, dtype))
        own = count_layers(*place)
        counted = gather_rows(here, own)
        bandwidths = [] if here.emulated else measure_bandwidths(here, args.rounds)
        forms = () if here.emulated else (False, True)
        compared = [compare_overlap(*place, sequence_parallel, args.rounds) for sequence_parallel in forms]
        screen.print(counts_table(own, f"Collectives: {options.described(shape, here, dtype)}"))
        if bandwidths:
            screen.print(bandwidths_table(bandwidths))
        wrong = [row for row in counted if not row["exact"]]
        for row in wrong:
            screen.print(row["difference"], style=WRONG, markup=False)
        if not wrong:
            screen.print("Every number, kind and byte agrees with the formulas.")
        for row in compared:
            screen.print(f"{row['comparison']}: {comparison_text(row)}")
        if here.emulated:
            screen.print("One emulated rank sends nothing, so nothing is timed.")
        else:
            screen.print(f"Times: medians of {args.rounds} rounds; {clock_name(here.device)}.")
        if args.device == "cuda" and compared:
            queues = os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
            screen.print(f"CUDA_DEVICE_MAX_CONNECTIONS={queues}: with 1 a collective starts before its matmul.")
        write_rows(args.json, here.rank, [*own, *bandwidths, *compared])
    return 1 if wrong else 0


# Counted


def count_layers(shape: ModelShape, here: Ranks, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Predict and count one layer's collectives, for every form of parallelism and mode of recomputation.

    Every rank must call this function.

    Args:
        shape: the layer's sizes, unsharded.
        here: this rank.
        dtype: of the weights and the input.

    Returns: a dict for each form and mode, with these keys:
        "name": the form of parallelism, a key of FORMS.
        "recompute": the mode of recomputation, one of COUNTED_MODES.
        "predicted", "measured": how many collectives of each kind run in forward and backward.
        "predicted_wire_bytes", "measured_wire_bytes": the bytes that this rank sends for them.
        "exact": whether predicted and measured numbers and bytes are equal.
        "difference": a line of text with the predicted and the measured numbers.
    """
    rows = []
    for name, sharing in FORMS.items():
        tp = tensor_parallel(**sharing)
        for recompute in COUNTED_MODES:
            layer = layer_runner(shape, tp, here.device, dtype, recompute)
            with count_collectives() as seen:
                layer.run()
            predicted, counted = predict(shape, tp, dtype, recompute), collectives_of(seen.collectives, here.size)
            row: dict[str, Any] = {
                "name": name,
                "recompute": recompute,
                "predicted": counts(predicted),
                "measured": counts(counted),
                "predicted_wire_bytes": wire_bytes(predicted),
                "measured_wire_bytes": wire_bytes(counted),
            }
            same_bytes = row["predicted_wire_bytes"] == row["measured_wire_bytes"]
            row["exact"] = same_bytes and row["predicted"] == row["measured"]
            row["difference"] = f"{name}, {recompute}: by formula {row['predicted']}, counted {row['measured']}"
            rows.append(row)
    return rows


def predict(
    shape: ModelShape, tp: TensorParallel, dtype: torch.dtype, recompute: str = "none"
) -> list[PredictedCollective]:
    """Predict one layer's collectives in forward and backward.

    Args:
        shape: the layer's sizes, unsharded.
        tp: how ranks share the layer: how many they are, and whether and how they use sequence parallelism.
        dtype: of the activations.
        recompute: the mode of recomputation, such as "none", "selective" or "full".
    """
    parallel = Parallel(tp.size, tp.sequence_parallel)
    return layer_collectives(shape, parallel, recompute, dtype.itemsize, keep_gathered_input=tp.keep_gathered_input)


def collectives_of(collectives: list[Collective], size: int) -> list[PredictedCollective]:
    """Convert counted collectives to the class of the predicted collectives, so that both can be compared.

    Args:
        collectives: the counted collectives, from ``count_collectives``.
        size: how many ranks take part in each collective.

    Returns: a ``PredictedCollective`` for each kind, such as "all-gather", and each size of the unsharded tensor; its
        ``count`` says how many collectives of this kind and size were counted.
    """
    found = Counter((one.kind, one.payload_bytes) for one in collectives)
    return [PredictedCollective(kind, "measured", size, payload, count) for (kind, payload), count in found.items()]


# Timed


def measure_bandwidths(here: Ranks, rounds: int) -> list[dict[str, Any]]:
    """Time each kind of collective at each of ``SIZES``, and compute its bus bandwidth.

    The bus bandwidth is the bytes that one rank sends in a ring, by formula, divided by the time. It is the rate of one
    link, so it can be compared between kinds and numbers of ranks. Every rank must call this function.

    Args:
        here: this rank.
        rounds: how many rounds to time; if it is less than LEAST_ROUNDS, that many are timed.

    Returns: a dict for each kind and size: "kind"; "bytes", of the unsharded tensor; "sent_bytes", which one rank
        sends; "seconds", the median; "bus", the bus bandwidth in bytes per second.
    """
    tp = tensor_parallel(sequence_parallel=True)
    rows = []
    for size in SIZES[here.device]:
        whole = torch.zeros(size // 4 // here.size * here.size, device=here.device)
        own = whole[: whole.numel() // here.size].clone()
        calls = {
            "all-reduce": lambda whole=whole: all_reduce(whole, tp),
            "all-gather": lambda own=own: all_gather(own, tp),
            "reduce-scatter": lambda whole=whole: reduce_scatter(whole, tp),
        }
        work = {kind: Work(call, lambda _: None) for kind, call in calls.items()}
        timed = time_in_turns(work, here, rounds=max(rounds, LEAST_ROUNDS))
        for kind in calls:
            sent = wire_bytes([PredictedCollective(kind, "forward", here.size, whole.numel() * 4)])
            seconds = timed.medians(kind)["forward_seconds"]
            rows.append({"kind": kind, "bytes": size, "sent_bytes": sent, "seconds": seconds, "bus": sent / seconds})
    return rows


def compare_overlap(
    shape: ModelShape, here: Ranks, dtype: torch.dtype, sequence_parallel: bool, rounds: int
) -> dict[str, Any]:
    """Time backward of one layer with its collectives overlapped by matmuls, and without overlap.

    Every rank must call this function.

    Args:
        shape: the layer's sizes, unsharded.
        here: this rank.
        dtype: of the weights and the input.
        sequence_parallel: whether the ranks use sequence parallelism in addition to tensor parallelism.
        rounds: how many rounds are timed.

    Returns: a dict with these keys:
        "comparison": a text that says what is compared.
        "first", "second": the names of the two candidates, "with overlap" and "without".
        "first_seconds", "second_seconds": the median seconds of their backward.
        "over": how much longer backward takes without overlap, a dict from ``Timings.over``.
        "hidden": the time that overlap saves, divided by the time of the collectives alone; None if the difference
            could be noise.
    """
    title = f"Backward, tensor {'+ sequence' if sequence_parallel else 'parallel'}"
    tp = tensor_parallel(sequence_parallel=sequence_parallel)
    layer = layer_runner(shape, tp, here.device, dtype).work()
    full = layer_input(shape, TensorParallel(), here.device, dtype).detach()
    own = full[: shape.seq_length // here.size].contiguous()

    def overlapped() -> None:
        """What overlaps in backward, alone: both column-parallel linears have it."""
        for _ in range(2):
            if sequence_parallel:
                all_gather(own, tp)
                reduce_scatter(full, tp)
            else:
                all_reduce(full, tp)

    first, second, alone = "with overlap", "without", "collectives alone"
    work = {first: layer, second: layer.under(without_overlap), alone: Work(overlapped, lambda _: None)}
    timed = time_in_turns(work, here, rounds=rounds, part="backward_seconds")
    seconds = [timed.medians(name)["backward_seconds"] for name in (first, second)]
    over = timed.over(second, first)
    saved = seconds[1] - seconds[0]
    return {
        "comparison": title,
        "first": first,
        "second": second,
        "first_seconds": seconds[0],
        "second_seconds": seconds[1],
        "over": over,
        "hidden": saved / timed.medians(alone)["forward_seconds"] if over["is_real"] else None,
    }


@contextmanager
def without_overlap() -> Iterator[None]:
    """Make a context in which column-parallel linears wait for each collective of backward right after starting it.

    The same collectives and matmuls run in the same order as otherwise, but they don't overlap.
    """

    def waiting(start: Callable) -> Callable:
        def start_and_wait(x, tp, **options):
            pending = start(x, tp, **options)
            pending.wait()
            return pending

        return start_and_wait

    with ExitStack() as stack:
        for name in ("start_all_gather", "start_reduce_scatter", "start_all_reduce"):
            stack.enter_context(replaced(linear, name, waiting))
        yield


# Printed


def counts_table(rows: list[dict[str, Any]], title: str) -> Table:
    """Make a table with a line for each form of parallelism and mode of recomputation.

    Its columns are the number of collectives of each kind, the bytes that a rank sends, and measured minus predicted
    bytes.

    Args:
        rows: the dicts from ``count_layers``.
        title: the lines above the table.
    """
    columns = map(numbers, ("all-red.", "gather", "scatter", "bytes sent", "diff."))
    made = table(title, "one layer, forward + backward", *columns, tight=True)
    for name in FORMS:
        made.add_row(name, style="bold")
        for row in (row for row in rows if row["name"] == name):
            kinds = (str(row["measured"].get(kind, 0) or "–") for kind in KINDS)
            sent, predicted = row["measured_wire_bytes"], row["predicted_wire_bytes"]
            style = red_if(not row["exact"])
            made.add_row(f"  {row['recompute']}", *kinds, f"{sent:,}", f"{sent - predicted:,}", style=style)
    return made


def bandwidths_table(rows: list[dict[str, Any]]) -> Table:
    """Make a table with a line for each size: the bus bandwidth in GB/s, and below it the time in microseconds.

    Args:
        rows: the dicts from ``measure_bandwidths``.
    """
    made = table("Bus bandwidth: bytes that each rank sends around a ring, over the time", "", *map(numbers, KINDS))
    for size in dict.fromkeys(row["bytes"] for row in rows):
        own = [row for row in rows if row["bytes"] == size]
        cells = (two_lines(f"{row['bus'] / 1e9:.2f} GB/s", f"{row['seconds'] * 1e6:,.0f} µs") for row in own)
        made.add_row(size_text(size), *cells)
    return made


def comparison_text(row: dict[str, Any]) -> str:
    """Return a sentence with the two times, and how much of the collectives' time overlap hides.

    Args:
        row: the dict from ``compare_overlap``.
    """
    times = ", ".join(f"{row[one]} {milliseconds(row[f'{one}_seconds'])} ms" for one in ("first", "second"))
    if not row["over"]["is_real"]:
        return f"{times}; no difference that stands out of the noise (±{100 * row['over']['within']:.0f}%)."
    hidden = ""
    if row["hidden"] is not None:
        hidden = f"; overlap hides {100 * row['hidden']:.0f}% of the collectives' own time"
    return f"{times} ({overhead_text(row['over'])}){hidden}."


if __name__ == "__main__":
    sys.exit(main())
