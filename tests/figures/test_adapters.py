"""Chapter 11: its figure shows the formulas' numbers, and peft keeps what it says."""

import pytest
import torch
from torch import nn

from actmem.ledger.recorder import record
from actmem.rows import total
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
