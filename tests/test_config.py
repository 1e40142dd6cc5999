"""Every bad size is refused in one line that names the argument and the rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actmem.config import (
    LARGEST_SIZE,
    ConfigError,
    ModelShape,
    Parallel,
    check_layer,
    check_vocab_size,
    padded_vocab_size,
)
from actmem.models import PAPER_MODELS, TINY, model_shape
from actmem.recipes import RECOMPUTE_MODES, Recompute
from actmem_course.others import paper

GOOD = dict(seq_length=6, micro_batch_size=2, hidden_size=12, num_attention_heads=3, num_layers=4, vocab_size=10)


@pytest.mark.parametrize(
    "sizes",
    [
        {"seq_length": 2**30, "hidden_size": 3},  # the scores: as²b
        {"seq_length": 2**28, "micro_batch_size": 2**10, "hidden_size": 2**20, "num_attention_heads": 1},
        {"hidden_size": 2**30, "num_attention_heads": 1},  # a weight: 4h²
        {"vocab_size": LARGEST_SIZE, "hidden_size": 2**28 + 1, "num_attention_heads": 1},  # the embedding: vh
    ],
)
def test_tensors_that_no_machine_can_address(sizes):
    with pytest.raises(ConfigError, match="^model shape: one tensor would have .* elements") as error:
        ModelShape(**{**GOOD, **sizes})
    assert "\n" not in str(error.value)


def test_letters_and_copies():
    shape = ModelShape(**GOOD)
    assert shape.letters() == (3, 2, 12, 6)
    assert shape.with_sizes(seq_length=7) == ModelShape(**{**GOOD, "seq_length": 7})
    assert shape.head_size == 4
    with pytest.raises(ConfigError, match="^hidden_size: 13 must be divisible by num_attention_heads = 3$"):
        shape.with_sizes(hidden_size=13)
    with pytest.raises(AttributeError):
        shape.seq_length = 8  # type: ignore[misc]  # frozen


@given(a=st.integers(1, 12), s=st.integers(1, 24), t=st.integers(1, 8), sequence=st.booleans())
def test_a_layer_is_shared_only_where_every_cut_is_even(a, s, t, sequence):
    shape = ModelShape(s, 1, 5 * a, a)
    if a % t:
        rule = f"num_attention_heads: {a} must be divisible by tensor_parallel_size = {t}"
    elif sequence and s % t:
        rule = f"seq_length: {s} must be divisible by tensor_parallel_size = {t}"
    else:
        check_layer(shape, Parallel(t, sequence))
        assert shape.hidden_size % t == 0
        return
    with pytest.raises(ConfigError) as error:
        check_layer(shape, Parallel(t, sequence))
    assert str(error.value) == rule


def test_a_mode_knows_its_region_and_its_end():
    modes = [Recompute.of(name) for name in RECOMPUTE_MODES]
    assert [mode.name for mode in modes] == list(RECOMPUTE_MODES)
    assert [(mode.region, mode.stop_early) for mode in modes] == [
        ("none", False), ("core", True), ("terms", True), ("layer", True), ("core", False), ("layer", False),
    ]  # fmt: skip
    assert all(Recompute.of(mode) is mode for mode in modes)
    with pytest.raises(AttributeError):
        modes[0].region = "layer"  # type: ignore[misc]  # frozen


def test_the_papers_models():
    assert model_shape("tiny") is TINY
    assert {name: model.num_devices for name, model in PAPER_MODELS.items()} == paper.TABLE3_DEVICES
    for name, model in PAPER_MODELS.items():
        assert model_shape(name) is model.shape
        check_layer(model.shape, model.parallel)
        chunks = model.parallel.pipeline_parallel_size * model.parallel.num_model_chunks
        assert model.shape.num_layers % chunks == 0
        assert model.global_batch_size % model.shape.micro_batch_size == 0


def test_padded_vocabulary():
    assert padded_vocab_size(50257, 4) == 50688 and padded_vocab_size(50257, 1) == 50304
    assert padded_vocab_size(51200, 8) == 51200 and padded_vocab_size(10, 3, multiple=1) == 12
    assert check_vocab_size(50688, 4) == 12672
