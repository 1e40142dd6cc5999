"""Record a forward and a backward pass as a list of events: storages made and freed, operations run.

An operation's event has its FLOPs and the bytes that it reads and writes (``tape.evaluate`` has the events).
"""

import gc
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

# torch's checkpoint loads the compiler.  Inside a recorded run its tensors would be taken for the model's.
import torch._dynamo  # noqa: F401
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from actmem.ledger.modes import StepMode, stays_as_gradient
from actmem.ledger.save_sites import RunningModules
from actmem.ledger.storages import (
    StorageLifetimes,
    noting_states,
    plain_tensors,
    replaced,
    storage_of,
    storages_in,
    tensors_in,
)
from actmem.main_grad import gradient_of
from actmem.torch_private import node_running
from actmem_more.torch_private import flash_on_cpu, flash_on_cpu_backward
from actmem_tools.tape.evaluate import BACKWARD, FORWARD, Event, Free, Gradient, Make, Mark, Resize, Run
from actmem_tools.torch_private import WEIGHTS_NODE, fake_tensor, is_fake

GENERATOR_STATE = "generator state"
#: By operation and arguments, the result of the operation on fake tensors, as the arguments of ``fake_tensor``.
_RESULTS: dict[tuple, tuple] = {}


def _spread(q: Tensor, grouped: Tensor) -> tuple[int, ...]:
    """Return the shape of K or V with as many heads as Q: before 2.13 torch's counter refuses grouped heads."""
    return (*q.shape[:2], *grouped.shape[2:])


#: FLOPs of the CPU's attention kernels, which torch's counter doesn't know.
_CPU_FLOPS: dict[Any, Callable[..., int]] = {
    flash_on_cpu: lambda q, k, v, *_: sdpa_flop_count(q.shape, _spread(q, k), _spread(q, v)),
    flash_on_cpu_backward: lambda g, q, k, v, *_: sdpa_backward_flop_count(
        g.shape, q.shape, _spread(q, k), _spread(q, v)
    ),
}


class Recorder(StepMode):
    """Records the events of all operations that run in its ``with`` block, in ``events``.

    A storage is made by the operation that first returns it, and freed when nothing refers to it any more.  Memory that
    a kernel allocates and frees inside itself isn't seen.

    Args:
        module: the model; operations and storages are named after its submodules.
        existing: tensors that exist before the block and stay.  Their storages aren't recorded.
    """

    needs_wrapper = False

    def __init__(self, module: nn.Module, existing: Iterable[Tensor] = ()):
        super().__init__()
        self.events = events = list[Event]([Mark(FORWARD)])
        self._storages = StorageLifetimes(lambda i, size: events.append(Free(i) if size is None else Resize(i, size)))
        self._existing: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet(storages_in(list(existing)))
        self._modules = RunningModules(module)
        #: Storages of weights' gradients that a new gradient was added to.
        self._summed: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def mark(self, name: str) -> None:
        """Append ``Mark(name)`` to ``events``, so that code that reads them finds this moment.

        Args:
            name: ``BACKWARD`` at the start of backward, or any other name that the reading code looks for.
        """
        self.events.append(Mark(name))

    def numbers(self) -> list[tuple[torch.UntypedStorage, int]]:
        """Return pairs (storage, its number on the tape) of the storages that are alive."""
        return list(self._storages.numbers.items())

    def resized(self, tensor: Tensor) -> None:
        """Record the new size of a tensor's storage, if it has changed."""
        for storage in storages_in([tensor]):
            self._storages.resized(storage)

    def note_state(self, state: Tensor) -> None:
        """Record the state of a random-number generator, which a checkpoint keeps for example, as a new storage.

        No operation that the recorder sees returns such a state, so each state that is read must be passed to this
        method.
        """
        for storage in storages_in([state]):
            self._begin(storage, GENERATOR_STATE)

    def named(self, call: Callable) -> Callable:
        """Wrap ``nn.Module.__call__`` so that the recorder knows which module runs.

        The wrapper also notices when a module is left by an exception, as in a checkpoint's second run.  Forward hooks
        could notice that only with ``always_call=True``, for which torch makes a reference cycle that keeps the
        arguments alive.

        Args:
            call: ``nn.Module.__call__``.

        Returns: the function to put in its place.
        """

        def run(part, *args, **kwargs):
            self._modules.enter(part)
            try:
                return call(part, *args, **kwargs)
            finally:
                self._modules.leave(part)

        return run

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # torch asks fake tensors for their device all the time
            return args[0].device if is_fake(args[0]) else func(*args)
        kwargs, func = kwargs or {}, self.real_operation(func, args)
        if func is torch.ops.aten.add_.Tensor and node_running() == WEIGHTS_NODE:
            self._note_gradient(args)
        given = [part for tensor in tensors_in([*args, *kwargs.values()]) for part in plain_tensors(tensor)]
        storages = [storage for tensor in given if (storage := storage_of(tensor)) is not None]
        # ``torch.tensor(1.0)`` makes its storage before the first operation that sees it.
        if func.overloadpacket is not torch.ops.aten.lift_fresh:
            self._existing.update(s for s in storages if s not in self._storages.numbers)
        result = _result(func, args, kwargs)
        for storage in storages if _described(func)[2] else ():
            self._storages.resized(storage)
        self._note(func, args, kwargs, given, {id(storage) for storage in storages}, result)
        return result

    def _note_gradient(self, args: tuple) -> None:
        """Record a ``Gradient``.

        Args:
            args: the arguments of the addition: the gradient so far, and the new gradient.
        """
        stays = stays_as_gradient(args)
        weights_storage, storage = map(storage_of, args)
        if storage is None or weights_storage is None or weights_storage in self._summed:
            return
        self._summed.add(weights_storage)
        if not stays:
            self.events.append(Gradient(-1, args[0].nbytes))
        elif storage in self._storages.numbers:
            self.events.append(Gradient(self._storages.numbers[storage], storage.nbytes()))

    def _note(self, func, args, kwargs, given: list[Tensor], before: set[int], result: Any) -> None:
        op, arguments, changed = _described(func)
        where = self._modules.name_or_node
        named = {**dict(zip(arguments, args)), **kwargs}
        written, made = [_bytes(tensor) for tensor in tensors_in([named.get(name) for name in changed])], False
        for tensor in tensors_in(result):
            for part in plain_tensors(tensor):
                storage = storage_of(part)
                if storage is None:
                    continue
                made |= self._begin(storage, f"{where}: {op}" if where else op)
                if id(storage) not in before and "empty" not in op:
                    written.append(_bytes(part))
        if made or written:
            read = tuple(map(_bytes, given)) if written else ()
            self.events.append(Run(op, where, _flops(func, args, kwargs, named, result), read, tuple(written)))

    def _begin(self, storage: torch.UntypedStorage, name: str) -> bool:
        """Record that a storage is made, unless it exists already; return whether it is new."""
        if storage in self._storages.numbers or storage in self._existing:
            return False
        self.events.append(Make(self._storages.begin(storage), storage.nbytes(), name))
        return True


