"""What is trained and how it is cut: model sizes and parallel sizes, checked on creation.

Every size a user can give arrives here first, so every bad size is refused here, in one
line that names the argument and the rule.  Nothing in this file needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

#: How much of the forward pass is thrown away and run again in backward.
#: ``selective`` and ``full`` stop the second run at the last tensor that backward reads;
#: the ``paper-`` forms run the whole region again, as 2205.05198 section 5 describes.
#: Both forms keep the same bytes.
RECOMPUTE_MODES = ("none", "selective", "full", "paper-selective", "paper-full")

#: Larger sizes than this are typing errors, not models.
LARGEST_SIZE = 2**31 - 1


class ConfigError(ValueError):
    """A size breaks a rule.  The message is one line: the argument, its value, the rule."""

    def __init__(self, argument: str, rule: str):
        self.argument = argument
        self.rule = rule
        super().__init__(f"{argument}: {rule}")


def check_size(argument: str, value: object, largest: int = LARGEST_SIZE) -> int:
    """Return ``value`` if it is an integer from 1 to ``largest``; raise ConfigError if not."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(argument, f"must be a whole number, got {value!r}")
    if value < 1:
        raise ConfigError(argument, f"must be at least 1, got {value}")
    if value > largest:
        raise ConfigError(argument, f"must be at most {largest}, got {value}")
    return value


def check_divides(argument: str, value: int, divisor_name: str, divisor: int) -> int:
    """Return ``value // divisor``; raise ConfigError on ``argument`` if it leaves a rest."""
    if value % divisor:
        raise ConfigError(argument, f"{value} must be divisible by {divisor_name} = {divisor}")
    return value // divisor


def check_recompute(recompute: str) -> str:
    """Return ``recompute`` if it is one of RECOMPUTE_MODES; raise ConfigError if not."""
    if recompute not in RECOMPUTE_MODES:
        raise ConfigError("recompute", f"must be one of {', '.join(RECOMPUTE_MODES)}, got {recompute!r}")
    return recompute


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the transformer, with the paper's letters in brackets (2205.05198 table 1).

    seq_length (s), micro_batch_size (b), hidden_size (h), num_attention_heads (a),
    num_layers (L), vocab_size (v).  Raises ConfigError on a size that no layer can have.
    """

    seq_length: int
    micro_batch_size: int
    hidden_size: int
    num_attention_heads: int
    num_layers: int = 1
    vocab_size: int = 51200

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            check_size(name, getattr(self, name))
        check_divides("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        largest = max(
            self.num_attention_heads * self.seq_length**2 * self.micro_batch_size,
            4 * self.hidden_size * max(self.seq_length * self.micro_batch_size, self.hidden_size),
            self.vocab_size * max(self.seq_length * self.micro_batch_size, self.hidden_size),
        )
        if largest >= 2**59:
            raise ConfigError(
                "model shape",
                f"one tensor would have {largest:.1e} elements; no tensor can have more than 2^59 here",
            )

    @property
    def head_size(self) -> int:
        """Elements of one head's query: h / a."""
        return self.hidden_size // self.num_attention_heads

    def letters(self) -> tuple[int, int, int, int]:
        """The paper's ``a, b, h, s``, in that order, for the first line of a formula."""
        return self.num_attention_heads, self.micro_batch_size, self.hidden_size, self.seq_length

    def with_sizes(self, **sizes: int) -> ModelShape:
        """A copy with some sizes changed, checked again."""
        return replace(self, **sizes)


@dataclass(frozen=True)
class Parallel:
    """How many devices share one model.  The paper's letters: t, p, m (model chunks a device).

    ``sequence_parallel`` cuts layer norms and dropouts along the sequence over the same t ranks.
    """

    tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_parallel_size: int = 1
    num_model_chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "num_model_chunks"):
            check_size(name, getattr(self, name))
        if self.num_model_chunks > 1 and self.pipeline_parallel_size == 1:
            raise ConfigError("num_model_chunks", "interleaving needs pipeline_parallel_size of at least 2")


def check_layer(shape: ModelShape, parallel: Parallel) -> None:
    """Raise ConfigError if t ranks cannot share one layer of this shape.

    t must divide a (heads are not cut) and, under sequence parallelism, s.  It then divides
    h and 4h too, because a divides h.
    """
    t = parallel.tensor_parallel_size
    check_divides("num_attention_heads", shape.num_attention_heads, "tensor_parallel_size", t)
    check_divides("hidden_size", shape.hidden_size, "tensor_parallel_size", t)
    if parallel.sequence_parallel:
        check_divides("seq_length", shape.seq_length, "tensor_parallel_size", t)
