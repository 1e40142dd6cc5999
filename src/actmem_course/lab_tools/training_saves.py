"""The state of a training, saved by its ranks in files that don't depend on t, and read again by any number of ranks.

torch.distributed.checkpoint writes each rank's shards, and reads those that another rank needs. The state is the
weights, the optimizer's averages and its count of steps, and the losses so far.

A save is a folder ``step-00000012`` with torch's files, the settings, and, written last, the checksums of all files.
Only with its checksums is a save complete. Only one training at a time may use a folder: it holds the lock of a file
there. ``.metadata`` is a pickle, so resume only from a folder that you trust: a checksum finds accidents, not forgers.
"""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from actmem.config import ConfigError
from actmem.layers.gpt import GPT
from actmem_course.files import write_text
from actmem_more.llama import LlamaStage

#: How many complete saves stay; older ones are deleted.
KEPT_SAVES = 2
#: The file in each save with the settings that a training must share to go on from it.
SETTINGS = "training.json"
#: Seconds that a training waits for the folder's lock, in case another one has just been killed.
LOCK_SECONDS = 5.0
_COMPLETE = "checksums.json"


def newest_save(folder: Path) -> int:
    """Return the step of the newest complete save in ``folder``; 0 if there is none."""
    return max(_whole_saves(folder), default=0)


def lock_folder(folder: Path) -> IO[str]:
    """Return a file of ``folder`` that is locked until it is closed or its process ends.

    Raises: ConfigError if another process keeps the lock.
    """
    end = time.monotonic() + LOCK_SECONDS
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / ".lock", "a")
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > end:
                raise ConfigError("save", f"another training is at work in {folder}: name another folder") from None
        time.sleep(0.1)


def save_training(
    folder: Path, model: GPT | LlamaStage, optimizer: torch.optim.Optimizer, losses: list[float], settings: dict
) -> None:
    """Save the state after ``len(losses)`` steps. Every rank must call it, and see the same folder.

    Args:
        settings: what a training that goes on from this save must share.

    Raises: OSError on every rank if one of them can't write.
    """
    place = _place(folder, len(losses))
    if torch.distributed.get_rank() == 0 and place.exists():
        shutil.rmtree(place)  # a save that was cut off, maybe of other ranks
    torch.distributed.barrier()
    state = {**_shards(model, optimizer), "losses": torch.tensor(losses, dtype=torch.float64)}
    _one_error(lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(place)), place)
    if torch.distributed.get_rank() == 0:
        write_text(place / SETTINGS, json.dumps(settings) + "\n")
        write_text(place / _COMPLETE, json.dumps(_checksums(place)) + "\n")
        for step in sorted(_whole_saves(folder))[:-KEPT_SAVES]:
            old = _place(folder, step)
            (old / _COMPLETE).unlink()  # first: what is left by a kill in between is no save
            shutil.rmtree(old)


def load_training(folder: Path, step: int, model: GPT | LlamaStage, optimizer: torch.optim.Optimizer) -> list[float]:
    """Read the save of ``step`` into a new model and optimizer; returns the losses so far.

    The ranks may share the model in another way than those that saved it, and run on another kind of device.
    Raises: OSError on every rank if one of them can't read.
    """
    place = _place(folder, step)
    losses = torch.zeros(step, dtype=torch.float64)
    state = {**_shards(model, optimizer), "losses": losses}
    _one_error(lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(place)), place)
    return losses.tolist()


def check_save(folder: Path, step: int) -> dict:
    """Return the settings in the save of ``step``.

    Raises: ConfigError if one of its files is not what was written.
    """
    place = _place(folder, step)
    try:
        expected, present = dict(json.loads((place / _COMPLETE).read_text(encoding="utf-8"))), _checksums(place)
    except (OSError, ValueError, TypeError, RecursionError):
        expected, present = {}, {}
    for name in [*expected, SETTINGS] if expected else [_COMPLETE]:
        if present.get(name) != expected.get(name, 0):
            raise ConfigError("resume", f"{place / name} is damaged: remove {place} to go on from an older save")
    return json.loads((place / SETTINGS).read_text(encoding="utf-8"))


def _checksums(place: Path) -> dict[str, int]:
    files = (path for path in place.iterdir() if path.is_file() and not path.name.startswith(_COMPLETE))
    return {path.name: zlib.crc32(path.read_bytes()) for path in sorted(files)}


def _one_error(run: Callable[[], object], place: Path) -> None:
    """Call ``run()``; if it fails on any rank, raise one OSError on every rank.

    torch's own error is not an Exception, and has 100 lines.
    """
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
    """Return weights and the optimizer's tensors, by name, as parts of the unsharded ones.

    They share this rank's storage.
    """
    shards = {}
    for name, parameter in model.named_parameters():
        shards[name] = _as_shard(parameter.detach(), parameter, model)
        for key, value in _averages(optimizer, parameter).items():
            has_its_shape = value.shape == parameter.shape
            shards[f"optimizer.{key}.{name}"] = _as_shard(value, parameter, model) if has_its_shape else value
    return shards


def _as_shard(tensor: Tensor, parameter: Tensor, model: GPT | LlamaStage) -> Tensor:
    """Return ``tensor`` as this rank's part of a tensor that the ranks of model.tp share, or itself if they don't."""
    dim = getattr(parameter, "partition_dim", None)
    if dim is None or model.tp.group is None or model.tp.size == 1:
        return tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard  # takes a second to load

    mesh = DeviceMesh.from_group(model.tp.group, tensor.device.type)
    return DTensor.from_local(tensor, mesh, [Shard(dim)], run_check=False)


def _averages(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return AdamW's tensors of a parameter, and make them if the optimizer has none before its first step."""
    state: dict[str, Any] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    return state
