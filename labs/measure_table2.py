"""torchrun --nproc-per-node 2 labs/measure_table2.py

Table 2 of 2205.05198, measured: for each of the six configurations, the bytes that one
transformer layer keeps for backward, by formula and by counting what autograd really holds.
Exit code 0 if all agree to the byte, 1 if any does not, 2 on wrong use.
"""

import sys

from actmem_course.arguments import add_shape_arguments, shape_from
from actmem_course.bench.layer_table import LayerTable, run_layer_table
from actmem_course.bench.runner import Measurement
from actmem_course.process import lab


@lab
def main() -> int:
    run = Measurement(__doc__)
    add_shape_arguments(run.parser)
    return run_layer_table(run, lambda args: LayerTable(shape_from(args)))


if __name__ == "__main__":
    sys.exit(main())
