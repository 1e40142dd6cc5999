"""A count of live bytes that shares no code with the library's: what bills of a step are compared with."""

import weakref
from contextlib import ExitStack

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actmem import recompute


class LiveCount(TorchDispatchMode):
    """Adds up all storages that are alive after each operation, held weakly; ``peak_bytes`` is the most.

    known: tensors from before.  Generators' states, which no operation makes, are seen where they are taken.
    """

    def __init__(self, *known):
        super().__init__()
        self.alive, self.peak_bytes = weakref.WeakSet(), 0
        self.note(known)

    def note(self, values):
        self.alive.update(t.untyped_storage() for t in tree_leaves(values) if isinstance(t, torch.Tensor))

    def count(self):
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in self.alive))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.note((args, kwargs, result))
        self.count()
        return result

    def __enter__(self):
        self.count()
        self.stack = ExitStack()
        states = recompute.generator_states
        self.stack.callback(setattr, recompute, "generator_states", states)

        def noted(generators):
            found = states(generators)
            self.note(found)
            return found

        recompute.generator_states = noted
        return super().__enter__()

    def __exit__(self, *error):
        self.stack.close()
        return super().__exit__(*error)


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
