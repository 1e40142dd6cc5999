"""The backward pass of one pipeline stage of the paper's GPT: its fullest moments, as our code runs it.

The last layer's backward is fuller than that of the layers before it, which no longer have what it
kept.  Beside it only the ends can be fuller: the loss and the output layer on the last stage, the
embedding's weight gradient on the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from actmem.config import ModelShape, Parallel
from actmem.formulas.layer_peak import GIVEN_GRADIENT, LayerBackward
from actmem.plan.ends_backward import EndsBackward
from actmem.plan.replay import Replay
from actmem.recipes import Recompute
from actmem.rows import Row


class GPTBackward:
    """shape: with the microbatch's size; ``layer_peak`` has the moments of one layer of it."""

    def __init__(self, shape: ModelShape, parallel: Parallel, recompute: str, device_type: str = "cpu"):
        self.layer = LayerBackward(shape, parallel, Recompute.of(recompute), 2, device_type)
        t, tokens = parallel.tensor_parallel_size, shape.seq_length * shape.micro_batch_size
        self.ends = EndsBackward(tokens, shape.vocab_size // t, shape.hidden_size, self.layer.sequence_parallel, t)
        self.adds_positions = shape.micro_batch_size > 1
        self.positions = 2 * shape.seq_length * shape.hidden_size

    def last_layer(self, layer_rows: Sequence[Row], end_rows: Sequence[Row], tied: bool) -> Replay:
        """From the beginning of backward through the stage's last layer.

        layer_rows: what that layer keeps.  end_rows: what the loss, the output layer and the final norm keep; none on
        another stage than the last.  tied: the embedding is on this stage too.
        """
        r = Replay([*layer_rows, *end_rows])
        if end_rows:
            self._last_end(r, tied)
        else:
            r.make(GIVEN_GRADIENT, self.layer.block)
        own = {row.term for row in layer_rows if row.term != "random-number state"}
        moments = self.layer.stage_moments()
        if end_rows:
            own.add(GIVEN_GRADIENT)
        else:  # the caller holds what arrived
            moments = [moment | {GIVEN_GRADIENT: 0} for moment in moments]
        r.go_through(moments, own)
        return r

    def _last_end(self, r: Replay, tied: bool) -> None:
        self.ends.loss_and_output(r, tied)
        r.make(GIVEN_GRADIENT, self.layer.block)
        r.make("gradients of a layer norm's weights", sum(self.layer.weight["layer norm"]))
        r.free("final layer-norm input", "final layer-norm statistics", "gradient of the block's input")
        r.free("gradients of a layer norm's weights")

    def embedding(self, first_rows: Sequence[Row], last: bool) -> Replay:
        """The embedding's backward, when nothing else of this microbatch is kept.

        first_rows: what the embedding keeps.  last: the loss is on this stage too, and its weight is the embedding's.
        """
        r = Replay(first_rows)
        self.ends.start_of_embedding(r, last, tied=last)
        r.make("gradient before dropout", self.layer.block)
        r.free("gradient of the embedding's output", "embedding dropout mask")
        cut = self.layer.t if self.layer.sequence_parallel else 1
        summed = ["gradient of this rank's positions"] * self.adds_positions
        for name in summed:
            r.make(name, self.positions // cut)
        r.make("gradient of the positions", self.positions)
        r.free("gradient of the positions", *summed)
        self.ends.lookup(r, "gradient before dropout", tied=last)
        return r
