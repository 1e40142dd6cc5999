"""Lab 6's training, of a GPT or a Llama, as a job: it saves itself, and goes on from there when it is started again.

Its state is in files that don't depend on t: torch.distributed.checkpoint writes each rank's shards, and reads those that
another rank needs.  What belongs to the state: weights, the optimizer's averages and its count of steps, and the losses
so far.  Batches and dropouts don't: they follow from the number of the step.

A save is a folder ``step-00000012`` with torch's files, the settings, and, written last, the checksums of all: it is whole
only with those.  One training at a time is at work in a folder: it holds the lock of a file there.  ``.metadata`` is a pickle, so resume only from a folder that you trust: a checksum finds accidents, not forgers.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from actmem.config import ConfigError, ModelShape, check_divides, check_layer, check_size, check_vocab_size
from actmem.formulas.activations import Configuration
from actmem.layers.gpt import GPT
from actmem.layers.transformer import TransformerLayer
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.weights import child_seed
from actmem_course.files import write_text
from actmem_course.judge.solutions.lab6_train import (
    LEARNING_RATE,
    MAX_NORM,
    NUM_MICROBATCHES,
    SEED,
    batch,
    make_model,
    training_step,
)
from actmem_course.ranks import Ranks
from actmem_more.llama import LlamaStage
from actmem_more.llama_shape import LlamaShape, check_llama_ranks

TEXT_BYTES = 200_000
#: Sizes that up to eight ranks can share.
TRAINING_SHAPE = ModelShape(64, 2, 64, 8, num_layers=2, vocab_size=256)
#: The same for a Llama: no two ranks hold the same key and value head.
LLAMA_TRAINING_SHAPE = LlamaShape(64, 2, 64, 16, 8, 176, num_layers=2, vocab_size=256)
#: In each save: what the training must have in common with the one that goes on.
SETTINGS = "training.json"
#: How long a training waits for one that has just been killed to be gone.
LOCK_SECONDS = 5.0


@dataclass(frozen=True)
class TrainingJob:
    """A training of lab 6.  shape: of a GPT, or of a Llama.  mode: how the ranks share the model; another one may go on."""

    shape: ModelShape | LlamaShape
    mode: Configuration
    num_steps: int
    dropout: float = 0.0
    dtype: str = "float32"

    def check(self, num_ranks: int) -> None:
        """Raise ConfigError if ``num_ranks`` ranks can't share the model so."""
        check_size("steps", self.num_steps, largest=10**6)
        if not 0 <= self.dropout < 1:
            raise ConfigError("dropout", f"must be at least 0 and less than 1, got {self.dropout}")
        parallel = self.mode.parallel(num_ranks)
        if isinstance(self.shape, ModelShape):
            check_layer(self.shape, parallel)
        else:
            check_llama_ranks(self.shape, parallel)
            check_divides(
                "num_key_value_heads",
                self.shape.num_key_value_heads,
                "tensor_parallel_size",
                parallel.tensor_parallel_size,
            )
            if self.dropout:
                raise ConfigError("dropout", f"a Llama has none, got {self.dropout}")
        check_vocab_size(self.shape.vocab_size, parallel.tensor_parallel_size)

    def settings(self, text: Tensor) -> dict:
        """What decides on the losses."""
        checksum = zlib.crc32(bytes(text.tolist()))
        own = {"dropout": self.dropout, "dtype": self.dtype, "text": checksum}
        return {"model": type(self.shape).__name__, **asdict(self.shape), **own}


def check_folder(job: TrainingJob, text: Tensor, folder: Path, resume: bool) -> AbstractContextManager[Any]:
    """Lock ``folder`` on rank 0, for as long as the result is open.

    Raises ConfigError if the job can't save there, can't go on from what is saved there, or another one is at work there.
    """
    try:
        held = _locked(folder) if int(os.environ.get("RANK", "0")) == 0 else nullcontext()
        there = newest_save(folder)
    except OSError as error:
        raise ConfigError("save", f"cannot write and lock {folder}: {error.strerror}") from None
    if there and not resume:
        raise ConfigError("save", f"{folder} holds a training of {there} steps: add --resume, or name another folder")
    if there:
        saved, own = check_save(folder, there), job.settings(text)
        different = [
            f"another {name}: {saved.get(name)}, not {own[name]}" for name in own if saved.get(name) != own[name]
        ]
        if different:
            raise ConfigError("resume", f"the training in {folder} has {'; '.join(different)}")
        if there > job.num_steps:
            raise ConfigError("steps", f"{folder} holds {there} already")
    return held


