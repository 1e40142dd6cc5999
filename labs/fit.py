"""python labs/fit.py

Make a model fit into a GPU's memory, flag by flag.  Without flags one GPU trains the model alone, and runs out of
memory.  Add --tensor, --sequence and --recompute until it fits, with as little recomputation as you can.  Each try
prints the predicted and the measured peak.  On a GPU the steps are real; on a CPU they run on fake tensors, and the
counted bytes are compared with the memory of the card that you name.  Once it fits, the planner says what it would do.

Exit code 0 if the model fits, 1 if it does not, 2 on wrong use.
"""

import sys
from argparse import Namespace

import torch
from gpu_steps.wall import climb

from actmem.config import PAPER_MODELS, ConfigError, ModelShape, Parallel, check_layer, check_size
from actmem.layers.gpt import GPT
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.whole_step import watch_step
from actmem.main_grad import MainWeights
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem_course.arguments import LabParser
from actmem_course.process import lab
from actmem_tools.plan.plan_report import plan_text
from actmem_tools.plan.planned_models import PlannedGPT
from actmem_tools.plan.search import Bill, Request, rank_bill
from actmem_tools.plan.step_time import GIBIBYTE, Cluster

MODES = ("none", "selective", "elementwise", "full")


@lab
def main() -> int:
    parser = LabParser(prog="fit.py", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--model", choices=tuple(PAPER_MODELS), default="22B", help="of the paper (default: 22B)")
    parser.add_argument("--card", type=float, default=80, metavar="GIB", help="memory of one GPU (default: 80)")
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="GPUs that may share the model (default: 8)")
    parser.add_argument("--layers", type=int, metavar="N", help="layers of this rank (default: all of the model's)")
    parser.add_argument("--tensor", action="store_true", help="the ranks share every layer (tensor parallelism)")
    parser.add_argument("--sequence", action="store_true", help="and the sequence between them (needs --tensor)")
    parser.add_argument("--recompute", choices=MODES, default="none", help="what backward runs again (default: none)")
    where = "default: a GPU if there is one"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=where)
    args = parser.parse_args()
    with parser.refusing():
        shape, parallel = check_options(args)
    device = "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"
    budget = round(args.card * GIBIBYTE)

    bill = predicted(shape, parallel, args.recompute, device)
    print(f"{args.model}, {shape.num_layers} layers, microbatch {shape.micro_batch_size}, {args.card:g} GiB")
    for part, size in bill.by_part().items():
        print(f"  {part:<20}{size / GIBIBYTE:>10.2f} GiB")
    print(f"  {'predicted peak':<20}{bill.bytes / GIBIBYTE:>10.2f} GiB")

    with emulated_rank(args.ranks, device=device):
        fits = try_on_gpu(args, shape, budget) if device == "cuda" else try_on_cpu(args, shape, budget)
    if fits:
        print(advice(args, shape, parallel, budget, device))
    return 0 if fits else 1


def check_options(args: Namespace) -> tuple[ModelShape, Parallel]:
    """Return the model's shape, and how the ranks share the model, as the options ask for.

    Args:
        args: the parsed options.

    Raises: ConfigError if options contradict each other.
    """
    check_size("ranks", args.ranks, largest=64)
    if not 0 < args.card < 2**20:
        raise ConfigError("card", f"must be a number of GiB above 0, got {args.card:g}")
    if args.sequence and not args.tensor:
        raise ConfigError("sequence", "needs --tensor: the same ranks share the sequence")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "there is no GPU that this torch can use")
    shape = PAPER_MODELS[args.model].shape
    if args.layers is not None:
        shape = shape.with_sizes(num_layers=check_size("layers", args.layers, largest=shape.num_layers))
    size = args.ranks if args.tensor else 1
    parallel = Parallel(size, args.sequence, micro_batch_size=shape.micro_batch_size)
    check_layer(shape, parallel)
    return shape, parallel


