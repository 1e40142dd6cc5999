"""torchrun --nproc-per-node 4 labs/measure_pipeline.py --pipeline 2 --tensor 2

One training step on a pipeline (2205.05198 section 4.2.3): what every rank holds when it holds
most, by formula and counted, the schedule that torch ran, and each rank's memory over the step.
Exit code 0 if all agrees to the byte, 1 if anything does not, 2 on wrong use.
"""

import sys

import torch

from actmem.config import Parallel
from actmem_course.arguments import ELEMENT_SIZES, add_shape_arguments, shape_from
from actmem_course.bench.measure_pipeline import PipelineRun, measure_pipeline
from actmem_course.bench.runner import Measurement
from actmem_course.bench.timing import memory_bytes, ranks_here
from actmem_course.figures.ch06_pipeline import measured_schedule
from actmem_course.others.timeline import draw, timeline
from actmem_course.process import lab
from actmem_course.ranks import add_rank_arguments, check_ranks
from actmem_course.show.tables import memory_table, pipeline_table

SPELLED = {
    "pipeline_parallel_size": "--pipeline",
    "tensor_parallel_size": "--tensor",
    "num_model_chunks": "--chunks",
    "num_microbatches": "--microbatches",
}
CHUNKS = "model chunks a rank, m; more than 1 interleaves (default: 1)"


@lab
def main() -> int:
    run = Measurement(__doc__, SPELLED)
    run.option("--pipeline", type=int, default=2, metavar="P", help="pipeline stages, p (default: 2)")
    run.option("--tensor", type=int, default=1, metavar="T", help="tensor-parallel ranks a stage, t (default: 1)")
    run.option("--chunks", type=int, default=1, metavar="M", help=CHUNKS)
    run.option("--microbatches", type=int, metavar="N", help="microbatches of the step (default: 2p)")
    run.option("--recompute", choices=("none", "selective", "full"), default="none")
    run.option("--no-sequence-parallel", action="store_true", help="tensor parallelism without sequence parallelism")
    run.option("--free-outputs", action="store_true", help="free each output once it is sent (appendix B)")
    add_shape_arguments(run.parser)
    run.option("--num-layers", type=int, metavar="N", help="layers of the model (L)")
    run.dtype()
    add_rank_arguments(run.parser, emulate=False)
    run.page("the schedule and the memory curves as a figure")
    with run.asked() as args:
        size = check_ranks(args, run.parser.prog)
        plan = plan_from(args)
        plan.check(size)
        plan.check_memory(ELEMENT_SIZES[args.dtype], ranks_here(args), memory_bytes(args.device))

    with run.ranks() as here:
        with run.status("running one step"):
            own = measure_pipeline(plan, here.rank, here.device, getattr(torch, args.dtype))
            results = run.gathered([own])
        run.show(pipeline_table(results))
        run.show("Schedule, a backward taking twice a forward's time:", style="bold")
        run.show(draw(timeline(plan.schedule)), markup=False, soft_wrap=True)
        run.show(memory_table(results))
        run.wrong(*(f"rank {one.rank}:\n{one.disagreement}" for one in results if not one.exact))
        other = [one for one in results if not one.order_as_drawn]
        run.wrong(*(f"rank {one.rank} ran its actions in another order than the one drawn" for one in other))
        agree = sum(one.exact for one in results)
        run.show(f"{agree} of {len(results)} ranks agree with the formulas to the byte")
        run.write(results)
        run.draw(lambda: measured_schedule(plan.schedule, results))
    return 0 if agree == len(results) and not other else 1


def plan_from(args) -> PipelineRun:
    """The run that the arguments describe.  Raises ConfigError on sizes that do not fit."""
    shape = shape_from(args)
    if args.num_layers is not None:
        shape = shape.with_sizes(num_layers=args.num_layers)
    parallel = Parallel(args.tensor, not args.no_sequence_parallel, args.pipeline, args.chunks)
    microbatches = 2 * args.pipeline if args.microbatches is None else args.microbatches
    return PipelineRun(shape, parallel, microbatches, args.recompute, args.free_outputs)


if __name__ == "__main__":
    sys.exit(main())
