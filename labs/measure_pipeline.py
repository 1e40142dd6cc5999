"""torchrun --nproc-per-node 4 labs/measure_pipeline.py --pipeline 2 --tensor 2

One training step on a pipeline (2205.05198 section 4.2.3): the bytes that every rank saves at its peak, by formula and
counted, and whether torch ran the planned schedule.
Exit code 0 if all agrees to the byte, 1 if anything does not, 2 on wrong use.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn

from actmem.config import PAPER_MODELS, ConfigError, ModelShape, Parallel, check_layer, check_vocab_size
from actmem.formulas.schedule import Schedule, interleaved, one_forward_one_backward, torch_microbatches_per_round
from actmem.formulas.stages import bytes_by_rank, in_flight, stage_rows
from actmem.formulas.states import parameter_counts
from actmem.ledger.measure_layer import rows_by_term
from actmem.ledger.recorder import Ledger, record
from actmem.pipeline import Pipeline, Stage, Watcher, check_pipeline, make_mesh
from actmem.rows import Row, extra_rows, merge, paper_rows, total
from actmem_course.arguments import add_rank_arguments
from actmem_course.lab_tools import options
from actmem_course.lab_tools.layer_bytes import compared
from actmem_course.lab_tools.machine import first_that_fits
from actmem_course.lab_tools.output import WRONG, gather_rows, screen_of, status, write_rows
from actmem_course.lab_tools.tables import numbers, red_if, table
from actmem_course.process import lab
from actmem_course.ranks import Ranks, check_ranks, ranks

SPELLED = {
    "pipeline_parallel_size": "--pipeline",
    "tensor_parallel_size": "--tensor",
    "num_model_chunks": "--chunks",
    "num_microbatches": "--microbatches",
}
OUTPUTS_HELD = "torch holds a stage's output although the next stage has a copy (appendix B)"
BUFFERS_HELD = "torch makes a receive buffer for every microbatch before the first one runs"


@lab
def main() -> int:
    parser = options.lab_parser("measure_pipeline.py", __doc__ or "", SPELLED)
    option = parser.add_argument
    option("--pipeline", type=int, default=2, metavar="P", help="pipeline stages, p (default: 2)")
    option("--tensor", type=int, metavar="T", help="tensor-parallel ranks a stage, t (default: all that there are)")
    option("--chunks", type=int, default=1, metavar="M", help="model chunks a rank, m (default: 1)")
    option("--microbatches", type=int, metavar="N", help="microbatches of the step (default: 2p)")
    option("--recompute", choices=("none", "selective", "full"), default="none")
    option("--no-sequence-parallel", action="store_true", help="tensor parallelism without sequence parallelism")
    option("--free-outputs", action="store_true", help="free each output once it is sent (appendix B)")
    options.add_shape_arguments(parser, "tiny; on GPUs 22B with a layer for each chunk")
    option("--num-layers", type=int, metavar="N", help="layers of the model (L)")
    options.add_dtype_argument(parser)
    add_rank_arguments(parser, emulate=False)
    args = parser.parse_args()
    with parser.refusing():
        size = check_ranks(args, parser.prog, "json")
        plan = plan_from(args, size)
        plan.check(size)
        first_that_fits({plan.shape: plan.largest_bytes(options.ELEMENT_SIZES[args.dtype])}, args)

    with ranks(args) as here:
        screen = screen_of(here.rank)
        with status(here.rank, "running one step"):
            rows = gather_rows(here, [measure(plan, here, getattr(torch, args.dtype))])
        screen.print(bytes_table(rows, options.described(plan.shape, here, args.dtype)))
        beside = ", ".join(f"{row['output_bytes']:,} + {row['buffer_bytes']:,}" for row in rows)
        screen.print(f"Beside the graphs, outputs held and idle receive buffers of each rank: {beside}")
        for row in rows:
            if not row["exact"]:
                screen.print(f"rank {row['rank']}:\n{row['disagreement']}", style=WRONG, markup=False)
            if not row["order_as_drawn"]:
                screen.print(f"rank {row['rank']} ran its actions in another order than planned", style=WRONG)
        agree = sum(row["exact"] for row in rows)
        screen.print(f"{agree} of {len(rows)} ranks agree with the formulas to the byte")
        write_rows(args.json, here.rank, rows)
    return 0 if all(row["exact"] and row["order_as_drawn"] for row in rows) else 1


@dataclass(frozen=True)
class Plan:
    """The training step to measure.

    Attributes:
        shape: the model's sizes.
        parallel: how ranks share the model: t, p, m, and whether there is sequence parallelism.
        num_microbatches: n, the microbatches of the step.
        recompute: what backward recomputes: "none", "selective" or "full".
        free_outputs: whether a stage's output is freed after it was sent (appendix B).
    """

    shape: ModelShape
    parallel: Parallel
    num_microbatches: int
    recompute: str = "none"
    free_outputs: bool = False

    def check(self, num_ranks: int) -> None:
        """Raise ConfigError if this plan cannot run on ``num_ranks`` ranks."""
        t, p, m = self.sizes
        if p * t != num_ranks:
            raise ConfigError("pipeline", f"p · t = {p} · {t} = {p * t} ranks wanted, {num_ranks} started")
        check_layer(self.shape, self.parallel)
        check_pipeline(self.shape, p, m, self.num_microbatches, self.free_outputs)
        check_vocab_size(self.shape.vocab_size, t)
        _ = self.schedule  # too long for one is refused here

    def largest_bytes(self, element_size: int) -> int:
        """Estimate the bytes that the fullest rank needs, to refuse a step that doesn't fit into memory.

        It counts weights, gradients, activations, two tensors of attention scores, two of logits, and the batch.

        Args:
            element_size: bytes of an activation element.
        """
        shape, n, (t, p, _) = self.shape, self.num_microbatches, self.sizes
        a, b, _, s = shape.letters()
        passing = 2 * element_size * a * s * s * b // t + 8 * s * b * shape.vocab_size // t + 16 * n * b * s
        saved = bytes_by_rank(shape, self.parallel, self.recompute, n, element_size, self.free_outputs)
        weights = [2 * element_size * sum(parameter_counts(shape, self.parallel, r).values()) for r in range(p)]
        return passing + max(map(sum, zip(weights, saved)))

    @property
    def schedule(self) -> Schedule:
        """The order in which torch will run the forward and backward passes on each rank."""
        _, p, m = self.sizes
        if m == 1:
            return one_forward_one_backward(p, self.num_microbatches)
        return interleaved(p, m, self.num_microbatches, self.per_round)

    @property
    def per_round(self) -> int | None:
        """How many microbatches go through one chunk before the rank turns to its next chunk; None for 1F1B."""
        _, p, m = self.sizes
        return torch_microbatches_per_round(p, self.num_microbatches) if m > 1 else None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tensor-parallel size t, pipeline-parallel size p, and model chunks m on each pipeline rank."""
        parallel = self.parallel
        return parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.num_model_chunks