def predicted(shape: ModelShape, parallel: Parallel, recompute: str, device: str) -> Bill:
    """Return the planner's prediction of one rank's peak, in parts: states, activations, loss, backward's tensors.

    Args:
        shape: the model's sizes.
        parallel: how ranks share the model.
        recompute: what backward recomputes: "none", "selective", "elementwise" or "full".
        device: "cpu" or "cuda", for which the bytes are predicted.
    """
    model = PlannedGPT("model", shape).on(device)
    return rank_bill(model, parallel, recompute, num_microbatches=1, pipeline_rank=0)


def try_on_gpu(args: Namespace, shape: ModelShape, budget: int) -> bool:
    """Run two real training steps on the GPU, print their peak, and return whether they fit.

    Args:
        args: the parsed options.
        shape: the model's sizes.
        budget: the most bytes of the GPU's memory that the steps may take.
    """
    found = climb(shape, args.tensor, args.sequence, args.recompute, "cuda", budget)
    if found["out_of_memory"]:
        print(f"  out of memory in {found['out_of_memory']}")
        return False
    print(f"  {'allocated at most':<20}{found['peak_bytes'] / GIBIBYTE:>10.2f} GiB")
    return True


def try_on_cpu(args: Namespace, shape: ModelShape, budget: int) -> bool:
    """Run one step on fake tensors, print its counted peak, and return whether it is at most ``budget`` bytes.

    Args:
        args: the parsed options.
        shape: the model's sizes.
        budget: the bytes of the card's memory.
    """
    print("  counting every storage of one step, about half a minute ...", file=sys.stderr, flush=True)
    counted = counted_peak(shape, args.tensor, args.sequence, args.recompute)
    print(f"  {'counted peak':<20}{counted / GIBIBYTE:>10.2f} GiB")
    if counted > budget:
        print(f"  out of memory: {(counted - budget) / GIBIBYTE:.2f} GiB more than the card has")
    return counted <= budget


def counted_peak(shape: ModelShape, tensor: bool, sequence: bool, recompute: str) -> int:
    """Return the most bytes alive at once in one step of this emulated rank, counted on fake tensors.

    In addition to the tensors in the planner's prediction, the causal mask and the token ids are counted.

    Args:
        shape: the model's sizes.
        tensor: whether the ranks share every layer by tensor parallelism.
        sequence: whether they also use sequence parallelism.
        recompute: what backward recomputes: "none", "selective", "elementwise" or "full".
    """
    tp = tensor_parallel(sequence_parallel=sequence) if tensor else TensorParallel()
    model = GPT(shape, tp, recompute=recompute, dtype=torch.bfloat16)
    main_weights = MainWeights(model)
    # Float32 weights and Adam's two averages: 12 bytes a parameter that no forward or backward touches.
    states = sum(3 * parameter.nbytes for parameter in main_weights.parameters())
    tokens = torch.randint(shape.vocab_size, (shape.micro_batch_size, shape.seq_length))
    with watch_step(model, None, tokens) as step:
        model.loss(model(tokens), tokens).backward()
    return states + step.peak_bytes


def advice(args: Namespace, shape: ModelShape, parallel: Parallel, budget: int, device: str) -> str:
    """Return the text to print after a try that fits: would less recomputation do, and what would the planner choose?

    Args:
        args: the parsed options.
        shape: the model's sizes.
        parallel: how the options share the model.
        budget: the bytes of the card's memory.
        device: "cpu" or "cuda".
    """
    lines = []
    for mode in MODES[: MODES.index(args.recompute)]:
        if predicted(shape, parallel, mode, device).bytes <= budget:
            lines.append(f"It fits.  Less recomputation would do: --recompute {mode}")
            break
    else:
        lines.append("It fits, with the least recomputation that these ranks allow.")
    try:
        cluster = Cluster(args.ranks, budget)
        best = Request(PlannedGPT("model", shape), cluster, shape.micro_batch_size * args.ranks).search().plans
    except ConfigError as error:
        return "\n".join([*lines, f"The planner has no answer: {error}"])
    if best:
        free = f"{cluster.allowance_bytes / GIBIBYTE:g} GiB left free"
        lines.append(f"The planner's first choice, with {free}: {plan_text(best[0])}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
