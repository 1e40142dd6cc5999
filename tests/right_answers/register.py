"""A register of right answers that differ from ours."""

import torch

#: Lab, exercise, function.
RIGHT = []


def right(lab, *numbers):
    """Register the decorated function as a right answer to these exercises."""

    def register(function):
        RIGHT.extend((lab, number, function) for number in numbers)
        return function

    return register


def mesh_of(group):
    return torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")
