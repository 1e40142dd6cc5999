"""``actmem plan``: the command line of two planners.

For a model known by name it searches layouts (``search``).  A model in the user's own code, or in Hugging Face's, is
planned by ``own_model``.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from actmem.config import LARGEST_SIZE, ConfigError, check_choice, check_divides, check_size, shown
from actmem_tools.command_line import Parser, screen, show_progress, write
from actmem_tools.config_file import read_config
from actmem_tools.plan.framework_flags import hugging_face_config
from actmem_tools.plan.optimizers import OPTIMIZERS, optimizer_of
from actmem_tools.plan.own_model import FSDP_DTYPES, LARGEST, OwnModel, StepOptions, outcome, print_outcome
from actmem_tools.plan.plan_report import as_object, print_plans
from actmem_tools.plan.planned_models import PlannedModel, planned_model_of
from actmem_tools.plan.search import Plan, Request
from actmem_tools.plan.step_time import ALLOWANCE_BYTES, DEVICES, GIBIBYTE, Cluster
from actmem_tools.tape.evaluate import parsed_sizes
from actmem_tools.tape.extrapolate_blocks import LOSS_CHUNKS, LOSS_CODE, BlockModel

if TYPE_CHECKING:  # only the screen needs it
    from rich.console import Console

#: The type of ``actmem_tools.tape.model_tape.solved_target``.  It is passed to ``main`` because it needs torch.
Solved = Callable[..., tuple[dict[str, BlockModel], dict[str, int], int]]
#: The type of ``actmem_tools.verify.report_verification``, which needs torch too.
Verify = Callable[["Console", PlannedModel, Plan], bool]

#: Options that fix one size of a layout: the option, and the field of ``Parallel`` that it fixes.
_AXES = {
    "--tensor": "tensor_parallel_size",
    "--pipeline": "pipeline_parallel_size",
    "--chunks": "num_model_chunks",
    "--context": "context_parallel_size",
    "--expert": "expert_parallel_size",
    "--data": "data_parallel_size",
    "--micro-batch-size": "micro_batch_size",
    "--zero": "zero_stage",
}
#: Three lists of options: those of the search for layouts only; those of the planner for code only; and of the latter
#: those which ask for that planner although the model is given by a name.
_OF_LAYOUTS = ("--seq-length", "--top", *_AXES, "--recompute", "--routing", "--all", "--verify")
_OF_CODE = ("--at", "--framework", "--letters", "--again", "--loss", "--lora", "--dtype")
_ASKS_FOR_CODE = ("--framework", "--loss", "--lora")
_HUGGING_FACE = "hugging-face"
#: Default of --again for Hugging Face's decoders: modules of a block that may be recomputed alone.
_ITS_PARTS = "mlp,self_attn"
_HELP = """
For code of one's own --at gives every size: s=4096,b=1,h=4096,a=32,f=11008,v=32000,l=32, or only s and b with a
config.json (b alone if it reads pictures).  The factory takes the letters (or seq_length, batch_size, hidden_size, …)
as keyword arguments and returns (model, inputs); it is run at tiny sizes, with one to five layers.  Backward starts
from the output's loss, or from the sum of its first tensor.  Counted as CPUs run it, attention by a fused kernel, with
dropout too; a GPU's keeps a few bytes more.
"""


def plan_parser() -> Parser:
    """Make the command-line parser of ``actmem plan``.

    Options that apply only to named models, or only to models in the user's own code, default to None, so that the
    command can tell whether they were given.
    """
    what = "Layouts of a training job that fit.\nOf a model of your own: whether it fits, and what makes it fit."
    parser = Parser("plan", what, epilog=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model",
        help="a name, as llama3-70b or 175B; or your own: file.py:factory, pkg.module:factory or a Hugging Face "
        "config.json",
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of the whole job (default for your own model: 1)")
    parser.add_argument("--memory", type=_gib, required=True, metavar="GIB", help="memory of one GPU")
    parser.add_argument("--per-node", type=int, default=8, metavar="N", help="GPUs of one node (default: 8)")
    free = f"left free on each (default: {ALLOWANCE_BYTES // GIBIBYTE})"
    parser.add_argument("--allowance", type=_gib, default=ALLOWANCE_BYTES, metavar="GIB", help=free)
    parser.add_argument("--device", default="h100", help=f"for times: one of {', '.join(DEVICES)} (default: h100)")
    parser.add_argument(
        "--global-batch",
        type=int,
        metavar="N",
        help="sequences of one step (default: what the model's paper states, else 4 million tokens; of your own "
        "model, b on each GPU)",
    )
    parser.add_argument("--optimizer", default="adamw", help=f"{', '.join(OPTIMIZERS)} (default: adamw)")
    parser.add_argument(
        "--precision",
        help="mixed (the default): gradients and states in float32, with float32 weights; bf16-gradients; bf16-states, "
        "gradients too; fp8: mixed, linears in 8 bits (all three Megatron-LM's); bf16: all. Of your own model it is "
        "FSDP2's, else all is of --dtype",
    )
    parser.add_json("everything")

    layouts = parser.add_argument_group("a named model's layouts")
    layouts.add_argument("--seq-length", type=int, metavar="N", help="tokens of a sequence (default: the model's own)")
    layouts.add_argument("--top", type=int, metavar="N", help="how many plans to show (default: 5)")
    for option, size in _AXES.items():
        layouts.add_argument(option, dest=size, type=int, metavar="N", help=f"only layouts with this {size}")
    layouts.add_argument(
        "--recompute",
        action="append",
        metavar="MODE",
        help="only this mode; may be repeated (default: all of the model's)",
    )
    layouts.add_argument(
        "--routing",
        metavar="WHAT",
        help="of experts: even (the default), or one-sided: every token goes to the same ones, the worst case",
    )
    layouts.add_argument(
        "--all", action="store_true", default=None, help="also plans that no framework runs whose settings are printed"
    )
    layouts.add_argument(
        "--verify",
        action="store_true",
        default=None,
        help="run the first plan's fullest rank, emulated, and compare each line of its bill",
    )
    own = parser.add_argument_group(
        f"your own model, or a named one in Hugging Face's code ({', '.join(_ASKS_FOR_CODE)})"
    )
    own.add_argument("--at", metavar="s=4096,b=1,…", help="the sizes (default of a name: its own, b = 1)")
    own.add_argument("--framework", metavar=_HUGGING_FACE, help="whose code of a named model, as llama3-8b")
    own.add_argument("--letters", metavar="h:8a,…", help="what else a letter must be a multiple of, in the tiny runs")
    own.add_argument(
        "--again",
        metavar="mlp,…",
        help="parts of a block that may be recomputed, besides all of it; operations: matmuls and attention saved, the "
        "rest recomputed; every-second-matmul: attention and every second matmul saved, as torchtitan has it",
    )
    own.add_argument("--loss", help="of a configuration: whole (the default), or chunked: eight chunks")
    own.add_argument("--lora", type=int, metavar="RANK", help="adapters beside the blocks' frozen linears")
    own.add_argument("--dtype", help="of weights and floating inputs (default: bfloat16)")
    return parser


def _gib(text: str) -> int:
    """Return the bytes of a number of GiB, written as "80" or "80GiB".

    "80GB" is refused, because in data sheets it means 80 GiB.
    """
    try:
        size = round(float(text.removesuffix("GiB")) * GIBIBYTE)
        if size < 0:
            raise ValueError
        return size
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"must be a number of GiB above 0, as 80 or 80GiB, got {shown(text)}"
        ) from None


def _cluster(args: argparse.Namespace) -> Cluster:
    """Make the Cluster of the options --gpus, --memory, --per-node, --device and --allowance.

    Raises: ConfigError on an unknown device or an impossible number.
    """
    check_choice("device", args.device, DEVICES)
    return Cluster(args.gpus, args.memory, args.per_node, DEVICES[args.device], args.allowance)


def main(argv: Sequence[str] | None, solved: Solved, verify: Verify) -> int:
    """Run ``actmem plan``.

    The functions ``solved`` and ``verify`` are arguments because they import torch, which --help and plans of named
    models don't need.

    Args:
        argv: the options as typed; None to read the process's own command line.
        solved: finds the formulas of a model in the user's own code: ``tape.model_tape.solved_target``.
        verify: runs --verify: ``actmem_tools.verify.report_verification``.

    Returns: the exit code.  For a named model: 0 if some layout fits, 1 if none does or if --verify finds a difference.
        For a model in the user's own code: 0 if it fits with the options asked for, else 1.  For both: 2, after one
        line on standard error, if the request is impossible.
    """

    def run(args: argparse.Namespace) -> int:
        asks_for_code = "" if not _is_code(args.model) else args.model
        asks_for_code = asks_for_code or next(_given(args, _ASKS_FOR_CODE), "")
        for option in _given(args, _OF_LAYOUTS if asks_for_code else _OF_CODE):
            rule = f"is for {', '.join(_ASKS_FOR_CODE)} or a file's model"
            rule = f"is for a named model's layouts, not for {asks_for_code}" if asks_for_code else rule
            raise ConfigError(option.strip("-"), rule)
        return _plan_code(args, solved) if asks_for_code else _plan_layouts(args, verify)

    return plan_parser().run(argv, run)


def _is_code(model: str) -> bool:
    return ":" in model or model.endswith(".json")


def _given(args: argparse.Namespace, options: Iterable[str]) -> Iterator[str]:
    """Yield each of ``options`` that was given on the command line."""
    return (option for option in options if getattr(args, _AXES.get(option, option[2:].replace("-", "_"))) is not None)


def _write_or_print(args: argparse.Namespace, found: dict, show: Callable[[], None]) -> None:
    if args.json:
        write(args.json, json.dumps(found, ensure_ascii=False, indent=1) + "\n")
    if args.json != "-":
        show()


def _plan_layouts(args: argparse.Namespace, verify: Verify) -> int:
    request = _request(args)
    if args.verify:  # refuse it now: the search can take a minute
        request.model.check_verifiable()
    try:
        found = request.search(keep=5 if args.top is None else check_size("top", args.top, 10_000))
    except ConfigError as error:
        options = {size: option.strip("-") for option, size in _AXES.items()}
        raise ConfigError(options.get(error.argument, error.argument), error.rule) from None
    outcome, console = as_object(request, found), screen()
    _write_or_print(args, outcome, lambda: print_plans(console, outcome))
    if not found.plans:
        return 1
    return 0 if not args.verify or verify(console, request.model, found.plans[0]) else 1


def _request(args: argparse.Namespace) -> Request:
    if args.gpus is None:
        raise ConfigError("gpus", "must be given")
    model, cluster = planned_model_of(args.model), _cluster(args)
    model = model.with_optimizer(args.optimizer, args.precision or "mixed")
    if args.precision == "fp8" and (args.all or args.device not in ("h100", "h200")):
        raise ConfigError("precision", "fp8's rule is Megatron-LM's on Hopper, h100 or h200, and not of --all")
    batch = model.global_batch_size if args.global_batch is None else args.global_batch
    if args.seq_length is not None:
        model = model.with_sizes(seq_length=args.seq_length)
    if args.routing:
        model = model.with_routing(args.routing)
    if args.recompute:
        model = model.with_modes(args.recompute)
    fixed = {_AXES[option]: getattr(args, _AXES[option]) for option in _given(args, _AXES)}
    return Request(model, cluster, batch, fixed, bool(args.all))


def _plan_code(args: argparse.Namespace, solved: Solved) -> int:
    model, asked = _asked(args, solved)
    found = outcome(model, asked, args.dtype or "bfloat16")
    _write_or_print(args, found, lambda: print_outcome(screen(), found, model.cluster))
    return 0 if found["fits"] else 1


def _asked(args: argparse.Namespace, solved: Solved) -> tuple[OwnModel, StepOptions]:
    """Find the formulas of the user's own model; return the OwnModel, and the options that the user asked for.

    To find the formulas takes a minute, so every option is checked before.
    """
    target: str | dict = args.model
    given = parsed_sizes(args.at) if args.at else {}
    args.gpus = 1 if args.gpus is None else args.gpus
    is_named = args.framework is not None or not _is_code(args.model)
    if is_named:
        check_choice("framework", args.framework or _HUGGING_FACE, (_HUGGING_FACE,))
        named = planned_model_of(args.model)
        target = hugging_face_config(named)
        given = {"s": named.seq_length, "b": 1} | given
    elif args.model.endswith(".json"):
        target = read_config(args.model)
    if args.letters and (is_named or isinstance(target, dict)):
        raise ConfigError("letters", "is for code of your own: a configuration runs at its own sizes")
    if "b" not in given:
        raise ConfigError("at", "b is missing")
    for letter, size in given.items():  # tapes are solved from runs of several tokens, and don't hold for one
        check_size(letter, size, LARGEST.get(letter, LARGEST_SIZE), 2 if letter == "s" else 1)
    rank, loss = check_size("lora", args.lora or 0, least=0), args.loss or "whole"
    if LOSS_CODE.get(loss) and "s" in given:
        check_divides("s", given["s"], "the loss's chunks", LOSS_CHUNKS)
    optimizer, precision, dtype = optimizer_of(args.optimizer), args.precision or "mixed", args.dtype or "bfloat16"
    check_choice("precision", precision, FSDP_DTYPES)
    if (args.precision and precision != "bf16" and args.gpus == 1) or (precision != "mixed" and dtype != "bfloat16"):
        raise ConfigError("precision", f"{precision} is of FSDP2 with --dtype bfloat16; without it all is in --dtype")
    cluster = _cluster(args)
    size = given["b"]
    batch = check_size("global_batch", size * args.gpus if args.global_batch is None else args.global_batch)
    if batch % (args.gpus * size):
        raise ConfigError("global_batch", f"{batch} must be divisible by gpus · b = {args.gpus * size}")
    again = args.again if args.again is not None else _ITS_PARTS if is_named else ""
    parts = ["", *dict.fromkeys(part for part in again.split(",") if part)]
    blocks, sizes, number = solved(target, given, args.letters or "", dtype, parts, loss, rank)
    show_progress("")
    sizes = {letter: value for letter, value in sizes.items() if letter != "b"}
    model = OwnModel(blocks, sizes, number, cluster, batch, optimizer, loss, rank, precision)
    if args.precision and precision != "bf16" and not model.may_shard():
        raise ConfigError("precision", f"{precision} is of FSDP2, which isn't planned for this model")
    return model, StepOptions(size, 0, model.may_shard())
