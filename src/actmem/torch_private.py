"""Every private or undocumented name of torch that this package uses. If a release of torch drops one, fix it here.

``actmem_more``, ``actmem_tools`` and ``actmem_course.judge`` have such a file too. Every name exists in each version of
``CHECKED_ON``; ``make matrix`` runs the tests on those versions. What the names are used for:

- ``torch.utils._python_dispatch``, ``torch.utils._pytree``: see every operation; recognise DTensor and other wrappers;
find tensors in lists
- ``torch._subclasses``, ``torch.distributed._tools``, ``torch.testing._internal``: fake tensors, collectives on them,
their store
- ``torch._C._autograd``: which backward pass runs, and whether it keeps its graph; the active saved-tensor hooks; how
often a tensor was written
- the autograd node that runs now: where in backward an operation is
- ``torch.autograd._engine_run_backward`` and how often a tensor and its storage are held: when gradients add up in
place
- ``PipelineStage``: what it holds, sends and receives, what ``pipeline.Stage`` overrides
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass  # noqa: F401
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: F401

never_compiled = torch._disable_dynamo  # torch.compiler.disable does the same and loads the compiler now, a second
CHECKED_ON = ("2.9.1", "2.11.0", "2.13.0", "2.14.1", "2.15.0")


class DispatchMode(TorchDispatchMode):
    """A TorchDispatchMode whose first operation doesn't load torch's compiler, which takes over a second.

    torch wraps the ``__torch_dispatch__`` of every other mode so that it is never compiled, and the wrapper loads the
    compiler. This class wraps ``__torch_dispatch__`` only if the compiler is loaded already when the mode begins. A
    subclass under which nothing compiles sets ``needs_wrapper = False``, because a call of the wrapper takes as long as
    a small operation.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch asks when a subclass is defined: it shall not wrap

    def __enter__(self):
        mode: Any = type(self)
        if "torch._dynamo" in sys.modules and vars(mode).get("needs_wrapper", True):
            mode.needs_wrapper, mode.__torch_dispatch__ = False, never_compiled(mode.__torch_dispatch__)
        return super().__enter__()


def no_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context in which no dispatch mode sees any operation.

    The call looks which modes are on, so enter the context at once.
    """
    modes = torch._C._len_torch_dispatch_stack() + torch._ops._len_torch_dispatch_stack_pre_dispatch()
    return _disable_current_modes() if modes else nullcontext()


def assert_async(condition: Tensor, message: str) -> None:
    """Raise RuntimeError with ``message`` unless ``condition`` is True: on a CPU at once, on a GPU later.

    The host doesn't wait for the GPU; there the error comes as a device-side assertion.
    """
    torch._assert_async(condition, message)


def fake_tensors() -> AbstractContextManager:
    """Return a context in which new tensors have a shape, a dtype and a storage with a size, but no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to load

    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):
        # Collectives on fake tensors: from 2.11 on torch.distributed registers them, in torch 2.9 this module does.
        from torch.distributed._tools import fake_collectives  # noqa: F401

    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)  # random-number states are real tensors even here
    mode.__deepcopy__ = lambda memo: mode  # a copied model's weights would be of a copied mode, and new at each use
    return mode


def fake_store() -> torch.distributed.Store:
    """Return a store for ``init_process_group("fake", store=…)``, and register that backend with torch."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def top_saved_tensors_hooks() -> tuple[Callable, Callable] | None:
    """Return the pack and unpack hooks that autograd would call now; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def times_written(tensor: Tensor) -> int:
    """Return how often a tensor's values were written in place; writes through ``tensor.data`` don't count."""
    return 0 if tensor.is_inference() else tensor._version


def backward_pass() -> int:
    """Return the number that torch gives to the backward pass that runs in this thread; -1 outside backward."""
    return torch._C._current_graph_task_id()


def graph_is_retained() -> bool:
    """Return whether the running backward pass keeps its graph (``retain_graph``); True outside of a backward pass.

    If True, nothing frees the graph soon, so a recomputation must not leave its tensors in the graph.
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()


def node_running() -> str:
    """Return the name of the autograd node whose backward runs now; "" outside backward."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name()


