"""Sizes of the model and of the parallelism, checked when they are created.

The dataclasses here check their own fields.  The few formulas and commands that take plain numbers check those numbers.
The error is one line that names the argument and the rule.  Nothing in this file needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

#: Larger sizes than this are typing errors, not models.
LARGEST_SIZE = 2**31 - 1
#: The largest number of ranks of one kind, and of chunks on a rank.
LARGEST_PARALLEL_SIZE = 2**16
#: Bytes of an activation's element.
ELEMENT_BYTES = (2, 4, 8)


class ConfigError(ValueError):
    """Error: an argument breaks a rule.  Its message is one line, such as "num_layers: must be at least 1, got 0".

    Args:
        argument: the name of the argument.
        rule: the rule and the value that breaks it.
    """

    def __init__(self, argument: str, rule: str):
        self.argument, self.rule = argument, rule
        super().__init__(argument, rule)  # both, so that another process can raise it again

    def __str__(self) -> str:
        return f"{self.argument}: {self.rule}"


def check_size(argument: str, value: object, largest: float = LARGEST_SIZE, least: float = 1) -> int:
    """Return ``value`` if it is an integer from ``least`` to ``largest``.

    Args:
        argument: the argument's name, for the error message.
        value: the size to check.
        largest: the largest size that is allowed.
        least: the smallest size that is allowed.

    Raises: ConfigError on any other value; a bool is no integer here.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(argument, f"must be a whole number, got {shown(value)}")
    if value < least:
        raise ConfigError(argument, f"must be at least {least}, got {shown(value)}")
    if value > largest:
        raise ConfigError(argument, f"must be at most {largest}, got {shown(value)}")
    return value


def check_sizes(**sizes: object) -> None:
    """Raise ConfigError unless every keyword's value is a whole number of at least 1; the message names the keyword.

    Args:
        sizes: the sizes to check, such as ``hidden_size=4096``.
    """
    for argument, value in sizes.items():
        check_size(argument, value)


def check_divides(argument: str, value: int, divisor_name: str, divisor: int) -> int:
    """Return ``value // divisor``; raise ConfigError if the division leaves a remainder.

    Args:
        argument: the name of ``value`` in the error message, such as "hidden_size".
        value: the size to divide.
        divisor_name: the name of ``divisor`` in the error message.
        divisor: the size by which to divide.
    """
    if value % divisor:
        raise ConfigError(argument, f"{value} must be divisible by {divisor_name} = {divisor}")
    return value // divisor


def check_choice(argument: str, value: object, choices: Iterable) -> None:
    """Raise ConfigError unless ``value`` equals one of ``choices`` and has its type (True is not 1 here).

    Args:
        argument: the name of ``value`` in the error message.
        value: the value to check.
        choices: all values that are allowed.
    """
    choices = tuple(choices)
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ConfigError(argument, f"must be one of {', '.join(map(str, choices))}, got {shown(value)}")


def shown(value: object) -> str:
    """Return the text by which an error message shows ``value``: one line of at most 60 characters."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int can be too long for it, and a class of anybody's can do anything
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}…"


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int, multiple: int = 128) -> int:
    """Return a vocabulary size rounded up, so that t = ``tensor_parallel_size`` ranks can share it evenly.

    Args:
        vocab_size: words of the vocabulary.
        tensor_parallel_size: t.
        multiple: the result is a multiple of this number · t.
    """
    check_sizes(vocab_size=vocab_size, tensor_parallel_size=tensor_parallel_size, multiple=multiple)
    unit = multiple * tensor_parallel_size
    return -(-vocab_size // unit) * unit


def check_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """Return how many words one of t = ``tensor_parallel_size`` ranks holds: ``vocab_size`` / t.

    Raises: ConfigError if t does not divide ``vocab_size``; the message names a padded size that t divides.
    """
    v, t = check_size("vocab_size", vocab_size), check_size("tensor_parallel_size", tensor_parallel_size)
    if v % t:
        offer = f"padded_vocab_size({v}, {t}) = {padded_vocab_size(v, t)} is; the loss takes vocab_size={v}"
        raise ConfigError("vocab_size", f"{v} must be divisible by tensor_parallel_size = {t}; {offer}")
    return v // t


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the transformer, with the letters of 2205.05198 table 1.

    Args:
        seq_length: s, tokens of one sequence.
        micro_batch_size: b, sequences of one microbatch.
        hidden_size: h, elements of one token's activation.
        num_attention_heads: a, attention heads; a must divide h.
        num_layers: L, layers of the whole model.
        vocab_size: v, words of the vocabulary.

    Raises: ConfigError on a size that is no whole number of at least 1, if a does not divide h, or if one tensor would
        have more than 2^59 elements.
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
            raise ConfigError("model shape", f"one tensor would have {largest:.1e} elements, at most 2^59 here")

    @property
    def head_size(self) -> int:
        """Elements of one head's query: h / a."""
        return self.hidden_size // self.num_attention_heads

    @property
    def ffn_hidden_size(self) -> int:
        """Width of the MLP: 4h."""
        return 4 * self.hidden_size

    def letters(self) -> tuple[int, int, int, int]:
        """Return the tuple (a, b, h, s), so that a formula can begin with ``a, b, h, s = shape.letters()``."""
        return self.num_attention_heads, self.micro_batch_size, self.hidden_size, self.seq_length

    def with_sizes(self, **sizes: int) -> ModelShape:
        """Return a copy with the named sizes changed, as in ``seq_length=4096``; it is checked like a new shape."""
        return replace(self, **sizes)


