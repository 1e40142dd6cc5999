"""Our solution of lab 10 beside plain autograd: results and gradients, and the bytes that each keeps."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from actmem.store import HostMemory
from actmem_course.judge.cases.lab10_keep_less import CountingHost
from actmem_course.judge.kept import Keeping
from actmem_course.judge.solutions import lab10_keep_less as ours

S, B, H, OUT, R, FFN = 13, 2, 12, 20, 3, 40


def random(*size):
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(size)))


CODES, SCALE, WEIGHT = (20 * random(OUT, H)).to(torch.int8), random(OUT, 1), random(OUT, H)
UP, DOWN = random(FFN, H), random(H, FFN)
#: By exercise: ours, plain autograd, what both are given besides x and trains, and bytes that each keeps in float64.
FORMS: dict[str, tuple[Any, ...]] = {
    "10.1": (
        lambda x: ours.frozen_linear(x, CODES, SCALE), lambda x: F.linear(x, CODES * SCALE), (), 0, 8 * OUT * H
    ),
    "10.2": (
        lambda x, a, b: ours.lora_linear(x, WEIGHT, a, b, 5.0),
        lambda x, a, b: F.linear(x, WEIGHT) + 5.0 / R * F.linear(F.linear(x, a), b),
        (random(R, H), random(OUT, R)), 8 * S * B * (H + R), 8 * S * B * (H + R),
    ),
    "10.3": (
        lambda x, up, down: ours.tiled_mlp(x, up, down, 3), ours.mlp,
        (UP, DOWN), 8 * S * B * H, 8 * S * B * (H + 2 * FFN),
    ),
    "10.4": (
        lambda x, up, down: ours.offloading_checkpoint(lambda y: ours.mlp(y, up, down), x, CountingHost()), ours.mlp,
        (UP, DOWN), 0, 8 * S * B * (H + 2 * FFN),
    ),
}  # fmt: skip


@pytest.mark.parametrize("number", FORMS)
def test_ours_is_plain_autograd_and_keeps_less(number):
    *forms, trained, least, plain = FORMS[number]
    found = []
    for form, enough in zip(forms, (least, plain)):
        leaves = [tensor.clone().requires_grad_() for tensor in (random(S, B, H), *trained)]
        with Keeping([CODES, SCALE, WEIGHT, *leaves[1:]]) as keeping:
            result = form(leaves[0] * 1, *leaves[1:])
            kept = keeping.kept()
        assert (kept.bytes, kept.hidden_bytes) == (enough, result.nbytes)
        result.backward(random(*result.shape))
        found.append([result.detach(), *(leaf.grad for leaf in leaves)])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if number == "10.4" else 1e-12)


def test_a_layer_on_the_librarys_own_host():
    x, host = random(S, B, H).requires_grad_(), HostMemory()
    y = x
    for _ in range(3):
        y = ours.offloading_checkpoint(lambda z: z + ours.mlp(z, UP, DOWN), y, host)
    (found,) = torch.autograd.grad(y.sum(), x)
    y = x
    for _ in range(3):
        y = y + ours.mlp(y, UP, DOWN)
    assert torch.equal(found, *torch.autograd.grad(y.sum(), x))