def _locked(folder: Path) -> IO[str]:
    """A file of ``folder``, locked until it is closed, or its process ends."""
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


def run_training(
    job: TrainingJob,
    here: Ranks,
    text: Tensor,
    folder: Path | None = None,
    save_every: int = 10,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """The losses of all steps, those before the newest save in ``folder`` as they were saved.

    on_step: called after each step that this call runs, with its number from 1 on.  Every rank must call this.
    """
    model: Any = job_model(job, dtype=getattr(torch, job.dtype), device=here.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses: list[float] = []
    if folder:
        saved = here.gather(newest_save(folder))[0]  # as rank 0 sees it
        if saved:
            losses = load_training(folder, saved, model, optimizer)
    size = NUM_MICROBATCHES * job.shape.micro_batch_size
    while len(losses) < job.num_steps:
        tokens, targets = batch(text, len(losses), job.shape.seq_length, size)
        microbatches = list(zip(tokens.chunk(NUM_MICROBATCHES), targets.chunk(NUM_MICROBATCHES)))
        seed_dropouts(model, len(losses))
        losses.append(training_step(model, optimizer, microbatches, MAX_NORM))
        on_step(len(losses), losses[-1])
        if folder and (len(losses) % save_every == 0 or len(losses) == job.num_steps):
            save_training(folder, model, optimizer, losses, job.settings(text))
    return losses


def job_model(job: TrainingJob, **factory) -> GPT | LlamaStage:
    """The whole model, shared among the ranks as the mode says.  factory: dtype and device."""
    shape, mode = job.shape, job.mode
    if isinstance(shape, ModelShape):
        return make_model(shape, mode, None, dropout=job.dropout, **factory)
    tp = tensor_parallel(sequence_parallel=mode.sequence_parallel) if mode.tensor_parallel else TensorParallel()
    return LlamaStage(shape, tp, recompute=mode.recompute, **factory)


#: Whole saves that stay; older ones are deleted.
KEPT_SAVES = 2
_COMPLETE = "checksums.json"


def newest_save(folder: Path) -> int:
    """The step of the newest whole save in ``folder``; 0 if there is none."""
    return max(_whole_saves(folder), default=0)


def save_training(
    folder: Path, model: GPT | LlamaStage, optimizer: torch.optim.Optimizer, losses: list[float], settings: dict
) -> None:
    """Save the state after ``len(losses)`` steps.  Every rank must call it, and see the same folder."""
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

    The ranks may share the model in another way than those that saved it, and be of another kind.
    """
    place = _place(folder, step)
    losses = torch.zeros(step, dtype=torch.float64)
    state = {**_shards(model, optimizer), "losses": losses}
    _one_error(lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(place)), place)
    return losses.tolist()


def seed_dropouts(model: GPT | LlamaStage, step: int) -> None:
    """Seed the generators that all dropouts of a GPT share, for one step.  A Llama drops nothing out."""
    if isinstance(model, LlamaStage):
        return
    streams = next(layer.streams for layer in model.modules() if isinstance(layer, TransformerLayer))
    streams.replicated.manual_seed(child_seed(SEED, "dropout", step))
    streams.sharded.manual_seed(child_seed(SEED, "dropout", step, model.tp.rank))


def check_save(folder: Path, step: int) -> dict:
    """The settings in the save of ``step``.  Raises ConfigError if one of its files is not what was written."""
    place = _place(folder, step)
    try:
        written, found = dict(json.loads((place / _COMPLETE).read_text(encoding="utf-8"))), _checksums(place)
    except (OSError, ValueError, TypeError, RecursionError):
        written, found = {}, {}
    for name in [*written, SETTINGS] if written else [_COMPLETE]:
        if found.get(name) != written.get(name, 0):
            raise ConfigError("resume", f"{place / name} is damaged: remove {place} to go on from an older save")
    return json.loads((place / SETTINGS).read_text(encoding="utf-8"))


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
