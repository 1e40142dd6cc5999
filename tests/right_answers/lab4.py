"""Right answers to lab 4: torch's checkpoints."""

from torch.utils.checkpoint import checkpoint

from actmem_course.reference_layer import core_attention, layer
from tests.right_answers.register import right


@right("4.1", "4.2")
def checkpoint_of_torch(function, *inputs):
    return checkpoint(function, *inputs, use_reentrant=False)


@right("4.1", "4.2")
def reentrant_checkpoint_of_torch(function, *inputs):
    return checkpoint(function, *inputs, use_reentrant=True)


@right("4.3")
def selective_by_torch(x, w, dropouts):
    return layer(x, w, dropouts, lambda *arguments: checkpoint(core_attention, *arguments, use_reentrant=False))


@right("4.4")
def full_by_torch(x, w, dropouts):
    return checkpoint(layer, x, w, dropouts, use_reentrant=False)
