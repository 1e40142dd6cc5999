"""torchrun --nproc-per-node 2 labs/measure_table2.py

Table 2 of 2205.05198, measured: for each of the six configurations, the bytes that one
transformer layer keeps for backward, by formula and by counting what autograd really holds.
Exit code 0 if all agree to the byte, 1 if any does not, 2 on wrong use.
"""

import sys

from actmem_course.arguments import add_shape_arguments, shape_from
from actmem_course.bench.layer_table import LayerTable, run_layer_table
from actmem_course.bench.measure_table2 import check_memory, check_table2, extras_of_table2, measure_table2
from actmem_course.bench.runner import Measurement
from actmem_course.process import lab


@lab
def main() -> int:
    run = Measurement(__doc__)
    add_shape_arguments(run.parser)
    # What today's layer asks the arguments for, table 2 has none of.
    check, check_room, measure = map(without_arguments, (check_table2, check_memory, measure_table2))
    return run_layer_table(run, LayerTable(shape_from, title, check, check_room, measure, extras_of_table2))


def without_arguments(function):
    """The same function, called with the lab's arguments first."""
    return lambda args, *others: function(*others)


def title(args, shape) -> str:
    """Says what is measured, with the sizes."""
    a, b, h, s = shape.letters()
    return f"Table 2 measured: s={s} b={b} h={h} a={a}"


if __name__ == "__main__":
    sys.exit(main())
