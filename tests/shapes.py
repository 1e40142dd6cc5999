"""Random layer shapes for property tests: small, odd, and valid; and today's models in small sizes."""

from hypothesis import strategies as st

from actmem.config import ModelShape
from actmem.llama_shape import LlamaShape


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
