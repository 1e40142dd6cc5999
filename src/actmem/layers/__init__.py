"""The paper's layer (2205.05198: pre-norm, biases, GeLU, causal, three dropouts).

``transformer`` is the layer, around ``attention``; ``gpt`` is its model.  Parallelism and recomputation are arguments;
the arithmetic is the same in every mode.  "Add a layer" in CONTRIBUTING.md says what a new one needs.
"""
