"""Lab 6's training as a job: it saves itself, and goes on from there when it is started again."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from actmem.config import ConfigError, ModelShape, check_layer, check_size, check_vocab_size
from actmem.formulas.activations import Configuration
from actmem_course.bench.saved_training import check_save, load_training, newest_save, save_training
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

TEXT_BYTES = 200_000
#: Sizes that up to eight ranks can share.
TRAINING_SHAPE = ModelShape(64, 2, 64, 8, num_layers=2, vocab_size=256)
#: In the folder, beside the saves: what the training must have in common with the one that goes on.
SETTINGS = "training.json"


@dataclass(frozen=True)
class TrainingJob:
    """A training of lab 6.  mode: how the ranks share the model; another one may go on."""

    shape: ModelShape
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
        check_layer(self.shape, parallel)
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
        saved = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
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
    model = make_model(
        job.shape, job.mode, None, dropout=job.dropout, dtype=getattr(torch, job.dtype), device=here.device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses: list[float] = []
    if folder:
        saved = here.gather(newest_save(folder))[0]  # as rank 0 sees it
        if saved:
            losses = load_training(folder, saved, model, optimizer, SEED)
        elif here.rank == 0:
            _make(folder)
            write_text(folder / SETTINGS, json.dumps(job.settings(text)) + "\n")
    size = NUM_MICROBATCHES * job.shape.micro_batch_size
    while len(losses) < job.num_steps:
        tokens, targets = batch(text, len(losses), job.shape.seq_length, size)
        microbatches = list(zip(tokens.chunk(NUM_MICROBATCHES), targets.chunk(NUM_MICROBATCHES)))
        losses.append(training_step(model, optimizer, microbatches, MAX_NORM))
        on_step(len(losses), losses[-1])
        if folder and (len(losses) % save_every == 0 or len(losses) == job.num_steps):
            save_training(folder, model, optimizer, losses)
    return losses
