"""Models that nobody here wrote: the ledger's total equals two other counts, for 15 architectures of transformers."""

import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from actmem.measure.census import census
from actmem.measure.ledger import record
from actmem.measure.whole_step import loss_of, step
from actmem.torch_private import fake_tensors
from tests.measure.live_count import LiveCount, existing, one_step
from tests.tiers import covering

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "head_dim": 8}
_GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Type of model → sizes.
ARCHITECTURES = {
    "llama": _GROUPED,
    "mistral": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _GROUPED,
    "gemma": _GROUPED,
    "phi3": _GROUPED,
    "olmo2": _GROUPED,
    "mixtral": {**_GROUPED, "num_local_experts": 4},
    "gpt2": _GPT2,
    "gpt_neox": _SIZES,
    "opt": {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {**_SIZES, "new_decoder_architecture": False},
    "bert": _SIZES,
    "roberta": _SIZES,
    "t5": {
        "vocab_size": 64,
        "d_model": 32,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "d_kv": 8,
        "decoder_start_token_id": 0,
    },
}
MODELS = {"bert": "AutoModelForMaskedLM", "roberta": "AutoModelForMaskedLM", "t5": "AutoModelForSeq2SeqLM"}


def built(name, attention="sdpa", dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **ARCHITECTURES[name])
    auto = getattr(transformers, MODELS.get(name, "AutoModelForCausalLM"))
    model = auto.from_config(config, attn_implementation=attention, dtype=dtype).train()
    ids = 3 + torch.arange(16).view(2, 8)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    return model, inputs


def hooked_bytes(model, inputs):
    """Storages that autograd asks hooks to pack and that are still alive at the end, without parameters and buffers."""
    weights = weakref.WeakSet(t.untyped_storage() for t in (*model.parameters(), *model.buffers()))
    kept = weakref.WeakSet()

    def pack(tensor):
        if tensor.untyped_storage() not in weights:
            kept.add(tensor.untyped_storage())
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**inputs)
    total = sum(storage.nbytes() for storage in kept)
    del output
    return total


def test_there_are_fifteen():
    assert len(ARCHITECTURES) == 15


@pytest.mark.parametrize(
    ("name", "attention", "dtype"),
    covering(ARCHITECTURES, ["eager", "sdpa"], [torch.float32, torch.bfloat16], of=1),
    ids=str,
)
def test_totals_equal_two_other_counts(name, attention, dtype):
    model, inputs = built(name, attention, dtype)
    with record(model) as ledger:
        output = model(**inputs)
    del output
    assert ledger.total_bytes == hooked_bytes(model, inputs) == census(model, lambda: inputs) > 0
    assert not ledger.unsaved and all(tensor.line for tensor in ledger.saved)


def test_gradient_checkpointing_holds_what_its_closures_hold():
    model, inputs = built("llama")
    model.gradient_checkpointing_enable()
    with record(model) as ledger:
        output = model(**inputs)
    del output
    assert ledger.total_bytes == census(model, lambda: inputs)
    assert {"generator state", "alive but not saved by autograd"} <= ledger.by_kind().keys()


@pytest.mark.parametrize("fake", [False, True])
def test_a_step_with_adamw_bills_the_independent_peak(fake):
    with fake_tensors() if fake else nullcontext():
        model, inputs = built("llama")
        # Without positions the model looks at their values, and takes another path where there are none.
        inputs["position_ids"] = torch.arange(8).expand(2, 8).contiguous()
        optimizer = torch.optim.AdamW(model.parameters())
        one_step(model, inputs, loss_of, optimizer)
        bill = step(model, inputs, loss_of, optimizer)
        with LiveCount(*existing(model, inputs, optimizer)) as second:
            one_step(model, inputs, loss_of, optimizer)
    assert sum(row.bytes for row in bill.peak) == bill.peak_bytes == max(bill.curve) == second.peak_bytes
    assert bill.by_kind()["activation"] > 0 and bill.by_kind()["optimizer state"] > bill.by_kind()["weight"]


def test_a_step_bills_its_peak_real_and_fake():
    def bill():
        model, inputs = built("llama")
        # Without positions the model looks at their values, and takes another path where there are none.
        return step(model, {**inputs, "position_ids": torch.arange(8).expand(2, 8).contiguous()})

    real = bill()
    with fake_tensors():
        fake = bill()
    assert sum(row.bytes for row in real.peak) == real.peak_bytes == fake.peak_bytes
    assert real.by_kind() == fake.by_kind() and real.by_kind()["activation"] > 0
