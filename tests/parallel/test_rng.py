"""Dropout: the right share dropped, the mean kept, streams apart, gradients through the same mask."""

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from actmem.config import ConfigError, ModelShape
from actmem.drop import NamedForward
from actmem.layers.gpt import GPT
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.recorder import record
from actmem.parallel.groups import TensorParallel
from actmem.parallel.rng import DropoutMask, DropoutStreams
from actmem.recipes import RECOMPUTE_MODES
from actmem.recompute import checkpoint

SHAPE = ModelShape(8, 2, 24, 4)


def stream(seed=1):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_dropped(p):
    x = torch.ones(401, 503)  # not a multiple of the four decisions of one draw
    y = DropoutMask(p, stream())(x).apply(x)
    dropped = y == 0
    # Six standard deviations of a fair mask, everywhere and in each of the four places of a draw.
    for part in (dropped.flatten(), *(dropped.flatten()[i::4] for i in range(4))):
        assert abs(part.double().mean().item() - p) < 6 * (p * (1 - p) / part.numel()) ** 0.5 + 2**-17
    kept = y[~dropped]
    assert (kept == kept[0]).all() and abs(kept[0].item() - 1 / (1 - p)) < 1e-3
    assert abs(y.double().mean().item() - 1) < 6 * (p / (1 - p) / y.numel()) ** 0.5


def test_gradient_passes_through_the_mask_of_the_forward():
    x = torch.randn(40, 9, dtype=torch.float64, requires_grad=True)
    mask = DropoutMask(0.3, stream())(x)
    y = mask.apply(x)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad * x.detach(), y.detach(), rtol=1e-15, atol=0)


def test_backward_lets_go_of_the_mask_while_the_output_lives():
    x = torch.randn(40, 9, requires_grad=True)
    mask = DropoutMask(0.3, stream())(x)
    kept = StorageWeakRef(mask._mask.untyped_storage())
    y = mask.apply(x)
    y.backward(torch.ones_like(y), retain_graph=True)
    first, x.grad = x.grad, None
    assert not kept.expired()
    y.backward(torch.ones_like(y))
    assert torch.equal(x.grad, first) and kept.expired()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward(torch.ones_like(y))


def test_a_mask_drawn_without_gradients_serves_a_forward_with_them():
    x = torch.ones(64, requires_grad=True)
    with torch.no_grad():
        mask = DropoutMask(0.5, torch.Generator().manual_seed(3))(x)
    dropped = mask.apply(x)
    dropped.sum().backward()
    assert torch.equal(x.grad, dropped)


def test_what_needs_no_gradient_gets_none_by_its_dropout():
    x = torch.randn(40, 9)
    mask = DropoutMask(0.3, stream())(x)
    kept = StorageWeakRef(mask._mask.untyped_storage())
    assert not mask.apply(x).requires_grad
    del mask
    assert kept.expired()


@pytest.mark.parametrize("mask", [DropoutMask(0.0, stream()), DropoutMask(0.5, stream()).eval()])
def test_no_dropout_draws_keeps_and_changes_nothing(mask):
    x, before = torch.randn(3, requires_grad=True), mask.generator.get_state()
    assert mask(x).apply(x) is x and torch.equal(mask.generator.get_state(), before)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("recompute", RECOMPUTE_MODES)
def test_a_layer_in_eval_drops_nothing(recompute):
    layer, without = (TransformerLayer(SHAPE, recompute=recompute, p=p, seed=3) for p in (0.5, 0.0))
    x = torch.randn(8, 2, 24, requires_grad=True)
    with record(layer) as ledger:
        y = layer.eval()(x)
    assert not any(saved.dtype is torch.bool and "dropout" in saved.module for saved in ledger.saved)
    assert torch.equal(y, without(x))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.autograd.grad(without(x).sum(), x)[0])
    assert not torch.equal(layer.train()(x), y)


@pytest.mark.parametrize("p", [0.5, 0.0])
def test_a_mask_drops_once(p):
    x = torch.ones(40)
    mask = DropoutMask(p, stream())(x)
    mask.apply(x)
    with pytest.raises(RuntimeError, match="apply: this mask has been used"):
        mask.apply(x)


