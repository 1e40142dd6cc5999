"""Dispatch modes that observe a training step without changing its memory.

If a tensor has two gradients, autograd adds the second into the first one's memory if nothing else holds that
(``can_accumulate_inplace`` in torch's ``input_buffer.cpp``). While any dispatch mode is on, autograd never does so, and
a count would have one tensor too many. So these modes recognise such sums, and run them in place where torch would.
Some nodes' formulas write into a tensor that they have just made, unless a mode is on
(``areAnyTensorSubclassLike`` in ``FunctionsManual.cpp``): there the modes write too.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from threading import get_ident
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from actmem.ledger.storages import replaced, storage_of
from actmem.torch_private import (
    DispatchMode,
    holders_of,
    is_traceable_wrapper_subclass,
    no_dispatch_modes,
    node_running,
    place_of_node_running,
)

_ATEN = torch.ops.aten
#: By operation, what some nodes run in its place without a mode, and these nodes (without "Backward0"). It writes into
#: the first argument, a tensor that the node has made.
_WRITTEN: dict[Any, tuple[Any, tuple[str, ...]]] = {
    _ATEN.index_put.default: (_ATEN.index_put_.default, ("Index",)),
    _ATEN.index_add.default: (_ATEN.index_add_.default, ("IndexSelect",)),
    _ATEN.scatter.src: (_ATEN.scatter_.src, ("Max", "Min", "Topk", "Sort", "Median", "Nanmedian", "Kthvalue", "Mode")),
    _ATEN.scatter_add.default: (_ATEN.scatter_add_.default, ("Gather", "Cummax", "Cummin")),
    _ATEN.mul.Tensor: (_ATEN.mul_.Tensor, ("BinaryCrossEntropyWithLogits",)),
    _ATEN.sub.Tensor: (_ATEN.sub_.Tensor, ("BinaryCrossEntropyWithLogits",)),
}
#: The operators that add up gradients: two of one tensor, and a weight's new one into its ``.grad``. With each, the
#: number of the argument that could become the gradient itself.
_SUMS = {_ATEN.add.Tensor: 0, _ATEN.add_.Tensor: 1}


class StepMode(DispatchMode):
    """A TorchDispatchMode for measuring memory, under which a backward takes as much memory as without a mode.

    It recognises what autograd runs in place only without a mode, sums of gradients for instance, and runs that in
    place too. For that, a subclass's ``__torch_dispatch__`` must run ``real_operation(func, args)`` in place of
    ``func``.

    Attributes:
        held: storages into which no sum may be written, because something that the mode doesn't see holds them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: WeakSet[torch.UntypedStorage] = WeakSet()
        #: By thread, the place of the node that ended last: autograd adds up its results before the next node begins.
        self._ended: dict[int, int] = {}
        self._noting: list[AbstractContextManager] = []

    def __enter__(self):
        _holders_where_free()  # while no backward pass runs
        self._noting.append(replaced(torch.autograd, "_engine_run_backward", self._noting_ends))
        self._noting[-1].__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._noting.pop().__exit__(*error)

    def _noting_ends(self, run_backward: Callable) -> Callable:
        def run(outputs: Any, *args: Any, **options: Any) -> Any:
            # Each output is a tensor or an edge of the graph.
            begins = [getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs]
            hooks = [node.register_hook(self._note_end) for node in nodes_from(begins) if node.next_functions]
            try:
                return run_backward(outputs, *args, **options)
            finally:
                for hook in hooks:
                    hook.remove()

        return run

    def _note_end(self, *_: Any) -> None:
        self._ended[get_ident()] = place_of_node_running()

    def real_operation(self, func: Any, args: tuple) -> Any:
        """Return the operation that torch would run without a dispatch mode.

        The result writes into the first argument if torch would: into a gradient to which another one is added, or into
        a node's own tensor. Else it is ``func``.

        Args:
            func: the operator that a ``__torch_dispatch__`` was called with.
            args: its positional arguments.
        """
        written, nodes = _WRITTEN.get(func, (func, ()))
        if nodes and not torch.is_grad_enabled() and node_running().partition("Backward")[0] in nodes:
            # The node may hold it in several variables.
            is_own = _holders(args[0])[1:] == _holders_where_free()[_ATEN.add.Tensor][1:]
            return written if is_own and not is_traceable_wrapper_subclass(args[0]) else func
        if func is not _ATEN.add.Tensor or torch.is_grad_enabled():
            return func
        # Outside backward the place is -1, which is that of no node.
        is_sum = place_of_node_running() == self._ended.get(get_ident())
        if not is_sum or not _is_free(args) or not _is_dense(args[0]) or storage_of(args[0]) in self.held:
            return func
        return _ATEN.add_.Tensor


