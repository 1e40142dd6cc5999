"""torchrun --nproc-per-node 2 labs/measure_peers.py

The same transformer layer by this course, by torch's DTensor plan and under FSDP2, in one run: time of the forward and
the backward pass in turns, bytes saved by one ledger, bytes at the peak. Over gloo DTensor runs as shipped and with our
reduce-scatter. A peer that cannot run here is named and left out.
On one GPU: python labs/measure_peers.py --emulate 8 --device cuda --model 22B
Exit code 0, or 2 on wrong use.
"""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import torch
from measure_speed import check_speed
from rich.table import Table
from rich.text import Text

from actmem.config import ModelShape
from actmem.ledger.layer_rows import layer_input
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem_course.arguments import add_shape_arguments
from actmem_course.figures.text import overhead_text
from actmem_course.figures.units import milliseconds, size_text
from actmem_course.files import check_files
from actmem_course.lab_tools import options
from actmem_course.lab_tools.held_bytes import Held, Runner, held_by
from actmem_course.lab_tools.machine import EMULATED, clock_name, described
from actmem_course.lab_tools.output import screen_of, show_progress, write_rows
from actmem_course.lab_tools.tables import numbers, table, two_lines
from actmem_course.lab_tools.timing import Timings, Work, time_in_turns
from actmem_course.peers import OURS, PEERS, PeerUnavailable, build, our_reduce_scatter
from actmem_course.process import lab
from actmem_course.ranks import Ranks, add_rank_arguments, check_ranks, ranks

PEER_MODES = ("none", "selective", "elementwise", "full")
#: Appended to a peer's name: it ran with our reduce-scatter.
OUR_COLLECTIVE = ", our collective"
NOTES = {
    "DTensor": "torch's ColwiseParallel, RowwiseParallel and SequenceParallel, with torch.utils.checkpoint; under "
    "sequence parallelism it keeps the gathered inputs whole, 30/t + 4 in place of 34/t",
    "FSDP2": "shards weights and batch, not the layer: each rank runs whole sequences of its own; its time and bytes "
    "are compared per sequence",
}
#: Printed if the collectives are gloo's.
OVER_GLOO = (
    "ours: its reduce-scatter over gloo sends only what is kept; DTensor uses torch's as shipped, an all-reduce that "
    "forgets the rest, and ours where the line says so. On GPUs all use NCCL's."
)


@lab
def main() -> int:
    parser = options.lab_parser("measure_peers.py", __doc__ or "")
    add_shape_arguments(parser, options.DEFAULT_LAYER)
    add_rank_arguments(parser)
    options.add_timing_arguments(parser)
    options.add_choices_argument(parser, "peer", tuple(PEERS), "NAME")
    options.add_choices_argument(parser, "recompute", PEER_MODES, "MODE")
    parser.add_argument(
        "--no-sequence-parallel", action="store_true", help="tensor parallelism without sequence parallelism"
    )
    args = parser.parse_args()
    with parser.refusing():
        check_files(args, "json")
        size = check_ranks(args, parser.prog)
        dtype = options.check_timing(args)
        shape = options.layer_shape(args, lambda layer: check_speed(layer, size, args, dtype))
    # What peers and torch warn of while they are built is not this lab's to say.
    warnings.filterwarnings("ignore")
    sequence_parallel = not args.no_sequence_parallel
    with ranks(args, real_tensors=True) as here:
        screen = screen_of(here.rank)
        torch.manual_seed(1234)
        modes = options.chosen(args.recompute, PEER_MODES)
        rows = measure_peers(
            shape, here, getattr(torch, dtype), rounds=args.rounds, peers=options.chosen(args.peer, tuple(PEERS)),
            modes=modes, sequence_parallel=sequence_parallel,
        )  # fmt: skip
        screen.print(f"One layer by others: {described(shape, here, dtype)}", style="bold")
        screen.print(*(peers_table(rows, mode) for mode in modes))
        if any(row["over"] for row in rows):
            screen.print(overheads_table(rows))
        screen.print(
            f"ours ÷ it: below 1, ours is faster. {args.rounds} rounds, {clock_name(here.device)}; ours against "
            f"itself came out up to {100 * (rows[0]['noise'] or 0):.1f}% apart. "
            "Below each: 95% interval; for bytes, over ours."
        )
        ran = {row["name"].removesuffix(OUR_COLLECTIVE) for row in rows if not row["unavailable"]}
        for name in PEERS:
            if name in ran:
                screen.print(f"{name}: {NOTES[name]}.")
        for line in missing_lines(rows):
            screen.print(line, markup=False)
        if here.device == "cpu" and here.size > 1 and not here.emulated:
            screen.print(OVER_GLOO)
        if note := options.shortened(shape):
            screen.print(note)
        if here.emulated:
            screen.print(EMULATED)
        if strange := ", ".join(sorted({row["name"] for row in rows if row["finite"] is False})):
            screen.print(f"Infinities or NaNs in {strange}: kernels can run faster on those.")
        write_rows(args.json, here.rank, rows)
    return 0


def runner_of(
    name: str, shape: ModelShape, here: Ranks, mode: str, dtype: torch.dtype, sequence_parallel: bool = True
) -> Runner:
    """A peer's layer and its input: a shard of one microbatch, or for FSDP2 whole sequences of its own."""
    tp = tensor_parallel(sequence_parallel=sequence_parallel)
    leaf = layer_input(shape, tp, here.device, dtype)
    if name == "FSDP2":
        shape = shape.with_sizes(micro_batch_size=own_sequences(shape, here))
        leaf = layer_input(shape, TensorParallel(), here.device, dtype)
    return Runner(build(name, shape, tp, mode, here.device, dtype), leaf)


