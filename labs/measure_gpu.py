"""python labs/measure_gpu.py

What one GPU can measure in 8 minutes, as one emulated rank of 8: Table 2 by the allocator, the memory wall of the 22B
model, Table 4, models from other libraries, attention kernels, the caching allocator, torch's own parallel layer.

Writes labs/results/DEVICE-DATE.json after every step, so that what was measured is kept whatever happens.
Try it without a GPU: --device cpu --quick
Exit code 0 if every byte count agrees, 1 if one does not or a step failed, 2 on wrong use.
"""

import os
import re
import sys
import warnings
from argparse import Namespace
from datetime import date
from functools import partial
from pathlib import Path

# With segments that can grow, a block is its tensor rounded up to 512 bytes.  Read when torch first uses the GPU.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from gpu_steps.allocator import measure_reserved
from gpu_steps.kernels import CALLS, measure_kernels
from gpu_steps.layer_bytes import measure_layer_bytes
from gpu_steps.session import NO_TIME, Session
from gpu_steps.strangers import QUICK, STEPS, Predictions, measure_real_step
from gpu_steps.times import matmul_rate, measure_modes
from gpu_steps.wall import LADDER, climb
from measure_peers import measure_peers
from measure_speed import measure_speed

from actmem.config import PAPER_MODELS, ModelShape
from actmem.formulas.activations import TABLE2
from actmem.ledger.emulate import emulated_rank
from actmem_course.arguments import LabParser
from actmem_course.judge.parent import signals_end
from actmem_course.process import lab
from actmem_course.ranks import Ranks

RESULTS = Path(__file__).parent / "results"
RANKS = 8
#: Shapes of the same kinds that a CPU runs in seconds.
TINY = ModelShape(16, 2, 64, 8, num_layers=2, vocab_size=64)


@lab
@signals_end()  # so that the processes that predict end too
def main() -> int:
    args = options()
    # What others' models warn of while they are built is not this script's to say.
    warnings.filterwarnings("ignore")
    device = args.device
    path = args.output or (None if args.quick else RESULTS / f"{file_name(device)}.json")
    if path is not None:
        path.parent.mkdir(exist_ok=True)
    session = Session(path, args.seconds, lambda text: print(text, flush=True))
    session.results["settings"] = {"tensor_parallel_size": RANKS, "dtype": "bfloat16", "quick": args.quick}
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 16 * 2**30
    predictions = Predictions(device, memory / 2**30)
    steps = QUICK if args.quick else STEPS
    with emulated_rank(RANKS, device=device, real_tensors=True):
        measure_paper(session, args, memory)
    try:
        measure_others(session, args, predictions, steps)
    finally:
        predictions.stop()
    with emulated_rank(RANKS, device=device, real_tensors=True):
        measure_dtensor(session, args)
    return report(session.results)


def options() -> Namespace:
    parser = LabParser(prog="measure_gpu.py", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to try the script; writes no file")
    parser.add_argument("--seconds", type=int, default=440, help="start no step after that (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: labs/results/DEVICE-DATE.json")
    parser.add_argument(
        "--card", type=float, default=80, metavar="GIB", help="memory of the wall (default: 80, an A100's)"
    )
    args = parser.parse_args()
    if args.device == "cpu" and not args.quick:
        parser.error("--device: a CPU would need days for these layers: add --quick")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: there is no GPU that this torch can use; try --device cpu --quick")
    return args


def file_name(device: str) -> str:
    """Return a name for the file of results, such as nvidia-h200-2026-11-26; a day's second run gets a number.

    Args:
        device: "cpu" or "cuda".
    """
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    stem = f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}-{date.today()}"
    number = sum(1 for _ in RESULTS.glob(f"{stem}*.json")) + 1
    return stem if number == 1 else f"{stem}-{number}"


def measure_paper(session: Session, args: Namespace, memory: int) -> None:
    """Measure the paper's layers and its 22B model as one emulated rank, the most important measurement first.

    Args:
        session: runs the measurements, and gets their results: saved bytes of layers, peaks of training steps, times.
        args: the script's parsed options.
        memory: all bytes of the GPU's memory.
    """
    device, dtype, quick = args.device, torch.bfloat16, args.quick
    ranks, rounds = Ranks(0, RANKS, device, emulated=True), 2 if quick else 12
    shapes = {name: TINY if quick else PAPER_MODELS[name].shape for name in ("22B", "175B")}

    for name, shape in shapes.items():
        for row in TABLE2:
            session.step("table2", f"{name}, {row.name}", partial(measure_layer_bytes, shape, row, device, dtype))

    budget = int(args.card * 2**30)
    for name, tensor, sequence, recompute in LADDER:
        curve = name.endswith("selective")
        run = partial(climb, shapes["22B"], tensor, sequence, recompute, device=device, curve=curve)
        session.step("wall", name, partial(run, budget_bytes=budget))
        last = session.results["wall"][-1:]
        # What this card could hold, but not the paper's: the prediction is measured there too.
        if last and last[0]["out_of_memory"] and last[0]["predicted_bytes"] < 0.97 * memory:
            session.step("wall", f"{name}, all of this card", partial(run, budget_bytes=memory))

    size = 512 if quick else 8192
    session.step("rates", "matmul and copy", partial(matmul_rate, device, size, rounds, torch.bfloat16))
    for name, shape in shapes.items():
        session.step("table4", name, lambda: {"rows": measure_speed(shape, ranks, dtype, rounds=rounds)})
        session.step("modes", name, partial(measure_modes, shape, ranks, dtype, rounds))


