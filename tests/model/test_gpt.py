"""The sharded GPT equals the unsharded one, and keeps what section 4.3 lists."""

import pytest
import torch
import torch.nn.functional as F

from actmem.config import ConfigError, ModelShape
from actmem.measure.comms import count_collectives
from actmem.measure.ledger import record
from actmem.measure.terms import rows_by_term
from actmem.model.gpt import GPT
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import load_dense, reduce_partial_gradients, shard
from actmem.rows import by_term

SHAPE = ModelShape(8, 2, 24, 4, num_layers=2, vocab_size=20)


def batch():
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 20, (2, 2, 8), generator=generator).unbind()


def dense_model():
    torch.manual_seed(3)
    dense = GPT(SHAPE, p=0.0, dtype=torch.float64)
    for parameter in dense.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return dense


def largest_error(sequence_parallel, recompute):
    tokens, targets = batch()
    dense = dense_model()
    dense_loss = dense.loss(dense(tokens), targets)
    dense_loss.backward()
    tp = tensor_parallel(sequence_parallel=sequence_parallel)
    model = GPT(SHAPE, tp, recompute=recompute, p=0.0, dtype=torch.float64)
    load_dense(model, dense.state_dict(), tp)
    loss = model.loss(model(tokens), targets)
    loss.backward()
    reduce_partial_gradients(model, tp)
    grads = {name: parameter.grad for name, parameter in dense.named_parameters()}
    errors = [(loss - dense_loss).abs().item()]
    for name, parameter in model.named_parameters():
        expected = shard(grads[name], getattr(parameter, "partition_dim", None), tp)
        errors.append((parameter.grad - expected).abs().max().item())
    assert len(errors) == 1 + 4 + 2 * 12
    return max(errors)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_loss_and_gradients_equal_the_unsharded_model(pools, size, sequence_parallel, recompute):
    assert max(pools[size].run(largest_error, sequence_parallel, recompute)) < 1e-12


def test_loss_is_torchs_own():
    dense = dense_model()
    tokens, targets = batch()
    logits = dense(tokens).detach().requires_grad_()
    ours = dense.loss(logits, targets)
    ours.backward()
    reference = logits.detach().clone().requires_grad_()
    expected = F.cross_entropy(reference.flatten(0, 1), targets.t().flatten())
    expected.backward()
    torch.testing.assert_close(ours, expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(logits.grad, reference.grad, rtol=0, atol=1e-16)


def kept():
    tp = tensor_parallel(sequence_parallel=True)
    model = GPT(SHAPE, tp, dtype=torch.bfloat16)
    tokens, targets = batch()
    with record(model) as ledger:
        loss = model.loss(model(tokens), targets)
    assert loss.dtype is torch.float32
    return by_term(rows_by_term(ledger.saved))


@pytest.mark.parametrize("size", [2, 4])
def test_what_the_ends_of_the_model_keep(pools, size):
    s, b, h, v = 8, 2, 24, 20
    for terms in pools[size].run(kept):
        assert terms["embedding dropout mask"] == s * b * h // size
        assert terms["final layer-norm input"] == terms["output layer input"] == 2 * s * b * h // size
        assert terms["logits (float32)"] == 4 * s * b * v // size
        assert terms["token ids"] == terms["target ids"] == 4 * s * b
        assert sum("logits" in term for term in terms) == 1  # no second copy


def loss_collectives():
    tp = tensor_parallel(sequence_parallel=True)
    model = GPT(SHAPE, tp)
    tokens, targets = batch()
    logits = model(tokens)
    with count_collectives() as seen:
        model.loss(logits, targets)
    return [(c.kind, c.payload_bytes) for c in seen.collectives]


def test_the_loss_exchanges_three_numbers_a_position(pools):
    sb = 8 * 2
    assert pools[2].run(loss_collectives) == [[("all-reduce", 4 * sb), ("all-reduce", 2 * 4 * sb)]] * 2


def test_targets_far_apart_do_not_overflow():
    cross_entropy = dense_model().cross_entropy
    logits = torch.tensor([[[1000.0, -1000.0, 0.0]]]).requires_grad_()
    loss = cross_entropy(logits, torch.tensor([[1]]))
    assert loss.item() == 2000.0


def test_parts_hold_the_whole_between_them():
    whole = {name for name, _ in GPT(SHAPE).named_parameters()}
    first = {name for name, _ in GPT(SHAPE, layers=range(0, 1)).named_parameters()}
    last = {name for name, _ in GPT(SHAPE, layers=range(1, 2)).named_parameters()}
    assert first | last == whole and first & last == {"words.weight"}


def test_refuses_what_cannot_be():
    with pytest.raises(ConfigError, match="layers"):
        GPT(SHAPE, layers=range(1, 3))
    with pytest.raises(ConfigError, match="vocab_size: 20 must be divisible by tensor_parallel_size = 8"):
        GPT(SHAPE.with_sizes(hidden_size=32, num_attention_heads=8), TensorParallel(size=8))
