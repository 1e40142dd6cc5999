"""torchrun --nproc-per-node 2 labs/train.py --mode tensor+sequence

Lab 6's training of a GPT, in any row of table 2; model, data and step are those of our solution.  The same ranks
give the same losses, bit for bit.  Other numbers of ranks and other modes give losses that differ by rounding.
Exit code 0 at the end of all steps, 2 on wrong use.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from actmem.config import ConfigError, ModelShape, check_layer, check_size, check_vocab_size
from actmem.formulas.activations import TABLE2, Configuration
from actmem.layers.transformer import TransformerLayer
from actmem.parallel.weights import child_seed
from actmem_course.arguments import add_rank_arguments
from actmem_course.judge.solutions import lab6_train as lab6
from actmem_course.lab_tools.options import lab_parser
from actmem_course.lab_tools.output import screen_of, write_rows
from actmem_course.process import lab
from actmem_course.ranks import check_ranks, ranks
from actmem_course.standard_library import standard_library

MODES = {mode.name: mode for mode in TABLE2}
#: Sizes that up to eight ranks can share.
SHAPE = ModelShape(64, 2, 64, 8, num_layers=2, vocab_size=256)
TEXT_BYTES = 200_000


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
    place = {"dtype": getattr(torch, job.dtype), "device": device}
    model = lab6.make_model(job.shape, job.mode, None, dropout=job.dropout, **place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lab6.LEARNING_RATE)
    batch_size = lab6.NUM_MICROBATCHES * job.shape.micro_batch_size
    streams = next(layer.streams for layer in model.modules() if isinstance(layer, TransformerLayer))
    losses: list[float] = []
    for step in range(job.num_steps):
        batch = lab6.batch(text, step, job.shape.seq_length, batch_size)
        microbatches = list(zip(*(part.chunk(lab6.NUM_MICROBATCHES) for part in batch)))
        # Which elements a step drops depends only on its number, not on the steps before.
        streams.replicated.manual_seed(child_seed(lab6.SEED, "dropout", step))
        streams.sharded.manual_seed(child_seed(lab6.SEED, "dropout", step, model.tp.rank))
        losses.append(lab6.training_step(model, optimizer, microbatches, lab6.MAX_NORM))
        on_step(step + 1, losses[-1])
    return losses


if __name__ == "__main__":
    sys.exit(main())
