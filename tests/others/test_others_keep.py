"""What other implementations of a Llama layer save: our own rows are the formulas', Hugging Face's are chapter 9's layer."""

import pytest

from actmem.rows import total
from actmem_course.figures.ch09_your_model import WRITTEN, saved_bytes
from actmem_course.others.others_keep import bytes_of_other
from actmem_more.llama_shape import LLAMA_MODELS
from actmem_more.llama_terms import llama_rows

LLAMA = LLAMA_MODELS["llama3-8b"]


@pytest.mark.parametrize("name, mode", [("ours", "none"), ("ours, elementwise", "elementwise")])
def test_ours_are_the_rows_of_the_layer(name, mode):
    assert bytes_of_other(name, LLAMA) == total(llama_rows(LLAMA, recompute=mode))


def test_hugging_faces_are_plain_operators_without_copies_of_keys_and_with_the_rotations_tables():
    keys_and_values = 4 * LLAMA.seq_length * LLAMA.micro_batch_size * LLAMA.key_value_size
    copies = LLAMA.num_attention_heads // LLAMA.num_key_value_heads
    plain = saved_bytes(LLAMA, WRITTEN) - (copies - 1) * keys_and_values
    assert bytes_of_other("Hugging Face Llama, sdpa", LLAMA) == plain + 4 * LLAMA.seq_length * LLAMA.d
