"""torchrun --nproc-per-node 2 labs/train.py --save run --resume

Lab 6's training, of a GPT or of a Llama, as a job that may be killed: it saves itself every few steps, and the same command started
again goes on from there.  With as many ranks the losses are, bit for bit, those of a training that nobody
interrupted; other numbers of ranks and other modes may go on too, and differ by rounding.
Exit code 0 at the end of all steps, 2 on wrong use.
"""

import argparse
import json
import sys
from pathlib import Path

from actmem.config import ModelShape, check_size
from actmem.formulas.activations import TABLE2
from actmem.llama_shape import LlamaShape
from actmem_course.arguments import LabParser, add_json_argument
from actmem_course.bench.training import (
    LLAMA_TRAINING_SHAPE,
    TEXT_BYTES,
    TRAINING_SHAPE,
    TrainingJob,
    check_folder,
    run_training,
)
from actmem_course.files import check_files, write_text
from actmem_course.process import lab
from actmem_course.ranks import add_rank_arguments, check_ranks, ranks
from actmem_course.standard_library import standard_library

SHAPES: dict[str, ModelShape | LlamaShape] = {"gpt": TRAINING_SHAPE, "llama": LLAMA_TRAINING_SHAPE}
MODES = {mode.name: mode for mode in TABLE2}


@lab
def main() -> int:
    parser = LabParser(prog="train.py", description=__doc__.split("\n\n")[1])
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="training steps (default: 20)")
    parser.add_argument("--mode", choices=tuple(MODES), default="tensor+sequence+selective", help="a row of table 2")
    parser.add_argument("--model", choices=tuple(SHAPES), default="gpt", help="default: gpt")
    parser.add_argument("--dropout", type=float, metavar="P", help="of the GPT (default: 0.1)")
    parser.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")
    parser.add_argument("--save", type=folder, metavar="FOLDER", help="where to save; all hosts must see it")
    parser.add_argument("--save-every", type=int, metavar="N", help="steps between two saves (default: 10)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest save there, if there is one")
    add_rank_arguments(parser, emulate=False)
    add_json_argument(parser)
    args = parser.parse_args()
    with parser.refusing():
        size = check_ranks(args, "train.py")
        dropout = (0.1 if args.model == "gpt" else 0.0) if args.dropout is None else args.dropout
        job = TrainingJob(SHAPES[args.model], MODES[args.mode], args.steps, dropout, args.dtype)
        job.check(size)
        check_size("save_every", 10 if args.save_every is None else args.save_every)
        for option in ("resume", "save_every"):
            if getattr(args, option) and not args.save:
                parser.error(f"--{option.replace('_', '-')}: needs --save FOLDER")
        text = standard_library(TEXT_BYTES)
        if args.save:
            check_folder(job, text, args.save, args.resume)
        check_files(args, "json")

    with ranks(args) as here:

        def on_step(step: int, loss: float) -> None:
            if here.rank == 0:
                print(f"step {step}: loss {loss:.6f}", flush=True)

        losses = run_training(job, here, text.to(args.device), args.save, args.save_every or 10, on_step)
        if here.rank == 0 and args.json:
            write_text(args.json, json.dumps(losses) + "\n")
    return 0


def folder(name: str) -> Path:
    """The folder of --save: ``""`` would be the one in which the lab was started."""
    if not name:
        raise argparse.ArgumentTypeError("must name a folder")
    return Path(name)


if __name__ == "__main__":
    sys.exit(main())
