"""torchrun --nproc-per-node 2 labs/measure_today.py

What today's layer keeps, measured: one layer for backward with nothing, the core, all that needs no
product, or everything recomputed; alone, with tensor and with sequence parallelism; by formula and by
counting what autograd really holds.  --paper-layer: the same for the paper's layer.  --context 2: with every
sequence cut among 2 of the ranks.
Exit code 0 if all agree to the byte, 1 if any does not, 2 on wrong use.
"""

import sys

from actmem.config import PAPER_MODELS, ConfigError, model_shape
from actmem_course.bench.layer_table import CONTEXT_WORDS, LayerTable, run_layer_table, today_configurations
from actmem_course.bench.runner import Measurement
from actmem_course.process import lab
from actmem_more.llama_shape import CONTEXT_KINDS, LLAMA_MODELS, llama_shape

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
    return run_layer_table(run, table_from)


def table_from(args) -> LayerTable:
    """The layer that the arguments name, and its sharing.  Raises ConfigError on sizes that do not fit together."""
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    if args.paper_layer:
        other = [name for name in ONLY_TODAY if name in given] + ["context_parallel_size"] * (args.context != 1)
        if other:
            raise ConfigError(other[0], "the paper's layer has none: leave out --paper-layer, or this")
        shape = model_shape(args.model or "tiny").with_sizes(**given)
        return LayerTable(shape, "The paper's layer", today_configurations())
    llama = llama_shape(args.model or "tiny-llama").with_sizes(**given)
    word = CONTEXT_WORDS[args.context_kind] if args.context != 1 else ""
    lines = today_configurations(word)
    return LayerTable(llama, "Today's layer", lines, args.routing, args.context, args.context_kind)


if __name__ == "__main__":
    sys.exit(main())
