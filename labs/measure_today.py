"""torchrun --nproc-per-node 2 labs/measure_today.py

What today's layer keeps, measured: one layer for backward with nothing, the core, all that needs no
product, or everything recomputed; alone, with tensor and with sequence parallelism; by formula and by
counting what autograd really holds.  --paper-layer: the same for the paper's layer.
Exit code 0 if all agree to the byte, 1 if any does not, 2 on wrong use.
"""

import json
import os
import sys
from dataclasses import asdict
from importlib.metadata import version

import torch
from rich.console import Console

from actmem.config import ConfigError
from actmem.llama_shape import LLAMA_MODELS, llama_shape
from actmem.models import PAPER_MODELS, model_shape
from actmem_course.arguments import ELEMENT_SIZES, LabParser, add_json_argument
from actmem_course.bench.measure_table2 import worst_by_configuration
from actmem_course.bench.measure_today import check_room, check_today, measure_today
from actmem_course.files import check_files, write_text
from actmem_course.process import lab, lab_console
from actmem_course.ranks import add_rank_arguments, check_ranks, ranks
from actmem_course.show.tables import table2_table

SIZES = {
    "seq_length": "tokens of one sequence (s)",
    "micro_batch_size": "sequences of one microbatch (b)",
    "hidden_size": "hidden size (h)",
    "num_attention_heads": "query heads (a)",
    "num_key_value_heads": "key and value heads (k)",
    "ffn_hidden_size": "width of the gated MLP (f)",
}
ONLY_TODAY = ("num_key_value_heads", "ffn_hidden_size")


@lab
def main() -> int:
    parser = LabParser(prog="measure_today.py", description=__doc__.split("\n\n")[1])
    parser.add_argument("--model", help=f"one of tiny-llama (default), {', '.join(LLAMA_MODELS)}; "
                        f"with --paper-layer of tiny (default), {', '.join(PAPER_MODELS)}")  # fmt: skip
    parser.add_argument("--paper-layer", action="store_true", help="measure the layer of 2205.05198 instead")
    for name, meaning in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=meaning)
    parser.add_argument(
        "--dtype", choices=tuple(ELEMENT_SIZES), default="bfloat16", help="of the activations (default: bfloat16)"
    )
    add_rank_arguments(parser)
    add_json_argument(parser)
    args = parser.parse_args()
    with parser.refusing():
        shape = shape_from(args)
        size = check_ranks(args, parser.prog)
        check_today(shape, size)
        if args.emulate is None and args.device != "cuda" and not torch.cuda.is_available():
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            check_room(shape, ELEMENT_SIZES[args.dtype], int(os.environ["LOCAL_WORLD_SIZE"]), memory)
        check_files(args, "json")

    torch.manual_seed(1234)
    with ranks(args) as here:
        screen = Console(stderr=True, quiet=here.rank > 0)
        with screen.status("measuring") as status:
            own = measure_today(
                shape, here, getattr(torch, args.dtype), lambda row: status.update(f"measuring {row.name}")
            )
        results = [result for of_rank in here.gather(own) for result in of_rank]
        if here.rank == 0:
            report(args, shape, here, results)
    return 0 if all(result.exact for result in results) else 1


def shape_from(args):
    """The layer that the arguments name.  Raises ConfigError on sizes that do not fit together."""
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    if args.paper_layer:
        for name in ONLY_TODAY:
            if name in given:
                raise ConfigError(name, "the paper's layer has none: leave out --paper-layer, or this")
        return model_shape(args.model or "tiny").with_sizes(**given)
    return llama_shape(args.model or "tiny-llama").with_sizes(**given)


def report(args, shape, here, results) -> None:
    """Print the table, of each configuration the worst rank, and write the file if one is asked for."""
    letters = {"seq_length": "s", "micro_batch_size": "b", "hidden_size": "h", "num_attention_heads": "a",
               "num_key_value_heads": "k", "ffn_hidden_size": "f"}  # fmt: skip
    sizes = " ".join(f"{letter}={getattr(shape, name)}" for name, letter in letters.items() if hasattr(shape, name))
    how = f"emulated rank 0 of {here.size}" if here.emulated else f"{here.size} ranks"
    kind = "The paper's layer" if args.paper_layer else "Today's layer"
    title = f"{kind}: {sizes}, {args.dtype}\n{how} on {here.device}, torch {version('torch')}"
    console = lab_console()
    console.print(table2_table(worst_by_configuration(results), title=title))
    wrong = [result for result in results if not result.exact]
    for result in wrong:
        console.print(f"{result.configuration}, rank {result.rank}:\n{result.disagreement}")
    verdict = f"{len(results) - len(wrong)} of {len(results)} measurements agree with the formulas to the byte"
    console.print(verdict if not wrong else f"[bold red]{verdict}")
    if args.json:
        write_text(args.json, json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
