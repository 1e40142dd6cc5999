"""Random layer shapes for property tests: small, odd, and valid; and today's models in small sizes."""

from hypothesis import strategies as st

from actmem.config import ModelShape, Parallel
from actmem_more.llama_shape import LlamaShape


@st.composite
def shapes(draw, divisible_by: int = 1):
    """A ModelShape whose heads and sequence are divisible by ``divisible_by``."""
    a = divisible_by * draw(st.integers(1, 4))
    return ModelShape(
        seq_length=divisible_by * draw(st.integers(1, 12)),
        micro_batch_size=draw(st.integers(1, 4)),
        hidden_size=a * draw(st.integers(1, 12)),
        num_attention_heads=a,
    )


def decoder(h, f, num_layers, a, k, vocab_size, s=64, b=1, **options):
    """A model of today, small as a test wants it."""
    return LlamaShape(s, b, h, a, k, f, num_layers=num_layers, vocab_size=vocab_size, **options)


@st.composite
def layer_cuts(draw):
    """(shape, parallel): a layer that t ranks can share."""
    t = draw(st.sampled_from([1, 2, 3, 4, 8]))
    a = t * draw(st.integers(1, 4))
    shape = ModelShape(
        seq_length=t * draw(st.integers(1, 40)),
        micro_batch_size=draw(st.integers(1, 5)),
        hidden_size=a * draw(st.integers(1, 20)),
        num_attention_heads=a,
        vocab_size=t * draw(st.integers(1, 100)),
    )
    return shape, Parallel(t, draw(st.booleans()))


@st.composite
def model_cuts(draw):
    """(shape, parallel, num_microbatches): a whole model with p and m that fit it."""
    shape, layer = draw(layer_cuts())
    p = draw(st.integers(1, 5))
    m = draw(st.integers(1, 3)) if p > 1 else 1
    n = draw(st.integers(1, 4)) * p if m > 1 else draw(st.integers(1, 12))
    shape = shape.with_sizes(num_layers=p * m * draw(st.integers(1, 3)))
    return shape, Parallel(layer.tensor_parallel_size, layer.sequence_parallel, p, m), n