@cache
def _described(func: Any) -> tuple[str, list[str], list[str]]:
    """Return an operation's name in ATen, and the names of its arguments: all, and those that it writes."""
    arguments = func._schema.arguments
    changed = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    op = func.name().removeprefix("aten::").removeprefix("c10d::").split(".")[0]
    return op, [a.name for a in arguments], changed


def _result(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the result of an operation, run now or made again from an earlier run on arguments of the same shapes.

    Results are remembered if they are a new fake tensor, a view of the first argument, or that argument itself: to run
    the operation takes torch several times as long as to make such a tensor.
    """
    key = func, _key(args), _key([*kwargs.items()])
    if key in _RESULTS:
        return fake_tensor(args[0], *known) if (known := _RESULTS[key]) else args[0]
    result = func(*args, **kwargs)
    has_values = not is_fake(result) or result.constant is not None
    is_plain = not has_values and result.layout is torch.strided and not result.is_complex()
    if is_plain and args and is_fake(args[0]) and result.device == args[0].device:
        storage, (of_first, *of_others) = storage_of(result), storages_in((args, kwargs))
        made = storage is of_first, result.shape, result.stride(), result.storage_offset(), result.dtype
        is_alike = fake_tensor(args[0], *made).untyped_storage().nbytes() == result.untyped_storage().nbytes()
        if is_alike and not any(storage is other for other in of_others) and torch.Tag.inplace_view not in func.tags:
            _RESULTS[key] = () if result is args[0] else made
    return result


def _key(value: Any) -> Any:
    """Return a key for one argument of an operation: equal keys give equal results on fake tensors.

    The key of a tensor with values equals no other key.
    """
    if isinstance(value, Tensor):
        if not is_fake(value) or getattr(value, "constant", None) is not None or value.is_complex():
            return object()
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.device
    return tuple(map(_key, value)) if isinstance(value, (list, tuple)) else (type(value), value)


def _bytes(tensor: Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in plain_tensors(tensor))


def _flops(func, args, kwargs, named: dict[str, Any], result: Any) -> int:
    packet = func.overloadpacket
    if packet in _CPU_FLOPS:
        flops = _CPU_FLOPS[packet](*args)
    elif packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=result)
    else:
        return 0
    return flops // 2 if named.get("is_causal") else flops


def record_step(
    module: nn.Module,
    forward: Callable[[Recorder], Tensor],
    backward: Callable[[Tensor, Recorder], object],
    inputs: object = (),
    is_first: bool = False,
) -> list[Event]:
    """Record forward and backward of one microbatch, by default of a microbatch that isn't the first of its step.

    Storages of weights, buffers and inputs aren't recorded.  Neither are the weights' ``.grad``: every weight gets a
    ``.grad`` of zeros before forward, so that each new gradient is added to it and then freed.

    Args:
        module: the model.
        forward: called with the Recorder; runs the forward pass, and returns the loss, or another output from which
            backward starts.
        backward: called with that output and the Recorder; runs the backward pass.
        inputs: the model's inputs.
        is_first: True records the first microbatch of a step: no weight then gets a ``.grad`` before forward.

    Returns: the events in order.
    """
    for parameter in module.parameters():
        if parameter.requires_grad and gradient_of(parameter) is None and not is_first:
            parameter.grad = torch.zeros_like(parameter)
    weights = [tensor for p in module.parameters() for tensor in (p, gradient_of(p)) if tensor is not None]

    def run(recorder: Recorder) -> None:
        output = forward(recorder)
        recorder.mark(BACKWARD)
        backward(output, recorder)
        recorder.mark("end")

    return recorded_run(module, run, [*weights, *module.buffers(), *tensors_in(inputs)])


def recorded_run(module: nn.Module, run: Callable[[Recorder], object], existing: Iterable[Tensor]) -> list[Event]:
    """Run a function, and record its events.

    Args:
        module: the model; operations and storages are named after its submodules.
        run: the function to record; it is called with the Recorder.
        existing: tensors that exist before the run and stay.  Their storages aren't recorded.

    Returns: the events in order.
    """
    collects = gc.isenabled()
    gc.disable()  # or storages in reference cycles would be freed at any moment
    try:
        recorder = Recorder(module, existing)
        with recorder, replaced(nn.Module, "__call__", recorder.named), noting_states(recorder.note_state):
            run(recorder)
        return list(recorder.events)
    finally:
        if collects:
            gc.enable()