def place_of_node_running() -> int:
    """Return the sequence number of the autograd node that runs now; -1 outside backward.

    Nodes made in one thread have different numbers. So if the number is still that of the node that ended last, no
    other node has begun, and autograd itself runs the operation: it adds up gradients.
    """
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


def holders_of(tensor: Tensor) -> tuple[int, int]:
    """Return how many C++ references there are to a tensor, and how many to its storage.

    These counts tell whether autograd would write a sum of gradients into the tensor: it does so if nothing else holds
    the tensor.
    """
    counted: Any = tensor  # some stubs lack the name
    return counted._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _send_parts(x: Tensor, ranks: int, group_name: str) -> Tensor:
    sizes = [x.shape[0] // ranks] * ranks
    return torch.ops._c10d_functional.all_to_all_single(x, sizes, sizes, group_name)


if not hasattr(torch.ops.actmem, "reduce_scatter"):  # once a process, also when this file is loaded again
    torch.library.define("actmem::reduce_scatter", "(Tensor x, int ranks, str group_name) -> Tensor")
    torch.library.impl("actmem::reduce_scatter", "default", _send_parts)


def start_sending_parts(x: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start the all-to-all of a reduce-scatter over gloo: send each rank its part of x, and receive one part from each.

    For torch's dispatcher this is one operator, ``actmem::reduce_scatter``, so a tool that counts collectives there
    counts a reduce-scatter.

    Args:
        x: the tensor to reduce, with as many equal parts along dimension 0 as there are ranks.
        ranks: the number of ranks in the group.
        group_name: the group's name, ``ProcessGroup.group_name``.

    Returns: a tensor of the shape of x with the parts of all ranks, one after the other. Call ``wait_for`` before you
        read it.
    """
    return torch.ops.actmem.reduce_scatter(x, ranks, group_name)


def wait_for(x: Tensor) -> Tensor:
    """Wait until the tensor that ``start_sending_parts`` returned is complete, and return this tensor."""
    return torch.ops._c10d_functional.wait_tensor(x)


def outputs_of(stage: Any, microbatch: int) -> tuple[Tensor, ...]:
    """Return the outputs of ``microbatch`` that torch's pipeline stage still holds.

    From torch 2.15 on these are the outputs that have not been sent yet, in earlier versions all outputs whose backward
    is still to come.

    Args:
        stage: a torch ``PipelineStage``.
        microbatch: the microbatch's number, from 0.
    """
    states = getattr(stage, "_forward_chunk_states", None)  # from torch 2.15 on
    return stage.fwd_cache[microbatch][0] if states is None else tuple(states[microbatch].live_outputs)


def receive_buffers_of(stage: Any) -> list[Tensor]:
    """Return the buffers into which torch's pipeline stage receives activations, for all microbatches.

    The first stage has none.
    """
    infos = (info for infos in stage.args_recv_info.values() for info in infos)
    return [info.buffer for info in infos if isinstance(getattr(info, "buffer", None), Tensor)]


def first_messages(operations: list) -> list:
    """Repair the sends and receives by which torch's pipeline stages connect to their neighbours before the first step.

    In torch 2.9 their tensors can differ in dtype, and a rank can have a send to itself, as in a V-shaped schedule.

    Args:
        operations: torch's list of ``P2POp``; their tensors are replaced.

    Returns: the operations with float32 tensors, without those from a rank to itself.
    """
    for operation in operations:
        operation.tensor = operation.tensor.float()
    return [operation for operation in operations if operation.peer != torch.distributed.get_rank()]


def without_outputs(schedule: Any) -> dict[str, bool]:
    """Return keyword arguments with which a pipeline schedule's ``step`` does not join the microbatches' outputs.

    The dict is empty for torch 2.9, which always joins the outputs.
    """
    return {"return_outputs": False} if "return_outputs" in signature(schedule.step).parameters else {}
