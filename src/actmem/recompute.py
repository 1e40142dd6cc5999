"""Activation recomputation: our own checkpoint function (2205.05198 section 5).

How it works, in six rules:

1. Forward runs normally and builds its graph, but each tensor that autograd wants to save is replaced by an empty slot.
   Only the inputs and the random-number states are kept, and what the function closes over.
2. When backward first opens a slot, the function runs again from the kept inputs and random-number states, and the
   tensors that it saves fill the slots, in the same order.
3. The second run stops as soon as the last slot is filled.  The rest (often the region's last matmul) computes
   only the output, which backward does not read.  ``stop_early=False`` runs the region to its end, as the paper's cost
   counts it.
4. A slot holds its tensor for as long as the graph holds the slot.  Autograd frees both after backward of the node that
   saved the tensor, as without recomputation.  A node may read the tensor any number of times.  With ``retain_graph``
   each read empties the slot, and the next read runs the function again; otherwise all tensors would stay in memory.
5. The second run has the autocast mode of the first run, and the training modes of ``module``; if no module is given,
   those of the module that is the function, or whose method the function is.  Afterwards these modes and the
   random-number generators are back in the state that they had before the second run.
6. The second run reads the present values of parameters and buffers, so backward raises an error if one has been
   written or replaced since the first run.  It also raises one if the second run itself writes a buffer, as spectral
   norm does, because the first run wrote that buffer already.  And it raises one, as without recomputation, if the
   second run has written a saved tensor in place after it was saved.

Gradients equal those without recomputation bit for bit if the second run computes the same values, because backward
uses the graph of the first run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

from actmem.keep import keep, released_by_reader, stays_eager
from actmem.torch_private import graph_is_retained, no_dispatch_modes, times_written, tree_leaves


@stays_eager
def checkpoint(
    function: Callable[..., Tensor],
    *inputs: Tensor,
    generators: Sequence[torch.Generator] = (),
    stop_early: bool = True,
    module: nn.Module | None = None,
) -> Tensor:
    """Run ``function(*inputs)`` and save only its inputs; backward runs the function again to recompute its tensors.

    torch.compile leaves this call, and all that the function does, eager.

    Args:
        function: the function to run; it must compute the same values each time.
        inputs: the tensors with which ``function`` is called.
        generators: all random-number generators from which ``function`` draws, torch's default generator too. If a
            generator is missing, the second run draws other numbers without an error.
        stop_early: end the second run at the last tensor that backward needs; False runs it to the end.
        module: what ``function`` runs, if it isn't the module itself or its method. The second run gets its training
            modes from here, and backward raises if any parameter or buffer of this module was written or replaced since
            the forward pass. None: backward checks only the parameters that ``function`` saved.

    Returns: what ``function`` returns.
    Saves: the storages of ``inputs``, and one state of each generator (5,056 bytes on a CPU, 16 on CUDA).
    Raises: RuntimeError in backward if the second run saves another number of tensors than the first, or tensors of
        another shape or dtype, or if a parameter that the function reads was written after the first run.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    region = _Region(function, inputs, generators, stop_early, module)
    with saved_tensors_hooks(region.pack, _open):
        result = function(*inputs)
    if module is not None:
        region.parameters = ParametersRead(module, result)
    return result


_observers: list[Callable[[Callable], AbstractContextManager]] = []


@contextmanager
def around_second_runs(observe: Callable[[Callable], AbstractContextManager]) -> Iterator[None]:
    """While the block runs, enter a context around each second run of a ``checkpoint``, to time or count these runs.

    Args:
        observe: called with the checkpoint's function before each second run; returns the context in which it runs.
    """
    _observers.append(observe)
    try:
        yield
    finally:
        _observers.remove(observe)


