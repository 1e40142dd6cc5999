"""Measurement: what autograd really keeps and what ranks really send.

``record`` lists what any module keeps for backward; ``step`` bills the peak of a training step;
``census`` counts storages without saved-tensor hooks; ``count_collectives`` lists the collectives; ``emulated_rank`` makes one
process act as one rank of many.  Nothing here knows a formula.
"""

from actmem.ledger.census import census
from actmem.ledger.comms import count_collectives
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.parts import layer_rows_of, measure_layer
from actmem.ledger.recorder import Ledger, SavedTensor, record
from actmem.ledger.whole_step import StepBill, step, watch_step

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
