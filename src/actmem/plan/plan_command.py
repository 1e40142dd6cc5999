"""``python -m actmem plan``: the command line of the planner."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from actmem.command_line import Parser, screen, write
from actmem.config import ConfigError, check_choice, check_size, shown
from actmem.formulas.states import OTHER_MOMENTS
from actmem.plan.plan_report import Request, as_object, print_plans
from actmem.plan.planned_models import planned_model_of
from actmem.plan.search import find_plans
from actmem.plan.step_time import ALLOWANCE_BYTES, DEVICES, GIBIBYTE, Cluster

#: Options that fix one axis, and the size that each fixes.
_AXES = {
    "--tensor": "tensor_parallel_size",
    "--pipeline": "pipeline_parallel_size",
    "--chunks": "num_model_chunks",
    "--context": "context_parallel_size",
    "--data": "data_parallel_size",
    "--micro-batch-size": "micro_batch_size",
    "--zero": "zero_stage",
}
#: Options that replace a device's rate: the field of Device, its unit, what it is.
_RATES = {
    "--device-flops": ("flops_per_second", "TFLOPS", "dense 16-bit rate"),
    "--memory-bandwidth": ("memory_bytes_per_second", "GB/s", "bandwidth of its memory"),
    "--node-bandwidth": ("node_bytes_per_second", "GB/s", "what it sends in one direction inside its node"),
    "--network-bandwidth": ("network_bytes_per_second", "GB/s", "the same to another node"),
    "--host-bandwidth": ("host_bytes_per_second", "GB/s", "the same to the host's memory"),
}


def make_parser() -> Parser:
    """All options, with their defaults."""
    parser = Parser("plan", "Layouts of a training job that fit, fastest first.")
    parser.add_argument(
        "model",
        help="a model by name, as llama3-70b or 175B; for your own, or --lora and --loss: "
        "python -m actmem plan file.py:factory --help",
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs of the whole job")
    add_cluster_options(parser)
    parser.add_argument("--seq-length", type=int, metavar="N", help="tokens of a sequence (default: the model's own)")
    parser.add_argument(
        "--global-batch",
        type=int,
        metavar="N",
        help="sequences of one step (default: what the model's paper states)",
    )
    parser.add_argument("--top", type=int, default=5, metavar="N", help="how many plans to show (default: 5)")
    for option, size in _AXES.items():
        parser.add_argument(option, dest=size, type=int, metavar="N", help=f"only layouts with this {size}")
    parser.add_argument(
        "--recompute",
        action="append",
        metavar="MODE",
        help="only this mode; may be repeated (default: all of the model's); offload: a Llama's full, layers' inputs on the host",
    )
    parser.add_argument(
        "--routing",
        metavar="WHAT",
        help="of experts: even (the default), or one-sided: every token goes to the same ones, the worst case",
    )
    parser.add_argument("--optimizer", default="adamw", help=f"adamw (the default), {', '.join(OTHER_MOMENTS)}")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="run the fastest plan's fullest rank, emulated, and compare each line of its bill",
    )
    parser.add_json("everything")
    return parser


def _gib(text: str) -> float:
    """A number of GiB, with the unit or without.  GB are refused: data sheets say 80 GB of what is 80 GiB."""
    try:
        return float(text.removesuffix("GiB"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a number of GiB above 0, as 80 or 80GiB, got {shown(text)}"
        ) from None


def add_cluster_options(parser: Parser) -> None:
    """The GPUs' options, all but their number."""
    allowance = ALLOWANCE_BYTES / GIBIBYTE
    parser.add_argument("--memory", type=_gib, required=True, metavar="GIB", help="memory of one GPU")
    parser.add_argument("--per-node", type=int, default=8, metavar="N", help="GPUs of one node (default: 8)")
    parser.add_argument(
        "--allowance", type=_gib, default=allowance, metavar="GIB", help=f"left free on each (default: {allowance:g})"
    )
    parser.add_argument("--device", default="h100", help=f"for times: one of {', '.join(DEVICES)} (default: h100)")
    for option, (field, unit, what) in _RATES.items():
        parser.add_argument(option, dest=field, type=float, metavar=unit, help=f"{what}, instead of the device's")


def cluster_of(args: argparse.Namespace) -> Cluster:
    """The GPUs that the options describe.  Raises ConfigError on anything impossible."""
    check_choice("device", args.device, DEVICES)
    for name in ("memory", "allowance"):
        if not 0 <= getattr(args, name) < 2**20 or (name == "memory" and not args.memory):
            raise ConfigError(name, f"must be a number of GiB above 0, got {getattr(args, name):g}")
    rates = {}
    for option, (field, unit, _) in _RATES.items():
        rate = getattr(args, field)
        if rate is not None:
            if not 0 < rate < 10**9:
                raise ConfigError(option.lstrip("-"), f"must be a number of {unit} above 0, got {rate:g}")
            rates[field] = max(1, round(rate * {"TFLOPS": 10**12, "GB/s": 10**9}[unit]))
    name = " ".join([args.device, *(["with other rates"] if rates else [])])
    device = replace(DEVICES[args.device], name=name, **rates)
    memory, allowance = round(args.memory * GIBIBYTE), round(args.allowance * GIBIBYTE)
    return Cluster(args.gpus, memory, args.per_node, device, allowance)


def main(argv: Sequence[str] | None = None, verify: Callable[..., bool] = lambda *_: False) -> int:
    """Exit code 0 if a plan fits, 1 if none does or ``verify`` finds a difference, 2 on an impossible request.

    verify: prints, on a console, the bill of a model's plan beside what is counted, and returns whether they agree; it needs torch.
    """

    def run(args: argparse.Namespace) -> int:
        request = _request(args)
        fixed = {size: getattr(args, size) for size in _AXES.values() if getattr(args, size) is not None}
        found = find_plans(request.model, request.cluster, request.global_batch_size, args.top, fixed)
        outcome = as_object(request, found)
        console = screen()
        if args.json:
            write(args.json, json.dumps(outcome, ensure_ascii=False, indent=1) + "\n")
        if args.json != "-":
            print_plans(console, outcome)
        if args.verify and found.plans:
            return 0 if verify(console, request.model, found.plans[0]) else 1
        return 0 if found.plans else 1

    return make_parser().run(argv, run)


def _request(args: argparse.Namespace) -> Request:
    model, cluster = planned_model_of(args.model).with_optimizer(args.optimizer), cluster_of(args)
    batch = model.global_batch_size if args.global_batch is None else args.global_batch
    if batch is None:
        raise ConfigError("global_batch", f"must be given: {model.name}'s paper states none")
    check_size("top", args.top, largest=10_000)
    if args.seq_length is not None:
        model = model.with_sizes(seq_length=args.seq_length)
    if args.routing:
        model = model.with_routing(args.routing)
    if args.recompute:
        model = model.with_modes(args.recompute)
    return Request(model, cluster, batch)