class ParametersRead:
    """Checks that a module's parameters and buffers don't change between forward and recomputation.

    Backward raises RuntimeError if one of them changed. Parameters are checked when the first gradient of ``result``
    is computed, that is before backward enters the module. After that an optimizer that steps during backward may write
    them. Buffers are checked after the recomputation too.

    Args:
        module: the module whose code recomputation runs.
        result: the module's output in the forward pass: a tensor, or several in any structure.
    """

    def __init__(self, module: nn.Module, result: Any):
        self._noted = [
            (f"{path}.{name}".lstrip("."), owner, name, tensor, times_written(tensor))
            for path, owner in module.named_modules()
            for name, tensor in (*owner._parameters.items(), *owner._buffers.items())
            if tensor is not None
        ]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        register_multi_grad_hook(outputs, lambda grad: self.check_written(parameters=True), mode="any")

    def check_written(self, *, parameters: bool) -> None:
        """Raise RuntimeError if a buffer was written in place since forward.

        Args:
            parameters: check parameters as well: before backward enters the module, and not after a recomputation, when
                an optimizer may have written them.
        """
        for path, _, _, tensor, before in self._noted:
            if times_written(tensor) != before and (parameters or not isinstance(tensor, nn.Parameter)):
                raise _other_values(path)

    def check_replaced(self) -> None:
        """Raise RuntimeError if a parameter or buffer was replaced by another tensor since forward."""
        for path, owner, name, tensor, _ in self._noted:
            now = getattr(owner, name, None)  # FSDP may have put another view of the same values there
            if now is not tensor and not (now is not None and now.is_set_to(tensor)):
                raise _other_values(path)


def _other_values(name: str) -> RuntimeError:
    return RuntimeError(f"{name} was written or replaced between the first run and the second, which reads it again")


class _AllSlotsFilled(Exception):
    """Ends the second run (rule 3)."""


class _Slot:
    """What the graph holds in place of a tensor that the region saved. ``tensor`` is None until the second run."""

    def __init__(self, region: _Region):
        self.region = region
        self.tensor: Tensor | None = None
        self.times_written = 0


@stays_eager
def _open(slot: _Slot) -> Tensor:
    tensor = opened(slot, slot.region.run_again)
    if times_written(tensor) != slot.times_written:  # which autograd asks of the tensors that it holds itself
        raise RuntimeError(f"{slot.region.name}: a saved tensor {tuple(tensor.shape)} was written in place afterwards")
    return tensor


def opened(slot: Any, fill: Callable[[], object]) -> Tensor:
    """Return the tensor of a slot, the object that the autograd graph holds in place of a tensor to be recomputed.

    If the slot is empty, the tensor is recomputed first. The slot then holds the tensor for further reads. With
    ``retain_graph``, and when ``Kept.tensors`` reads, the slot is emptied again, so that the tensor doesn't stay in
    memory.

    Args:
        slot: an object whose attribute ``tensor`` is the tensor, or None if the slot is empty.
        fill: runs the recomputation, which sets ``slot.tensor``.
    """
    empties = released_by_reader() or graph_is_retained()  # before the second run, which reads tensors too
    if slot.tensor is None:
        fill()
    tensor = slot.tensor
    assert tensor is not None
    if empties:
        slot.tensor = None
    return tensor


class _Region:
    """One checkpointed call: the function to run again, its inputs, and the slots that the second run fills."""

    def __init__(self, function, inputs, generators, stop_early, module):
        self.function, self.generators, self.stop_early = function, tuple(generators), stop_early
        self.autocast = autocast_state()
        self.requires_grad = [x.requires_grad for x in inputs]
        self.name = getattr(function, "__qualname__", type(function).__name__)
        states = generator_states(self.generators)
        self.digests = [digest_of(state) for state in states]
        self.kept = keep(*inputs, *states)
        self.parameters: ParametersRead | None = None
        owner = getattr(function, "__self__", function) if module is None else module
        self.modes = [(module, module.training) for module in owner.modules()] if isinstance(owner, nn.Module) else []
        self.saved: list[tuple] = []  # shape, dtype, parameter and times written of each saved tensor
        self.slots: list[weakref.ref[_Slot]] = []  # weak, so that a slot goes with its node

    def pack(self, tensor: Tensor) -> _Slot:
        slot = _Slot(self)
        self.saved.append((tensor.shape, tensor.dtype, _parameter_of(tensor), times_written(tensor)))
        self.slots.append(weakref.ref(slot))
        return slot

    def run_again(self) -> None:
        tensors = self.kept.tensors()
        inputs, states = tensors[: len(self.requires_grad)], tensors[len(self.requires_grad) :]
        # A checkpoint around this one may have run its ``keep`` again, with the generators in another state.
        if any(digest_of(state) not in (0, digest) for state, digest in zip(states, self.digests)):
            raise other_numbers(self.name)
        starts = [x.detach().requires_grad_(needs) for x, needs in zip(inputs, self.requires_grad)]
        count = 0

        def fill(tensor: Tensor) -> None:
            nonlocal count
            expected = self.saved[count] if count < len(self.saved) else None
            if not expected or expected[:2] != (tensor.shape, tensor.dtype):
                first = f"{tuple(expected[0])} {expected[1]}" if expected else "no more"
                second = f"{tuple(tensor.shape)} {tensor.dtype} as tensor {count + 1}"
                raise RuntimeError(f"the second run of {self.name} saved {second}; the first run saved {first}")
            parameter = _parameter_of(tensor)
            if parameter is not None and (parameter is not expected[2] or times_written(tensor) != expected[3]):
                raise _other_values(f"{self.name}: a parameter of shape {tuple(parameter.shape)}")
            slot = self.slots[count]()
            if slot is not None:  # else its node is done
                slot.tensor, slot.times_written = tensor.detach(), times_written(tensor)
            count += 1
            if self.stop_early and count == len(self.saved):
                raise _AllSlotsFilled

        with ExitStack() as stack:
            for observe in _observers:
                stack.enter_context(observe(self.function))
            stack.enter_context(_generators_at(self.generators, states))
            stack.enter_context(_modes_at(self.modes))
            stack.enter_context(second_run(self.autocast, fill, self.parameters))
            stack.enter_context(suppress(_AllSlotsFilled))
            self.function(*starts)
        if count != len(self.saved):
            raise RuntimeError(f"the second run of {self.name} saved {count} tensors, the first {len(self.saved)}")