def test_default_layers_drop_differently_and_alike_under_one_seed():
    def mask():
        return TransformerLayer(SHAPE).attention_dropout(torch.empty(8, 2, 24))._mask

    torch.manual_seed(4)
    first, second = mask(), mask()
    torch.manual_seed(4)
    assert torch.equal(first, mask()) and not torch.equal(first, second)


def test_a_dropped_mask_needs_a_generator_whose_state_can_be_read():
    like = torch.empty(8, 2, device="meta")  # goes where a GPU's tensors go
    with pytest.raises(ConfigError, match="^generator: must be given to draw 'mask' again$"):
        DropoutMask(0.5, None)(like, NamedForward(frozenset({"mask"})))


def draw(generator):
    return tuple(torch.rand(8, generator=generator).tolist())


def test_ranks_draw_alike_what_is_replicated_and_no_two_streams_meet():
    """Of many seeds: sums of a seed and a rank would meet."""
    draws = set()
    for seed in range(1_100):
        streams = [DropoutStreams(seed, TensorParallel(size=2, rank=rank)) for rank in (0, 1)]
        (replicated,) = {draw(one.replicated) for one in streams}
        draws |= {replicated, *(draw(one.sharded) for one in streams)}
    assert len(draws) == 3 * 1_100


def test_no_two_streams_of_4096_ranks_meet_in_the_32_bits_that_a_cpu_uses():
    """Of hashes of this seed, the name "dropout" and the rank two would meet."""
    streams = [DropoutStreams(49, TensorParallel(size=4096, rank=rank)) for rank in range(4096)]
    seeds = {one.sharded.initial_seed() % 2**32 for one in streams}
    assert len(seeds | {streams[0].replicated.initial_seed() % 2**32}) == 4096 + 1


@pytest.mark.parametrize("seed", [1234, 1234 + 7919])  # the second: once the seed of the first's layer 1
def test_stages_of_a_model_draw_different_masks(seed):
    shape = SHAPE.with_sizes(vocab_size=32, num_layers=2)
    parts: list[Any] = [GPT(shape, layers=range(i, i + 1), seed=one) for i, one in ((0, seed), (1, 1234))]
    first, second = (next(iter(part.layers.values())).streams for part in parts)
    assert draw(first.replicated) != draw(second.replicated) and draw(first.sharded) != draw(second.sharded)


@pytest.mark.parametrize("recompute", RECOMPUTE_MODES)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_that_would_draw_other_masks_is_refused(recompute, use_reentrant):
    layer, x = TransformerLayer(SHAPE, recompute=recompute, p=0.5, seed=3), torch.randn(8, 2, 24, requires_grad=True)
    around = [
        lambda x: torch_checkpoint(layer, x, use_reentrant=use_reentrant),
        lambda x: checkpoint(layer, x),
        lambda x: checkpoint(layer, x, generators=[layer.streams.replicated]),
    ]
    for run in around:
        with pytest.raises(
            RuntimeError, match="^(dropout|TransformerLayer._forward|CoreAttention): a checkpoint around it"
        ):
            run(x).sum().backward()
    x.grad = None
    layer, same = (TransformerLayer(SHAPE, recompute=mode, p=0.5, seed=3) for mode in (recompute, "none"))
    checkpoint(layer, x, generators=[layer.streams.replicated, layer.streams.sharded]).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(same(x).sum(), x)[0])


@pytest.mark.parametrize("recompute", RECOMPUTE_MODES[1:])
@pytest.mark.parametrize("training", [True, False])
def test_the_second_run_drops_as_the_first_did_whatever_mode_the_layer_is_in_by_then(recompute, training):
    found = []
    for mode in (recompute, "none"):
        layer, x = TransformerLayer(SHAPE, recompute=mode, p=0.5, seed=3).train(training), torch.ones(8, 2, 24)
        y = layer(x.requires_grad_())
        layer.train(not training)
        y.sum().backward()
        found.append(x.grad)
        assert all(module.training is not training for module in layer.modules())
    assert torch.equal(*found)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_that_would_run_in_another_mode_is_refused(use_reentrant):
    layer, x = TransformerLayer(SHAPE, p=0.5, seed=3), torch.ones(8, 2, 24, requires_grad=True)
    for training in (True, False):
        y = torch_checkpoint(layer.train(training), x, use_reentrant=use_reentrant)
        layer.train(not training)
        with pytest.raises(RuntimeError, match="^dropout: a checkpoint around it"):
            y.sum().backward()
