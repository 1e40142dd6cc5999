"""Layers: the paper's (2205.05198: pre-norm, biases, GeLU, causal, three dropouts) and those since.

``transformer`` is the paper's layer, around ``attention``; ``gpt`` is its model.  ``llama`` is the layer since: RMSNorm,
rotary positions, a gated MLP (all in ``llama_parts``) or ``experts``, grouped queries or ``latent`` attention;
``context`` shares its sequence.  Parallelism and recomputation are arguments; the arithmetic is the same in every mode.
"Add a layer" in CONTRIBUTING.md says what a new one needs.
"""
