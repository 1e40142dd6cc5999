"""Measurement: what autograd really keeps and what ranks really exchange.

``record`` lists the saved tensors of any module; ``census`` counts storages without looking at
saved tensors at all; ``count_collectives`` lists the exchanges; ``emulated_rank`` makes one
process one rank of many.  Nothing here knows a formula.
"""

from actmem.measure.census import census
from actmem.measure.comms import count_collectives
from actmem.measure.emulate import emulated_rank
from actmem.measure.layer import layer_rows_of, measure_layer
from actmem.measure.ledger import Ledger, SavedTensor, record

__all__ = [
    "Ledger",
    "SavedTensor",
    "census",
    "count_collectives",
    "emulated_rank",
    "layer_rows_of",
    "measure_layer",
    "record",
]
