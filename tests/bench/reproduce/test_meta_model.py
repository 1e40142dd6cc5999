"""torch's FLOP counter on the real GPT: equation 7, full recomputation and what selective really adds."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from actmem.config import ModelShape
from actmem.formulas.flops import eq7, eq8, hardware_flops, text_selective
from actmem.formulas.states import num_parameters, parameter_counts
from actmem.layers.gpt import GPT
from actmem.measure.emulate import emulated_rank
from actmem.models import PAPER_MODELS
from actmem.parallel.groups import tensor_parallel
from actmem.recipes import RECOMPUTE_MODES
from actmem_course.bench.reproduce.paper_stage import count_flops, count_iteration, count_parameters

SHAPE = ModelShape(16, 2, 48, 8, num_layers=3, vocab_size=40)


@pytest.mark.parametrize("recompute", RECOMPUTE_MODES)
def test_every_mode_on_a_small_model(recompute):
    assert sum(count_flops(SHAPE, recompute).values()) == hardware_flops(SHAPE, 2, recompute)


def test_recomputation_on_a_whole_model():
    """Full is exact; selective is what the text says, which is not equation 8."""
    shape, batch = PAPER_MODELS["22B"].shape, PAPER_MODELS["22B"].global_batch_size
    s, h, layers = shape.seq_length, shape.hidden_size, shape.num_layers
    counted = {mode: sum(count_iteration("22B", mode).values()) for mode in RECOMPUTE_MODES[1:]}
    model_flops, forward = eq7(shape, batch), 24 * batch * s * h * h + 4 * batch * s * s * h
    assert counted["paper-full"] == model_flops + layers * forward
    assert counted["full"] == model_flops + layers * (forward - 8 * batch * s * h * h)
    assert counted["paper-selective"] == model_flops + 4 * batch * layers * s * s * h == text_selective(shape, batch)
    assert counted["selective"] == model_flops + 2 * batch * layers * s * s * h
    assert counted["paper-selective"] < eq8(shape, batch)


@pytest.mark.parametrize("recompute", RECOMPUTE_MODES)
def test_an_emulated_rank_runs_its_share(recompute):
    """No product is run twice or left out by the cut: t ranks together run what one device runs."""
    with emulated_rank(8):
        model = GPT(SHAPE, tensor_parallel(sequence_parallel=True), recompute=recompute)
        tokens = torch.zeros(2, 16, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model.loss(model(tokens), tokens).backward()
    assert 8 * counter.get_total_flops() == sum(count_flops(SHAPE, recompute).values())


@pytest.mark.parametrize("name", PAPER_MODELS)
def test_parameters(name):
    model = PAPER_MODELS[name]
    assert count_parameters(name) == (
        num_parameters(model.shape),
        sum(parameter_counts(model.shape, model.parallel).values()),
    )
