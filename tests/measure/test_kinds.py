"""What the ledger calls each storage, and that records inside records, parts and ranks count the same."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from actmem import recompute
from actmem.measure.ledger import record
from tests.measure.corner_cases import STATE, B, Run, x


def kinds_of(module, *inputs):
    with record(module) as ledger:
        output = module(*inputs)
    del output
    return ledger.by_kind()


def blocks(count=3):
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(count)))


TABLE = torch.ones(4, 8)
KINDS = {
    "an input": (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), {"activation": B, "input": B}),
    "a mask made without chance": (Run(lambda m, x: x.sin() * torch.ones(4, 8).tril()), {"input": B, "constant": B}),
    "a mask that is drawn": (Run(lambda m, x: x * torch.rand(4, 8)), {"activation": B}),
    "a generator's state": (Run(lambda m, x: checkpoint(torch.sin, x, use_reentrant=False)), {"input": B, "generator state": STATE}),
    "a global tensor": (Run(lambda m, x: x * TABLE), {"constant": B}),
    "lazy modules": (nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d()), {"activation": B + 2 * 8 * 4, "input": B}),
    "a module made in the block": (Run(lambda m, x: nn.LazyLinear(8)(x)), {"input": B}),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_what_each_storage_is(name):
    module, expected = KINDS[name]
    assert kinds_of(module, x()) == expected


def test_an_input_made_in_the_block_is_an_input():
    with record(linear := nn.Linear(8, 8)) as ledger:
        y = linear(made := torch.ones(4, 8))
    assert y.requires_grad and made is not None and ledger.by_kind() == {"input": B}


def test_weights_of_the_whole_model_do_not_count_when_a_part_is_recorded():
    model, inputs = blocks(), x()
    with record(model) as whole:
        y = model(inputs)
    with record(model[0]) as part:
        y = model(inputs)
    assert y.requires_grad and part.total_bytes == whole.total_bytes
    assert sum(t.bytes for t in part.weights) > 0 and {t.kind for t in part.weights} == {"weight"}


@pytest.mark.parametrize(("cached", "bias"), [(False, 0), (True, 8 * 2)])  # the cache also keeps the bias
def test_autocast_makes_cast_weights_and_activations(cached, bias):
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
        assert kinds_of(nn.Linear(8, 8), x()) == {"activation": B // 2, "cast weight": 8 * 8 * 2 + bias}


def test_a_generators_state_counts_on_a_device_too(monkeypatch):
    """Of a generator on a GPU it is 16 bytes in the host's memory, and part of what the layer keeps."""
    monkeypatch.setattr(
        recompute, "generator_states", lambda generators: [torch.zeros(16, dtype=torch.uint8, device="cpu")]
    )
    with torch.device("meta"):
        module, given = Run(lambda m, x: recompute.checkpoint(torch.sin, m.a(x)), a=nn.Linear(8, 8)), torch.ones(4, 8)
    with record(module) as ledger:
        y = module(given)
    assert y.requires_grad and ledger.device == "meta" and ledger.host_bytes == 0
    assert ledger.by_kind() == {"input": B, "activation": B, "generator state": 16}


@pytest.mark.parametrize("last", ["weight", "input"])
def test_a_buffer_that_a_second_copy_overwrites_is_what_it_holds_then(last):
    """A shard's buffer takes one weight after the other: it is the weight that it holds, by whichever copy."""

    def reused(m, x):
        buffer = m.first.weight.detach().clone()
        buffer.copy_((m.second.weight if last == "weight" else x).detach())
        return x * buffer

    weights = {name: nn.Linear(8, 4, bias=False) for name in ("first", "second")}
    assert kinds_of(Run(reused, **weights), x()) == {"cast weight" if last == "weight" else "activation": B}


def test_records_inside_records_count_the_same():
    model, inputs, totals = blocks(), x(), []

    def nested(left):
        with record(model) as ledger:
            y = nested(left - 1) if left else model(inputs)
        totals.append(ledger.total_bytes)
        return y

    y = nested(2)
    assert y.requires_grad and len(totals) == 3 and len(set(totals)) == 1


def test_a_record_inside_a_checkpoint_leaves_it_a_checkpoint():
    inner = blocks(1)

    def recorded(y):
        with record(inner):
            return inner(y)

    inputs = x()
    with record(inner) as ledger:
        y = checkpoint(recorded, inputs, use_reentrant=False, preserve_rng_state=False)
    assert ledger.total_bytes == B
    y.sum().backward()
    assert inputs.grad is not None


def test_hooks_around_a_record_still_pack():
    inputs, packed = x(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        with record(nn.Identity()) as ledger:
            y = inputs.sin()
    assert ledger.total_bytes == B and len(packed) == 1 and y.requires_grad


def test_a_failing_forward_leaves_nothing_behind():
    def fail(m, x):
        raise ValueError("no")

    hooks = dict(torch.nn.modules.module._global_forward_pre_hooks)
    with pytest.raises(ValueError, match="no"):
        with record(Run(fail)):
            Run(fail)(x())
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert dict(torch.nn.modules.module._global_forward_pre_hooks) == hooks
    assert torch.get_rng_state.__module__ == "torch.random"


def test_gradients_are_those_without_a_record():
    model, inputs = blocks(), x()
    (expected,) = torch.autograd.grad(model(inputs).sum(), inputs)
    with record(model):
        y = model(inputs)
    (grad,) = torch.autograd.grad(y.sum(), inputs)
    assert torch.equal(grad, expected)


def test_it_shows_itself():
    with record(model := blocks()) as ledger:
        y = model(x())
    text = repr(ledger)
    assert y is not None and text.splitlines()[0].startswith(f"{ledger.total_bytes:,} B")
    assert "0-2.2 ×3" in text and "tanh" in text and "activation" in text
    assert "<table>" in ledger._repr_html_() and "0-2.2 ×3" in ledger._repr_html_()


def test_fsdps_gathered_weights_do_not_count(pools):
    for resharded, kept in pools[2].run(fsdp_bytes):
        assert resharded == kept == plain_bytes()


def plain_bytes():
    model = blocks()
    with record(model) as ledger:
        y = model(x())
    return ledger.total_bytes if y is not None else 0


def fsdp_bytes():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    totals = []
    for reshard in (True, False):
        model = blocks()
        for part in (*model, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=reshard)
        with record(model) as ledger:
            y = model(x())
        totals.append(ledger.total_bytes)
        y.sum().backward()
    return totals
