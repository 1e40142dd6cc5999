"""Measurement: what autograd really keeps and what ranks really send.

``record`` lists what any module keeps for backward; ``step`` bills the peak of a training step;
``census`` counts storages without saved-tensor hooks; ``count_collectives`` lists the collectives; ``emulated_rank``
makes one process act as one rank of many.  Nothing here knows a formula.
"""
