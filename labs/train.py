"""torchrun --nproc-per-node 2 labs/train.py --save run --resume

Lab 6's training, of a GPT or of a Llama, as a job that may be killed.  It saves itself every few steps, and the same
command started again goes on from there.  With as many ranks the losses are, bit for bit, those of a training that
nobody interrupted.  Other numbers of ranks and other modes may go on too, and differ by rounding.
Exit code 0 at the end of all steps, 2 on wrong use.
"""

import argparse
import math
import os
import sys
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actmem.config import ConfigError, ModelShape, check_divides, check_layer, check_size, check_vocab_size
from actmem.formulas.activations import TABLE2, Configuration
from actmem.layers.gpt import GPT
from actmem.layers.transformer import TransformerLayer
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import reduce_partial_gradients
from actmem.parallel.weights import child_seed
from actmem_course.arguments import add_rank_arguments
from actmem_course.files import check_files
from actmem_course.lab_tools.options import lab_parser
from actmem_course.lab_tools.output import screen_of, write_rows
from actmem_course.lab_tools.training_saves import check_save, load_training, lock_folder, newest_save, save_training
from actmem_course.process import lab
from actmem_course.ranks import Ranks, check_ranks, ranks
from actmem_course.standard_library import standard_library
from actmem_more.llama import LlamaStage
from actmem_more.llama_shape import LlamaShape, check_llama_ranks

MODES = {mode.name: mode for mode in TABLE2}
#: Sizes that up to eight ranks can share; no two ranks hold the same key and value head of the Llama.
SHAPES: dict[str, ModelShape | LlamaShape] = {
    "gpt": ModelShape(64, 2, 64, 8, num_layers=2, vocab_size=256),
    "llama": LlamaShape(64, 2, 64, 16, 8, 176, num_layers=2, vocab_size=256),
}
TEXT_BYTES = 200_000
SEED = 1234
NUM_MICROBATCHES = 2
LEARNING_RATE = 3e-3
MAX_NORM = 1.0


