"""Random layer shapes for property tests: small, odd, and valid."""

from hypothesis import strategies as st

from actmem.config import ModelShape


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
