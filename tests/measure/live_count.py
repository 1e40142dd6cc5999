"""A count of live bytes that shares no code with the library's and needs no mode: what bills of a step are compared with.

Under a dispatch mode autograd runs other operations than without one, so this asks the CPU's allocator.
"""

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves


def most_alive(run, known):
    """The most bytes alive while ``run()`` runs.  known: what is alive before, tensors in any containers."""
    storages = {id(t.untyped_storage()): t.untyped_storage() for t in tree_leaves(known) if isinstance(t, Tensor)}
    live = most = sum(storage.nbytes() for storage in storages.values())
    torch.set_num_threads(1)  # with several a sum allocates a buffer for their parts
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = profiler.profiler.kineto_results.events()
    for _, size in sorted(((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda e: e[0]):
        live += size
        most = max(most, live)
    return most


def one_step(model, batch, loss, optimizer):
    """A training step, by hand.  batch: a tensor or keyword arguments."""
    value = loss(model(**batch) if isinstance(batch, dict) else model(batch))
    value.backward()
    if optimizer:
        optimizer.step()


def existing(model, batch, optimizer):
    """Every tensor that is there before a step."""
    states = [state for state in optimizer.state.values()] if optimizer else []
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*model.parameters(), *model.buffers(), *gradients, batch, states]
