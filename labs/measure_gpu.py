"""python labs/measure_gpu.py

All that one GPU can tell, in about 9 minutes: table 2, table 4 and the peers on one emulated
rank of 8, for a layer of the 22B and the 175B model at s = 2048 and 8192. Writes
labs/results/DEVICE-DATE.json after every step, so that what was measured is kept whatever happens. Try it without a GPU: --device cpu --quick
Exit code 0 if all claims hold, which are about bytes, 1 if one does not or a step failed, 2 on wrong use.
"""

import re
import sys
import time
import warnings
from datetime import date
from pathlib import Path

import torch

from actmem.config import ConfigError, ModelShape, Parallel, check_layer, check_size
from actmem_course.bench.measure_gpu import GPU_LAYERS, QUICK_LAYERS, Session
from actmem_course.bench.measure_peers import PEER_MODES
from actmem_course.bench.runner import Measurement
from actmem_course.bench.timing import device_name, setting, usual_dtype
from actmem_course.files import check_writable
from actmem_course.process import lab
from actmem_course.ranks import check_ranks
from actmem_course.show.tables import missing_lines, noise_line, overheads_table, peers_table, speed_table

RESULTS = Path(__file__).parent / "results"
QUICK = "the same steps on layers of no size, to try the script"
SECONDS = "start no step after that (default: %(default)s)"
OUTPUT = "where to write (default: labs/results/DEVICE-DATE.json; nothing with --quick)"


@lab
def main() -> int:
    run = Measurement(__doc__, json=False)
    run.option("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    run.option("--emulate", type=int, metavar="T", default=8, help="be one rank of T (default: 8)")
    run.option("--quick", action="store_true", help=QUICK)
    run.option("--seconds", type=int, metavar="N", default=480, help=SECONDS)
    run.option("--output", type=Path, metavar="FILE", help=OUTPUT)
    with run.asked() as args:
        run.alone()
        check_size("seconds", args.seconds)
        check_ranks(args, run.parser.prog)
        if args.device == "cpu" and not args.quick:
            raise ConfigError("device", "a CPU would need days for these layers: add --quick")
        layers = QUICK_LAYERS if args.quick else GPU_LAYERS
        for _, shape in layers:
            check_layer(shape, Parallel(args.emulate, sequence_parallel=True))
        if args.output is None and not args.quick:
            name = re.sub(r"[^a-z0-9]+", "-", device_name(args.device).lower()).strip("-")
            args.output = RESULTS / f"{name}-{date.today()}.json"
            RESULTS.mkdir(exist_ok=True)
        if args.output is not None:
            check_writable("output", args.output)

    # What peers and torch warn of while they are built is not this lab's to say.
    warnings.filterwarnings("ignore")
    started, dtype = time.monotonic(), getattr(torch, usual_dtype(args.device))

    def say(text: str) -> None:
        run.show(f"{time.monotonic() - started:6.1f} s  {text}", markup=False, soft_wrap=True)

    with run.ranks(real_tensors=True) as here:
        results = Session(here, dtype, 2 if args.quick else 20, args.seconds, args.output, say).measure(layers)
        report(run, results, here)
    if args.output:
        run.show(f"wrote {args.output}", soft_wrap=True)
    failed = [skip for skip in results["skipped"] if skip["reason"] != "no time left"]
    return 1 if failed or not all(claim.holds for claim in results["claims"]) else 0


def report(run: Measurement, results: dict, here) -> None:
    """Print the tables of every case, then what was skipped, then the claims: the end of a log is what is read."""
    for case in results["cases"]:
        shape = ModelShape(**{name: case[name] for name in ModelShape.__dataclass_fields__})
        speed, peers = case["speed"], case["peers"]
        if speed:
            title = f"{case['model']}: {setting(shape, here, results['settings']['dtype'])}"
            run.show(speed_table(speed, title), noise_line(speed[0].noise, results["settings"]["rounds"], run.clock))
        run.show(*(peers_table(peers, mode) for mode in (PEER_MODES if peers else ())))
        if (table := overheads_table(peers)) is not None:
            run.show(table)
        run.show(*missing_lines(peers), markup=False)
    run.show(*(f"skipped: {skip['job']}: {skip['reason']}" for skip in results["skipped"]), markup=False)
    for claim in results["claims"]:
        if claim.holds:
            run.show(f"holds: {claim.claim}: {claim.measured}", markup=False)
        else:
            run.wrong(f"DOES NOT HOLD: {claim.claim}: {claim.measured}")


if __name__ == "__main__":
    sys.exit(main())
