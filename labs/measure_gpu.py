"""python labs/measure_gpu.py

All that one GPU can tell, in less than 9 minutes: table 2, table 4 and the peers on one emulated
rank of 8, for a layer of the 22B and the 175B model at s = 2048 and 8192, the rate of a matrix
product beside them. Writes labs/results/DEVICE-DATE.json after every step, so that what
was measured is kept whatever happens. Try it without a GPU: --device cpu --quick
Exit code 0 if all claims hold, which are about bytes, 1 if one does not or a step failed, 2 on wrong use.
"""

import os
import re
import sys
import time
import warnings
from datetime import date
from pathlib import Path

import torch

from actmem.config import ConfigError, ModelShape, check_size
from actmem_course.arguments import LabParser
from actmem_course.bench.measure_gpu import check_plan, full_plan, quick_plan, run_plan
from actmem_course.bench.measure_peers import PEER_MODES
from actmem_course.bench.session import Session
from actmem_course.bench.timing import device_name, setting, usual_dtype
from actmem_course.files import check_writable
from actmem_course.process import lab, lab_console
from actmem_course.ranks import check_ranks, ranks
from actmem_course.show.tables import missing_lines, noise_line, overheads_table, peers_table, speed_table

RESULTS = Path(__file__).parent / "results"


@lab
def main() -> int:
    parser = LabParser(prog="measure_gpu.py", description=__doc__.split("\n\n")[1])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--emulate", type=int, metavar="T", default=8, help="be one rank of T (default: 8)")
    parser.add_argument("--quick", action="store_true", help="the same steps on layers of no size, to try the script")
    parser.add_argument(
        "--seconds",
        type=int,
        metavar="N",
        default=510,
        help="start no step after that, and stop the one that runs (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write (default: labs/results/DEVICE-DATE.json; nothing with --quick)",
    )
    parser.set_defaults(can_emulate=True)
    args = parser.parse_args()
    with parser.refusing():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            raise ConfigError("started by torchrun", f"needs a single process: python labs/{parser.prog}")
        check_size("seconds", args.seconds)
        check_ranks(args, parser.prog)
        if args.device == "cpu" and not args.quick:
            raise ConfigError("device", "a CPU would need days for these layers: add --quick")
        plan = quick_plan() if args.quick else full_plan()
        check_plan(plan, args.emulate)
        if args.output is None and not args.quick:
            args.output = RESULTS / f"{slug(device_name(args.device))}-{date.today()}.json"
        check_output(args.output)

    # What peers and torch warn of while they are built is not this lab's to say.
    warnings.filterwarnings("ignore")
    torch.manual_seed(1234)
    console, started = lab_console(), time.monotonic()
    dtype = getattr(torch, usual_dtype(args.device))
    with ranks(args, real_tensors=True) as here:

        def say(text: str) -> None:
            console.print(f"{time.monotonic() - started:6.1f} s  {text}", highlight=False, markup=False, soft_wrap=True)

        session = Session(here, dtype, args.seconds, args.output, say)
        results = run_plan(plan, session)
        report(console, results, here)
    if args.output:
        console.print(f"wrote {args.output}", highlight=False, soft_wrap=True)
    failed = [skip for skip in results["skipped"] if skip["reason"] != "no time left"]
    return 1 if failed or not all(claim.holds for claim in results["claims"]) else 0


def check_output(path: Path | None) -> None:
    """Raise ConfigError if results can't be written there.  A results folder is made; a device is refused, for it would be replaced."""
    if path is None:
        return
    try:
        if path.parent == RESULTS:
            RESULTS.mkdir(exist_ok=True)
        if path.exists() and not path.is_file():
            raise ConfigError("output", f"{path} must be a file")
    except OSError as error:
        raise ConfigError("output", f"cannot write {path}: {error.strerror}") from None
    check_writable("output", path)


def slug(name: str) -> str:
    """A device's name as part of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def report(console, results, here) -> None:
    """Print the tables of every case, then what was skipped, then the claims: the end of a log is what is read."""
    for case in results["cases"]:
        shape = ModelShape(**{name: case[name] for name in ModelShape.__dataclass_fields__})
        where = setting(shape, here, results["settings"]["dtype"])
        speed, peers = case["speed"], case["peers"]
        if speed:
            console.print(speed_table(speed, f"{case['model']}: {where}"))
            console.print(
                noise_line(
                    speed[0].noise,
                    results["settings"]["rounds"],
                    "CUDA events" if here.device == "cuda" else "wall clock",
                ),
                highlight=False,
            )
        for mode in PEER_MODES if peers else ():
            console.print(peers_table(peers, mode))
        if (table := overheads_table(peers)) is not None:
            console.print(table)
        for sentence in missing_lines(peers):
            console.print(sentence, highlight=False, markup=False)
    gemm = results["gemm"]
    if gemm:
        console.print(
            f"Matrix product of {gemm['size']}³: {gemm['flops_per_second'] / 1e12:,.1f} TFLOP/s", highlight=False
        )
    for skip in results["skipped"]:
        console.print(f"skipped: {skip['job']}: {skip['reason']}", highlight=False, markup=False)
    for sentence in results["findings"]:
        console.print(sentence, highlight=False, markup=False)
    for claim in results["claims"]:
        mark = "holds" if claim.holds else "DOES NOT HOLD"
        console.print(
            f"{mark}: {claim.claim}: {claim.measured}",
            highlight=False,
            markup=False,
            style="" if claim.holds else "bold red",
        )


if __name__ == "__main__":
    sys.exit(main())
