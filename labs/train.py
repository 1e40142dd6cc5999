"""torchrun --nproc-per-node 2 labs/train.py --mode tensor+sequence

Lab 6's training of a GPT, in any row of table 2.  The same ranks give the same losses, bit for bit.
Other numbers of ranks and other modes give losses that differ by rounding.
Exit code 0 at the end of all steps, 2 on wrong use.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from actmem.config import ConfigError, ModelShape, check_layer, check_size, check_vocab_size
from actmem.formulas.activations import TABLE2, Configuration
from actmem.layers.gpt import GPT
from actmem.layers.transformer import TransformerLayer
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import reduce_partial_gradients
from actmem.parallel.weights import child_seed
from actmem_course.arguments import add_rank_arguments
from actmem_course.lab_tools.options import lab_parser
from actmem_course.lab_tools.output import screen_of, write_rows
from actmem_course.process import lab
from actmem_course.ranks import check_ranks, ranks
from actmem_course.standard_library import standard_library

MODES = {mode.name: mode for mode in TABLE2}
#: Sizes that up to eight ranks can share.
SHAPE = ModelShape(64, 2, 64, 8, num_layers=2, vocab_size=256)
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
    option("--dropout", type=float, default=0.1, metavar="P", help="default: 0.1")
    option("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    add_rank_arguments(parser, emulate=False)
    args = parser.parse_args()
    with parser.refusing():
        size = check_ranks(args, parser.prog, "json")
        job = TrainingJob(SHAPE, MODES[args.mode], args.steps, args.dropout, args.dtype)
        job.check(size)
        text = standard_library(TEXT_BYTES)

    with ranks(args) as here:
        screen = screen_of(here.rank)

        def say(step: int, loss: float) -> None:
            screen.print(f"step {step}: loss {loss:.6f}")

        losses = train(job, here.device, text.to(here.device), say)
        write_rows(args.json, here.rank, losses)
    return 0


@dataclass(frozen=True)
class TrainingJob:
    """The training to run.

    Attributes:
        shape: the model's sizes.
        mode: a row of table 2: how the ranks share the model, and what is recomputed.
        num_steps: how many training steps.
        dropout: the dropouts' probability.
        dtype: of the weights and activations, by its name, such as "float32".
    """

    shape: ModelShape
    mode: Configuration
    num_steps: int
    dropout: float = 0.0
    dtype: str = "float32"

    def check(self, num_ranks: int) -> None:
        """Raise ConfigError if ``num_ranks`` ranks can't share the model in this mode."""
        check_size("steps", self.num_steps, largest=10**6)
        if not 0 <= self.dropout < 1:
            raise ConfigError("dropout", f"must be at least 0 and less than 1, got {self.dropout}")
        parallel = self.mode.parallel(num_ranks)
        check_layer(self.shape, parallel)
        check_vocab_size(self.shape.vocab_size, parallel.tensor_parallel_size)

    def model(self, **place) -> GPT:
        """Make the model, with this rank's shards of the parameters.

        Args:
            place: dtype and device of the parameters.
        """
        mode, tp = self.mode, TensorParallel()
        if mode.tensor_parallel:
            tp = tensor_parallel(sequence_parallel=mode.sequence_parallel)
        return GPT(self.shape, tp, recompute=mode.recompute, p=self.dropout, seed=SEED, **place)


def train(
    job: TrainingJob,
    device: str,
    text: Tensor,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Train a GPT, and return the loss of each step.  Every rank must call this function.

    A step's batch and dropouts depend only on the step's number.

    Args:
        job: the model, the mode and the number of steps.
        device: "cpu" or "cuda".
        text: ``[length]``, token ids.
        on_step: called after each step with the step's number, from 1, and its loss.
    """
    model = job.model(dtype=getattr(torch, job.dtype), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batch_size = NUM_MICROBATCHES * job.shape.micro_batch_size
    losses: list[float] = []
    for step in range(job.num_steps):
        tokens, targets = batch(text, step, job.shape.seq_length, batch_size)
        seed_dropouts(model, step)
        losses.append(training_step(model, optimizer, tokens, targets))
        on_step(step + 1, losses[-1])
    return losses


def batch(text: Tensor, step: int, seq_length: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and next-token targets of one step, the same on every rank.

    Args:
        text: ``[length]``, token ids.
        step: the step's number, from 0; the pieces of text are drawn with a seed made from it.
        seq_length: tokens of one sequence.
        batch_size: sequences of the whole batch, all microbatches together.

    Returns: tokens and targets, ``[batch_size, seq_length]`` each.
    """
    starts = torch.randint(len(text) - seq_length, (batch_size,), generator=torch.Generator().manual_seed(SEED + step))
    pieces = text[starts.to(text.device).unsqueeze(1) + torch.arange(seq_length + 1, device=text.device)]
    return pieces[:, :-1], pieces[:, 1:]


def training_step(model: GPT, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> float:
    """Run one step on all microbatches, with the gradient's norm clipped to MAX_NORM, and return the mean loss.

    Args:
        model: the GPT, with this rank's shards.
        optimizer: of the model's parameters.
        tokens: ``[batch_size, s]``; they are split into NUM_MICROBATCHES microbatches.
        targets: ``[batch_size, s]``, for each position the token that follows.
    """
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


def gradient_norm(model: GPT) -> float:
    """Return the 2-norm of the unsharded model's gradient.

    The squares of sharded parameters' gradients are summed over the ranks; parameters that every rank has count once.

    Args:
        model: the GPT after backward; every parameter has its .grad, already summed over the ranks where needed.
    """
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


def seed_dropouts(model: GPT, step: int) -> None:
    """Seed the random-number generators of the model's dropouts with the step's number.

    So which elements a step drops depends only on this number, and not on the steps before.

    Args:
        model: the GPT, with this rank's shards.
        step: the step's number, from 0.
    """
    streams = next(layer.streams for layer in model.modules() if isinstance(layer, TransformerLayer))
    streams.replicated.manual_seed(child_seed(SEED, "dropout", step))
    streams.sharded.manual_seed(child_seed(SEED, "dropout", step, model.tp.rank))


if __name__ == "__main__":
    sys.exit(main())
