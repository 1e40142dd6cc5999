"""The ledger on modules that are not ours, and on what is easy to count wrongly."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from actmem.layers.transformer import TransformerLayer
from actmem.measure import tools
from actmem.measure.census import census
from actmem.measure.ledger import record
from actmem.measure.ledger_tables import readable_size
from actmem.measure.origins import UNSAVED
from actmem.models import TINY
from tests.measure.corner_cases import Run, x


def ledger_of(module, x):
    with record(module) as ledger:
        y = module(x)
    del y
    return ledger


def test_linear_keeps_its_input_and_not_its_weight():
    ledger = ledger_of(nn.Linear(8, 4), torch.ones(3, 8, requires_grad=True))
    (saved,) = ledger.saved
    assert (saved.op, saved.argument, saved.shape, saved.dtype, saved.bytes) == (
        "linear",
        "0",
        (3, 8),
        torch.float32,
        96,
    )


def test_names_module_op_and_line():
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Sequential(nn.Tanh()))
    ledger = ledger_of(model, torch.ones(3, 8))
    assert [(t.module, t.op, t.argument) for t in ledger.saved] == [
        ("0", "linear", "0"),
        ("1", "softmax", ""),
        ("2.0", "tanh", ""),
    ]


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


@pytest.mark.parametrize("function", [Square, SquareSetUp])
def test_names_an_autograd_function_and_its_arguments(function):
    class Calls(nn.Module):
        def forward(self, x):
            return function.apply(x, 3.0)

    original = vars(torch.autograd.Function)["apply"]
    saved = ledger_of(Calls(), torch.ones(4, requires_grad=True)).saved
    assert [(t.op, t.argument) for t in saved] == [(function.__name__, "0"), (function.__name__, "")]
    assert all(t.line.startswith("test_ledger.py:") for t in saved)
    assert vars(torch.autograd.Function)["apply"] is original


@pytest.mark.parametrize("function", [Square, SquareSetUp])
def test_names_an_autograd_function_whose_apply_was_taken_before(function):
    class Calls(nn.Module):
        def forward(self, x):
            return TAKEN_BEFORE[function](x, 3.0).exp()

    saved = ledger_of(Calls(), torch.ones(4, requires_grad=True)).saved
    assert [(t.op, t.argument) for t in saved] == [
        (function.__name__, "unknown"),
        (function.__name__, "unknown"),
        ("exp", ""),
    ]
    assert all(t.line.startswith("test_ledger.py:") for t in saved)


def test_looking_for_the_saver_keeps_no_frame():
    """A frame would hold its variables, and with them tensors, until the garbage is collected."""
    seen = []

    class Forgets(nn.Module):
        def forward(self, x):
            let_go = x.detach() + 1
            seen.append(weakref.ref(let_go))
            return x.exp()

    gc.disable()
    try:
        ledger_of(Forgets(), torch.ones(4, requires_grad=True))
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


def test_an_argument_without_a_storage_does_not_stop_forward():
    class Calls(nn.Module):
        def forward(self, x):
            return Masked.apply(torch.eye(4).to_sparse(), x)

    (saved,) = ledger_of(Calls(), torch.ones(4, 4, requires_grad=True)).saved
    assert (saved.op, saved.argument, saved.bytes) == ("Masked", "1", 64)


def test_line_is_the_learners_own():
    class Square(nn.Module):
        def forward(self, x):
            return x * x

    (saved,) = ledger_of(Square(), torch.ones(3, requires_grad=True)).saved
    assert saved.line.startswith("test_ledger.py:")


def test_one_storage_counts_once():
    class Twice(nn.Module):
        def forward(self, x):
            y = x.exp()  # keeps its result
            return y * y.t()  # keeps y twice, once as a view

    ledger = ledger_of(Twice(), torch.ones(4, 4, requires_grad=True))
    assert ledger.total_bytes == 4 * 4 * 4


def test_a_view_keeps_its_whole_storage():
    class Slice(nn.Module):
        def forward(self, x):
            return (x + 1)[:1].exp().sum() + (x + 1)[0].square().sum()

    ledger = ledger_of(Slice(), torch.ones(4, 4, requires_grad=True))
    # exp keeps its own result, 16 B; square keeps 16 B of a storage of 64 B.
    assert ledger.total_bytes == 16 + 64
    assert sorted(t.bytes for t in ledger.saved) == [16, 16, 48]
    assert sum("rest of its storage" in t.argument for t in ledger.saved) == 1


def test_what_is_let_go_during_forward_does_not_count():
    class Forgetful(nn.Module):
        def forward(self, x):
            x.exp().sum().detach()
            return x + 1

    assert ledger_of(Forgetful(), torch.ones(4, requires_grad=True)).total_bytes == 0


def test_the_ledger_keeps_nothing_alive_itself():
    x = torch.ones(4, requires_grad=True)
    with record(nn.Identity()) as ledger:
        y = x.exp()  # saved as the output of its own node
    result = weakref.ref(y.untyped_storage())
    assert ledger.total_bytes == 16
    del y
    assert result() is None


def test_buffers_do_not_count():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(5))

        def forward(self, x):
            return x * self.scale

    (saved,) = ledger_of(Scaled(), torch.ones(5, requires_grad=True)).saved or [None]
    assert saved is None or saved.argument == "0"


def test_census_agrees_on_strangers():
    x = torch.randn(6, 2, 16)
    strangers = [
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1),
        nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, activation="gelu"),
        nn.MultiheadAttention(16, 4),
        nn.LSTM(16, 8),
        nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(56, 3), nn.LogSoftmax(-1)
        ),
    ]
    for module in strangers:

        class First(nn.Module):
            def __init__(self, inner):
                super().__init__()
                self.inner = inner

            def forward(self, x):
                y = self.inner(*(x,) * (3 if isinstance(self.inner, nn.MultiheadAttention) else 1))
                return y[0] if isinstance(y, tuple) else y

        wrapped = First(module)
        counted = census(wrapped, lambda: torch.randn(x.shape, requires_grad=True))
        recorded = ledger_of(wrapped, torch.randn(x.shape, requires_grad=True)).total_bytes
        assert recorded == counted > 0, type(module).__name__


def test_census_sees_what_hooks_cannot():
    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.hidden = x.clone()  # the classic mistake
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.hidden

    class Hiding(nn.Module):
        def forward(self, x):
            return Hidden.apply(x)

    ledger = ledger_of(Hiding(), torch.ones(7, requires_grad=True))
    assert not ledger.saved
    (hidden,) = ledger.unsaved  # what hooks don't see, the ledger finds another way
    assert (hidden.bytes, hidden.kind, hidden.held_by) == (28, UNSAVED, "an attribute of ctx of Hidden")
    assert f"{hidden.kind}, held by an attribute of ctx of Hidden" in str(ledger)
    assert census(Hiding(), lambda: torch.ones(7, requires_grad=True)) == 28


def test_a_checkpoint_counts_what_it_keeps():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        def forward(self, x):
            return torch_checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False)

    assert ledger_of(Checkpointed(), torch.ones(3, 8, requires_grad=True)).total_bytes == 3 * 8 * 4


def test_frozen_weights_keep_no_input():
    linear = nn.Linear(8, 4)
    linear.requires_grad_(False)
    assert ledger_of(linear, torch.ones(3, 8, requires_grad=True)).total_bytes == 0


def test_autocast_copies_count():
    """Under autocast the 16-bit copy of the weight is kept as well: it is not the parameter's storage."""
    linear = nn.Linear(8, 4)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        ledger = ledger_of(linear, torch.ones(3, 8, requires_grad=True))
    assert ledger.total_bytes == 3 * 8 * 2 + 8 * 4 * 2