def plan_from(args: argparse.Namespace, size: int) -> Plan:
    """Return the step that the command line asks for.

    Args:
        args: the parsed options.
        size: how many ranks there are.

    Raises: ConfigError on bad sizes.
    """
    tensor = max(1, size // max(1, args.pipeline)) if args.tensor is None else args.tensor
    shape = options.shape_from(args)
    if args.device == "cuda" and not options.names_a_shape(args):
        shape = PAPER_MODELS["22B"].shape.with_sizes(num_layers=max(1, args.pipeline) * max(1, args.chunks))
    if args.num_layers is not None:
        shape = shape.with_sizes(num_layers=args.num_layers)
    parallel = Parallel(tensor, not args.no_sequence_parallel, args.pipeline, args.chunks)
    microbatches = 2 * args.pipeline if args.microbatches is None else args.microbatches
    return Plan(shape, parallel, microbatches, args.recompute, args.free_outputs)


class MemoryWatcher(Watcher):
    """Measures after each forward and backward pass of a Pipeline what this rank holds.

    Attributes:
        samples: a dict for each pass: its "kind" ("F" or "B"), "stage" and "microbatch"; "in_flight", how many
            microbatches are in flight, counted once for each chunk; "kept_bytes", which autograd graphs save;
            "output_bytes" and "buffer_bytes", of outputs and of receive buffers that torch's runtime holds and no
            graph saves.
        peak_rows: rows of what was held when the graphs saved most, with the outputs and buffers as extra rows.
    """

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        #: By term, when the graphs held most; with torch's own tensors.
        self.peak_rows: list[Row] = []
        self._ledgers: dict[tuple[int, int], list[Ledger]] = {}
        self._stages: dict[int, Stage] = {}

    @contextmanager
    def during(self, module: nn.Module, stage: int, microbatch: int) -> Iterator[None]:
        with record(module) as ledger:
            yield
        self._ledgers.setdefault((stage, microbatch), []).append(ledger)

    def after(self, kind: str, stage: Stage, microbatch: int) -> None:
        self._stages[stage.stage_index] = stage
        if kind == "B":
            del self._ledgers[stage.stage_index, microbatch]
        ledgers = [ledger for own in self._ledgers.values() for ledger in own]
        kept = {key: size for ledger in ledgers for key, size in ledger.storages().items()}

        def beside(storages: dict[int, int]) -> int:
            return sum(size for key, size in storages.items() if key not in kept)

        outputs = sum(beside(one.held_outputs()) for one in self._stages.values())
        buffers = sum(beside(one.receive_buffers()) for one in self._stages.values())
        kept_bytes = sum(kept.values())
        most = max((sample["kept_bytes"] for sample in self.samples), default=0)
        place = {"kind": kind, "stage": stage.stage_index, "microbatch": microbatch, "in_flight": len(self._ledgers)}
        self.samples.append({**place, "kept_bytes": kept_bytes, "output_bytes": outputs, "buffer_bytes": buffers})
        if kept_bytes >= most:  # the last maximum: the steady state, not the warm-up
            merged = merge(row for ledger in ledgers for row in rows_by_term(ledger.saved))
            assert total(merged) == kept_bytes, "two microbatches share a storage"
            self.peak_rows = [
                *merged,
                Row("outputs held by the runtime", outputs, extra=OUTPUTS_HELD),
                Row("receive buffers not in use", buffers, extra=BUFFERS_HELD),
            ]


def measure(plan: Plan, here: Ranks, dtype: torch.dtype) -> dict[str, Any]:
    """Run forward and backward of all microbatches once, and compare the bytes held with the formulas.

    Every rank must call this function.

    Args:
        plan: the step to run: the model's sizes, the schedule, and how ranks share the model.
        here: this rank.
        dtype: of the weights and activations.

    Returns: a dict with this rank's results at the moment when its graphs save most:
        "rank", "pipeline_rank": the rank's number, and the number of its pipeline rank.
        "predicted_in_flight", "measured_in_flight": the most microbatches in flight.
        "predicted_bytes", "extra_bytes", "measured_bytes", "difference_bytes", "exact", "disagreement": from
            ``layer_bytes.compared``.
        "output_bytes", "buffer_bytes": bytes that torch's runtime holds in addition to the graphs, of outputs and of
            receive buffers not in use.
        "order_as_drawn": whether the passes ran in the schedule's order.
        "samples": what was held after each pass, from ``MemoryWatcher``.
    """
    shape, parallel = plan.shape, plan.parallel
    t, p, m = plan.sizes
    watcher = MemoryWatcher()
    pipeline = Pipeline(
        shape,
        make_mesh(here.device, p, t),
        num_microbatches=plan.num_microbatches,
        num_model_chunks=m,
        sequence_parallel=parallel.sequence_parallel,
        free_outputs=plan.free_outputs,
        watcher=watcher,
        recompute=plan.recompute,
        device=here.device,
        dtype=dtype,
    )
    batch = (plan.num_microbatches * shape.micro_batch_size, shape.seq_length)
    tokens = torch.randint(0, shape.vocab_size, batch, device=here.device)
    pipeline.step(tokens, tokens.roll(-1, 1))

    stage = here.rank // t
    place = (shape, parallel, stage, plan.recompute, plan.num_microbatches, dtype.itemsize)
    predicted = stage_rows(*place, device_type=here.device, microbatches_per_round=plan.per_round)
    measured = paper_rows(watcher.peak_rows)  # what torch's runtime holds besides the graphs is marked as extra
    outputs, buffers = (row.bytes for row in extra_rows(watcher.peak_rows))
    order = [(action.kind, action.chunk * p + action.rank, action.microbatch) for action in plan.schedule[stage]]
    return {
        "rank": here.rank,
        "pipeline_rank": stage,
        "predicted_in_flight": in_flight(parallel, stage, plan.num_microbatches, plan.per_round),
        "measured_in_flight": max(sample["in_flight"] for sample in watcher.samples),
        **compared(paper_rows(predicted), extra_rows(predicted), measured),
        "output_bytes": outputs,
        "buffer_bytes": buffers,
        "order_as_drawn": [(one["kind"], one["stage"], one["microbatch"]) for one in watcher.samples] == order,
        "samples": watcher.samples,
    }


def bytes_table(rows: list[dict[str, Any]], where: str) -> Table:
    """Make a table with a line for each rank: microbatches in flight and bytes, predicted and measured.

    Args:
        rows: the dicts from ``measure``, of all ranks.
        where: the end of the table's title: the model's sizes, the ranks and the device.
    """
    columns = ("rank", "stage", "in flight", "predicted", "extra", "measured", "diff.")
    made = table(f"One step, when each rank holds most: {where}", *map(numbers, columns))
    for row in rows:
        predicted, measured = row["predicted_in_flight"], row["measured_in_flight"]
        flight = f"{measured}" if measured == predicted else f"{measured} ≠ {predicted}"
        counts = (f"{row[f'{kind}_bytes']:,}" for kind in ("predicted", "extra", "measured", "difference"))
        made.add_row(str(row["rank"]), str(row["pipeline_rank"]), flight, *counts, style=red_if(not row["exact"]))
    return made


if __name__ == "__main__":
    sys.exit(main())