def _parameter_of(tensor: Tensor) -> nn.Parameter | None:
    """Return the parameter that this tensor is, or is a view of; None if it is neither."""
    source = tensor if tensor._base is None else tensor._base
    return source if isinstance(source, nn.Parameter) else None


@contextmanager
def _modes_at(modes: Sequence[tuple[nn.Module, bool]]):
    before = [(module, module.training) for module, _ in modes]
    try:
        for module, training in modes:
            module.training = training
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def second_run(autocast: list[dict], save: Callable | None, parameters: ParametersRead | None) -> Iterator[None]:
    """Run the block as a recomputation: under the first run's autocast state, and with its parameters checked.

    Args:
        autocast: the result of ``autocast_state()`` in the first run.
        save: called with each tensor that autograd saves in the block; None: the block runs without autograd.
        parameters: the check of the parameters and buffers that the block reads; None: nothing is checked.

    Raises: RuntimeError if a tensor of ``parameters`` was replaced before the block, or a buffer was written before the
        block's end.
    """
    if parameters:
        parameters.check_replaced()
    with ExitStack() as stack:
        for arguments in autocast:
            stack.enter_context(torch.autocast(**arguments))
        stack.enter_context(torch.set_grad_enabled(save is not None))
        if save is not None:
            stack.enter_context(saved_tensors_hooks(save, _never_read))
        yield
    if parameters:
        parameters.check_written(parameters=False)


def _never_read(_: object) -> Tensor:
    raise RuntimeError("nothing reads the graph of a second run")


def autocast_state() -> list[dict]:
    """Return the present autocast state: for each kind of device a dict of the arguments of ``torch.autocast``."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return [
        {
            "device_type": device,
            "dtype": torch.get_autocast_dtype(device),
            "enabled": torch.is_autocast_enabled(device),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for device in sorted({"cpu", "cuda"} | ({accelerator.type} if accelerator else set()))
    ]


def generator_states(generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Return the present state of each generator, as ``Generator.get_state`` does.

    No operation of torch's dispatcher makes these tensors, so a tool that counts bytes sees them by wrapping this
    function.
    """
    return [generator.get_state() for generator in generators]


def digest_of(state: Tensor) -> int:
    """Return a hash of a generator's state, to compare two states; 0 for a fake tensor."""
    if type(state) is not Tensor:
        return 0
    with no_dispatch_modes():
        return hash(state.numpy().tobytes())


@contextmanager
def _generators_at(generators: Sequence[torch.Generator], states: Sequence[Tensor]):
    """In the block, put each generator into the state given, and afterwards back into its present one (rule 5)."""
    before = generator_states(generators)
    try:
        for generator, state in zip(generators, states):
            # torch reads the state byte by byte from the storage's start, but a hook outside may have moved it.
            lies_so = state.is_contiguous() and not state.storage_offset()
            generator.set_state(state if lies_so else state.clone(memory_format=torch.contiguous_format))
        yield
    finally:
        for generator, state in zip(generators, before):
            generator.set_state(state)


def other_numbers(name: str) -> RuntimeError:
    """Make the RuntimeError for a recomputation of ``name`` that would draw other random numbers than forward did."""
    return RuntimeError(
        f"{name}: a checkpoint around it runs it again and would draw other numbers: use the layer's recompute=, "
        "or actmem.recompute.checkpoint with its generators="
    )
