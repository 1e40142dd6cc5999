"""torchrun --nproc-per-node 2 labs/measure_today.py

What a Llama layer saves for backward, by formula and by counting what autograd really holds: without parallelism, with
tensor and with sequence parallelism; without recomputation, with the core attention recomputed, with all that needs no
matmul, and with the whole layer.  --context 2: every sequence is sharded among 2 of the ranks.
Exit code 0 if all agree to the byte, 1 if any does not, 2 on wrong use.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from actmem.config import ConfigError, Parallel, check_size
from actmem.formulas.activations import Configuration
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.rows import Row, total
from actmem_course.arguments import add_rank_arguments
from actmem_course.lab_tools.gpu_kernel import attention_rows, kernel_here
from actmem_course.lab_tools.layer_bytes import layer_result, print_layers
from actmem_course.lab_tools.machine import first_that_fits, ranks_in_words
from actmem_course.lab_tools.options import add_dtype_argument, lab_parser
from actmem_course.lab_tools.output import gather_rows, screen_of, status, write_rows
from actmem_course.process import lab
from actmem_course.ranks import Ranks, check_ranks, ranks
from actmem_more.context import ContextParallel, layer_groups
from actmem_more.llama import LlamaLayer
from actmem_more.llama_measured import measure_llama_layer
from actmem_more.llama_shape import CONTEXT_KINDS, LLAMA_MODELS, LlamaShape, llama_shape, own_context_shape
from actmem_more.llama_terms import forced_routed_tokens, llama_rows

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
LETTERS = dict(zip(SIZES, "sbhakfEκ", strict=True))
#: The word in a configuration's name for each way to share the sequence.
CONTEXT_WORDS = {"gather": "context", "gather-plain": "context, plain", "ulysses": "ulysses"}
ROUTING = "of a mixture of experts: all alike (default), or every token to the first κ: rank 0 is the fullest"
CONTEXT_KIND = (
    "how they see its keys and values: gathered, and again in backward (default); gathered and kept; all-to-all"
)


def configurations(context: str = "") -> list[Configuration]:
    """Return the configurations to measure: three forms of parallelism, each in four modes of recomputation.

    Args:
        context: the word for the kind of context parallelism in the configurations' names, from CONTEXT_WORDS; "" if
            there is no context parallelism.
    """
    found = []
    for sharing in ("", "tensor", "tensor+sequence"):
        for mode in ("none", "selective", "elementwise", "full"):
            name = "+".join(filter(None, (sharing, context, mode if mode != "none" else ""))) or "none"
            found.append(Configuration(name, bool(sharing), "sequence" in sharing, mode, ""))
    return found


@lab
def main() -> int:
    parser = lab_parser("measure_today.py", __doc__ or "", {"context_parallel_size": "--context"})
    models = f"one of tiny-llama (default; llama3-8b on GPUs), {', '.join(LLAMA_MODELS)}"
    parser.add_argument("--model", help=models)
    for name, meaning in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=meaning)
    parser.add_argument("--routing", choices=("even", "one-sided"), default="even", help=ROUTING)
    parser.add_argument("--context", type=int, default=1, metavar="C", help="ranks that share each sequence")
    parser.add_argument("--context-kind", choices=CONTEXT_KINDS, default="gather", help=CONTEXT_KIND)
    add_dtype_argument(parser)
    add_rank_arguments(parser)
    args = parser.parse_args()
    with parser.refusing():
        size = check_ranks(args, parser.prog, "json")
        case = case_from(args)
        case.check(size, args)

    with ranks(args) as here:
        screen = screen_of(here.rank)
        kernel = case.kernel(here.device)
        with status(here.rank, "measuring"):
            rows = gather_rows(here, measure(case, here, kernel))
        predictions = [case.predict(one, here.size, 0, kernel) for one in case.configurations]
        exact = print_layers(screen, rows, case.title(here), [row for _, extra in predictions for row in extra])
        write_rows(args.json, here.rank, rows)
    return 0 if exact else 1


def case_from(args: argparse.Namespace) -> "Case":
    """Return the layer and the parallelism that the command line asks for.  Raises ConfigError on a bad option."""
    given = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    large = args.device == "cuda" and not given
    shape = llama_shape(args.model or ("llama3-8b" if large else "tiny-llama")).with_sizes(**given)
    return Case(shape, getattr(torch, args.dtype), args.routing, args.context, args.context_kind)


@dataclass(frozen=True)
class Case:
    """The layer to measure, and how the ranks share it.

    Attributes:
        shape: the layer's sizes, unsharded.
        dtype: of the activations and weights.
        routing: how tokens choose experts: "even", or "one-sided" for every token to the first experts.
        context: how many ranks share each sequence; the layer's weights are shared among (number of ranks) / context
            ranks.
        context_kind: how these ranks share a sequence, one of CONTEXT_KINDS: "gather", "gather-plain" or "ulysses".
    """

    shape: LlamaShape
    dtype: torch.dtype
    routing: str = "even"
    context: int = 1
    context_kind: str = "gather"

    @property
    def configurations(self) -> list[Configuration]:
        return configurations(CONTEXT_WORDS[self.context_kind] if self.context != 1 else "")

    def parallel(self, configuration: Configuration, ranks: int) -> Parallel:
        return replace(configuration.parallel(ranks // self.context), context_parallel_size=self.context)

    def check(self, ranks: int, args: argparse.Namespace) -> None:
        """Raise ConfigError if ranks can't share the layer in every configuration, or have no room for it.

        Args:
            ranks: how many ranks there are.
            args: the parsed options, of which ``device`` and ``emulate`` are used.
        """
        check_size("context_parallel_size", self.context, ranks)
        if ranks % self.context:
            raise ConfigError("context_parallel_size", f"must divide the number of ranks, {ranks}, got {self.context}")
        for parallel in {self.parallel(one, ranks) for one in self.configurations}:
            own_context_shape(self.shape, parallel, self.context_kind)
        if args.device == "cuda":
            self.kernel("cuda")
        elif args.emulate is None:
            first_that_fits({self.shape: self.largest_bytes()}, args, "use --emulate, or smaller sizes")

    def largest_bytes(self) -> int:
        """Return the bytes of activations and weights on one rank in the configuration that needs most memory.

        It is the first one, in which the layer's weights are not sharded and nothing is recomputed.
        """
        e = self.dtype.itemsize
        weights = sum(one.numel() for one in LlamaLayer(self.shape, seed=0, device="meta").parameters())
        first = self.parallel(self.configurations[0], self.context)
        return total(llama_rows(self.shape, first, element_size=e, context_kind=self.context_kind)) + e * weights

    def predict(self, configuration: Configuration, ranks: int, rank: int, kernel: str) -> tuple[list[Row], list[Row]]:
        """Predict what the layer saves on one rank.

        Args:
            configuration: the forms of parallelism, and the mode of recomputation.
            ranks: how many ranks there are.
            rank: the rank's number, from 0, among the ranks that share the layer's experts.
            kernel: the name of the attention kernel, from ``Case.kernel``.

        Returns: the rows by formula, and rows of the small extra tensors that the attention kernel saves.
        """
        shape, recompute, e = self.shape, configuration.recompute, self.dtype.itemsize
        parallel = self.parallel(configuration, ranks)
        own = own_context_shape(shape, parallel, self.context_kind)
        routed = forced_routed_tokens(own, parallel, self.routing, rank) if shape.num_experts else None
        rows = llama_rows(shape, parallel, recompute, e, routed, self.context_kind)
        if not kernel or all(row.term != "log-sum-exp" for row in rows):  # attention is recomputed, seed and all
            return rows, []
        t = parallel.tensor_parallel_size * (self.context if self.context_kind == "ulysses" else 1)
        return rows, attention_rows(kernel, shape.micro_batch_size, shape.num_attention_heads // t, shape.seq_length, t)

    def kernel(self, device: str) -> str:
        """Return the name of the attention kernel that torch chooses on this GPU; "" where torch doesn't choose.

        torch doesn't choose on a CPU, nor if context parallelism gathers K and V, which calls the flash kernel itself.

        Args:
            device: "cpu" or "cuda".

        Raises: ConfigError if the kernel saves more than the formulas count.
        """
        whole = self.context == 1 or self.context_kind == "ulysses"
        return kernel_here(self.shape, self.dtype) if device == "cuda" and whole else ""

    def title(self, here: Ranks) -> str:
        """Return the printed table's title: the layer's sizes and dtype, the ranks, the device, torch's version.

        Args:
            here: this rank, which knows the number of ranks and the device.
        """
        sizes = [f"{letter}={size}" for name, letter in LETTERS.items() if (size := getattr(self.shape, name, None))]
        words = [" ".join(sizes)]
        if self.shape.num_experts:
            words.append(f"{self.routing} routing")
        if self.context > 1:
            words.append(f"c={self.context}")
        dtype = str(self.dtype).removeprefix("torch.")
        return f"Today's layer: {', '.join(words)}, {dtype}\n{ranks_in_words(here)}"


def measure(case: Case, here: Ranks, kernel: str) -> list[dict[str, Any]]:
    """Compare predicted and measured bytes of every configuration.  Every rank must call this function.

    Args:
        case: the layer, and how the ranks share it.
        here: this rank.
        kernel: the name of the attention kernel, from ``Case.kernel``.

    Returns: this rank's dicts, one for each configuration, from ``layer_bytes.layer_result``: predicted and measured
        bytes, and whether they agree.
    """
    tensor, context = tensor_parallel(), ContextParallel()
    if case.context > 1:
        tensor, context = layer_groups(case.context, case.context_kind)
    rows = []
    for one in case.configurations:
        tp = replace(
            tensor if one.tensor_parallel and tensor.size > 1 else TensorParallel(),
            sequence_parallel=one.sequence_parallel,
        )
        place: dict[str, Any] = {"device": here.device, "dtype": case.dtype, "routing": case.routing}
        measured = measure_llama_layer(case.shape, tp, one.recompute, context=context, **place)
        predicted, extra = case.predict(one, here.size, tp.rank, kernel)
        sbh = case.shape.seq_length * case.shape.micro_batch_size * case.shape.hidden_size
        formula = f"{total(predicted) / sbh:.4g}"
        rows.append(layer_result(one.name, formula, tp.size, here.rank, predicted, extra, measured))
    return rows


if __name__ == "__main__":
    sys.exit(main())
