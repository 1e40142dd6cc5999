"""Every private or undocumented name of torch that actmem uses.  When a release of torch drops one, mend it here.
All of them were there in each of ``CHECKED_ON``; ``make matrix`` runs the tests on those versions again.

- ``torch.utils._python_dispatch``, ``torch.utils._pytree``: see every operation; tell DTensor and its like; tensors in lists
- ``torch._subclasses``, ``torch.distributed._tools``, ``torch.testing._internal``: fake tensors, collectives on them, their store
- ``multi_threaded_pg``, thread isolation: each thread has process groups of its own, as a rank has
- ``torch._C._autograd``: whether a backward pass keeps its graph; the saved-tensor hooks that are active; a tensor's version
- ``torch.library._scoped_library`` and ``OpOverload.decompose``: attention as another device has it
- the autograd node that runs now, and the group that a collective was given: what a tape notes
- ``torch.autograd._engine_run_backward`` and how often a tensor and its storage are held: when gradients add up in place
- ``PipelineStage``: what it holds, sends and receives, what ``pipeline.Stage`` overrides
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass  # noqa: F401
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: F401

flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
#: The node that adds a gradient to a weight's.
WEIGHTS_NODE = "torch::autograd::AccumulateGrad"
never_compiled = torch._disable_dynamo  # torch.compiler.disable does the same and loads the compiler now, a second
CHECKED_ON = ("2.9.1", "2.11.0", "2.13.0", "2.14.1", "2.15.0")


def no_dispatch_modes() -> AbstractContextManager[Any]:
    """No mode sees the operations of the block, which starts at once."""
    modes = torch._C._len_torch_dispatch_stack() + torch._ops._len_torch_dispatch_stack_pre_dispatch()
    return _disable_current_modes() if modes else nullcontext()


def torch_release() -> tuple[int, int]:
    """(2, 13) for torch 2.13.0."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@contextmanager
def memory_snapshot(path: str) -> Iterator[None]:
    """Note every allocation of the GPU in the block, and write them as https://pytorch.org/memory_viz reads them."""
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        yield
        torch.cuda.memory._dump_snapshot(path)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def assert_async(condition: Tensor, message: str) -> None:
    """Raise RuntimeError unless ``condition`` is True: now on a CPU, and on a GPU without waiting for it."""
    torch._assert_async(condition, message)


def fake_tensors() -> AbstractContextManager:
    """In the block, new tensors have a shape, a dtype and a storage with a size, and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to load

    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):
        # Collectives on fake tensors: torch.distributed brings them from 2.11 on, torch 2.9 in this file of its own.
        from torch.distributed._tools import fake_collectives  # noqa: F401

    return FakeTensorMode(allow_non_fake_inputs=True)  # random-number states are real tensors even here


@contextmanager
def attention_on(device: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    """In the block ``make(original)`` runs where attention is asked for on ``"CPU"`` or ``"CUDA"``, by whatever name in Python or C++."""
    original = torch.ops.aten.scaled_dot_product_attention.default.decompose
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", make(original), f"Autograd{device}")
        yield


def fake_store() -> torch.distributed.Store:
    """The store of the ``"fake"`` backend; loading it registers the backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


@contextmanager
def world_of_each_thread() -> Iterator[None]:
    """In the block each thread has process groups of its own, and a default one if it makes it."""
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    c10d: Any = torch.distributed.distributed_c10d
    before, c10d._world = c10d._world, ThreadLocalWorld()
    private: Any = torch._C._distributed_c10d  # no stub has the name
    isolate = private._set_thread_isolation_mode
    isolate(True)
    try:
        yield
    finally:
        isolate(False)
        c10d._world = before


def name_of_group(group: torch.distributed.ProcessGroup) -> str:
    """The name under which this thread's torch.distributed has a group."""
    return torch.distributed.distributed_c10d._world.pg_names[group]


def top_saved_tensors_hooks() -> tuple[Callable, Callable] | None:
    """The pack and unpack hooks that autograd would call now; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def times_written(tensor: Tensor) -> int:
    """How often its values were written in place, by other ways than ``tensor.data``."""
    return tensor._version


def graph_is_retained() -> bool:
    """True in a backward pass with ``retain_graph``, and outside any backward pass."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def node_running() -> str:
    """The name of the autograd node whose backward runs now; "" outside backward."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def place_of_node_running() -> int:
    """The how-many-th of its thread's nodes runs now; -1 outside backward."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def holders_of(tensor: Tensor) -> tuple[int, int]:
    """How often C++ holds a tensor, and its storage."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined] # no stub has the first


def ranks_of(arguments: dict[str, Any]) -> int:
    """The ranks of a collective's group, by the arguments of its operator; 0 if they don't tell."""
    for value in arguments.values():
        try:
            if isinstance(value, torch.ScriptObject):
                return torch.distributed.ProcessGroup.unbox(value).size()
        except (RuntimeError, AttributeError):  # the operation that reduces is such an object too
            continue
    name: Any = arguments.get("group_name")
    return torch.distributed.distributed_c10d._resolve_process_group(name).size() if name else 0


def _send_parts(x: Tensor, ranks: int, group_name: str) -> Tensor:
    sizes = [x.shape[0] // ranks] * ranks
    return torch.ops._c10d_functional.all_to_all_single(x, sizes, sizes, group_name)


if not hasattr(torch.ops.actmem, "reduce_scatter"):  # once a process, also when this file is loaded again
    torch.library.define("actmem::reduce_scatter", "(Tensor x, int ranks, str group_name) -> Tensor")
    torch.library.impl("actmem::reduce_scatter", "default", _send_parts)


def start_sending_parts(x: Tensor, ranks: int, group_name: str) -> Tensor:
    """Begin to send each rank its part of dimension 0 and to receive as much from it; read it after ``wait_for``.

    One operator of torch's dispatcher, so that a tool that counts collectives there sees a reduce-scatter.
    """
    return torch.ops.actmem.reduce_scatter(x, ranks, group_name)


def wait_for(x: Tensor) -> Tensor:
    """The result of ``start_sending_parts``, complete."""
    return torch.ops._c10d_functional.wait_tensor(x)


def outputs_of(stage: Any, microbatch: int) -> tuple[Tensor, ...]:
    """The outputs of ``microbatch`` that torch's pipeline stage holds, for as long as they are not sent."""
    states = getattr(stage, "_forward_chunk_states", None)  # from torch 2.15 on
    return stage.fwd_cache[microbatch][0] if states is None else tuple(states[microbatch].live_outputs)


def receive_buffers_of(stage: Any) -> list[Tensor]:
    """The buffers of all microbatches into which torch's pipeline stage receives activations; the first has none."""
    infos = (info for infos in stage.args_recv_info.values() for info in infos)
    return [info.buffer for info in infos if isinstance(getattr(info, "buffer", None), Tensor)]


def first_messages(operations: list) -> list:
    """A pipeline stage's first messages, for torch 2.9 too: all of one size, none to the rank itself (on a V)."""
    for operation in operations:
        operation.tensor = operation.tensor.float()
    return [operation for operation in operations if operation.peer != torch.distributed.get_rank()]


def without_outputs(schedule: Any) -> dict[str, bool]:
    """What tells a schedule's ``step`` not to join the outputs; torch 2.9 always does."""
    return {"return_outputs": False} if "return_outputs" in signature(schedule.step).parameters else {}