#: What ZeRO divides among the data-parallel ranks (1910.02054): nothing, optimizer states, gradients
#: as well, weights as well (FSDP).
ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Parallel:
    """How the devices share the work. Their number is data · context · pipeline · tensor parallel size.

    Args:
        tensor_parallel_size: t, ranks that split each layer's weights.
        sequence_parallel: whether layer norms and dropouts are split along the sequence among the same t ranks.
        pipeline_parallel_size: p, pipeline ranks, each with its share of the layers.
        num_model_chunks: m, the model chunks on each pipeline rank; more than 1 means an interleaved schedule.
        micro_batch_size: b, sequences of a microbatch. Only the planner sets it; a layer's formulas read
            ``ModelShape.micro_batch_size``.
        data_parallel_size: ranks that hold the same weights and read different samples.
        context_parallel_size: ranks that share one sequence in every layer, attention included.
        zero_stage: what ZeRO divides among the data-parallel ranks: 0 nothing, 1 optimizer states, 2 gradients as
            well, 3 weights as well.
        expert_parallel_size: ranks that share the experts, a multiple of t; None: the same t ranks. If it is more than
            t, several tensor-parallel groups share the experts, and each group has tokens of its own.

    Formulas of the paper's layers and stages read only t, p, m and ``sequence_parallel``; those of Llama's layers also
    read context_parallel_size and expert_parallel_size.

    Raises: ConfigError on a size that is no whole number of at least 1 or is too large, on another ``zero_stage``, and
        on sizes that contradict each other, such as several model chunks on one pipeline rank.
    """

    tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_parallel_size: int = 1
    num_model_chunks: int = 1
    micro_batch_size: int = 1
    data_parallel_size: int = 1
    context_parallel_size: int = 1
    zero_stage: int = 1
    expert_parallel_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel"):
            check_size(f"{name}_size", getattr(self, f"{name}_size"), LARGEST_PARALLEL_SIZE)
        check_size("num_model_chunks", self.num_model_chunks, LARGEST_PARALLEL_SIZE)
        check_size("micro_batch_size", self.micro_batch_size)
        check_choice("zero_stage", self.zero_stage, ZERO_STAGES)
        if not isinstance(self.sequence_parallel, bool):
            raise ConfigError("sequence_parallel", f"must be True or False, got {shown(self.sequence_parallel)}")
        t, experts = self.tensor_parallel_size, self.expert_parallel_size
        if experts is not None:
            check_size("expert_parallel_size", experts)
            check_divides("expert_parallel_size", experts, "tensor_parallel_size", t)
            if experts > t and self.sequence_parts < t:
                raise ConfigError("expert_parallel_size", f"{experts} needs sequence parallelism among the {t} ranks")
        if self.num_model_chunks > 1 and self.pipeline_parallel_size == 1:
            raise ConfigError("num_model_chunks", "interleaving needs pipeline_parallel_size of at least 2")

    @property
    def sequence_parts(self) -> int:
        """Number of shards of the sequence outside attention and MLP: t under sequence parallelism, else 1."""
        return self.tensor_parallel_size if self.sequence_parallel else 1

    @property
    def shared(self) -> str:
        """How ranks share a layer: "alone" (t = 1), "tensor", or "sequence" (tensor and sequence parallelism)."""
        return "alone" if self.tensor_parallel_size == 1 else "sequence" if self.sequence_parallel else "tensor"

    @cached_property
    def stage_axes(self) -> Parallel:
        """A copy without data parallelism and ZeRO, on which a pipeline stage's activations don't depend.

        All other sizes stay. The planner uses it as a cache key: layouts that differ only in data parallelism and ZeRO
        have equal copies, so a stage is computed once for all of them.
        """
        t, p, m = self.tensor_parallel_size, self.pipeline_parallel_size, self.num_model_chunks
        c, experts = self.context_parallel_size, self.expert_parallel_size
        return _axes(t, self.sequence_parallel, p, m, self.micro_batch_size, c, experts)

    @cached_property
    def layer_axes(self) -> Parallel:
        """A copy that keeps only the sizes on which one layer's tensors depend, as a cache key for the planner.

        It keeps t, ``sequence_parallel``, b, and the context- and expert-parallel sizes. Every other size gets its
        default. So layouts that differ only in those other sizes have equal copies, and a layer is computed once for
        all of them.
        """
        c, experts = self.context_parallel_size, self.expert_parallel_size
        return _axes(self.tensor_parallel_size, self.sequence_parallel, 1, 1, self.micro_batch_size, c, experts)

    @property
    def num_devices(self) -> int:
        """Number of devices of the whole job."""
        return self.replicas * self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same weights: data · context parallel size.

        ZeRO divides optimizer states, and depending on ``zero_stage`` gradients and weights, among these ranks.
        """
        return self.data_parallel_size * self.context_parallel_size

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that share the experts: ``expert_parallel_size``, or t if that is None."""
        return self.expert_parallel_size or self.tensor_parallel_size

    @property
    def expert_replicas(self) -> int:
        """Number of ranks that hold copies of the same experts: data · context · t / ``expert_ranks``."""
        return self.replicas * self.tensor_parallel_size // self.expert_ranks

    def num_microbatches(self, global_batch_size: int) -> int:
        """Return the microbatches of one step on one data-parallel rank: global batch / (data · b).

        Args:
            global_batch_size: sequences of one step on all ranks together.

        Raises: ConfigError if there is a remainder.
        """
        check_size("global_batch_size", global_batch_size)
        per_pass = self.data_parallel_size * self.micro_batch_size
        if global_batch_size % per_pass:
            sizes = f"data_parallel_size · micro_batch_size = {self.data_parallel_size} · {self.micro_batch_size}"
            raise ConfigError("global_batch_size", f"{global_batch_size} must be divisible by {sizes}")
        return global_batch_size // per_pass


