"""Measurement: what autograd really keeps and what ranks really send.

``record`` lists what any module keeps for backward; ``step`` bills the peak of a training step;
``census`` counts storages without saved-tensor hooks; ``count_collectives`` lists the collectives; ``emulated_rank`` makes one
process act as one rank of many.  Nothing here knows a formula.
"""

from actmem.measure.census import census
from actmem.measure.comms import count_collectives
from actmem.measure.emulate import emulated_rank
from actmem.measure.ledger import Ledger, SavedTensor, record
from actmem.measure.parts import layer_rows_of, measure_layer
from actmem.measure.whole_step import StepBill, step, watch_step

__all__ = [
    "Ledger",
    "SavedTensor",
    "StepBill",
    "census",
    "count_collectives",
    "emulated_rank",
    "layer_rows_of",
    "measure_layer",
    "record",
    "step",
    "watch_step",
]
