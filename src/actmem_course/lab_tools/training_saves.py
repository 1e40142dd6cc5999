"""The state of a training, saved by its ranks in files that don't depend on t, and read again by any number of them.

torch.distributed.checkpoint writes each rank's shards, and reads those that another rank needs.  What belongs to the
state: weights, the optimizer's averages and its count of steps, and the losses so far.

A save is a folder ``step-00000012`` with torch's files and, written last, their checksums: it is whole only with those.
``.metadata`` is a pickle, so resume only from a folder that you trust: a checksum finds accidents, not forgers.
"""

from __future__ import annotations

import errno
import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from actmem.config import ConfigError
from actmem.layers.gpt import GPT
from actmem_course.files import write_text
from actmem_more.llama import LlamaStage

#: Whole saves that stay; older ones are deleted.
KEPT_SAVES = 2
_COMPLETE = "checksums.json"


def newest_save(folder: Path) -> int:
    """The step of the newest whole save in ``folder``; 0 if there is none."""
    return max(_whole_saves(folder), default=0)


def save_training(folder: Path, model: GPT | LlamaStage, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
    """Save the state after ``len(losses)`` steps.  Every rank must call it, and see the same folder."""
    place = _place(folder, len(losses))
    state = {**_shards(model, optimizer), "losses": torch.tensor(losses, dtype=torch.float64)}
    _one_error(lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(place)), place)
    if torch.distributed.get_rank() == 0:
        write_text(place / _COMPLETE, json.dumps(_checksums(place)) + "\n")
        for step in sorted(_whole_saves(folder))[:-KEPT_SAVES]:
            old = _place(folder, step)
            (old / _COMPLETE).unlink()  # first: what is left by a kill in between is no save
            shutil.rmtree(old)


def load_training(folder: Path, step: int, model: GPT | LlamaStage, optimizer: torch.optim.Optimizer) -> list[float]:
    """Read the save of ``step`` into a new model and optimizer; returns the losses so far.

    The ranks may share the model in another way than those that saved it, and be of another kind.
    """
    place = _place(folder, step)
    losses = torch.zeros(step, dtype=torch.float64)
    state = {**_shards(model, optimizer), "losses": losses}
    _one_error(lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(place)), place)
    return losses.tolist()


def check_save(folder: Path, step: int) -> None:
    """Raise ConfigError if a file of the save of ``step`` is not what was written."""
    place = _place(folder, step)
    try:
        written, found = dict(json.loads((place / _COMPLETE).read_text(encoding="utf-8"))), _checksums(place)
    except (OSError, ValueError, TypeError):
        written, found = {}, {}
    for name in written or [_COMPLETE]:
        if found.get(name) != written.get(name, 0):
            raise ConfigError("resume", f"{place / name} is damaged: remove {place} to go on from an older save")


def _checksums(place: Path) -> dict[str, int]:
    files = (path for path in place.iterdir() if path.is_file() and not path.name.startswith(_COMPLETE))
    return {path.name: zlib.crc32(path.read_bytes()) for path in sorted(files)}


def _one_error(run: Callable[[], object], place: Path) -> None:
    """``run()``; what fails on any rank is an OSError on every one: torch's own is no Exception, and has 100 lines."""
    try:
        run()
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        first = next((cause for cause in causes if isinstance(cause, OSError)), causes[0])
        reason = getattr(first, "strerror", None) or str(first).partition("\n")[0]
        raise OSError(getattr(first, "errno", None) or errno.EIO, reason, str(place)) from None


def _place(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08}"


def _whole_saves(folder: Path) -> set[int]:
    names = {file.parent.name.removeprefix("step-") for file in folder.glob(f"step-*/{_COMPLETE}")}
    return {int(name) for name in names if name.isdecimal()}


def _shards(model: GPT | LlamaStage, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and the optimizer's tensors, by name, as parts of the unsharded ones.  They share this rank's storage."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = _as_shard(parameter.detach(), parameter, model)
        for key, value in _averages(optimizer, parameter).items():
            whole = value.shape == parameter.shape
            found[f"optimizer.{key}.{name}"] = _as_shard(value, parameter, model) if whole else value
    return found


def _as_shard(tensor: Tensor, parameter: Tensor, model: GPT | LlamaStage) -> Tensor:
    """``tensor`` as this rank's part of what the ranks of model.tp hold together; itself if they share nothing."""
    dim = getattr(parameter, "partition_dim", None)
    if dim is None or model.tp.group is None or model.tp.size == 1:
        return tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard  # takes a second to load

    mesh = DeviceMesh.from_group(model.tp.group, tensor.device.type)
    return DTensor.from_local(tensor, mesh, [Shard(dim)], run_check=False)


def _averages(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """AdamW's tensors of a parameter, in the optimizer from now on: it makes them in its first step only."""
    state: dict[str, Any] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    return state