@lru_cache(maxsize=2**12)
def _axes(t: int, sequence_parallel: bool, p: int, m: int, b: int, c: int, experts: int | None) -> Parallel:
    """Return one shared object for all layouts with these sizes, so that caches with it as their
    key find their entry.
    """
    return Parallel(t, sequence_parallel, p, m, b, 1, c, expert_parallel_size=experts)


def check_layer(shape: ModelShape, parallel: Parallel, element_size: int = 2) -> None:
    """Raise ConfigError if t ranks cannot share one layer of this shape, or if context parallelism is asked for.

    t must divide a (a head is never split) and, under sequence parallelism, s. As a divides h, t then divides h and 4h
    too. The paper's layer has no context parallelism.

    Args:
        shape: the sizes of the layer.
        parallel: how the ranks share the layer; t, ``sequence_parallel`` and ``context_parallel_size`` are read.
        element_size: bytes of an activation element, one of ELEMENT_BYTES.
    """
    check_choice("element_size", element_size, ELEMENT_BYTES)
    t, c = parallel.tensor_parallel_size, parallel.context_parallel_size
    if c > 1:
        raise ConfigError("context_parallel_size", f"must be 1, got {c}: the paper's layer has no context parallelism")
    check_divides("num_attention_heads", shape.num_attention_heads, "tensor_parallel_size", t)
    if parallel.sequence_parallel:
        check_divides("seq_length", shape.seq_length, "tensor_parallel_size", t)


@dataclass(frozen=True)
class PaperModel:
    """One row of 2205.05198 table 3: a model, and how the paper trains it.

    Attributes:
        name: "22B", "175B", "530B" or "1T".
        shape: the sizes of the model, with the microbatch.
        parallel: tensor, sequence and pipeline parallelism.
        global_batch_size: sequences of one step on all ranks together.
    """

    name: str
    shape: ModelShape
    parallel: Parallel
    global_batch_size: int


def _model(name: str, a: int, h: int, layers: int, p: int, chunks: int, batch: int, b: int) -> PaperModel:
    shape = ModelShape(2048, b, h, a, num_layers=layers, vocab_size=51200)
    return PaperModel(name, shape, Parallel(8, True, p, chunks), batch)


PAPER_MODELS = {
    model.name: model
    for model in (
        _model("22B", a=64, h=6144, layers=48, p=1, chunks=1, batch=4, b=4),
        _model("175B", a=96, h=12288, layers=96, p=8, chunks=3, batch=64, b=1),
        _model("530B", a=128, h=20480, layers=105, p=35, chunks=3, batch=280, b=1),
        _model("1T", a=160, h=25600, layers=128, p=64, chunks=1, batch=512, b=1),
    )
}

#: Small enough for two processes on a laptop; all sizes differ, so that none can be mistaken for another.
TINY = ModelShape(
    seq_length=128, micro_batch_size=2, hidden_size=256, num_attention_heads=8, num_layers=4, vocab_size=1024
)


def model_shape(model: str) -> ModelShape:
    """Return the sizes of a model by its name.

    Args:
        model: "tiny" for ``TINY``, or the name of one of the paper's models: "22B", "175B", "530B" or "1T".

    Raises: ConfigError on another name.
    """
    check_choice("model", model, ("tiny", *PAPER_MODELS))
    return TINY if model == "tiny" else PAPER_MODELS[model].shape
