"""Chapter 11: its figure shows the formulas' numbers, its cell for several ranks is right on real ones, and peft keeps what it says."""

import ast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from actmem.ledger.recorder import record
from actmem.parallel.groups import tensor_parallel
from actmem.rows import total
from actmem_course.launch import LABS
from actmem_course.predicted.adapters import (
    ADAPTERS,
    ALL_LINEARS,
    IN_16_BITS,
    PLACES,
    adapter_parameters,
    adapter_rows,
    lora_rows,
)
from actmem_more.llama_shape import llama_shape
from actmem_more.llama_terms import llama_rows

LLAMA = llama_shape("llama3-8b")
TOKENS, H, F_, R = 8192, 4096, 14336, 16
SBH = 2 * TOKENS * H


def test_adapters_on_all_linears_keep_what_full_training_keeps_and_seven_narrow_matmuls():
    assert total(lora_rows(LLAMA)) == total(llama_rows(LLAMA)) + 7 * 2 * TOKENS * R
    assert total(lora_rows(LLAMA, PLACES["q and v"])) == total(lora_rows(LLAMA, ())) + SBH + 2 * 2 * TOKENS * R
    # float32 copies: three of QKV's input, one of attention's output, two of the MLP's input, one of its width.
    more = total(lora_rows(LLAMA, rank=R, adapters="float32")) - total(lora_rows(LLAMA, ()))
    assert more == 4 * TOKENS * (6 * H + F_ + 7 * R)
    assert adapter_parameters(LLAMA, ALL_LINEARS, R) == R * (2 * 2 * H + 2 * (H + H // 4) + 3 * (H + F_))


def _cell(name):
    """What a cell of the chapter defines."""
    source = (LABS.parent / "notebooks" / "source" / "11_adapters.py").read_text(encoding="utf-8")
    (function,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name)
    from actmem.parallel.conjugates import g
    from actmem.parallel.linear import column_parallel

    found = {"F": F, "g": g, "column_parallel": column_parallel}
    exec(compile(ast.Module([function], []), "<cell>", "exec"), found)
    return found[name]


def _whole_numbers(*size):
    """In float64 no sum of them rounds, so every order gives the same bits."""
    return torch.randint(-4, 5, size, generator=torch.Generator().manual_seed(sum(size))).double()


def adapter_on_ranks(form):
    """Whether this rank's outputs and gradients are those of one process, bit for bit, and what it keeps."""
    tp = tensor_parallel(sequence_parallel=True)
    full, weight, a, b = (_whole_numbers(*size) for size in ((4, 3, 6), (8, 6), (2, 6), (8, 2)))
    full.requires_grad_()
    a, b = (nn.Parameter(each) for each in (a, b))
    y = F.linear(full, weight) + F.linear(F.linear(full, a), b)
    upstream = _whole_numbers(*y.shape)
    wanted = torch.autograd.grad(y, (full, a, b), upstream)

    def own(tensor, dim):
        return tensor.detach().chunk(tp.size, dim)[tp.rank].clone()

    x, part = own(full, 0).requires_grad_(), nn.Parameter(own(b, 0))
    held = nn.ParameterList([nn.Parameter(own(weight, 0), False), a, part])
    with record(held) as ledger:
        z = _cell("beside")(form, x, tp, *held)
    grad_x, grad_a, grad_b = torch.autograd.grad(z, (x, a, part), own(upstream, 2))
    torch.distributed.all_reduce(grad_a)
    pairs = (z, own(y, 2)), (grad_x, own(wanted[0], 0)), (grad_a, wanted[1]), (grad_b, own(wanted[2], 0))
    return [torch.equal(one, other) for one, other in pairs], ledger.total_bytes


@pytest.mark.parametrize(
    ("form", "parts"), [("gather once, save X", 1), ("save the shard, gather again", 2), ("gather XA", 2)]
)
def test_an_adapter_beside_a_frozen_weight_on_two_ranks(pools, form, parts):
    kept = 8 * 4 * 3 * 6 // parts + 8 * 4 * 3 * 2
    assert pools[2].run(adapter_on_ranks, form) == [([True] * 4, kept)] * 2


@pytest.mark.parametrize("adapters", ADAPTERS)
@pytest.mark.parametrize("dropout", [False, True])
def test_peft_keeps_as_much(adapters, dropout):
    peft = pytest.importorskip("peft", reason="peft is not among the course's packages")
    model = nn.Sequential(nn.Linear(64, 96, bias=False, dtype=torch.bfloat16))
    config = peft.LoraConfig(r=8, target_modules=["0"], lora_dropout=0.1 * dropout)
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=adapters != IN_16_BITS)
    x = torch.randn(24, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    with record(model) as ledger, torch.autocast("cpu", torch.bfloat16, enabled=adapters == ADAPTERS[-1]):
        y = model(x)
    mask_bytes = 2 if adapters == IN_16_BITS else 4
    assert ledger.total_bytes == total(adapter_rows(48, (64, 96), 8, adapters, dropout, mask_bytes))
    y.sum().backward()
