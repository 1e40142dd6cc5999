"""Tensor and sequence parallelism, 2205.05198 section 4.2.

Read in this order: ``groups`` (which ranks share the layer), ``collectives`` (how they communicate), ``conjugates``
(f, f_bar, g, g_bar), ``linear`` (the two linears; the column-parallel one fuses f or g with its matmuls), ``rng``
(which dropout draws must agree between ranks), ``weights`` (initial values that don't depend on t), ``vocab`` (the
embedding and the loss).
"""
