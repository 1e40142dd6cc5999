"""The four models of 2205.05198 table 3, and one that fits on a laptop."""

from __future__ import annotations

from dataclasses import dataclass

from actmem.config import ModelShape, Parallel, check_choice


@dataclass(frozen=True)
class PaperModel:
    """One row of table 3: the shape, the parallel sizes, and the global batch in sequences."""

    name: str
    shape: ModelShape
    parallel: Parallel
    global_batch_size: int

    @property
    def num_devices(self) -> int:
        """GPUs used: t · p (the paper runs these without data parallelism)."""
        return self.parallel.tensor_parallel_size * self.parallel.pipeline_parallel_size


def _model(name: str, a: int, h: int, layers: int, p: int, chunks: int, batch: int, b: int) -> PaperModel:
    shape = ModelShape(2048, b, h, a, num_layers=layers, vocab_size=51200)
    return PaperModel(name, shape, Parallel(8, True, p, chunks), batch)


PAPER_MODELS = {
    model.name: model
    for model in (
        _model("22B", a=64, h=6144, layers=48, p=1, chunks=1, batch=4, b=4),
        _model("175B", a=96, h=12288, layers=96, p=8, chunks=3, batch=64, b=1),
        _model("530B", a=128, h=20480, layers=105, p=35, chunks=3, batch=280, b=1),
        _model("1T", a=160, h=25600, layers=128, p=64, chunks=1, batch=512, b=1),
    )
}

#: Small enough for two processes on a laptop; all sizes differ, so that none can be mistaken for another.
TINY = ModelShape(
    seq_length=128, micro_batch_size=2, hidden_size=256, num_attention_heads=8, num_layers=4, vocab_size=1024
)


def model_shape(model: str) -> ModelShape:
    """The shape of ``tiny`` or of one of the paper's models; ConfigError on another name."""
    check_choice("model", model, ("tiny", *PAPER_MODELS))
    return TINY if model == "tiny" else PAPER_MODELS[model].shape
