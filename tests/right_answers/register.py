"""A register of right answers that differ from ours."""

from typing import Any

import torch

#: Exercise, function.
RIGHT = []


def right(*numbers):
    """Register the decorated function as a right answer to these exercises."""

    def register(function):
        RIGHT.extend((number, function) for number in numbers)
        return function

    return register


def mesh_of(group):
    return torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")


def applied(forward, backward, *arguments):
    """A torch.autograd.Function of these two, applied."""
    both = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    answer: Any = type("Answer", (torch.autograd.Function,), both)
    return answer.apply(*arguments)