def measure_others(session: Session, args: Namespace, predictions: Predictions, steps: tuple) -> None:
    """Measure training steps of other libraries' models, attention kernels and the allocator.

    ``predictions`` predicts the same steps with ``actmem`` in other processes meanwhile.  They disturb nothing: only
    bytes are measured here, not times.

    Args:
        session: runs the measurements, and gets their results.
        args: the script's parsed options.
        predictions: starts the processes that predict.
        steps: the training steps, each a model's name and its sizes.
    """
    for name, sizes in dict(steps).items():
        predictions.start_plan(name, sizes)
    for name, sizes in steps:
        predictions.start_record(name, sizes)
    for name, sizes in steps:
        session.step("strangers", f"{name} {sizes}", partial(measure_real_step, name, sizes, args.device))
    for call in CALLS[:2] if args.quick else CALLS:
        session.step("kernels", call.name, partial(measure_kernels, call, args.device, torch.bfloat16))

    with emulated_rank(RANKS, device=args.device, real_tensors=True):
        shape = TINY if args.quick else PAPER_MODELS["22B"].shape
        measure = partial(measure_reserved, shape, (1, 2, 3, 4, 6, 8), args.device, torch.bfloat16)
        session.step("allocator", "growing batches", measure)

    for row in session.results["strangers"]:
        for kind in predictions.about(row["name"]):
            wait = max(1.0, args.seconds - session.elapsed)
            session.attempt(f"strangers: {kind} of {row['name']}", partial(predictions.add_to, row, kind, wait))


def measure_dtensor(session: Session, args: Namespace) -> None:
    """Time one layer of the 22B model by torch's DTensor and by this course.

    Call this function when no process that predicts is running any more, because such a process would disturb times.

    Args:
        session: runs the measurement, and gets its results.
        args: the script's parsed options.
    """
    shape, rounds = (TINY, 2) if args.quick else (PAPER_MODELS["22B"].shape, 12)
    ranks = Ranks(0, RANKS, args.device, emulated=True)
    session.step("peers", "22B", lambda: {"rows": measure_peers(shape, ranks, torch.bfloat16, rounds=rounds)})


def report(results: dict) -> int:
    """Print predicted beside measured numbers, and then which measurements were skipped.

    Args:
        results: ``Session.results``.

    Returns: the exit code: 1 if a count of Table 2 differs from its prediction or a measurement failed, else 0.
    """
    wrong = 0
    print("\nTable 2, bytes of one layer        predicted           ledger        requested   apart")
    for row in results.get("table2", []):
        counted = [row["ledger_bytes"]] + [row["requested_bytes"]] * (row["requested_bytes"] is not None)
        apart = max((abs(count - row["predicted_bytes"]) for count in counted), default=0)
        wrong += apart != 0
        requested = "–" if row["requested_bytes"] is None else f"{row['requested_bytes']:,}"
        print(f"{row['name']:<32}{row['predicted_bytes']:>14,}{row['ledger_bytes']:>17,}{requested:>17}{apart:>8,}")
    print("\nThe wall                              predicted, GiB   measured, GiB   apart")
    for row in results.get("wall", []):
        measured, predicted = row["peak_bytes"], row["predicted_bytes"]
        outcome = row["out_of_memory"]
        if measured:
            outcome = f"{measured / 2**30:>16.2f}{measured / predicted - 1:>8.2%}"
        print(f"{row['name']:<40}{predicted / 2**30:>12.2f}  {outcome}")
    print("\nA step of others' models, GiB       record --fake    plan   measured   apart")
    for row in results.get("strangers", []):
        recorded = row.get("record_fake", {}).get("peak_bytes")
        planned = row.get("plan", {}).get("asked", {}).get("bytes")
        print(f"{row['name']:<36}{gib(recorded):>13}{gib(planned):>8}", end="")
        # cuBLAS's workspaces are in no prediction.
        measured = row["peak_bytes"] - row["cublas_bytes"] if "peak_bytes" in row else None
        apart = f"{measured / recorded - 1:.3%}" if measured and recorded else "–"
        print(f"{gib(measured):>11}{apart:>8}")
    for skip in results["skipped"]:
        print(f"skipped: {skip['step']}: {skip['reason']}")
    failed = any(skip["reason"] != NO_TIME for skip in results["skipped"])
    return 1 if wrong or failed else 0


def gib(size: int | None) -> str:
    return "–" if size is None else f"{size / 2**30:.2f}"


if __name__ == "__main__":
    sys.exit(main())
