"""Layers as models have them since 2023, with the paper's parallelism and any set of recomputed terms; pipelines since then."""
