"""Pairs of runs in the logs of NVIDIA's CI that differ in one setting, with a formula for the difference in memory.

logged_pairs.tsv has numbers of the last rank from NVIDIA/Megatron-LM's
tests/functional_tests/test_cases/*/golden_values_dev_dgx_*.json (snapshot d98e8a64). "peak" is the largest
mem-max-allocated-bytes. "held" is mem-allocated-bytes: what stays between steps (weights, gradients, optimizer states).
Peak minus held is the activations; the difference of two runs in it comes from the setting in which they differ. The
last columns count the tensors that make up this difference.

These are the pairs that tensors alone explain. In others the kernels' source doesn't show what they save, or the
allocator's blocks change from log to log.
"""

from dataclasses import dataclass

from actmem.config import ModelShape, padded_vocab_size
from actmem.formulas.activations import eq1
from actmem_course.others import table_rows

#: The layer of nearly all these tests.  A pair whose tests have another layer has the formula 0, which needs no sizes.
SHAPE = ModelShape(seq_length=1024, micro_batch_size=4, hidden_size=512, num_attention_heads=8)
_WORDS = 50257
#: Bytes of the block that a tensor of one number takes.
BLOCK_BYTES = 512
#: How many tensors of one number, such as a loss, a pair may differ by besides its formula.
MOST_NUMBERS = 12


def term_bytes() -> dict[str, int]:
    """Return the bytes of one tensor of each kind by which two logged runs may differ, such as a layer's input.

    Activations have 16 bits, statistics and the logits of the loss 32.

    Returns: bytes by the kind's name, which is a column of logged_pairs.tsv: "2sbh", or "layer" for all that a layer
        saves.
    """
    a, b, h, s = SHAPE.letters()
    v, of_two_ranks = (padded_vocab_size(_WORDS, t) for t in (1, 2))
    return {
        "layer": eq1(SHAPE) + 16 * s * b,  # with the float32 statistics of its two norms
        "2sbh": 2 * s * b * h,  # a layer's input
        "sbh": s * b * h,  # the mask of the embedding's dropout
        "s²b": s * s * b,  # a causal mask
        "(24sbh + 5as²b)/2": 12 * s * b * h + 5 * a * s * s * b // 2,  # what two tensor-parallel ranks share of a layer
        "6sb(v − v′/2)": 6 * s * b * (v - of_two_ranks // 2),  # and of the logits; v′ is padded for two ranks
        "8sb": 8 * s * b,  # ids
    }


@dataclass(frozen=True)
class LoggedPair:
    """Two logged runs that differ in one setting.

    Attributes:
        what: The setting in which they differ.
        gpu: The kind of GPU, such as "a100".
        first: The name of the first run's test in NVIDIA/Megatron-LM.
        second: The name of the second run's test.
        logged_bytes: The first run's activations minus the second's, in bytes.  A run's activations are its logged
            peak minus what it holds between steps.
        counts: How many tensors of each kind the first run has in addition to those of the second (negative: fewer).
            The keys are those of ``term_bytes``, such as "2sbh".
    """

    what: str
    gpu: str
    first: str
    second: str
    logged_bytes: int
    counts: dict[str, int]

    @property
    def formula(self) -> str:
        """The predicted difference as a formula, such as ``12 · layer − 12 · 2sbh``; ``0`` if there should be none."""
        parts = [f"{'−' if count < 0 else '+'} {abs(count)} · {term}" for term, count in self.counts.items()]
        return " ".join(parts).removeprefix("+ ") or "0"

    @property
    def formula_bytes(self) -> int:
        """The predicted difference in bytes."""
        terms = term_bytes()
        return sum(count * terms[term] for term, count in self.counts.items())

    @property
    def apart_bytes(self) -> int:
        """Logged difference minus predicted difference, in bytes."""
        return self.logged_bytes - self.formula_bytes

    @property
    def explained(self) -> bool:
        """Whether the formula is exact up to at most MOST_NUMBERS tensors of one element, such as a loss.

        Each of these takes a block of 512 B, so the difference must be a multiple of 512 B.
        """
        numbers, rest = divmod(abs(self.apart_bytes), BLOCK_BYTES)
        return not rest and numbers <= MOST_NUMBERS


def logged_pairs() -> list[LoggedPair]:
    """Read all pairs of logged runs from logged_pairs.tsv, in the order of its lines.

    In each of the first two pairs the two runs' activations differ by exactly the bytes that the pair's formula
    predicts.  In the third they differ by 3,072 B more than predicted: six tensors of one element, 512 B each.
    """
    pairs = []
    for row in table_rows("logged_pairs.tsv"):
        first, second = (int(row[f"{which} peak"]) - int(row[f"{which} held"]) for which in ("first", "second"))
        counts = {term: int(row[term]) for term in term_bytes() if row[term] != "0"}
        pairs.append(LoggedPair(row["what"], row["gpu"], row["first run"], row["second run"], first - second, counts))
    return pairs
