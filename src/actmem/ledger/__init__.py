"""Measurement: what autograd really saves and what ranks really send.

``record`` lists the tensors that any module saves for backward (a ledger).  ``step`` lists the storages alive at the
peak of a training step (a bill).  ``census`` counts storages without saved-tensor hooks, to check the ledger.
``count_collectives`` lists the collectives.  ``emulated_rank`` makes one process act as one rank of many.  Nothing here
uses a formula.
"""
