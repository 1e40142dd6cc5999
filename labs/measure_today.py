"""torchrun --nproc-per-node 2 labs/measure_today.py

What today's layer keeps, measured: one layer for backward with nothing, the core, all that needs no
product, or everything recomputed; alone, with tensor and with sequence parallelism; by formula and by
counting what autograd really holds.  --paper-layer: the same for the paper's layer.  --context 2: with every
sequence cut among 2 of the ranks.
Exit code 0 if all agree to the byte, 1 if any does not, 2 on wrong use.
"""

import sys

import torch

from actmem.config import ConfigError
from actmem.llama_shape import CONTEXT_KINDS, LLAMA_MODELS, llama_shape
from actmem.models import PAPER_MODELS, model_shape
from actmem_course.arguments import noting_smaller
from actmem_course.bench.layer_table import LayerTable, run_layer_table
from actmem_course.bench.measure_today import (
    check_kernel,
    check_room,
    check_today,
    extras_of_today,
    measure_today,
)
from actmem_course.bench.runner import Measurement
from actmem_course.process import lab

SIZES = {
    "seq_length": "tokens of one sequence (s)",
    "micro_batch_size": "sequences of one microbatch (b)",
    "hidden_size": "hidden size (h)",
    "num_attention_heads": "query heads (a)",
    "num_key_value_heads": "key and value heads (k)",
    "ffn_hidden_size": "width of the gated MLP, or of one expert (f)",
    "num_experts": "experts (E)",
    "experts_per_token": "experts that each token takes (κ)",
}
ONLY_TODAY = tuple(SIZES)[4:]


@lab
def main() -> int:
    spelled = {"context_parallel_size": "--context", "context_kind": "--context-kind"}
    run = Measurement(__doc__, spelled)
    run.option("--model", help=f"one of tiny-llama (default), {', '.join(LLAMA_MODELS)}; "
                        f"with --paper-layer of tiny (default), {', '.join(PAPER_MODELS)}")  # fmt: skip
    run.option("--paper-layer", action="store_true", help="measure the layer of 2205.05198 instead")
    for name, meaning in SIZES.items():
        run.option(f"--{name.replace('_', '-')}", type=int, metavar="N", help=meaning)
    run.option(
        "--routing",
        choices=("even", "one-sided"),
        default="even",
        help="of a mixture of experts: all alike (default), or every token to the first κ: rank 0 is the fullest",
    )
    run.option(
        "--context",
        type=int,
        default=1,
        metavar="C",
        help="ranks that share each sequence; the others share the weights",
    )
    run.option(
        "--context-kind",
        choices=CONTEXT_KINDS,
        default="gather",
        help="how they see its keys and values: gathered, and again in backward (default); gathered and kept; all-to-all",
    )
    return run_layer_table(run, LayerTable(shape_from, title, check, check_memory, measure, extras_of_today))


def check(args, shape, ranks):
    """Whether the ranks can share the sequence and the layer."""
    if args.paper_layer and args.context != 1:
        raise ConfigError("context_parallel_size", "the paper's layer has none: leave out --paper-layer, or this")
    check_today(shape, ranks, args.context, args.context_kind)
    if not args.paper_layer and args.device == "cuda":
        check_kernel(shape, getattr(torch, args.dtype), args.context, args.context_kind)


def check_memory(args, shape, element_size, ranks_here, memory_bytes):
    """Whether real tensors fit, each rank with its part of the sequence."""
    check_room(shape, element_size, ranks_here, memory_bytes, args.context, args.context_kind)


def measure(args, shape, ranks, dtype, on_configuration):
    """Measure with the routing and the context parallelism that the arguments name."""
    return measure_today(shape, ranks, dtype, on_configuration, args.routing, args.context, args.context_kind)


def shape_from(args):
    """The layer that the arguments name.  Raises ConfigError on sizes that do not fit together."""
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    if args.paper_layer:
        for name in ONLY_TODAY:
            if name in given:
                raise ConfigError(name, "the paper's layer has none: leave out --paper-layer, or this")
        return noting_smaller(model_shape(args.model or "tiny").with_sizes(**given))
    return noting_smaller(llama_shape(args.model or "tiny-llama").with_sizes(**given))


def title(args, shape) -> str:
    """Says what is measured, with the sizes."""
    letters = {"seq_length": "s", "micro_batch_size": "b", "hidden_size": "h", "num_attention_heads": "a",
               "num_key_value_heads": "k", "ffn_hidden_size": "f", "num_experts": "E", "experts_per_token": "κ"}  # fmt: skip
    sizes = " ".join(
        f"{letter}={getattr(shape, name)}" for name, letter in letters.items() if getattr(shape, name, None)
    )
    options = f", {args.routing} routing" if getattr(shape, "num_experts", None) else ""
    options += f", c={args.context}" if args.context > 1 else ""
    return f"{'The paper' if args.paper_layer else 'Today'}'s layer: {sizes}{options}"


if __name__ == "__main__":
    sys.exit(main())
