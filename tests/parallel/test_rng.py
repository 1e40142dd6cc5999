"""Dropout: the right share dropped, the mean kept, streams apart, gradients through the same mask."""

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from actmem.config import ConfigError, ModelShape
from actmem.drop import Terms
from actmem.layers.gpt import GPT
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.recorder import record
from actmem.parallel.groups import TensorParallel
from actmem.parallel.rng import DropoutMask, DropoutStreams
from actmem.recipes import RECOMPUTE_MODES, Recompute

SHAPE = ModelShape(8, 2, 24, 4)


def stream(seed=1):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_dropped(p):
    x = torch.ones(401, 503)  # not a multiple of the four decisions of one draw
    y = DropoutMask(p, stream())(x).drop(x)
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
    y = mask.drop(x)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad * x.detach(), y.detach(), rtol=1e-15, atol=0)


def test_backward_lets_go_of_the_mask_while_the_output_lives():
    x = torch.randn(40, 9, requires_grad=True)
    mask = DropoutMask(0.3, stream())(x)
    kept = StorageWeakRef(mask._mask.untyped_storage())
    y = mask.drop(x)
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
    dropped = mask.drop(x)
    dropped.sum().backward()
    assert torch.equal(x.grad, dropped)


def test_what_needs_no_gradient_gets_none_by_its_dropout():
    x = torch.randn(40, 9)
    mask = DropoutMask(0.3, stream())(x)
    kept = StorageWeakRef(mask._mask.untyped_storage())
    assert not mask.drop(x).requires_grad
    del mask
    assert kept.expired()


@pytest.mark.parametrize("mask", [DropoutMask(0.0, stream()), DropoutMask(0.5, stream()).eval()])
def test_no_dropout_draws_keeps_and_changes_nothing(mask):
    x, before = torch.randn(3, requires_grad=True), mask.generator.get_state()
    assert mask(x).drop(x) is x and torch.equal(mask.generator.get_state(), before)


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
    mask.drop(x)
    with pytest.raises(RuntimeError, match="drop: this mask has been used"):
        mask.drop(x)


def test_default_layers_drop_differently_and_alike_under_one_seed():
    def masks():
        layers = [TransformerLayer(SHAPE, TensorParallel(size=2, rank=rank)) for rank in (0, 1)]
        return [layer.attention_dropout(torch.empty(8, 2, 24))._mask for layer in layers]

    first, second = masks()
    assert not torch.equal(first, second)
    # One rank after the other, each seeded alike: what they replicate they drop alike.
    torch.manual_seed(4)
    rank0 = TransformerLayer(SHAPE, TensorParallel(size=2, rank=0))
    torch.manual_seed(4)
    rank1 = TransformerLayer(SHAPE, TensorParallel(size=2, rank=1))
    x, scores = torch.empty(8, 2, 24), torch.empty(4, 8, 8)
    assert torch.equal(rank0.mlp_dropout(x)._mask, rank1.mlp_dropout(x)._mask)
    of_scores = [rank.attention.core.dropout_mask(scores)._mask for rank in (rank0, rank1)]
    assert not torch.equal(*of_scores)


def test_a_dropped_mask_needs_a_generator_whose_state_can_be_read():
    like = torch.empty(8, 2, device="meta")  # goes where a GPU's tensors go
    with pytest.raises(ConfigError, match="^generator: must be given to draw 'mask' again$"):
        DropoutMask(0.5, None)(like, Terms(frozenset({"mask"})))


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


def test_copies_of_a_model_draw_different_masks_and_the_same_weights():
    one, same, other = (GPT(SHAPE.with_sizes(vocab_size=32), data_parallel_rank=rank) for rank in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    for name in ("replicated", "sharded"):
        first, again, differs = (draw(getattr(part.layers["0"].streams, name)) for part in (one, same, other))
        assert first == again != differs


@pytest.mark.parametrize("seed", [1234, 1234 + 7919])  # the second: once the seed of the first's layer 1
def test_stages_of_a_model_draw_different_masks(seed):
    shape = SHAPE.with_sizes(vocab_size=32, num_layers=2)
    parts: list[Any] = [GPT(shape, layers=range(i, i + 1), seed=one) for i, one in ((0, seed), (1, 1234))]
    first, second = (next(iter(part.layers.values())).streams for part in parts)
    assert draw(first.replicated) != draw(second.replicated) and draw(first.sharded) != draw(second.sharded)


@pytest.mark.parametrize("recompute", [mode for mode in RECOMPUTE_MODES[1:] if Recompute.of(mode).region != "terms"])
@pytest.mark.parametrize("training", [True, False])
def test_a_second_run_in_another_mode_is_refused(recompute, training):
    layer = TransformerLayer(SHAPE, recompute=recompute, p=0.5)
    y = layer.train(training)(torch.randn(8, 2, 24, requires_grad=True))
    layer.train(not training)
    with pytest.raises(RuntimeError, match="the second run of .* saved"):
        y.sum().backward()
