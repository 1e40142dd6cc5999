"""A layer in several configurations on the ranks at hand: each predicted, measured, and printed in a line.

Table 2's six, or twelve of the paper's layer or today's, with every named set of recomputed terms.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version

import torch
import torch.nn.functional as F

from actmem.config import ConfigError, ModelShape, Parallel, check_layer, check_size
from actmem.formulas.activations import TABLE2, Configuration, eq1, layer_extra_rows, layer_rows
from actmem.ledger.parts import measure_layer
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.rows import Row, compare, total
from actmem_course.arguments import ELEMENT_SIZES
from actmem_course.bench.runner import Measurement
from actmem_course.bench.timing import check_fits, local_rank, memory_bytes, ranks_here
from actmem_course.ranks import Ranks, add_rank_arguments, check_ranks
from actmem_course.results import Table2Result
from actmem_course.show.tables import extras_table, table2_table
from actmem_more.context import ContextParallel, layer_groups
from actmem_more.experts import Routing
from actmem_more.llama import LlamaLayer
from actmem_more.llama_measured import measure_llama_layer
from actmem_more.llama_shape import LlamaShape, own_context_shape
from actmem_more.llama_terms import forced_routed_tokens, llama_rows
from actmem_tools.attention_kernels import FLASH_WIDTH, KERNEL_NODES, AttentionCall, attention_kernel, attention_rows
from actmem_tools.no_device import H100, gpu_of_this_build

#: The word in a configuration's name for each way to share the sequence.
CONTEXT_WORDS = {"gather": "context", "gather-plain": "context, plain", "ulysses": "ulysses"}
_LETTERS = {
    "seq_length": "s", "micro_batch_size": "b", "hidden_size": "h", "num_attention_heads": "a",
    "num_key_value_heads": "k", "ffn_hidden_size": "f", "num_experts": "E", "experts_per_token": "κ",
}  # fmt: skip


def today_configurations(context: str = "") -> tuple[Configuration, ...]:
    """Alone, with tensor and with sequence parallelism: each with nothing, the core, all that needs no product, or
    everything recomputed.  context: the word for how all of them share the sequence."""
    found = []
    for sharing in ("", "tensor", "tensor+sequence"):
        for mode in ("none", "selective", "elementwise", "full"):
            words = (sharing, context, "" if mode == "none" else mode)
            name = "+".join(filter(None, words)) or "none"
            found.append(Configuration(name, bool(sharing), "sequence" in sharing, mode, ""))
    return tuple(found)


@dataclass(frozen=True)
class LayerTable:
    """What is measured.  context: how many ranks share each sequence, in the way ``context_kind``; the others share the layer.

    routing: of experts, forced.
    """

    shape: ModelShape | LlamaShape
    what: str = "Table 2 measured"
    configurations: tuple[Configuration, ...] = TABLE2
    routing: Routing = "even"
    context: int = 1
    context_kind: str = "gather"

    @property
    def title(self) -> str:
        sizes = [f"{letter}={size}" for name, letter in _LETTERS.items() if (size := getattr(self.shape, name, None))]
        routing = f", {self.routing} routing" if getattr(self.shape, "num_experts", None) else ""
        return f"{self.what}: {' '.join(sizes)}{routing}" + (f", c={self.context}" if self.context > 1 else "")

    def _parallel(self, configuration: Configuration, ranks: int) -> Parallel:
        return replace(configuration.parallel(ranks // self.context), context_parallel_size=self.context)

    def check(self, ranks: int, device: str, dtype: torch.dtype) -> None:
        """Raise ConfigError if that many ranks can't measure every configuration."""
        check_size("context_parallel_size", self.context, ranks)
        if ranks % self.context:
            rule = f"must divide the number of ranks, {ranks}, got {self.context}"
            raise ConfigError("context_parallel_size", rule)
        for parallel in {self._parallel(one, ranks) for one in self.configurations}:
            if isinstance(self.shape, LlamaShape):
                own_context_shape(self.shape, parallel, self.context_kind)
            else:
                check_layer(self.shape, parallel)
        if isinstance(self.shape, LlamaShape) and device == "cuda":
            check_kernel(self.shape, dtype, self.context, self.context_kind)

    def check_room(self, element_size: int, ranks_here: int, memory_bytes: int) -> None:
        """Raise ConfigError if real tensors of the largest configuration can't fit into memory.

        The largest is the first, with its weights, on every rank at once.  The paper's layer needs two score
        tensors (as²b each) for a moment as well; a flash kernel makes none.
        """
        first = self._parallel(self.configurations[0], self.context)
        if isinstance(self.shape, ModelShape):
            a, b, h, s = self.shape.letters()
            each = eq1(self.shape, element_size) + element_size * (12 * h * h + 2 * a * s * s * b)
        else:
            weights = sum(one.numel() for one in LlamaLayer(self.shape, seed=0, device="meta").parameters())
            rows = llama_rows(self.shape, first, element_size=element_size, context_kind=self.context_kind)
            each = total(rows) + element_size * weights
        check_fits(each, ranks_here, memory_bytes, "use --emulate, or smaller sizes")

    def rows(
        self, configuration: Configuration, ranks: int, element_size: int, device: str, rank: int = 0, kernel: str = ""
    ) -> tuple[list[Row], list[Row]]:
        """The formula's rows, and those that it leaves out.  rank: of those that share the layer's experts.

        kernel: of ``kernel_here``.
        """
        shape, recompute = self.shape, configuration.recompute
        parallel = self._parallel(configuration, ranks)
        if isinstance(shape, ModelShape):
            place = shape, parallel, recompute, element_size
            return layer_rows(*place), layer_extra_rows(*place, device)
        own = own_context_shape(shape, parallel, self.context_kind)
        routed = forced_routed_tokens(own, parallel, self.routing, rank) if shape.num_experts else None
        rows = llama_rows(shape, parallel, recompute, element_size, routed, self.context_kind)
        if not kernel or all(row.term != "log-sum-exp" for row in rows):  # attention runs again, seed and all
            return rows, []
        t = parallel.tensor_parallel_size * (self.context if self.context_kind == "ulysses" else 1)
        return rows, attention_rows(kernel, shape.micro_batch_size, shape.num_attention_heads // t, shape.seq_length, t)

    def extras(self, ranks: Ranks, dtype: torch.dtype) -> list[Row]:
        """The rows that the formulas of all configurations leave out, for the list of reasons."""
        place, kernel = (ranks.size, dtype.itemsize, ranks.device), self._kernel(ranks, dtype)
        return [row for one in self.configurations for row in self.rows(one, *place, kernel=kernel)[1]]

    def _kernel(self, ranks: Ranks, dtype: torch.dtype) -> str:
        if isinstance(self.shape, ModelShape):
            return ""
        return kernel_here(self.shape, dtype, ranks.device, self.context, self.context_kind)

    def measure(
        self, ranks: Ranks, dtype: torch.dtype, on_configuration: Callable[[Configuration], None] = lambda one: None
    ) -> list[Table2Result]:
        """This rank's results, in the order of the configurations.  Every rank must call it."""
        tensor, context = tensor_parallel(), ContextParallel()
        if self.context > 1:
            tensor, context = layer_groups(self.context, self.context_kind)
        kernel, results = self._kernel(ranks, dtype), []
        for one in self.configurations:
            on_configuration(one)
            tp = replace(
                tensor if one.tensor_parallel and tensor.size > 1 else TensorParallel(),
                sequence_parallel=one.sequence_parallel,
            )
            if isinstance(self.shape, ModelShape):
                measured = measure_layer(self.shape, tp, one.recompute, device=ranks.device, dtype=dtype)
            else:
                measured = measure_llama_layer(
                    self.shape,
                    tp,
                    one.recompute,
                    device=ranks.device,
                    dtype=dtype,
                    routing=self.routing,
                    context=context,
                )
            predicted, extra = self.rows(one, ranks.size, dtype.itemsize, ranks.device, tp.rank, kernel)
            comparison = compare(predicted + extra, measured)
            sums = total(predicted), total(extra), total(measured)
            sbh = self.shape.seq_length * self.shape.micro_batch_size * self.shape.hidden_size
            results.append(
                Table2Result(
                    one.name, one.formula(dtype.itemsize) or f"{sums[0] / sbh:.4g}", tp.size, ranks.rank, *sums,
                    sums[2] - sums[0] - sums[1], comparison.exact, "" if comparison.exact else comparison.describe(),
                )
            )  # fmt: skip
        return results


# Which attention kernel this rank's GPU runs, or an H100 would: by the table, and by asking the GPU.


def check_kernel(shape: LlamaShape, dtype: torch.dtype, context_parallel_size: int, context_kind: str) -> str:
    """The attention kernel of this rank's GPU by the table, or of an H100 where there is none.

    ``""`` where parts of a sequence call the flash kernel themselves.  Raises ConfigError where more is kept than the formulas say.
    """
    if context_parallel_size > 1 and context_kind != "ulysses":
        return ""
    here = torch.cuda.is_available()
    gpu = gpu_of_this_build(torch.cuda.get_device_capability(local_rank()) if here else H100)
    name, heads = _name(dtype), (shape.num_attention_heads, shape.num_key_value_heads)
    lengths = shape.seq_length, shape.seq_length
    kernel = attention_kernel(gpu, AttentionCall(name, shape.d, shape.value_size, *heads, *lengths, causal=True))
    if kernel == "math":
        raise _no_fused_kernel(shape, dtype, "a GPU of capability {}.{}".format(*gpu.capability))
    if kernel == "flash" and shape.d % FLASH_WIDTH:
        rule = f"gives heads of {shape.d}: a GPU's flash kernel keeps copies padded to a multiple of {FLASH_WIDTH}"
        raise ConfigError("num_attention_heads", rule)
    return kernel


def kernel_here(
    shape: LlamaShape, dtype: torch.dtype, device: str, context_parallel_size: int, context_kind: str
) -> str:
    """The attention kernel of this rank, ``""`` on a CPU: a GPU is asked by a small call, and the node that autograd records tells."""
    kernel = check_kernel(shape, dtype, context_parallel_size, context_kind) if device == "cuda" else ""
    if not kernel or not torch.cuda.is_available():
        return kernel
    heads = (shape.num_attention_heads, *2 * (shape.num_key_value_heads,))
    q, k, v = (
        torch.zeros(1, min(shape.seq_length, 128), count, width, device="cuda", dtype=dtype, requires_grad=True)
        for count, width in zip(heads, (shape.d, shape.d, shape.value_size))
    )
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    node = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads[0] != heads[1]).grad_fn
    assert node is not None
    for kernel, name in KERNEL_NODES.items():
        if node.name().startswith(name):
            return kernel
    raise _no_fused_kernel(shape, dtype, "this GPU")


