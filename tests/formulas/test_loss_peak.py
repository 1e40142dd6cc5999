"""The peak of the loss by formula, and as counted storage by storage on one emulated rank."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from actmem.ledger.emulate import emulated_rank
from actmem.ledger.whole_step import watch_step
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.vocab import VocabParallelCrossEntropy
from actmem.rows import total
from actmem_more.chunked_loss import LinearCrossEntropy
from actmem_more.loss_peak import LOSSES, loss_peak_rows


def counted(loss, s, b, h, v, t=1, chunk=1024):
    """Bytes at the peak, beside the weight."""
    with emulated_rank(t):
        tp = tensor_parallel() if t > 1 else TensorParallel()
        shared = loss in ("in place", "in chunks")
        linear = nn.Linear(h, v // t if shared else v, bias=False, dtype=torch.bfloat16)
        x = torch.zeros(s, b, h, dtype=torch.bfloat16, requires_grad=True)
        ids = torch.zeros(s, b, dtype=torch.long)
        runs = {
            "float32": lambda: F.cross_entropy(linear(x).float().flatten(0, 1), ids.flatten()),
            "16 bits": lambda: F.cross_entropy(linear(x).flatten(0, 1), ids.flatten()),
            "in place": lambda: VocabParallelCrossEntropy(tp)(linear(x), ids),
            "in chunks": lambda: LinearCrossEntropy(tp, chunk)(x, linear.weight, ids).mean(),
        }
        with watch_step(linear, batch=(x, ids)) as bill:
            runs[loss]().backward()
        return bill.peak_bytes - 2 * linear.weight.numel()


@pytest.mark.by_day(28)
@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize(
    ("s", "b", "h", "v", "chunk"),
    [
        (48, 2, 24, 1024, 8),
        (48, 2, 24, 1024, 32),
        (7, 3, 64, 256, 5),
        (96, 1, 40, 512, 1000),
        (4096, 1, 4096, 128256, 1024),
    ],
)
@pytest.mark.parametrize("loss", LOSSES)
def test_formula_and_count_are_one_number(loss, s, b, h, v, chunk, t):
    assert total(loss_peak_rows(loss, s * b, h, v, t, chunk)) == counted(loss, s, b, h, v, t, chunk)