@lab
def main() -> int:
    parser = lab_parser("train.py", __doc__ or "")
    option = parser.add_argument
    option("--steps", type=int, default=20, metavar="N", help="training steps (default: 20)")
    option("--mode", choices=tuple(MODES), default="tensor+sequence+selective", help="a row of table 2")
    option("--model", choices=tuple(SHAPES), default="gpt", help="default: gpt")
    option("--dropout", type=float, metavar="P", help="of the GPT (default: 0.1)")
    option("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    option("--save", type=folder_name, metavar="FOLDER", help="where to save; all hosts must see it")
    option("--save-every", type=int, metavar="N", help="steps between two saves (default: 10)")
    option("--resume", action="store_true", help="go on from the newest save there, if there is one")
    add_rank_arguments(parser, emulate=False)
    args = parser.parse_args()
    with parser.refusing():
        check_files(args, "json")
        size = check_ranks(args, parser.prog)
        dropout = (0.1 if args.model == "gpt" else 0.0) if args.dropout is None else args.dropout
        job = TrainingJob(SHAPES[args.model], MODES[args.mode], args.steps, dropout, args.dtype)
        job.check(size)
        check_size("save_every", 10 if args.save_every is None else args.save_every)
        for name in ("resume", "save_every"):
            if getattr(args, name) and not args.save:
                raise ConfigError(name, "needs --save FOLDER")
        text = standard_library(TEXT_BYTES)
        held = check_folder(job, text, args.save, args.resume) if args.save else nullcontext()

    with held, ranks(args) as here:
        screen = screen_of(here.rank)

        def say(step: int, loss: float) -> None:
            screen.print(f"step {step}: loss {loss:.6f}")

        torch.manual_seed(1234)
        losses = train(job, here, text.to(args.device), args.save, args.save_every or 10, say)
        write_rows(args.json, here.rank, losses)
    return 0


def folder_name(name: str) -> Path:
    """The folder of --save: ``""`` would be the one in which the lab was started."""
    if not name:
        raise argparse.ArgumentTypeError("must name a folder")
    return Path(name)


@dataclass(frozen=True)
class TrainingJob:
    """A training of a GPT, or of a Llama.  mode: how the ranks share the model; another one may go on."""

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
        shape, parallel = self.shape, self.mode.parallel(num_ranks)
        t = parallel.tensor_parallel_size
        if isinstance(shape, ModelShape):
            check_layer(shape, parallel)
        else:
            check_llama_ranks(shape, parallel)
            check_divides("num_key_value_heads", shape.num_key_value_heads, "tensor_parallel_size", t)
            if self.dropout:
                raise ConfigError("dropout", f"a Llama has none, got {self.dropout}")
        check_vocab_size(shape.vocab_size, t)

    def settings(self, text: Tensor) -> dict:
        """What decides on the losses."""
        checksum = zlib.crc32(bytes(text.tolist()))
        own = {"dropout": self.dropout, "dtype": self.dtype, "text": checksum}
        return {"model": type(self.shape).__name__, **asdict(self.shape), **own}

    def model(self, **place) -> GPT | LlamaStage:
        """The whole model, shared among the ranks as the mode says.  place: dtype and device."""
        mode, tp = self.mode, TensorParallel()
        if mode.tensor_parallel:
            tp = tensor_parallel(sequence_parallel=mode.sequence_parallel)
        if isinstance(self.shape, ModelShape):
            return GPT(self.shape, tp, recompute=mode.recompute, p=self.dropout, seed=SEED, **place)
        return LlamaStage(self.shape, tp, recompute=mode.recompute, **place)


def check_folder(job: TrainingJob, text: Tensor, folder: Path, resume: bool) -> AbstractContextManager[Any]:
    """Lock ``folder`` on rank 0, for as long as the result is open.

    Raises: ConfigError if the job can't save there, can't go on from what is saved there, or another one is at work
    there.
    """
    try:
        held = lock_folder(folder) if int(os.environ.get("RANK", "0")) == 0 else nullcontext()
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


def train(
    job: TrainingJob,
    here: Ranks,
    text: Tensor,
    folder: Path | None = None,
    save_every: int = 10,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """The losses of all steps, those before the newest save in ``folder`` as they were saved.

    Every rank must call this.  Batches and dropouts follow from the number of the step, so no save has them.
    on_step: called after each step that this call runs, with its number from 1 on.
    """
    model = job.model(dtype=getattr(torch, job.dtype), device=here.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses: list[float] = []
    if folder:
        saved = here.gather(newest_save(folder))[0]  # as rank 0 sees it
        if saved:
            losses = load_training(folder, saved, model, optimizer)
    batch_size = NUM_MICROBATCHES * job.shape.micro_batch_size
    while len(losses) < job.num_steps:
        tokens, targets = batch(text, len(losses), job.shape.seq_length, batch_size)
        seed_dropouts(model, len(losses))
        losses.append(training_step(model, optimizer, tokens, targets))
        on_step(len(losses), losses[-1])
        if folder and (len(losses) % save_every == 0 or len(losses) == job.num_steps):
            save_training(folder, model, optimizer, losses, job.settings(text))
    return losses


def batch(text: Tensor, step: int, seq_length: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens of one step, ``[batch_size, seq_length]`` each: pieces of text, the same on every rank."""
    starts = torch.randint(len(text) - seq_length, (batch_size,), generator=torch.Generator().manual_seed(SEED + step))
    pieces = text[starts.to(text.device).unsqueeze(1) + torch.arange(seq_length + 1, device=text.device)]
    return pieces[:, :-1], pieces[:, 1:]


def training_step(model: GPT | LlamaStage, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> float:
    """One step on all microbatches, with the gradient clipped to MAX_NORM; the mean loss."""
    optimizer.zero_grad()
    mean = 0.0
    for inputs, wanted in zip(tokens.chunk(NUM_MICROBATCHES), targets.chunk(NUM_MICROBATCHES)):
        loss = model.loss(model(inputs), wanted) / NUM_MICROBATCHES
        loss.backward()
        mean += loss.item()
    reduce_partial_gradients(model, model.tp)
    norm = gradient_norm(model)
    if norm > MAX_NORM:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad *= MAX_NORM / norm
    optimizer.step()
    return mean


def gradient_norm(model: GPT | LlamaStage) -> float:
    """The 2-norm of the unsharded model's gradient: shards are added up over the ranks, whole parameters count once."""
    sharded = whole = next(model.parameters()).new_zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        assert parameter.grad is not None
        square = parameter.grad.double().square().sum()
        if hasattr(parameter, "partition_dim"):
            sharded = sharded + square
        else:
            whole = whole + square
    if model.tp.size > 1:
        dist.all_reduce(sharded, group=model.tp.group)
    return math.sqrt(sharded + whole)


def seed_dropouts(model: GPT | LlamaStage, step: int) -> None:
    """Seed the generators that all dropouts of a GPT share, for one step.  A Llama drops nothing out."""
    if isinstance(model, LlamaStage):
        return
    streams = next(layer.streams for layer in model.modules() if isinstance(layer, TransformerLayer))
    streams.replicated.manual_seed(child_seed(SEED, "dropout", step))
    streams.sharded.manual_seed(child_seed(SEED, "dropout", step, model.tp.rank))


if __name__ == "__main__":
    sys.exit(main())
