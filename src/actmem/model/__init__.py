"""The transformer of 2205.05198: pre-norm, biases, GeLU, causal, three dropouts a layer.

Parallelism and recomputation are arguments; the arithmetic is the same in every mode.
"""
