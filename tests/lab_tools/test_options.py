"""The layer that a lab measures where nobody names one."""

from argparse import Namespace

import pytest

from actmem.config import PAPER_MODELS, TINY, ConfigError
from actmem_course.lab_tools.options import layer_shape, shortened

SIZES = dict.fromkeys(("seq_length", "micro_batch_size", "hidden_size", "num_attention_heads"))


def asked(device, model=None, **sizes):
    return Namespace(device=device, model=model, **{**SIZES, **sizes})


def at_most(tokens):
    """A card with room for so many tokens."""

    def check(shape):
        if shape.seq_length > tokens:
            raise ConfigError("model shape", "too large")

    return check


def test_the_22b_layer_on_gpus_and_a_tiny_one_on_cpus():
    assert layer_shape(asked("cpu"), at_most(4096)) == TINY
    assert layer_shape(asked("cuda"), at_most(4096)) == PAPER_MODELS["22B"].shape
    assert shortened(PAPER_MODELS["22B"].shape) == shortened(TINY) == ""


def test_a_small_card_gets_fewer_tokens_and_is_told():
    shape = layer_shape(asked("cuda"), at_most(600))
    assert shape == PAPER_MODELS["22B"].shape.with_sizes(seq_length=512)
    assert shortened(shape) == "The 22B model's layer with 512 of its 2,048 tokens: more do not fit."


@pytest.mark.parametrize("named", [asked("cuda", model="1T"), asked("cuda", hidden_size=8192), asked("cpu")])
def test_what_was_named_is_measured_or_refused(named):
    with pytest.raises(ConfigError, match="model shape: too large"):
        layer_shape(named, at_most(100))


def test_a_rule_that_fewer_tokens_cannot_meet_is_refused():
    def check(shape):
        raise ConfigError("num_attention_heads", "must be divisible")

    with pytest.raises(ConfigError, match="num_attention_heads"):
        layer_shape(asked("cuda"), check)