def own_sequences(shape: ModelShape, here: Ranks) -> int:
    """How many sequences each rank runs under FSDP2: its part of the microbatch, at least 1."""
    return max(1, shape.micro_batch_size // here.size)


def measure_peers(
    shape: ModelShape,
    here: Ranks,
    dtype: torch.dtype,
    *,
    rounds: int,
    peers: Sequence[str] = tuple(PEERS),
    modes: Sequence[str] = PEER_MODES,
    sequence_parallel: bool = True,
) -> list[dict[str, Any]]:
    """A row for each mode and layer, ours first.  Every rank must call it.

    All modes of all layers take turns in every round, so that modes can be compared too.  DTensor over gloo
    runs as shipped, and once more with our reduce-scatter.
    """
    over_gloo = sequence_parallel and here.device == "cpu" and here.size > 1 and not here.emulated
    ours = partial(our_reduce_scatter, tensor_parallel(sequence_parallel=sequence_parallel))
    work: dict[tuple[str, str], Work] = {}
    held: dict[tuple[str, str], Held | str] = {}  # or why it is missing
    for mode, name in product(modes, (OURS, *peers)):
        show_progress(here.rank, f"building {name}, recompute: {mode}")
        try:
            runner = runner_of(name, shape, here, mode, dtype, sequence_parallel)
            held[mode, name] = held_by(runner)
        except Exception as error:
            if name == OURS:
                raise
            first = str(error).strip().partition("\n")[0]
            held[mode, name] = first if isinstance(error, PeerUnavailable) else f"{type(error).__name__}: {first}"
            continue
        work[mode, name] = runner.work()
        if over_gloo and name == "DTensor":
            same = mode, name + OUR_COLLECTIVE
            work[same], held[same] = runner.work().under(ours), held[mode, name]
    show_progress(here.rank, f"timing {len(work)} layers in turns")
    timed = time_in_turns(work, (modes[0], OURS), here, rounds=rounds)
    show_progress(here.rank)
    return [row_of(*key, timed, found, shape, here) for key, found in held.items()]


def row_of(mode: str, name: str, timed: Timings, found: Held | str, shape: ModelShape, here: Ranks) -> dict[str, Any]:
    """One library's layer in one mode; unavailable: why it did not run, and the rest is None then.

    ours: our time over this one's, per sequence.  over: this one's time over its own without recomputation.
    sequences: how many the ranks ran together.
    """
    row: dict[str, Any] = {"mode": mode, "name": name, "unavailable": ""}
    times = dict.fromkeys(("forward_seconds", "backward_seconds", "combined_seconds"))
    compared = dict.fromkeys(("ours", "over", "noise"))
    if isinstance(found, str):
        counts = dict.fromkeys(("held_bytes", "peak_bytes", "finite"))
        return {**row, "unavailable": found, **times, **compared, "sequences": 1, **counts}
    key, without = (mode, name), ("none", name)
    sequences = here.size * own_sequences(shape, here) if name == "FSDP2" else shape.micro_batch_size
    per_sequence = sequences / shape.micro_batch_size
    if name != OURS:
        compared["ours"] = timed.over((mode, OURS), key, factor=per_sequence)
    if mode != "none" and without in timed.samples:
        compared["over"] = timed.over(key, without)
    compared["noise"] = timed.noise
    return {**row, **timed.medians(key), **compared, "sequences": sequences, **asdict(found)}


def peers_table(rows: list[dict[str, Any]], mode: str) -> Table:
    """The rows of one mode: medians, our time over each, bytes held (and over ours) and at the peak.

    Ours is the first row.  What is over ours is per sequence.
    """
    columns = map(numbers, ("forward", "backward", "both, ms", "ours ÷ it", "holds", "peak"))
    made = table(f"recompute: {mode}", "layer", *columns, tight=True)
    ours = None
    for row in (row for row in rows if row["mode"] == mode and not row["unavailable"]):
        each = row["held_bytes"] / row["sequences"]
        ours = ours or each
        times = (milliseconds(row[f"{part}_seconds"]) for part in ("forward", "backward", "combined"))
        holds = two_lines(size_text(row["held_bytes"]), f"× {each / ours:.2f}")
        name = row["name"].replace(", ", "\n  ")
        made.add_row(name, *times, ratio_text(row["ours"]), holds, size_text(row["peak_bytes"]))
    return made


def ratio_text(ours: dict[str, Any] | None) -> Text:
    """A ratio and its interval; "same" where it could be noise."""
    if ours is None:
        return Text("–")
    if not ours["is_real"]:
        return two_lines("same", f"within {ours['within']:.2f}")
    return two_lines(f"{ours['ratio']:.2f}", ours["interval"])


def overheads_table(rows: list[dict[str, Any]]) -> Table:
    """What each way to recompute costs each layer, over the same layer without."""
    over = {(row["name"], row["mode"]): row["over"] for row in rows if row["over"]}
    modes = list(dict.fromkeys(mode for _, mode in over))
    made = table("overhead of recomputation", "layer", *map(numbers, modes), tight=True)
    for name in dict.fromkeys(name for name, _ in over):
        made.add_row(name, *(overhead_text(over[name, mode]) if (name, mode) in over else "" for mode in modes))
    return made


def missing_lines(rows: list[dict[str, Any]]) -> list[str]:
    """One sentence for each peer that did not run, and in which modes."""
    missing: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["unavailable"]:
            missing.setdefault((row["name"], row["unavailable"]), []).append(row["mode"])
    return [f"{name} did not run ({', '.join(modes)}): {reason}" for (name, reason), modes in missing.items()]


if __name__ == "__main__":
    sys.exit(main())
