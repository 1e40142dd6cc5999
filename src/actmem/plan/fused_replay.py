"""Replays of the layer's operations that compute in float32: a norm and a rotation, forward and backward.

Their temporaries are twice the size of what they keep, so they can be the fullest moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from actmem.plan.replay import Replay

#: What a norm's backward makes last; whoever asked for it frees it.
WEIGHT_GRADIENT = "gradient of the norm's weight"


@dataclass(frozen=True)
class NormReplay:
    """An RMSNorm.  kept, statistics: names of what it keeps.  size: bytes of its input in 16 bits, as of its output;
    statistic: of 1/rms; vector: of its weight in 16 bits."""

    kept: str
    statistics: str
    size: int
    statistic: int
    vector: int

    def forward(self, r: Replay, output: str, keeps_statistics: bool = False) -> None:
        """Makes ``output`` again, and the statistics if they are gone too."""
        r.make("norm's input, float32", 2 * self.size)
        r.make("squares", 2 * self.size)
        r.make("mean of squares", self.statistic)
        r.free("squares")
        r.make("mean of squares + ε", self.statistic)
        r.free("mean of squares")
        inverse = self.statistics if keeps_statistics else "1/rms"
        r.make(inverse, self.statistic)
        r.free("mean of squares + ε")
        r.make("norm's output, float32", 2 * self.size)
        r.pass_by("norm's weight, float32", 2 * self.vector)
        r.make(output, self.size)
        r.free("norm's input, float32", "norm's output, float32", *[inverse] * (not keeps_statistics))

    def backward(self, r: Replay, gradient: str, result: str) -> None:
        """From ``gradient``, which it frees, to ``result`` and WEIGHT_GRADIENT."""
        wide = 2 * self.size
        r.make("norm's input, float32", wide)
        r.make("normed, float32", wide)
        r.free("norm's input, float32")
        r.make("gradient, float32", wide)
        r.make("gradient · normed", wide)
        r.make("gradient of the weight, float32", 2 * self.vector)
        r.free("gradient · normed")
        r.make(WEIGHT_GRADIENT, self.vector)
        r.free("gradient of the weight, float32")
        r.make("norm's weight, float32", 2 * self.vector)
        r.make("gradient · weight", wide)
        r.free("gradient, float32", "norm's weight, float32")
        r.make("gradient · weight · normed", wide)
        r.make("its mean", self.statistic)
        r.free("gradient · weight · normed")
        r.make("normed · mean", wide)
        r.free("its mean")
        r.make("difference", wide)
        r.free("normed · mean")
        r.make(result, self.size)
        r.free("normed, float32", "gradient · weight", "difference", self.kept, self.statistics, gradient)


def replay_rotation(r: Replay, source: str, result: str, size: int, table: int = 0) -> None:
    """Turns ``source``, which it frees, into ``result`` of as many bytes.  table: bytes of the turned-back table, in backward.

    Each half of a head in float32 has as many bytes as the whole head in 16 bits; both halves stay to the end.
    """
    r.make("table, turned back", table)
    for half in ("first half", "second half"):
        r.make("products with cos and sin", 2 * size)
        r.make(half, size)
        r.free("products with cos and sin")
    r.make("both halves, float32", 2 * size)
    r.free("first half", "second half")
    r.make(result, size)
    r.free("both halves, float32", "table, turned back", source)
