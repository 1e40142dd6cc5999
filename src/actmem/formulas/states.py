"""Bytes of parameters, gradients and optimizer state on one rank, which 2205.05198 figure 1 shows beside activations.

Counted for this course's GPT: biases on all four linears of a layer, layer norms with scale and
shift, learned positions, and a word embedding that the output layer shares.
"""

from dataclasses import dataclass

from actmem.config import ConfigError, ModelShape, Parallel, shown
from actmem.formulas.stages import check_stage, layers_per_chunk
from actmem.rows import Row


@dataclass(frozen=True)
class State:
    """One kind of training state, such as gradients or Adam's first moment, and its bytes for each parameter.

    Attributes:
        term: the state's name, such as "Adam first moment".
        bytes_per_parameter: bytes for each parameter; if ``parameters`` is more than 1, for each block of parameters.
        reason: a phrase that says why training needs this state, for the row's ``source``.
        parameters: how many parameters share these bytes; more than 1 for the scale of a block of 8-bit values, say.
    """

    term: str
    bytes_per_parameter: int
    reason: str
    parameters: int = 1

    def bytes_of(self, count: int) -> int:
        """Return the bytes of this state for a model of ``count`` parameters."""
        return self.bytes_per_parameter * -(-count // self.parameters)


_WEIGHTS = State("parameters", 2, "16-bit weights: what forward and backward multiply with")
_MASTER = (
    State("float32 parameters", 4, "steps are too small for 16 bits: the optimizer keeps its own copy"),
    State("Adam first moment", 4, "running mean of the gradient, float32"),
    State("Adam second moment", 4, "running mean of its square, float32"),
)

_GRADIENTS = State("gradients", 2, "16-bit, as backward makes them")

#: What mixed-precision Adam keeps for one parameter.  The paper does not say which.  18 bytes is
#: Megatron's with gradients added up in float32, and ours with ``actmem.main_grad``; 20 is its
#: form with 16-bit gradients, which are copied to float32 for the step (its guide on the
#: distributed optimizer); 16 is the count of 1910.02054, which leaves that copy out.
ADAM = {
    "float32 gradients": (_WEIGHTS, State("gradients", 4, "microbatches are added up in float32"), *_MASTER),
    "16-bit gradients": (_WEIGHTS, _GRADIENTS, State("float32 gradients", 4, "a copy for the step"), *_MASTER),
    "16-bit gradients, no copy": (_WEIGHTS, _GRADIENTS, *_MASTER),
}


def parameter_counts(shape: ModelShape, parallel: Parallel = Parallel(), pipeline_rank: int = 0) -> dict[str, int]:
    """Count the parameters on one rank by kind, in elements.

    Weights and biases that are sharded over the ranks: (12h² + 7h)/t a layer. Replicated on every rank: 6h a layer (two
    layer norms, and the biases after the two row-parallel matmuls). The word embedding has v/t rows of h; with p > 1
    the last rank holds a second copy for the output layer.

    Args:
        shape: the sizes of the whole model.
        parallel: how the ranks share the model; only t, p and m are read.
        pipeline_rank: the rank's place in the pipeline, from 0 to p − 1.

    Returns: elements of "layer weights", "layer biases, cut" (those that are sharded), "layer biases, whole" (those
        that are replicated), "layer norms", "word embedding" and "positions".
    Raises: ConfigError if a or v is not divisible by t, or L by p·m.
    """
    check_stage(shape, parallel, pipeline_rank)
    _, _, h, s = shape.letters()
    t, p = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    layers = layers_per_chunk(shape, parallel) * parallel.num_model_chunks
    first, last = pipeline_rank == 0, pipeline_rank == p - 1
    return {
        "layer weights": layers * (3 * h * h + h * h + 4 * h * h + 4 * h * h) // t,
        "layer biases, cut": layers * (3 * h + 4 * h) // t,
        "layer biases, whole": layers * (h + h),
        "layer norms": layers * 4 * h + (2 * h if last else 0),
        "word embedding": shape.vocab_size * h // t if first or last else 0,
        "positions": s * h if first else 0,
    }


def num_parameters(shape: ModelShape) -> int:
    """Count the parameters of the whole model: L(12h² + 13h) + (v + s + 2)h."""
    h, layers = shape.hidden_size, shape.num_layers
    return layers * (12 * h * h + 13 * h) + (shape.vocab_size + shape.seq_length + 2) * h


def state_rows(
    shape: ModelShape, parallel: Parallel = Parallel(), pipeline_rank: int = 0, adam: str = "float32 gradients"
) -> list[Row]:
    """List the bytes of parameters, gradients and optimizer state on one rank, without data parallelism.

    Args:
        shape: the sizes of the whole model.
        parallel: how the ranks share the model; only t, p and m are read.
        pipeline_rank: the rank's place in the pipeline, from 0 to p − 1.
        adam: which copies of weights and gradients mixed-precision Adam keeps, and in which dtype: "float32 gradients"
            (18 bytes a parameter), "16-bit gradients" (20) or "16-bit gradients, no copy" (16).

    Returns: one Row for each state.
    Source: 2205.05198 figure 1.
    """
    if adam not in [*ADAM]:
        raise ConfigError("adam", f"must be one of {'; '.join(ADAM)}, got {shown(adam)}")
    count = sum(parameter_counts(shape, parallel, pipeline_rank).values())
    t = parallel.tensor_parallel_size
    return [
        Row(state.term, state.bytes_per_parameter * count, t, f"{state.bytes_per_parameter} B each: {state.reason}")
        for state in ADAM[adam]
    ]
