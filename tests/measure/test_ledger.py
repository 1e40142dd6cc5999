"""The ledger: who saved what, what it calls each storage, and what is easy to count wrongly."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from actmem import recompute
from actmem.config import TINY
from actmem.layers.transformer import TransformerLayer
from actmem.ledger import storages
from actmem.ledger.ledger_tables import UNSAVED
from actmem.ledger.recorder import record
from actmem.recipes import RECOMPUTE_MODES
from tests.measure.corner_cases import CASES, STATE, B, Run, ledger_of, x


def test_names_module_op_argument_and_line():
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Sequential(nn.Tanh()), Run(lambda m, x: x * x))
    saved = ledger_of(model, torch.ones(3, 8)).saved
    names = [("0", "linear", "0"), ("1", "softmax", ""), ("2.0", "tanh", "")]  # the product keeps tanh's result too
    assert [(t.module, t.op, t.argument) for t in saved] == names
    assert {(t.shape, t.dtype, t.bytes) for t in saved} == {((3, 8), torch.float32, 96)}
    (own,) = ledger_of(model[3], x()).saved
    assert own.line.startswith("test_ledger.py:")


@pytest.mark.parametrize("mode", RECOMPUTE_MODES)
def test_a_layers_tensors_have_lines_of_the_layer_not_of_what_saves_them_for_it(mode):
    layer = TransformerLayer(TINY, recompute=mode, dtype=torch.float32)
    files = {t.line.partition(":")[0] for t in ledger_of(layer, torch.ones(8, 2, TINY.hidden_size)).saved}
    assert "transformer.py" in files and files <= {"transformer.py", "attention.py", "linear.py", "rng.py"}


def test_a_part_that_two_modules_share_has_the_name_of_the_one_that_calls_it():
    shared = nn.Tanh()
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), shared), nn.Sequential(nn.Linear(8, 8), shared))
    assert [t.module for t in ledger_of(model, x()).saved] == ["0.0", "0.1", "1.1"]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        x = x.detach()  # a variable that changes its meaning, as it may
        result = x * x * scale
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class SquareSetUp(torch.autograd.Function):
    @staticmethod
    def forward(x, scale):
        return x * x * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


TAKEN_BEFORE = {Square: Square.apply, SquareSetUp: SquareSetUp.apply}


@pytest.mark.parametrize("taken_before", [False, True])
@pytest.mark.parametrize("function", [Square, SquareSetUp])
def test_names_an_autograd_function_and_its_arguments(function, taken_before):
    original = vars(torch.autograd.Function)["apply"]
    apply = TAKEN_BEFORE[function] if taken_before else lambda *given: function.apply(*given)
    saved = ledger_of(Run(lambda m, x: apply(x, 3.0).exp()), x()).saved
    own = [(function.__name__, "unknown")] * 2 if taken_before else [(function.__name__, "0"), (function.__name__, "")]
    assert [(t.op, t.argument) for t in saved] == [*own, ("exp", "")]
    assert all(t.line.startswith("test_ledger.py:") for t in saved)
    assert vars(torch.autograd.Function)["apply"] is original


def test_looking_for_the_saver_keeps_no_frame():
    """A frame would hold its variables, and with them tensors, until the garbage is collected."""
    seen = []

    def forgets(m, x):
        let_go = x.detach() + 1
        seen.append(weakref.ref(let_go))
        return x.exp()

    gc.disable()
    try:
        ledger_of(Run(forgets), x())
        assert seen[0]() is None
    finally:
        gc.enable()


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mask, x):
        ctx.save_for_backward(x)
        return x * mask.to_dense()

    @staticmethod
    def backward(ctx, grad):
        return None, grad


def test_two_arguments_of_one_storage_are_told_apart():
    saved = ledger_of(Run(lambda m, x: (lambda y: y[0] * y[:, :1])(x.sin())), x(2, 3)).saved
    shapes = {t.argument: t.shape for t in saved if t.op == "mul"}
    assert shapes["0"] == (3,) and shapes["1"] == (2, 1)


def test_an_argument_without_a_storage_does_not_stop_forward():
    (saved,) = ledger_of(Run(lambda m, x: Masked.apply(torch.eye(4).to_sparse(), x)), x(4, 4)).saved
    assert (saved.op, saved.argument, saved.bytes) == ("Masked", "1", 64)


def test_a_view_keeps_its_whole_storage():
    ledger = ledger_of(Run(lambda m, x: (x + 1)[:1].exp().sum() + (x + 1)[0].square().sum()), x(4, 4))
    # exp keeps its own result, 16 B; square keeps 16 B of a storage of 64 B.
    assert ledger.total_bytes == 16 + 64
    assert sorted(t.bytes for t in ledger.saved) == [16, 16, 48]
    assert sum("rest of its storage" in t.argument for t in ledger.saved) == 1


def test_the_ledger_keeps_nothing_alive_itself():
    given = x()
    with record(nn.Identity()) as ledger:
        y = given.exp()  # saved as the output of its own node
    result = weakref.ref(y.untyped_storage())
    assert ledger.total_bytes == B == sum(ledger.storages().values())
    del y
    assert result() is None and not ledger.storages()


#: Of corner cases: what made the one tensor that autograd didn't save, and who holds it.
HOLDERS = {
    "ctx_attribute": ("clone", "an attribute of ctx of Hidden"),
    "ctx_container": ("clone", "an attribute of ctx of Hidden"),
    "ctx_attribute_of_an_activation": ("add", "an attribute of ctx of Hidden"),
    "ctx_object": ("clone", "an object of tests.measure.corner_cases.Anything"),
    "attribute_of_the_module": ("add", "an attribute of Run"),
    "saved_on_cpu": ("sin", "the hooks of save_on_cpu"),
    "selective_list": ("tanh", "the cache of selective checkpointing"),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_autograd_did_not_save_is_listed_with_its_holder(name):
    make, _ = CASES[name]
    module, inputs = make()
    ledger = ledger_of(module, *inputs)
    (held,) = [t for t in ledger.tensors if t.held_by]
    assert ((held.op, held.held_by), held.bytes) == (HOLDERS[name], B)
    assert f"held by {held.held_by}" in str(ledger) and {t.kind for t in ledger.unsaved} <= {UNSAVED}


def test_a_count_that_gloos_threads_still_lower_is_taken_when_it_no_longer_changes(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(storages.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(storages.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    for name, value in (("is_available", True), ("is_initialized", True), ("get_backend", "gloo")):
        monkeypatch.setattr(storages.dist, name, lambda value=value: value)
    for started in (0.0, 1e6):  # what a clock shows at first means nothing
        clock[0] = started
        found = storages.settled(lambda: 1 + (clock[0] < started + 0.09))
        assert found == 1 and clock[0] - started == pytest.approx(0.19, abs=0.006)


def test_what_was_recorded_is_freed_without_pythons_collector():
    module, scale = nn.Linear(2, 2), torch.ones(2)

    def recorded():
        with record(module):
            output = module(torch.ones(1, 2)) * scale
        return weakref.ref(output)

    gc.disable()
    try:
        assert recorded()() is None
    finally:
        gc.enable()


def test_bytes_on_the_host_are_no_bytes_of_the_device():
    """Offloading lowers the total of a model on a device; the meta device is one here."""

    def run(m, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: torch.zeros(t.shape), lambda t: t):
            y = torch.relu(m.a(x))
        return y.exp()

    with torch.device("meta"):
        ledger = ledger_of(Run(run, a=nn.Linear(8, 8)), torch.ones(4, 8))
    # The input and relu's result are packed; exp's result stays.
    assert (ledger.device, ledger.total_bytes, ledger.host_bytes) == ("meta", B, 2 * B)
    assert sum(ledger.by_kind().values()) == ledger.total_bytes
    assert f"{ledger.host_bytes:,} B in the host's memory" in repr(ledger)


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


@pytest.mark.by_day(4)
@pytest.mark.parametrize("name", KINDS)
def test_what_each_storage_is(name):
    module, expected = KINDS[name]
    assert ledger_of(module, x()).by_kind() == expected


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


def test_weights_of_no_part_of_the_model_do_not_count_after_a_freeze():
    teacher, table = nn.BatchNorm1d(8).eval(), nn.Parameter(torch.ones(8, 8))
    student = Run(lambda m, x: teacher(m.linear(x)) @ table.detach(), linear=nn.Linear(8, 8))
    gc.freeze()  # gc.get_objects() lists none of them now
    assert ledger_of(student, x()).by_kind() == {"activation": B, "input": B}


@pytest.mark.parametrize(("cached", "bias"), [(False, 0), (True, 8 * 2)])  # the cache also keeps the bias
def test_autocast_makes_cast_weights_and_activations(cached, bias):
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
        assert ledger_of(nn.Linear(8, 8), x()).by_kind() == {"activation": B // 2, "cast weight": 8 * 8 * 2 + bias}


def test_a_generators_state_counts_on_a_device_too(monkeypatch):
    """Of a generator on a GPU it is 16 bytes in the host's memory, and part of what the layer keeps."""
    monkeypatch.setattr(
        recompute, "generator_states", lambda generators: [torch.zeros(16, dtype=torch.uint8, device="cpu")]
    )
    with torch.device("meta"):
        module, given = Run(lambda m, x: recompute.checkpoint(torch.sin, m.a(x)), a=nn.Linear(8, 8)), torch.ones(4, 8)
    ledger = ledger_of(module, given)
    assert ledger.device == "meta" and ledger.host_bytes == 0
    assert ledger.by_kind() == {"input": B, "activation": B, "generator state": 16}


@pytest.mark.parametrize("last", ["weight", "input"])
def test_a_buffer_that_a_second_copy_overwrites_is_what_it_holds_then(last):
    """A shard's buffer takes one weight after the other: it is the weight that it holds, by whichever copy."""

    def reused(m, x):
        buffer = m.first.weight.detach().clone()
        buffer.copy_((m.second.weight if last == "weight" else x).detach())
        return x * buffer

    weights = {name: nn.Linear(8, 4, bias=False) for name in ("first", "second")}
    assert ledger_of(Run(reused, **weights), x()).by_kind() == {"cast weight" if last == "weight" else "activation": B}


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


def test_fsdps_gathered_weights_do_not_count(pools):
    for resharded, kept in pools[2].run(fsdp_bytes):
        assert resharded == kept == ledger_of(blocks(), x()).total_bytes


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
