"""torchrun --nproc-per-node 4 labs/measure_pipeline.py --pipeline 2 --tensor 2

One training step on a pipeline (2205.05198 section 4.2.3): what every rank holds when it holds
most, by formula and counted, the schedule that torch ran, and each rank's memory over the step.
Exit code 0 if all agrees to the byte, 1 if anything does not, 2 on wrong use.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from actmem.config import Parallel
from actmem.formulas.timeline import draw, timeline
from actmem_course.arguments import (
    ELEMENT_SIZES,
    LabParser,
    add_json_argument,
    add_shape_arguments,
    shape_from,
)
from actmem_course.bench.measure_pipeline import PipelineRun, measure_pipeline
from actmem_course.bench.timing import memory_bytes, ranks_here
from actmem_course.files import check_files, replacing, write_text
from actmem_course.process import lab, lab_console
from actmem_course.ranks import add_rank_arguments, check_ranks, ranks
from actmem_course.show.tables import memory_table, pipeline_table

SPELLED = {
    "pipeline_parallel_size": "--pipeline",
    "tensor_parallel_size": "--tensor",
    "num_model_chunks": "--chunks",
    "num_microbatches": "--microbatches",
}


@lab
def main() -> int:
    parser = LabParser(prog="measure_pipeline.py", description=__doc__.split("\n\n")[1], spelled=SPELLED)
    parser.add_argument("--pipeline", type=int, default=2, metavar="P", help="pipeline stages, p (default: 2)")
    parser.add_argument(
        "--tensor", type=int, default=1, metavar="T", help="tensor-parallel ranks a stage, t (default: 1)"
    )
    parser.add_argument(
        "--chunks",
        type=int,
        default=1,
        metavar="M",
        help="model chunks a rank, m; more than 1 interleaves (default: 1)",
    )
    parser.add_argument("--microbatches", type=int, metavar="N", help="microbatches of the step (default: 2p)")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument(
        "--no-sequence-parallel", action="store_true", help="tensor parallelism without sequence parallelism"
    )
    parser.add_argument("--free-outputs", action="store_true", help="free each output once it is sent (appendix B)")
    add_shape_arguments(parser)
    parser.add_argument("--num-layers", type=int, metavar="N", help="layers of the model (L)")
    parser.add_argument(
        "--dtype", choices=tuple(ELEMENT_SIZES), default="bfloat16", help="of the activations (default: bfloat16)"
    )
    add_rank_arguments(parser, emulate=False)
    add_json_argument(parser)
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write the schedule and the memory curves as a figure (needs plotly)"
    )
    args = parser.parse_args()
    with parser.refusing():
        size = check_ranks(args, parser.prog)
        plan = plan_from(args)
        plan.check(size)
        plan.check_memory(ELEMENT_SIZES[args.dtype], ranks_here(args), memory_bytes(args.device))
        check_files(args, "json", "html")

    torch.manual_seed(1234)
    with ranks(args) as here:
        with Console(stderr=True, quiet=here.rank > 0).status("running one step"):
            results = here.gather(measure_pipeline(plan, here.rank, here.device, getattr(torch, args.dtype)))
        if here.rank == 0:
            report(args, plan, results)
    return 0 if all(result.exact and result.order_as_drawn for result in results) else 1


def plan_from(args) -> PipelineRun:
    """The run that the arguments describe.  Raises ConfigError on sizes that do not fit."""
    shape = shape_from(args)
    if args.num_layers is not None:
        shape = shape.with_sizes(num_layers=args.num_layers)
    parallel = Parallel(args.tensor, not args.no_sequence_parallel, args.pipeline, args.chunks)
    microbatches = 2 * args.pipeline if args.microbatches is None else args.microbatches
    return PipelineRun(shape, parallel, microbatches, args.recompute, args.free_outputs)


def report(args, plan, results) -> None:
    """Print the tables and the schedule, and write the files that are asked for."""
    console = lab_console()
    console.print(pipeline_table(results))
    spans = timeline(plan.schedule)
    console.print("Schedule, a backward taking twice a forward's time:", style="bold")
    console.print(draw(spans), markup=False, highlight=False, soft_wrap=True)
    console.print(memory_table(results))
    wrong = [result for result in results if not result.exact]
    for result in wrong:
        console.print(f"rank {result.rank}:\n{result.disagreement}", style="bold red")
    for result in results:
        if not result.order_as_drawn:
            console.print(f"rank {result.rank} ran its actions in another order than the one drawn", style="bold red")
    console.print(f"{len(results) - len(wrong)} of {len(results)} ranks agree with the formulas to the byte")
    if args.json:
        write_text(args.json, json.dumps([asdict(result) for result in results], indent=1) + "\n")
    if args.html:
        from actmem_course.show.measured import write_page  # plotly is loaded only to draw
        from actmem_course.show.pipeline import measured_schedule

        with replacing(args.html) as beside:
            write_page(measured_schedule(plan.schedule, results), beside)


if __name__ == "__main__":
    sys.exit(main())