def _no_fused_kernel(shape: LlamaShape, dtype: torch.dtype, gpu: str) -> ConfigError:
    heads = f"{shape.num_attention_heads} query and {shape.num_key_value_heads} key heads of {shape.d}"
    rule = f"{_name(dtype)} with {heads} has no fused attention kernel on {gpu}, which would keep the scores"
    return ConfigError("dtype", f"{rule}: no formula here (--device cpu has one)")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def run_layer_table(run: Measurement, table_from: Callable[[argparse.Namespace], LayerTable]) -> int:
    """Measure on all ranks and print of each configuration the worst rank; the exit code: 0 if all agree to the byte, or 1."""
    run.dtype()
    add_rank_arguments(run.parser)
    run.parser.set_defaults(can_fake_cuda=True)
    with run.asked() as args:
        table, dtype = table_from(args), getattr(torch, args.dtype)
        table.check(check_ranks(args, run.parser.prog), args.device, dtype)
        if args.emulate is None and args.device == "cpu":
            table.check_room(ELEMENT_SIZES[args.dtype], ranks_here(args), memory_bytes("cpu"))

    with run.ranks() as here:
        with run.status("measuring") as say:
            results = run.gathered(table.measure(here, dtype, lambda one: say(f"measuring {one.name}")))
        how = f"emulated rank 0 of {here.size}" if here.emulated else f"{here.size} ranks"
        if here.device == "cuda" and not torch.cuda.is_available():
            how += " (fake tensors, an H100's kernels)"
        title = f"{table.title}, {args.dtype}\n{how} on {here.device}, torch {version('torch')}"
        run.show(table2_table(worst_by_configuration(results), title=title))
        if extras := table.extras(here, dtype):
            run.show(extras_table(extras))
        wrong = [result for result in results if not result.exact]
        run.wrong(*(f"{one.configuration}, rank {one.rank}:\n{one.disagreement}" for one in wrong))
        verdict = f"{len(results) - len(wrong)} of {len(results)} measurements agree with the formulas to the byte"
        run.show(f"[bold red]{verdict}" if wrong else verdict)
        run.write(results)
    return 1 if wrong else 0


def worst_by_configuration(results: list[Table2Result]) -> list[Table2Result]:
    """For each configuration the rank that is furthest off, or else the one that holds most."""
    ranks: dict[str, list[Table2Result]] = {}
    for result in results:
        ranks.setdefault(result.configuration, []).append(result)
    return [
        max(own, key=lambda one: (not one.exact, abs(one.difference_bytes), one.measured_bytes))
        for own in ranks.values()
    ]