class QuietDispatchMode(StepMode):
    """A StepMode under which torch.compile still compiles and higher-order operators still run."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:  # torch 2.9 knows no other way
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def nodes_from(begins: Iterable[Any]) -> Iterator[Any]:
    """Yield ``begins`` and all nodes that come after them in backward, each node once.

    Args:
        begins: autograd nodes, such as the ``grad_fn`` of outputs; a None among them is skipped.
    """
    nodes = list(dict.fromkeys(begins))
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is not None:
            yield node
            following = {following for following, _ in node.next_functions} - seen
            seen |= following
            nodes.extend(following)


def stays_as_gradient(args: tuple) -> bool:
    """Return whether autograd would make a weight's new gradient its ``.grad``; False: it would copy the gradient.

    The question is about weights whose ``.grad`` is None. There a dispatch mode sees no operation. So this function
    looks at a weight that has a ``.grad`` already, where a mode sees the addition of the new gradient to it.

    Args:
        args: the two arguments of this addition: the weight's ``.grad`` and the new gradient.
    """
    weight, (in_cpp, _, in_python) = args[0], _holders(args[1])
    free_in_cpp, _, free_in_python = _holders_where_free()[_ATEN.add_.Tensor]
    kept_layout = weight.stride() if _is_dense(weight) else torch.empty(weight.shape, device="meta").stride()
    dims = zip(weight.shape, args[1].stride(), kept_layout)
    is_free = in_cpp == free_in_cpp and in_python == free_in_python
    return is_free and all(size == 1 or a == b for size, a, b in dims)


def _is_free(args: tuple) -> bool:
    """Return whether both arguments of a sum are plain tensors and nothing but the sum itself holds the first."""
    plain = (isinstance(x, Tensor) and x.layout is torch.strided and not is_traceable_wrapper_subclass(x) for x in args)
    return all(plain) and _holders(args[0]) == _holders_where_free()[_ATEN.add.Tensor]


def _holders(tensor: Tensor) -> tuple[int, int, int]:
    """Return how often C++ holds a tensor, how often its storage is held, and how often Python holds the tensor."""
    return *holders_of(tensor), sys.getrefcount(tensor)


@cache
def _holders_where_free() -> dict[Any, tuple[int, int, int]]:
    """Return the counts of ``_holders`` that a dispatch mode sees for a tensor that nothing else holds.

    They are counted once, for tensors of which it is known that nothing else holds them.

    Returns: by operator of ``_SUMS`` the counts for the first of two gradients that were just made for one tensor, and
        for a gradient that is added to a weight's.
    """
    holders: dict[Any, tuple[int, int, int]] = {}

    class Sees(DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in _SUMS:
                holders[func] = _holders(args[_SUMS[func]])
            return func(*args, **(kwargs or {}))

    with no_dispatch_modes(), torch.enable_grad():
        weight = torch.ones(2, requires_grad=True)
        weight.grad = torch.ones(2)
        x = weight * 2
        twice = (x * 3, x * 4)
        with Sees():
            torch.autograd.backward(twice, (torch.ones(2), torch.ones(2)))
    return holders


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor's elements lie in memory without gaps, each once, in whatever order."""
    next_stride = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size != 1):
        if stride != next_stride:
            return False
        next_stride *= size
    return True
