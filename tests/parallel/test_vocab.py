"""Ids and targets outside the vocabulary, and targets to ignore."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from actmem.config import ConfigError
from actmem.ledger.recorder import record
from actmem.parallel.collectives import all_reduce
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.vocab import VocabParallelCrossEntropy, VocabParallelEmbedding
from actmem_more.chunked_loss import LinearCrossEntropy

VOCABULARY = 12


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, -100, 2**40])
def test_ids_outside_the_vocabulary_are_refused(wrong):
    embedding = VocabParallelEmbedding(VOCABULARY, 4, TensorParallel())
    with pytest.raises(ConfigError, match=f"^token ids: must be from 0 to 11, got {wrong}$"):
        embedding(torch.tensor([[0, 11], [wrong, 3]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_ids_that_are_no_whole_numbers_are_refused(dtype):
    with pytest.raises(ConfigError, match=f"^token ids: must be whole numbers, got {dtype}$"):
        VocabParallelEmbedding(VOCABULARY, 4, TensorParallel())(torch.ones(2, 1, dtype=dtype))


def test_an_embedding_refuses_second_derivatives():
    """Of two ranks each marks the other's words with a row of -1, which torch's own would look up."""
    embedding = VocabParallelEmbedding(VOCABULARY, 4, TensorParallel())
    vectors = embedding(torch.tensor([[0, 11]]))
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(vectors.square().sum(), embedding.weight, create_graph=True)


def with_a_masked_word(word):
    """Losses with one word's logits at -inf, as of padding, and vectors of others where its own is no number."""
    tp = tensor_parallel()
    targets = torch.tensor([[number] for number in range(VOCABULARY) if number != word])
    weight = torch.randn(VOCABULARY, 4, generator=torch.Generator().manual_seed(4))
    logits = torch.randn(len(targets), 1, VOCABULARY, generator=torch.Generator().manual_seed(2))
    logits[..., word], weight[word] = -torch.inf, torch.nan
    loss = VocabParallelCrossEntropy(tp)(logits.chunk(tp.size, -1)[tp.rank], targets)
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
    finite, one_hot = (
        logits.clamp(min=-1e30),
        torch.eye(len(targets)).unsqueeze(1),
    )  # of which the product makes the logits
    chunks = LinearCrossEntropy(tp, chunk=3)(one_hot, finite[:, 0].t().chunk(tp.size)[tp.rank], targets)
    torch.testing.assert_close(chunks.mean(), loss)
    embedding = VocabParallelEmbedding(VOCABULARY, 4, tp, seed=1)
    embedding.weight.data = weight.chunk(tp.size)[tp.rank].clone()
    assert torch.equal(embedding(targets), weight[targets])
    return True


def gradient_with_infinity():
    """The embedding's gradient where one token's is infinite, as of float16 with scaled losses; this rank's part, and all."""
    tp = tensor_parallel()
    embedding = VocabParallelEmbedding(VOCABULARY, 4, tp, seed=1)
    upstream = torch.ones(VOCABULARY - 2, 1, 4)  # words 5 and 6, beside the cut, are in no text
    upstream[0] = torch.inf
    ids = torch.tensor([[word] for word in range(VOCABULARY) if word not in (5, 6)])
    embedding(ids).backward(upstream)
    expected = torch.ones(VOCABULARY, 4)
    expected[0], expected[5:7] = torch.inf, 0
    assert torch.equal(embedding.weight.grad, expected.chunk(tp.size)[tp.rank])
    return True


def test_an_infinite_gradient_stays_with_its_own_word(pools):
    assert all(pools[2].run(gradient_with_infinity))


