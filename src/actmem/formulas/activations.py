"""Activation bytes of one transformer layer: equations 1, 2 and 4, table 2, and what the paper leaves out.

``layer_rows`` lists each saved tensor by name.  ``layer_bytes`` computes the total from equations 1, 2 and 4, without
these rows, so that the two check each other.  The equations don't cover tensors dropped one by one (*elementwise*, or a
set of names); for these ``layer_bytes`` sums the rows.
``layer_extra_rows`` lists what a real layer saves and the paper does not count, each row with its reason.  Every value
is an exact integer.

``e`` is the size of one activation element in bytes: 2 for float16 and bfloat16, which gives
the paper's coefficients, 4 for float32.  Dropout masks take 1 byte an element for every e.
"""

from dataclasses import dataclass

from actmem.config import ELEMENT_BYTES, ModelShape, Parallel, check_choice, check_layer, check_sizes
from actmem.recipes import PAPER_LAYER, Mode, Recompute
from actmem.rows import LAYER_TERMS, Row, on_device, total

#: Terms inside the core attention: selective recomputation drops them.
CORE_ATTENTION_TERMS = tuple(term for term in LAYER_TERMS if term in PAPER_LAYER.core)


def layer_rows(
    shape: ModelShape, parallel: Parallel = Parallel(), recompute: Mode = "none", element_size: int = 2
) -> list[Row]:
    """List the tensors that one layer saves for backward on one rank, one row each.

    Args:
        shape: the sizes of the layer and of one microbatch.
        parallel: how the ranks share the layer; only t and ``sequence_parallel`` are read.
        recompute: a mode's name such as "selective", a set of tensors' names to drop, or a dict from names to actions
            such as "offload".
        element_size: bytes of an activation element.

    Returns: up to 15 rows in the order of the forward pass; 12 under selective, 7 under elementwise and 1 under full
        recomputation, which saves only the layer's input. Offloaded tensors are left out; ``rows.on_host`` lists them.
    Raises: ConfigError if t does not divide a, or under sequence parallelism s; and if a named tensor can't be
        recomputed.
    Source: 2205.05198 sections 4.1, 4.2 and 5.
    """
    check_layer(shape, parallel, element_size)
    a, b, h, s = shape.letters()
    e = element_size
    t = parallel.tensor_parallel_size
    # Tensor parallelism leaves these whole; sequence parallelism splits them along s.
    cut = parallel.sequence_parts
    sbh, scores = s * b * h, a * s * s * b

    # In 16 bits without parallelism, in sbh: 2 for the first norm and 2 for its output; 2 each for Q, K and V; 2 + 1
    # for the projection and its mask; 2 for the second norm and 2 for its output; 8 for GeLU; 8 + 1 for the last
    # matmul and its mask: 34.  The three softmax rows are 2 + 1 + 2 of as²b: 5as²b.
    rows = [
        Row("layer-norm 1 input", e * sbh // cut, cut, "§4.1, layer norm"),
        Row("QKV projection input", e * sbh // cut, cut, "§4.1, Q, K, V matmuls"),
        Row("Q", e * sbh // t, t, "§4.1, QKᵀ"),
        Row("K", e * sbh // t, t, "§4.1, QKᵀ"),
        Row("softmax output", e * scores // t, t, "§4.1, softmax"),
        Row("softmax dropout mask", scores // t, t, "§4.1, softmax dropout"),
        Row("softmax dropout output", e * scores // t, t, "§4.1, attention over V"),
        Row("V", e * sbh // t, t, "§4.1, attention over V"),
        Row("attention projection input", e * sbh // t, t, "§4.1, linear projection"),
        Row("attention dropout mask", sbh // cut, cut, "§4.1, attention dropout"),
        Row("layer-norm 2 input", e * sbh // cut, cut, "§4.1, layer norm"),
        Row("h→4h input", e * sbh // cut, cut, "§4.1, MLP"),
        Row("GeLU input", 4 * e * sbh // t, t, "§4.1, MLP"),
        Row("4h→h input", 4 * e * sbh // t, t, "§4.1, MLP"),
        Row("MLP dropout mask", sbh // cut, cut, "§4.1, MLP"),
    ]
    return on_device(rows, PAPER_LAYER, recompute, element_size)


def eq1(shape: ModelShape, element_size: int = 2) -> int:
    """Predict the activation bytes of one layer without parallelism: sbh(34 + 5as/h) in 16 bits.

    Args:
        shape: the sizes of the layer and of one microbatch.
        element_size: e, bytes of an activation element: 2, 4 or 8.

    Source: 2205.05198 eq. 1.
    """
    check_choice("element_size", element_size, ELEMENT_BYTES)
    a, b, h, s = shape.letters()
    e = element_size
    return (16 * e + 2) * s * b * h + (2 * e + 1) * a * s * s * b


def eq2(shape: ModelShape, tensor_parallel_size: int, element_size: int = 2) -> int:
    """Predict the activation bytes of one layer on one of t tensor-parallel ranks.

    In 16 bits they are sbh(10 + 24/t + 5as/(ht)).

    Args:
        shape: the sizes of the layer and of one microbatch.
        tensor_parallel_size: t.
        element_size: e, bytes of an activation element: 2, 4 or 8.

    Source: 2205.05198 eq. 2.
    """
    check_layer(shape, Parallel(tensor_parallel_size), element_size)
    a, b, h, s = shape.letters()
    e, t = element_size, tensor_parallel_size
    return (4 * e + 2) * s * b * h + (12 * e * s * b * h + (2 * e + 1) * a * s * s * b) // t


def eq4(shape: ModelShape, tensor_parallel_size: int, element_size: int = 2) -> int:
    """Predict the activation bytes of one layer on one of t sequence-parallel ranks: (sbh/t)(34 + 5as/h) in 16 bits.

    Args:
        shape: the sizes of the layer and of one microbatch.
        tensor_parallel_size: t.
        element_size: e, bytes of an activation element: 2, 4 or 8.

    Source: 2205.05198 eq. 4.
    """
    check_layer(shape, Parallel(tensor_parallel_size, sequence_parallel=True), element_size)
    return eq1(shape, element_size) // tensor_parallel_size


def layer_bytes(
    shape: ModelShape, parallel: Parallel = Parallel(), recompute: Mode = "none", element_size: int = 2
) -> int:
    """Predict the bytes that one layer saves on one rank, in any mode of recomputation.

    Equations 1, 2 and 4 give the bytes in the modes of table 2. For tensors dropped one by one the bytes are the sum of
    ``layer_rows``.

    Args:
        shape: the sizes of the layer and of one microbatch.
        parallel: how the ranks share the layer; only t and ``sequence_parallel`` are read.
        recompute: a mode's name such as "selective", a set of tensors' names to drop, or a dict from names to actions
            such as "offload".
        element_size: bytes of an activation element: 2, 4 or 8.
    """
    check_layer(shape, parallel, element_size)
    region = Recompute.of(recompute).region
    a, b, h, s = shape.letters()
    e, t = element_size, parallel.tensor_parallel_size
    if region == "layer":
        return e * s * b * h // parallel.sequence_parts
    if region == "terms":
        return total(layer_rows(shape, parallel, recompute, e))
    core = (2 * e + 1) * a * s * s * b // t if region == "core" else 0
    return (eq4(shape, t, e) if parallel.sequence_parallel else eq2(shape, t, e)) - core


def gathered_input_bytes(shape: ModelShape, tensor_parallel_size: int, element_size: int = 2) -> int:
    """Predict the bytes that the plain form of sequence parallelism saves beyond eq. 4: 4sbh(1 − 1/t) in 16 bits.

    In the plain form an ordinary linear follows an all-gather, so every rank saves the gathered input of both
    column-parallel linears, and eq. 4's 34/t becomes 30/t + 4. 2205.05198 section 4.2.2 saves the shard instead and
    gathers it again in backward.

    Args:
        shape: the sizes of the layer and of one microbatch.
        tensor_parallel_size: t.
        element_size: e, bytes of an activation element.
    """
    check_layer(shape, Parallel(tensor_parallel_size, sequence_parallel=True), element_size)
    _, b, h, s = shape.letters()
    e, t = element_size, tensor_parallel_size
    return 2 * e * (s * b * h - s * b * h // t)


def crossover_seq_length(hidden_size: int, num_attention_heads: int) -> float:
    """Return the s, in tokens, above which the attention scores save more than the rest of the layer: 34h/(5a).

    In 16 bits the scores save 5as²b bytes and the rest 34sbh.

    Args:
        hidden_size: h, elements of one token's activation.
        num_attention_heads: a.
    """
    check_sizes(hidden_size=hidden_size, num_attention_heads=num_attention_heads)
    return 34 * hidden_size / (5 * num_attention_heads)


#: Bytes of one saved random-number state.  CPU: the Mersenne Twister's, as torch stores it.
#: CUDA: Philox keeps an 8-byte seed and an 8-byte offset.
RNG_STATE_BYTES = {"cpu": 5056, "cuda": 16}

STATISTICS_REASON = "mean and 1/deviation of each token; the paper ignores 2sb beside sbh (§4)"
MASK_REASON = "s×s, one for all heads and samples: the second run needs it again, backward itself does not"
RNG_REASON = "the random-number state that lets the second run draw the same dropout"


def statistics_row(term: str, shape: ModelShape, parallel: Parallel, element_size: int, device_type: str) -> Row:
    """Return the row of what one layer norm saves besides its input: two numbers a token.

    Args:
        term: the row's name.
        shape: the sizes of the layer.
        parallel: how the ranks share it; t and ``sequence_parallel`` are read.
        element_size: bytes of an activation element, and on a CPU of each number.
        device_type: "cpu" or "cuda". On CUDA the numbers have at least 4 bytes.

    Raises: ConfigError on another device type than "cpu" and "cuda".
    """
    check_choice("device_type", device_type, RNG_STATE_BYTES)
    size, cut = max(element_size, 4) if device_type == "cuda" else element_size, parallel.sequence_parts
    return Row(term, 2 * shape.seq_length * shape.micro_batch_size * size // cut, cut, "layer norm", STATISTICS_REASON)


def layer_extra_rows(
    shape: ModelShape,
    parallel: Parallel = Parallel(),
    recompute: Mode = "none",
    element_size: int = 2,
    device_type: str = "cpu",
) -> list[Row]:
    """List the tensors that a real layer saves on one rank and the paper does not count.

    Args:
        shape: the sizes of the layer and of one microbatch.
        parallel: how the ranks share the layer; only t and ``sequence_parallel`` are read.
        recompute: a mode's name such as "selective", a set of tensors' names to drop, or a dict from names to actions
            such as "offload".
        element_size: bytes of an activation element.
        device_type: "cpu" or "cuda".

    Returns: rows, each with its reason in ``extra``:
        the layer-norm statistics, on a CPU in the activations' dtype, on CUDA in float32;
        the causal mask, 1 byte an element, if backward recomputes the softmax;
        random-number states: one if the core attention is recomputed as a region, two if the whole layer is, because it
        has two dropout generators. A dropout mask recomputed on its own needs no state: its recipe holds the seed.
    Raises: ConfigError if t ranks can't share the layer, and on another device type.
    """
    check_layer(shape, parallel, element_size)
    region, s = Recompute.of(recompute).region, shape.seq_length
    rows = [statistics_row(term, shape, parallel, element_size, device_type) for term in PAPER_LAYER.statistics]
    rng = RNG_STATE_BYTES[device_type]
    if region == "layer":
        return [Row("random-number state", 2 * rng, 1, "checkpoint of the layer", RNG_REASON)]
    dropped = PAPER_LAYER.dropped(recompute)
    rows = [row for row in rows if row.term not in dropped]
    if "softmax output" in dropped:
        rows.append(Row("causal mask", s * s, 1, "softmax run again", MASK_REASON))
    if region == "core":
        rows.append(Row("random-number state", rng, 1, "checkpoint of the core attention", RNG_REASON))
    return rows


@dataclass(frozen=True)
class Configuration:
    """One row of 2205.05198 table 2.

    Attributes:
        name: the row's name in the labs' JSON files.
        tensor_parallel: False for the row without any parallelism.
        sequence_parallel: whether the t ranks also split the sequence.
        recompute: a mode's name: "none", "selective", "elementwise" or "full".
        template: the formula, with placeholders for the coefficients that depend on the element size.
    """

    name: str
    tensor_parallel: bool
    sequence_parallel: bool
    recompute: str
    template: str

    def formula(self, element_size: int = 2) -> str:
        """Return the formula of the bytes divided by sbh as text, such as "34/t + 5as/ht" for 16-bit elements.

        Args:
            element_size: e, bytes of an activation element.
        """
        e = element_size
        return self.template.format(all=16 * e + 2, whole=4 * e + 2, cut=12 * e, core=2 * e + 1, own=10 * e, input=e)

    def parallel(self, tensor_parallel_size: int) -> Parallel:
        """Return how t ranks share the layer in this row: all t of them, or a single rank in the row "none"."""
        t = tensor_parallel_size if self.tensor_parallel else 1
        return Parallel(tensor_parallel_size=t, sequence_parallel=self.sequence_parallel)


TABLE2 = (
    Configuration("none", False, False, "none", "{all} + {core}as/h"),
    Configuration("tensor", True, False, "none", "{whole} + {cut}/t + {core}as/ht"),
    Configuration("tensor+sequence", True, True, "none", "{all}/t + {core}as/ht"),
    Configuration("tensor+selective", True, False, "selective", "{whole} + {cut}/t"),
    Configuration("tensor+sequence+selective", True, True, "selective", "{all}/t"),
    Configuration("full", True, False, "full", "{input}"),
)
#: A row that the paper doesn't have: what needs no matmul is recomputed, dropout masks too.
ELEMENTWISE = Configuration("tensor+sequence+elementwise", True, True, "elementwise", "{own}/t")


def closed_form(
    configuration: Configuration, shape: ModelShape, tensor_parallel_size: int, element_size: int = 2
) -> int:
    """Predict the bytes of one layer on one rank by the formula of a row of table 2, not by a sum over tensors.

    Args:
        configuration: a row of ``TABLE2``; or ``ELEMENTWISE``, for which there is only the sum over tensors.
        shape: the sizes of the layer and of one microbatch.
        tensor_parallel_size: t; the row "none" ignores it.
        element_size: e, bytes of an activation element: 2, 4 or 8.
    """
    parallel = configuration.parallel(tensor_parallel_size)
    return layer_bytes(shape, parallel, configuration.recompute, element_size)
