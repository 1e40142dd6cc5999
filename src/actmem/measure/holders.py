"""What is alive after forward although autograd did not save it, and who holds it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Container, Iterable, Iterator
from types import CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

from actmem.measure.leaves import storage_of, storages_in, tensors_in
from actmem.measure.origins import Origin, Origins
from actmem.measure.savers import OperationTracker

#: How far from a tensor its holder is looked for: a list in a dict in a cache is three steps.
_STEPS = 6


def unsaved(
    tracker: OperationTracker, origins: Origins, saved: Container[torch.UntypedStorage], variables: Iterable[object]
) -> Iterator[tuple[torch.UntypedStorage, Origin, str]]:
    """Storages made in the block, alive and not ``saved``, with their origin and their holder ("" if unknown).

    Left out: what outermost modules returned, and what was made outside of modules and is in one of
    ``variables``; both are the caller's.
    """

    def left() -> list[tuple[torch.UntypedStorage, Origin]]:
        return [
            (storage, origin)
            for storage, origin in origins.found.items()
            if origin.made and storage not in saved and storage not in tracker.outputs and storage.nbytes()
        ]

    found = _settled_list(left)
    if not all(origin.inside for _, origin in found):
        mine = {id(storage) for storage in storages_in([v for v in variables if not isinstance(v, _OURS)])}
        found = [(storage, origin) for storage, origin in found if origin.inside or id(storage) not in mine]
    found = [(storage, origin) for storage, origin in found if storage not in tracker.inputs]
    tensors = [origin.tensor() if origin.tensor is not None else None for _, origin in found]
    texts = _holders([tensor for tensor in tensors if tensor is not None], _text) if found else {}
    for (storage, origin), tensor in zip(found, tensors):
        yield storage, origin, texts.get(id(tensor), "")


def held_anyway(tracker: OperationTracker, saved: Container[torch.UntypedStorage]) -> Iterator[tuple[Tensor, str]]:
    """Inputs and outputs of outermost modules that a ctx or a checkpoint holds although autograd did not save them."""
    theirs = [reference() for reference in tracker.input_tensors + tracker.output_tensors]
    wanted = {id(s): s for s in storages_in([t for t in theirs if t is not None]) if s not in saved}
    if wanted and tracker.functions_ran:
        for node in graph_nodes(tracker):
            if isinstance(node, torch.autograd.function.FunctionCtx):
                for tensor in tensors_in(vars(node)):
                    if wanted.pop(id(storage_of(tensor)), None) is not None:
                        yield tensor, _text(node)
    if wanted and tracker.checkpoint_ran:  # it takes a look at every object of the process
        found = [one for one in gc.get_objects() if issubclass(type(one), Tensor) and id(storage_of(one)) in wanted]
        texts = _holders(found, _text_of_checkpoint)
        for tensor in found:
            if id(tensor) in texts and wanted.pop(id(storage_of(tensor)), None) is not None:
                yield tensor, texts[id(tensor)]


def graph_nodes(tracker: OperationTracker) -> Iterator[Any]:
    """Every node of the graphs behind what outermost modules returned."""
    nodes = [tensor.grad_fn for reference in tracker.output_tensors if (tensor := reference()) is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is not None:
            yield node
            following = {following for following, _ in node.next_functions} - seen
            seen |= following
            nodes.extend(following)


_OURS = (OperationTracker, Origins)


def _settled_list(look: Any) -> list:
    """``look()``; where gloo's threads still let go of tensors, once its length no longer changes."""
    found = look()
    if found and dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        since, count = time.monotonic(), len(found)
        found = None  # it would hold what is to be let go
        while time.monotonic() - since < 0.1:
            time.sleep(0.005)
            if (now := len(look())) != count:
                since, count = time.monotonic(), now
        found = look()
    return found


def _holders(tensors: list[Tensor], text_of: Callable[[Any], str]) -> dict[int, str]:
    """What keeps each tensor, by its id: the nearest object that ``text_of`` has words for, found by the garbage collector."""
    found: dict[int, str] = {}
    #: Objects of this step, and the tensors that each leads to.
    here: list[Any] = list(tensors)
    leads_to = {id(tensor): {id(tensor)} for tensor in tensors}
    passed = {id(here), id(tensors), id(leads_to)}
    for _ in range(_STEPS):
        above: list[Any] = []
        for holder in gc.get_referrers(*here) if here else ():
            if id(holder) in passed or isinstance(holder, (FrameType, type)):
                continue
            reached = {tensor for held in gc.get_referents(holder) for tensor in leads_to.get(id(held), ())} - set(
                found
            )
            if text := text_of(holder):
                found.update(dict.fromkeys(reached, text))
            elif reached:
                above.append(holder)
                leads_to.setdefault(id(holder), set()).update(reached)
        passed.update(map(id, here), (id(above),))
        here = above
    return found


def _text(holder: Any) -> str:
    kind = type(holder)
    if issubclass(kind, nn.Module):
        return f"an attribute of {kind.__name__}"
    if issubclass(kind, torch.autograd.function.FunctionCtx):
        return f"an attribute of ctx of {kind.__name__.removesuffix('Backward')}"
    if issubclass(kind, FunctionType):
        return f"the closure of {holder.__qualname__}"
    if issubclass(kind, ModuleType):
        return f"a global of {holder.__name__}"
    plain = (dict, list, tuple, set, CellType, MethodType, Tensor)
    if issubclass(kind, plain) or kind.__module__ in ("builtins", "_weakref", "weakref"):
        return ""
    return f"an object of {kind.__module__}.{kind.__qualname__}"


def _text_of_checkpoint(holder: Any) -> str:
    if isinstance(holder, torch.autograd.function.FunctionCtx):
        return _text(holder)
    owner = holder if type(holder) is FunctionType else type(holder)
    is_checkpoint = getattr(owner, "__module__", "") == torch.utils.checkpoint.__name__
    return "an argument of a checkpoint" if is_checkpoint else ""
