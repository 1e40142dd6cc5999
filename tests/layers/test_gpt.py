"""The sharded GPT equals the unsharded one, and keeps what section 4.3 lists."""

import copy
import io
from typing import Any

import pytest
import torch

from actmem.config import ModelShape
from actmem.layers.gpt import GPT
from actmem.parallel.groups import tensor_parallel
from actmem.parallel.linear import reduce_partial_gradients

SHAPE = ModelShape(8, 2, 24, 4, num_layers=2, vocab_size=20)


def batch():
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 20, (2, 2, 8), generator=generator).unbind()


def test_targets_far_apart_do_not_overflow():
    cross_entropy = GPT(SHAPE).cross_entropy
    logits = torch.tensor([[[1000.0, -1000.0, 0.0]]]).requires_grad_()
    loss = cross_entropy(logits, torch.tensor([[1]]))
    assert loss.item() == 2000.0


def copied_and_saved():
    tp = tensor_parallel(sequence_parallel=True)
    model = GPT(SHAPE, tp)
    copied: Any = copy.deepcopy(model)
    assert copied.tp is tp and copied.layers["0"].attention.qkv.tp is tp
    assert copied.layers["0"].streams is copied.layers["1"].streams is not model.layers["0"].streams
    tokens, targets = batch()
    grads = []
    for each in (model, copied):  # the generators are copied too: the same dropout
        each.loss(each(tokens), targets).backward()
        reduce_partial_gradients(each, tp)
        grads.append([parameter.grad for parameter in each.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*grads))

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = GPT(SHAPE, tp, seed=5)
    other.load_state_dict(torch.load(file))
    assert all(torch.equal(*pair) for pair in zip(other.parameters(), model.parameters()))
    return True


def test_a_parallel_model_is_copied_and_its_state_saved(pools):
    assert all(pools[2].run(copied_and_saved))


def shorter(sequence_parallel, recompute, length):
    """Logits of the first tokens: the same whether the others are there or not."""
    tp = tensor_parallel(sequence_parallel=sequence_parallel)
    model = GPT(SHAPE, tp, recompute=recompute, p=0.0, dtype=torch.float64)
    tokens, targets = batch()
    whole, part = model(tokens), model(tokens[:, :length])
    model.loss(part, targets[:, :length]).backward()
    return (whole[:length] - part).abs().max().item()


@pytest.mark.parametrize(("sequence_parallel", "recompute"), [(False, "full"), (True, "none"), (True, "selective")])
def test_shorter_sequences(pools, sequence_parallel, recompute):
    assert max(pools[2].run(shorter, sequence_parallel, recompute, 6)) < 1e-14