def test_dtensor_is_counted_by_what_it_wraps(pools):
    assert pools[2].run(dtensor_bytes) == [8 * 3 * 4] * 2


def dtensor_bytes():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(16, 3), mesh, [Shard(0)]).requires_grad_()
    with record(nn.Identity()) as ledger:
        y = x.exp()
    assert y.requires_grad
    return ledger.total_bytes


def test_memtracker_agrees():
    """torch's own tracker as a third opinion.  It counts the module's output as well, which
    nothing in this layer keeps."""
    layer = TransformerLayer(TINY, dtype=torch.float32)
    x = torch.randn(128, 2, 256, requires_grad=True)
    tracker = MemTracker()
    tracker.track_external(layer)
    with tracker:
        y = layer(x)
        snapshot = tracker.get_tracker_snapshot("current")[x.device]
    assert snapshot[_MemRefType.ACT] == ledger_of(layer, x).total_bytes + y.untyped_storage().nbytes()


def test_a_count_that_gloos_threads_still_lower_is_taken_when_it_no_longer_changes(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(tools.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(tools.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    for name, value in (("is_available", True), ("is_initialized", True), ("get_backend", "gloo")):
        monkeypatch.setattr(tools.dist, name, lambda value=value: value)
    for started in (0.0, 1e6):  # what a clock shows at first means nothing
        clock[0] = started
        found = tools.settled(lambda: 1 + (clock[0] < started + 0.09))
        assert found == 1 and clock[0] - started == pytest.approx(0.19, abs=0.006)


def test_a_readable_size_keeps_every_byte_below_a_kibibyte():
    sizes = [0, 1023, 1024, 1536, 2**20 - 1, 3 * 2**20, 80 * 2**30, 2048 * 2**30]
    texts = ["0 B", "1,023 B", "1 KiB", "1.5 KiB", "1024 KiB", "3 MiB", "80 GiB", "2,048 GiB"]
    assert [readable_size(size) for size in sizes] == texts


def test_what_hooks_inside_the_block_pack_is_counted_and_named():
    def run(m, x):
        with torch.autograd.graph.save_on_cpu():
            return m.b(torch.relu(m.a(x)))

    module, given = Run(run, a=nn.Linear(8, 8), b=nn.Linear(8, 8)), x()
    with record(module) as ledger:
        y = module(given)
    del y
    # On a CPU save_on_cpu holds the tensors themselves: the input and relu's result.
    assert {(t.op, t.bytes, t.held_by) for t in ledger.tensors} == {
        ("linear", 4 * 8 * 4, "the hooks of save_on_cpu"),
        ("relu", 4 * 8 * 4, "the hooks of save_on_cpu"),
    }


def test_the_cache_of_selective_checkpointing_is_named():
    def run(m, x):
        def context():
            return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

        return torch_checkpoint(lambda y: m.b(torch.relu(m.a(y))), x, use_reentrant=False, context_fn=context)

    module, given = Run(run, a=nn.Linear(8, 8), b=nn.Linear(8, 8)), x()
    with record(module) as ledger:
        y = module(given)
    del y
    (cached,) = (t for t in ledger.tensors if t.op == "addmm")
    assert cached.held_by == "the cache of selective checkpointing" and cached.bytes == 4 * 8 * 4


def test_bytes_on_the_host_are_no_bytes_of_the_device():
    """Offloading lowers the total of a model on a device; the meta device is one here."""

    def run(m, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: torch.zeros(t.shape), lambda t: t):
            y = torch.relu(m.a(x))
        return y.exp()

    with torch.device("meta"):
        module, given = Run(run, a=nn.Linear(8, 8)), torch.ones(4, 8)
    with record(module) as ledger:
        y = module(given)
    assert y.requires_grad and ledger.device == "meta"
    # The input and relu's result are packed; exp's result stays.
    assert (ledger.total_bytes, ledger.host_bytes) == (4 * 8 * 4, 2 * 4 * 8 * 4)
    assert sum(ledger.by_kind().values()) == ledger.total_bytes
    assert f"{ledger.host_bytes:,} B in the host's memory" in repr(ledger)
