"""torchrun --nproc-per-node 2 labs/measure_parity.py

One layer shared by all ranks against the same layer on one: output and every gradient in
float64, the exchanges of forward and of backward, and the gradients that each rank has in part.
Exit code 0 if all numbers agree, 1 if any does not, 2 on wrong use.
"""

import sys

from actmem_course.arguments import add_shape_arguments, shape_from
from actmem_course.bench.measure_parity import LARGEST_ERROR, check_parity, measure_parity
from actmem_course.bench.runner import Measurement
from actmem_course.figures.text import text_table
from actmem_course.process import lab
from actmem_course.ranks import add_rank_arguments, check_ranks


@lab
def main() -> int:
    run = Measurement(__doc__)
    add_shape_arguments(run.parser)
    add_rank_arguments(run.parser, emulate=False)
    with run.asked() as args:
        shape = shape_from(args)
        check_parity(shape, check_ranks(args, run.parser.prog))

    with run.ranks() as here:
        with run.status("measuring") as say:
            results = run.gathered(measure_parity(shape, here, lambda form: say(f"measuring {form}")))
        header = ("form", "rank", "largest error", "exchanges forward", "backward", "partial gradients")
        lines = [
            (r.form, r.rank, f"{r.largest_error:.1e}", sum(r.forward.values()), sum(r.backward.values()), len(r.partial_gradients))
            for r in results
        ]  # fmt: skip
        agree = sum(result.exact for result in results)
        run.show(text_table(header, lines, " rrrrr"), soft_wrap=True)
        run.show(f"{agree} of {len(results)} agree with the unsharded layer to {LARGEST_ERROR}")
        run.write(results)
    return 0 if agree == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
