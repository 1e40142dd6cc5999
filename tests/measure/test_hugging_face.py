"""Models that nobody here wrote: the ledger's total equals two other counts, for 15 architectures of transformers."""

import weakref

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from actmem.ledger.census import census
from actmem.ledger.whole_step import loss_of, step
from actmem_tools.load_model import built_model, tensors_for
from actmem_tools.tape.solver import parsed_letters
from tests.measure.corner_cases import ledger_of
from tests.measure.live_count import existing, most_alive, one_step
from tests.models_of_others import LETTERS, MODELS
from tests.tiers import covering

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

ARCHITECTURES = "llama mistral qwen2 qwen3 gemma phi3 olmo2 mixtral gpt2 gpt_neox opt falcon bert roberta t5".split()


def built(name, attention="sdpa", dtype=torch.float32):
    sizes = {"s": 8, "b": 2, "h": 32, "a": 4, "k": 2, "f": 48, "v": 64}
    model, inputs = MODELS[name](**{x: sizes[x] for x in parsed_letters(LETTERS[name])[0]})
    model.set_attn_implementation(attention)
    return model if dtype is torch.float32 else model.to(dtype), inputs  # fake parameters can't be moved


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


@pytest.mark.parametrize(
    ("name", "attention", "dtype"),
    covering(ARCHITECTURES, ["eager", "sdpa"], [torch.float32, torch.bfloat16], of=1),
    ids=str,
)
def test_totals_equal_two_other_counts(name, attention, dtype):
    model, inputs = built(name, attention, dtype)
    ledger = ledger_of(model, **inputs)
    assert ledger.total_bytes == hooked_bytes(model, inputs) == census(model, lambda: inputs) > 0
    assert not ledger.unsaved and all(tensor.line for tensor in ledger.saved)


def test_gradient_checkpointing_holds_what_its_closures_hold():
    model, inputs = built("llama")
    model.gradient_checkpointing_enable()
    ledger = ledger_of(model, **inputs)
    assert ledger.total_bytes == census(model, lambda: inputs)
    assert {"generator state", "alive but not saved by autograd"} <= ledger.by_kind().keys()


def test_watching_mamba_changes_neither_its_gradients_nor_its_peak():
    def gradients(run):
        torch.manual_seed(0)
        model, inputs = MODELS["mamba"](b=2, h=32, v=64)
        seen = run(model, inputs)
        return seen, [parameter.grad for parameter in model.parameters()]

    def plainly(model, inputs):
        return most_alive(lambda: one_step(model, inputs, loss_of, None), existing(model, inputs, None))

    peak, expected = gradients(plainly)
    bill, found = gradients(step)
    assert bill.peak_bytes == peak and all(map(torch.equal, found, expected))


def test_fake_position_ids_are_those_of_one_sequence_a_row():
    """Without this, a fake run makes a mask for packed rows and repeats keys and values for it."""

    def llama():
        model, inputs = built("llama")
        return model, {"input_ids": inputs["input_ids"], "position_ids": torch.arange(8).expand(2, 8)}

    totals = []
    for fake in (False, True):
        with tensors_for(fake):
            model, inputs = built_model(llama, {})
            totals.append(ledger_of(model, **inputs).total_bytes)
    assert totals[0] == totals[1]
