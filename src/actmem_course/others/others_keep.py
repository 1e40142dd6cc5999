"""What one layer of other implementations and frameworks keeps, as formulas: read from their operators.

A formula is a sum of products of sizes: s, b, h, a, k, f as in LlamaShape, d elements of a head, E experts,
κ experts a token; of a layer that ranks share, a second sum that the t tensor-parallel ranks divide.  Each is counted
by ``measure_peers --today`` except those that say "on paper".  On CPUs; transformers 5.23, torch 2.13, megatron-core
0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from actmem.config import ConfigError, check_divides, check_size
from actmem_course.others import table_rows
from actmem_more.llama_shape import LlamaShape


@dataclass(frozen=True)
class OtherLayer:
    """One implementation.  coefficients: of each product of sizes, in bytes; divided: of those that the t ranks share.

    why: who keeps more than needed, and the way out.  dtype: of its activations.  dropout: whether it is on.
    sequence_parallel: whether its ranks also shard the sequence.  constant_bytes: generator states and
    counters, whatever the sizes.  modules: what megatron-core's recompute_modules name.  budget: torch's
    activation memory budget.
    """

    name: str
    dtype: str
    coefficients: dict[str, int]
    why: str
    dropout: bool = False
    divided: dict[str, int] = field(default_factory=dict)
    sequence_parallel: bool = False
    constant_bytes: int = 0
    modules: tuple[str, ...] = ()
    budget: float = 1

    @property
    def formula(self) -> str:
        """Such as ``4sbh + (20sbh + 4sbkd)/t``."""
        whole, shared = (
            " + ".join(f"{count}{product}" for product, count in part.items())
            for part in (self.coefficients, self.divided)
        )
        constant = f"{self.constant_bytes:,}" if self.constant_bytes else ""
        return " + ".join(part for part in (whole, f"({shared})/t" if shared else "", constant) if part)


def bytes_of_other(layer: OtherLayer, shape: LlamaShape, tensor_parallel_size: int = 1) -> int:
    """Its bytes on one of ``tensor_parallel_size`` ranks.  Raises ConfigError where they can't share the layer."""
    t = check_size("tensor_parallel_size", tensor_parallel_size)
    if t > 1 and not layer.divided:
        raise ConfigError("tensor_parallel_size", f"nothing cuts this layer: must be 1, got {t}")
    for name in ("num_attention_heads", "num_key_value_heads", "ffn_hidden_size"):
        check_divides(name, getattr(shape, name), "tensor_parallel_size", t)
    if layer.sequence_parallel:
        check_divides("seq_length", shape.seq_length, "tensor_parallel_size", t)
    return _sum(layer.coefficients, shape) + _sum(layer.divided, shape) // t + layer.constant_bytes


def _sum(coefficients: Mapping[str, int], shape: LlamaShape) -> int:
    s, b, h, a = shape.seq_length, shape.micro_batch_size, shape.hidden_size, shape.num_attention_heads
    k, f, d = shape.num_key_value_heads, shape.ffn_hidden_size, shape.d
    experts, taken = shape.num_experts or 0, shape.experts_per_token or 0
    products = {
        "sbh": s * b * h,
        "sbkd": s * b * k * d,
        "sbf": s * b * f,
        "as²b": a * s * s * b,
        "asb": a * s * b,
        "sb": s * b,
        "sd": s * d,
        "sbκh": s * b * taken * h,
        "sbκf": s * b * taken * f,
        "sbκ": s * b * taken,
        "sbE": s * b * experts,
        "E": experts,
    }
    return sum(count * products[product] for product, count in coefficients.items())


def _terms(text: str) -> dict[str, int]:
    """``4sbh + 8sb``: bytes of each product of sizes."""
    return {product: int(count) for count, product in re.findall(r"(\d+)(\S+)", text)}


def _layers(kind: str) -> tuple[OtherLayer, ...]:
    """Rows of ``others_keep.tsv``; one without a why has that of the row before."""
    found, why = [], ""
    for row in table_rows("others_keep.tsv"):
        why = row["why"] or why
        modules = tuple(row["modules"].split())
        # Each of megatron-core's checkpoints holds a generator state; the core's also the mask's kind, one int32.
        constant = 5056 * int(row["states"] or 0) + (4 if modules else 0)
        layer = OtherLayer(
            row["name"], row["dtype"], _terms(row["bytes"]), why, bool(row["dropout"]), _terms(row["divided by t"]),
            bool(row["sequence parallel"]), constant, modules, float(row["budget"] or 1),
        )  # fmt: skip
        found += [layer] * (row["kind"] == kind)
    return tuple(found)


OTHERS, FRAMEWORKS = _layers("layer"), _layers("framework")
