"""The layer that a lab measures where nobody names one."""

from argparse import Namespace

import pytest

from actmem.config import PAPER_MODELS, TINY, ConfigError
from actmem_course.lab_tools import machine
from actmem_course.lab_tools.options import described, layer_shapes
from actmem_course.ranks import Ranks

SIZES = dict.fromkeys(("seq_length", "micro_batch_size", "hidden_size", "num_attention_heads"))
LARGE = PAPER_MODELS["22B"].shape


def asked(device, model=None, **sizes):
    return Namespace(device=device, emulate=None, model=model, **{**SIZES, **sizes})


def test_what_is_named_and_a_tiny_one_on_cpus():
    assert layer_shapes(asked("cpu")) == [TINY]
    assert layer_shapes(asked("cuda", model="1T")) == [PAPER_MODELS["1T"].shape]
    assert layer_shapes(asked("cuda", hidden_size=512)) == [TINY.with_sizes(hidden_size=512)]


@pytest.mark.parametrize(("room", "tokens"), [(4096, 2048), (2048, 2048), (600, 512), (256, 256)])
def test_on_gpus_the_22b_layer_with_as_many_tokens_as_fit(room, tokens, monkeypatch):
    """A token needs one byte."""
    monkeypatch.setattr(machine, "memory_bytes", lambda device: room)
    shapes = layer_shapes(asked("cuda"))
    shape = machine.first_that_fits({shape: shape.seq_length for shape in shapes}, asked("cuda"))
    assert shape == LARGE.with_sizes(seq_length=tokens)
    more = f"\nThe 22B model's layer with {tokens} of its 2,048 tokens: more do not fit."
    assert described(shape, Ranks(0, 1, "cpu", False), "float32").endswith(more) == (tokens < 2048)


def test_where_nothing_fits_one_line_says_what_is_needed(monkeypatch):
    monkeypatch.setattr(machine, "memory_bytes", lambda device: 2**30)
    with pytest.raises(ConfigError, match="1 ranks need about 1.5 GiB for real tensors, and there are 1.0 GiB; buy"):
        machine.first_that_fits({LARGE: 3 * 2**29}, asked("cuda"), "buy")
