"""Layers: the paper's (2205.05198: pre-norm, biases, GeLU, causal, three dropouts) and those since.

``transformer`` is the paper's layer, of ``attention`` and ``mlp``; ``gpt`` is its model.  ``llama`` is the layer since:
RMSNorm (``norms``), ``rotary`` positions, grouped queries or ``latent`` attention, a gated MLP or ``experts``;
``context`` shares its sequence.  Parallelism and recomputation are arguments; the arithmetic is the same in every mode.
"""
