"""torchrun --nproc-per-node 2 labs/train.py --save run --resume

Lab 6's training, of a GPT or of a Llama, as a job that may be killed: it saves itself every few steps, and the same command started
again goes on from there.  With as many ranks the losses are, bit for bit, those of a training that nobody
interrupted; other numbers of ranks and other modes may go on too, and differ by rounding.
Exit code 0 at the end of all steps, 2 on wrong use.
"""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

from actmem.config import ConfigError, ModelShape, check_size
from actmem.formulas.activations import TABLE2
from actmem_course.bench.runner import Measurement
from actmem_course.bench.training import (
    LLAMA_TRAINING_SHAPE,
    TEXT_BYTES,
    TRAINING_SHAPE,
    TrainingJob,
    check_folder,
    run_training,
)
from actmem_course.process import lab
from actmem_course.ranks import add_rank_arguments, check_ranks
from actmem_course.standard_library import standard_library
from actmem_more.llama_shape import LlamaShape

SHAPES: dict[str, ModelShape | LlamaShape] = {"gpt": TRAINING_SHAPE, "llama": LLAMA_TRAINING_SHAPE}
MODES = {mode.name: mode for mode in TABLE2}


@lab
def main() -> int:
    run = Measurement(__doc__)
    run.option("--steps", type=int, default=20, metavar="N", help="training steps (default: 20)")
    run.option("--mode", choices=tuple(MODES), default="tensor+sequence+selective", help="a row of table 2")
    run.option("--model", choices=tuple(SHAPES), default="gpt", help="default: gpt")
    run.option("--dropout", type=float, metavar="P", help="of the GPT (default: 0.1)")
    run.option("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    run.option("--save", type=folder, metavar="FOLDER", help="where to save; all hosts must see it")
    run.option("--save-every", type=int, metavar="N", help="steps between two saves (default: 10)")
    run.option("--resume", action="store_true", help="go on from the newest save there, if there is one")
    add_rank_arguments(run.parser, emulate=False)
    with run.asked() as args:
        size = check_ranks(args, "train.py")
        dropout = (0.1 if args.model == "gpt" else 0.0) if args.dropout is None else args.dropout
        job = TrainingJob(SHAPES[args.model], MODES[args.mode], args.steps, dropout, args.dtype)
        job.check(size)
        check_size("save_every", 10 if args.save_every is None else args.save_every)
        for option in ("resume", "save_every"):
            if getattr(args, option) and not args.save:
                raise ConfigError(option, "needs --save FOLDER")
        text = standard_library(TEXT_BYTES)
        held = check_folder(job, text, args.save, args.resume) if args.save else nullcontext()

    with held, run.ranks() as here:
        say = lambda step, loss: run.show(f"step {step}: loss {loss:.6f}")  # noqa: E731
        run.write(run_training(job, here, text.to(args.device), args.save, args.save_every or 10, say))
    return 0


def folder(name: str) -> Path:
    """The folder of --save: ``""`` would be the one in which the lab was started."""
    if not name:
        raise argparse.ArgumentTypeError("must name a folder")
    return Path(name)


if __name__ == "__main__":
    sys.exit(main())