@pytest.mark.parametrize("word", [0, VOCABULARY // 2, VOCABULARY - 1])
def test_what_is_no_number_stays_with_its_own_word(pools, word):
    assert all(pools[2].run(with_a_masked_word, word))


def chunked(dtype, chunk, tp):
    """Losses and gradients in chunks, and by torch on the whole vocabulary, this rank's part; two targets are ignored."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(8, 3, 8, generator=generator, dtype=torch.float64).to(dtype)
    weight = 30 * torch.randn(VOCABULARY, 8, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.arange(24).remainder(VOCABULARY).view(8, 3)
    targets[2, 1] = targets[6, 2] = -100
    upstream = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    rows = VOCABULARY // tp.size
    own, part = weight[tp.rank * rows :][:rows].clone().requires_grad_(), tp.rank if tp.sequence_parallel else 0
    a, b, whole = (tensor.clone().requires_grad_() for tensor in (x.chunk(tp.sequence_parts)[part], x, weight))
    loss = LinearCrossEntropy(tp, chunk)
    with record(loss) as ledger:
        losses = loss(a, own, targets)
    assert ledger.total_bytes == own.nbytes + a.nbytes + 24 * (4 + losses.element_size())
    losses.backward(upstream.to(wide))
    logits = F.linear(b, whole).to(wide).flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), reduction="none").view(8, 3)
    expected.backward(upstream.to(wide))
    grad_x = b.grad.chunk(tp.sequence_parts)[part]
    return (losses, a.grad, own.grad), (expected, grad_x, whole.grad[tp.rank * rows :][:rows])


def chunked_equals_whole():
    tp = tensor_parallel(sequence_parallel=True)
    for chunk in (1, 4, 24, 100):
        for found, expected in zip(*chunked(torch.float64, chunk, tp)):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    return True


def test_loss_in_chunks_of_shared_tokens_equals_the_whole_vocabularys(pools):
    assert all(pools[2].run(chunked_equals_whole))


def test_loss_in_chunks_of_16_bits_is_in_float32():
    found, expected = chunked(torch.bfloat16, 4, TensorParallel())
    assert [one.dtype for one in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-5)
    for one, other in zip(found[1:], expected[1:]):  # each chunk's part of the weight's gradient is rounded to 16 bits
        assert (one.float() - other.float()).abs().max() < 2**-7 * other.float().abs().max()


def test_a_loss_takes_one_target_for_each_token():
    x, targets = torch.ones(4, 2, 8), torch.ones(8, 2, dtype=torch.long)
    for loss in (
        lambda: VocabParallelCrossEntropy(TensorParallel())(x, targets),
        lambda: LinearCrossEntropy(TensorParallel())(x, torch.ones(VOCABULARY, 8), targets),
    ):
        with pytest.raises(
            ConfigError, match=r"^targets: must be one for each token of x, got \[8, 2\] for x of \[4, 2, 8\]$"
        ):
            loss()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16])
def test_ids_and_targets_of_any_whole_numbers(dtype):
    ids = torch.tensor([[200, 156, 3]])
    embedding, loss = (
        VocabParallelEmbedding(300, 4, TensorParallel(), seed=1),
        VocabParallelCrossEntropy(TensorParallel()),
    )
    assert torch.equal(embedding(ids.to(dtype)), embedding(ids))
    logits = torch.randn(1, 3, 300)
    assert torch.equal(loss(logits, ids.to(dtype)), loss(logits, ids))
    for wrong in (VocabParallelEmbedding(100, 4, TensorParallel()), lambda ids: loss(logits[..., :100], ids)):
        with pytest.raises(ConfigError, match="must be from 0 to 99.*, got 200$"):
            wrong(ids.to(dtype))


def test_loss_in_chunks_of_ignored_tokens_that_are_no_numbers_is_0():
    x, weight, loss = torch.ones(4, 2, 8), torch.ones(VOCABULARY, 8), LinearCrossEntropy(TensorParallel(), chunk=2)
    x[0] = torch.inf
    targets = torch.full((4, 2), 3)
    targets[0] = -100
    assert loss(x, weight, targets)[0].eq(0).all()


def test_loss_in_chunks_under_autocast_is_that_of_sixteen_bits():
    x, weight = torch.randn(6, 2, 8).requires_grad_(), torch.randn(VOCABULARY, 8).requires_grad_()
    targets, results = torch.randint(VOCABULARY, (6, 2)), list[Any]()
    for cast in (False, True):
        x.grad = weight.grad = None
        with torch.autocast("cpu", enabled=cast):
            inputs = (x, weight) if cast else (x.bfloat16(), weight.bfloat16())
            LinearCrossEntropy(TensorParallel(), chunk=5)(*inputs, targets).sum().backward()
        results.append((x.grad, weight.grad))
    results[1] = x.grad, results[1][1].bfloat16().float()  # the weight's gradient needn't be rounded in float32
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(("needs_x", "needs_weight", "matmuls"), [(True, True, 4), (True, False, 3), (False, True, 3)])
def test_loss_in_chunks_computes_the_gradients_that_are_needed(needs_x, needs_weight, matmuls):
    x = torch.randn(3, 7, 8).transpose(0, 1).requires_grad_(needs_x)  # not contiguous
    weight = torch.randn(VOCABULARY, 8, requires_grad=needs_weight)
    targets = torch.zeros(7, 3, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        LinearCrossEntropy(TensorParallel(), 4)(x, weight, targets).sum().backward()
    assert counter.get_total_flops() == matmuls * 2 * 21 * 8 * VOCABULARY
    expected = F.cross_entropy((x @ weight.t()).flatten(0, 1), targets.flatten(), reduction="sum")
    for tensor, needs in ((x, needs_x), (weight, needs_weight)):
        assert (tensor.grad is not None) == needs
        if needs:
            torch.testing.assert_close(tensor.grad, *torch.autograd.grad(expected, tensor, retain_graph=True))


def losses(words, targets, ignore_index):
    """Both losses over rows that may go beyond the vocabulary, their gradients and bytes, beside torch's on one device."""
    tp, h, rows = tensor_parallel(), 4, 16
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(rows, h, dtype=torch.float64, generator=generator)
    x = torch.randn(*targets.shape, h, dtype=torch.float64, generator=generator)
    alone, whole_x = (one.clone().requires_grad_() for one in (weight[:words], x))
    right = F.cross_entropy((whole_x @ alone.t()).flatten(0, 1), targets.flatten(), ignore_index=ignore_index)
    right.backward()
    padded = torch.cat([alone.grad, torch.zeros(rows - words, h, dtype=torch.float64)])
    counted = targets != ignore_index
    for chunked in (False, True)[: 1 + bool(counted.any())]:  # in chunks there is no mean of no tokens
        own, part = weight.chunk(tp.size)[tp.rank].clone().requires_grad_(), x.clone().requires_grad_()
        module = (LinearCrossEntropy if chunked else VocabParallelCrossEntropy)(
            tp, ignore_index=ignore_index, vocab_size=words, **({"chunk": 5} if chunked else {})
        )
        logits = part @ own.t()
        with record(module) as ledger:
            loss = module(part, own, targets).sum() / counted.sum() if chunked else module(logits, targets)
        assert chunked or ledger.total_bytes == targets.numel() * (8 * rows // tp.size + 4)
        loss.backward()
        torch.testing.assert_close(loss, right, rtol=0, atol=1e-12, equal_nan=True)
        torch.testing.assert_close(own.grad, padded.chunk(tp.size)[tp.rank], rtol=0, atol=1e-12)
        grad = part.grad if chunked else all_reduce(part.grad, tp)
        torch.testing.assert_close(grad, whole_x.grad, rtol=0, atol=1e-12)
        assert grad[~counted].eq(0).all()
        for wrong in (-1, words, -101, 2**32):
            rule = f"^targets: must be from 0 to {words - 1}, or ignore_index = {ignore_index}, got {wrong}$"
            with pytest.raises(ConfigError, match=rule):
                VocabParallelCrossEntropy(tp, ignore_index, words)(logits, torch.full_like(targets, wrong))
    return True


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("words", "targets", "ignore_index"),
    [
        # Of 16 rows on 4 ranks the last has 4, 1, none; of 7 two have none.
        (16, [[3, -100], [-100, 11], [0, 15]], -100),
        (13, [[3, 5], [6, 11], [0, 12]], -100),
        (9, [[3, 5], [5, 8], [0, 5]], 5),
        (7, [[-100, 6], [5, 1]], -100),
        (16, [[-100, -100]], -100),
    ],
)
def test_losses_are_torchs_of_the_words_that_count(pools, size, words, targets, ignore_index):
    assert all(pools[size].run(losses, words, torch.tensor(targets), ignore_index))
