"""Lab 6's training, of a GPT or a Llama, as a job: it saves itself, and goes on from there when it is started again.

Its state is in files that don't depend on t: torch.distributed.checkpoint writes each rank's shards, and reads those that
another rank needs.  What belongs to the state: weights, the optimizer's averages and its count of steps, and the losses
so far.  Batches and dropouts don't: they follow from the number of the step.

A save is a folder ``step-00000012`` with torch's files and, written last, their checksums: it is whole only with those.
``.metadata`` is a pickle, so resume only from a folder that you trust: a checksum finds accidents, not forgers.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
from actmem_course.files import check_writable, write_text
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
#: In the folder, beside the saves: what the training must have in common with the one that goes on.
SETTINGS = "training.json"


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
        return {"shape": asdict(self.shape), "dropout": self.dropout, "dtype": self.dtype, "text": checksum}


def check_folder(job: TrainingJob, text: Tensor, folder: Path, resume: bool) -> None:
    """Raise ConfigError if the job can't save in ``folder``, or can't go on from what is saved there."""
    there = newest_save(folder)
    if there and not resume:
        raise ConfigError("save", f"{folder} holds a training of {there} steps: add --resume, or name another folder")
    if not there:
        if int(os.environ.get("RANK", "0")) == 0:
            _make(folder)
        return
    try:
        saved = dict(json.loads((folder / SETTINGS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise ConfigError("save", f"{folder / SETTINGS} can't be read: name another folder") from None
    own = job.settings(text)
    different = [name for name in own if saved.get(name) != own[name]]
    if different:
        raise ConfigError(
            "resume",
            f"the training in {folder} has another {different[0]}: {saved.get(different[0])}, not {own[different[0]]}",
        )
    check_save(folder, there)
    if there > job.num_steps:
        raise ConfigError("steps", f"{folder} holds {there} already")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("save", f"cannot write {folder}: {error.strerror}") from None
    check_writable("save", folder / SETTINGS)


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
        elif here.rank == 0:
            _make(folder)
            write_text(folder / SETTINGS, json.dumps(job.settings(text)) + "\n")
    size = NUM_MICROBATCHES * job.shape.micro_batch_size
    while len(losses) < job.num_steps:
        tokens, targets = batch(text, len(losses), job.shape.seq_length, size)
        microbatches = list(zip(tokens.chunk(NUM_MICROBATCHES), targets.chunk(NUM_MICROBATCHES)))
        seed_dropouts(model, len(losses))
        losses.append(training_step(model, optimizer, microbatches, MAX_NORM))
        on_step(len(losses), losses[-1])
        if folder and (len(losses) % save_every == 0 or len(losses) == job.num_steps):
            save_training(folder, model, optimizer, losses)
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


def seed_dropouts(model: GPT | LlamaStage, step: int) -> None:
    """Seed the generators that all dropouts of a GPT share, for one step.  A Llama drops nothing out."""
    if isinstance(model, LlamaStage):
        return
    streams = next(layer.streams for layer in model.modules() if isinstance(layer, TransformerLayer))
    streams.replicated.manual_seed(child_seed(SEED, "dropout", step))
    streams.sharded.manual_seed(child_seed(SEED, "dropout", step, model.tp.rank))


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
