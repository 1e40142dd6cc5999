"""Measure today's layer, or the paper's, with every named set of recomputed terms on the ranks at hand."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from actmem.attention_kernels import (
    FLASH_WIDTH,
    KERNEL_NODES,
    AttentionCall,
    attention_kernel,
    attention_rows,
)
from actmem.config import ConfigError, ModelShape, Parallel, check_layer, check_size
from actmem.formulas.activations import layer_extra_rows, layer_rows
from actmem.formulas.llama_terms import context_rows, forced_routed_tokens
from actmem.layers.context import layer_groups
from actmem.layers.experts import Routing
from actmem.layers.llama import LlamaLayer
from actmem.llama_shape import LlamaShape, own_context_shape
from actmem.measure.emulate import H100, gpu_of_this_build
from actmem.measure.parts import measure_layer
from actmem.parallel.groups import TensorParallel
from actmem.rows import Row, total
from actmem_course.arguments import ELEMENT_SIZES
from actmem_course.bench.measure_table2 import OR_EMULATE, check_memory, layer_result
from actmem_course.bench.session import FORMS
from actmem_course.bench.timing import check_fits, local_rank
from actmem_course.ranks import Ranks
from actmem_course.results import Table2Result

TODAY_MODES = ("none", "selective", "elementwise", "full")
#: Ways to share the layer: not at all, and the first two of ``parallel.groups``.
SHARINGS = ("", *list(FORMS)[:2])
#: The word in a configuration's name for each way to share the sequence.
CONTEXT_WORDS = {"gather": "context", "gather-plain": "context, plain", "ulysses": "ulysses"}


@dataclass(frozen=True)
class TodayConfiguration:
    """One line of the table.  sharing: one of SHARINGS.  recompute: one of TODAY_MODES.

    context_kind: one of CONTEXT_WORDS, or empty if no ranks share the sequence.
    """

    sharing: str
    recompute: str
    context_kind: str = ""

    @property
    def name(self) -> str:
        """Joined as in table 2, where *none* adds no word."""
        recompute = "" if self.recompute == "none" else self.recompute
        words = (self.sharing, CONTEXT_WORDS.get(self.context_kind, ""), recompute)
        return "+".join(filter(None, words)) or "none"

    def parallel(self, tensor_parallel_size: int) -> Parallel:
        """How t ranks share the layer; without a sharing each has all of it."""
        return Parallel(tensor_parallel_size, **FORMS[self.sharing]) if self.sharing else Parallel()


CONFIGURATIONS = tuple(TodayConfiguration(sharing, recompute) for sharing in SHARINGS for recompute in TODAY_MODES)


def configurations(context_parallel_size: int = 1, context_kind: str = "gather") -> list[TodayConfiguration]:
    """All lines of the table; with c ranks that share each sequence in every one of them."""
    if context_parallel_size == 1:
        return list(CONFIGURATIONS)
    return [replace(configuration, context_kind=context_kind) for configuration in CONFIGURATIONS]


def check_today(
    shape: ModelShape | LlamaShape, ranks: int, context_parallel_size: int = 1, context_kind: str = "gather"
) -> None:
    """Raise ConfigError if that many ranks cannot measure all configurations of this layer."""
    check_size("context_parallel_size", context_parallel_size, ranks)
    if ranks % context_parallel_size:
        rule = f"must divide the number of ranks, {ranks}, got {context_parallel_size}"
        raise ConfigError("context_parallel_size", rule)
    for configuration in CONFIGURATIONS:
        parallel = configuration.parallel(ranks // context_parallel_size)
        if isinstance(shape, LlamaShape):
            own_context_shape(shape, parallel, context_parallel_size, context_kind)
        else:
            check_layer(shape, parallel)


def check_room(
    shape: ModelShape | LlamaShape,
    element_size: int,
    ranks_here: int,
    memory_bytes: int,
    context_parallel_size: int = 1,
    context_kind: str = "gather",
) -> None:
    """Raise ConfigError if real tensors of the largest configuration cannot fit into memory.

    The largest is the first, with its weights, on every rank at once.  The paper's layer needs its
    scores for a moment as well; a flash kernel makes none.
    """
    if isinstance(shape, ModelShape):
        check_memory(shape, element_size, ranks_here, memory_bytes)
        return
    weights = sum(parameter.numel() for parameter in LlamaLayer(shape, seed=0, device="meta").parameters())
    rows = context_rows(shape, Parallel(), context_parallel_size, context_kind, element_size=element_size)
    each = total(rows) + element_size * weights
    check_fits(each, ranks_here, memory_bytes, OR_EMULATE)


def extras_of_today(args: argparse.Namespace, shape: ModelShape | LlamaShape, ranks: Ranks) -> list[Row]:
    """The extra rows of all configurations, for the list of reasons."""
    if isinstance(shape, LlamaShape):
        kernel = kernel_here(shape, getattr(torch, args.dtype), ranks, args.context, args.context_kind)
        return predictions(shape, Parallel(), "none", 2, ranks.device, kernel=kernel)[1]
    cells = (
        (shape, configuration.parallel(ranks.size), configuration.recompute, ELEMENT_SIZES[args.dtype], ranks.device)
        for configuration in CONFIGURATIONS
    )
    return [row for cell in cells for row in layer_extra_rows(*cell)]


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
    shape: LlamaShape, dtype: torch.dtype, ranks: Ranks, context_parallel_size: int, context_kind: str
) -> str:
    """The attention kernel of this rank, ``""`` on a CPU: a GPU is asked by a small call, and the node that autograd records tells."""
    kernel = check_kernel(shape, dtype, context_parallel_size, context_kind) if ranks.device == "cuda" else ""
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


def predictions(
    shape: ModelShape | LlamaShape,
    parallel: Parallel,
    recompute: str,
    element_size: int,
    device_type: str,
    routing: Routing = "even",
    rank: int = 0,
    context_parallel_size: int = 1,
    context_kind: str = "gather",
    kernel: str = "",
) -> tuple[list[Row], list[Row]]:
    """The formula's rows, and those that it leaves out.  rank: of the ranks that share the layer's experts.

    kernel: of ``kernel_here``.
    """
    if isinstance(shape, LlamaShape):
        own = own_context_shape(shape, parallel, context_parallel_size, context_kind)
        routed = forced_routed_tokens(own, parallel, routing, rank) if shape.num_experts else None
        rows = context_rows(shape, parallel, context_parallel_size, context_kind, recompute, element_size, routed)
        if not kernel or all(row.term != "log-sum-exp" for row in rows):  # attention runs again, seed and all
            return rows, []
        t = parallel.tensor_parallel_size * (context_parallel_size if context_kind == "ulysses" else 1)
        return rows, attention_rows(kernel, shape.micro_batch_size, shape.num_attention_heads // t, shape.seq_length, t)
    rows = layer_rows(shape, parallel, recompute, element_size)
    return rows, layer_extra_rows(shape, parallel, recompute, element_size, device_type)


def measure_today(
    shape: ModelShape | LlamaShape,
    ranks: Ranks,
    dtype: torch.dtype,
    on_configuration: Callable[[TodayConfiguration], None] = lambda configuration: None,
    routing: Routing = "even",
    context_parallel_size: int = 1,
    context_kind: str = "gather",
) -> list[Table2Result]:
    """This rank's results, in the order of ``configurations``.  Every rank must call it.  routing: of experts, forced.

    Of the ranks c share each sequence, and t = ranks / c the layer.
    """
    results = []
    kernel = ""
    if isinstance(shape, LlamaShape):
        kernel = kernel_here(shape, dtype, ranks, context_parallel_size, context_kind)
    tensor, context = layer_groups(context_parallel_size, context_kind)
    for configuration in configurations(context_parallel_size, context_kind):
        on_configuration(configuration)
        parallel = configuration.parallel(tensor.size)
        form = FORMS.get(configuration.sharing, {})
        tp = TensorParallel(**form) if parallel.tensor_parallel_size == 1 else replace(tensor, **form)
        measured = measure_layer(
            shape, tp, configuration.recompute, device=ranks.device, dtype=dtype, routing=routing, context=context
        )
        predicted, extra = predictions(
            shape, parallel, configuration.recompute, dtype.itemsize, ranks.device, routing, tp.rank,
            context_parallel_size, context_kind, kernel,
        )  # fmt: skip
        sbh = shape.seq_length * shape.micro_batch_size * shape.hidden_size
        names = configuration.name, f"{total(predicted) / sbh:.4g}"
        results.append(layer_result(*names, parallel.tensor_parallel_size, ranks.rank, predicted, extra, measured))
    return results
