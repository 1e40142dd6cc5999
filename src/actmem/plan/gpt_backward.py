"""The backward pass of one pipeline stage of the paper's GPT: its fullest moments, as our code runs it.

The last layer's backward is fuller than that of the layers before it, which no longer have what it
kept.  Beside it only the ends can be fuller: the loss and the output layer on the last stage, the
embedding's weight gradient on the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from actmem.config import ModelShape, Parallel
from actmem.plan.layer_backward import LayerBackward
from actmem.plan.replay import Replay
from actmem.rows import Row

#: Bytes a token that the loss's backward makes beside the logits' gradient, most of them at once: which targets count (1),
#: their share (4), their place among this rank's words (8), whether they are there (1), and three numbers of float32.
_LOSS_BYTES = 1 + 4 + 8 + 1 + 3 * 4
#: The loss's own gradient: one number, held to the end.
_ONE = 4


class GPTBackward:
    """shape: with the microbatch's size; one layer of it is replayed."""

    def __init__(self, shape: ModelShape, parallel: Parallel, recompute: str, device_type: str = "cpu"):
        self.layer = LayerBackward(shape, parallel, recompute, device_type)
        self.tokens, self.b = shape.seq_length * shape.micro_batch_size, shape.micro_batch_size
        words = shape.vocab_size // parallel.tensor_parallel_size
        self.logits, self.table = 2 * self.tokens * words, 2 * words * shape.hidden_size
        self.positions = 2 * shape.seq_length * shape.hidden_size

    def last_layer(self, layer_rows: Sequence[Row], end_rows: Sequence[Row], tied: bool) -> Replay:
        """From the beginning of backward through the stage's last layer.

        layer_rows: what that layer keeps.  end_rows: what the loss, the output layer and the final norm keep; none on
        another stage than the last.  tied: the embedding is on this stage too.
        """
        r = Replay([*layer_rows, *end_rows])
        if end_rows:
            self._ends(r, tied)
            self.layer.run(r, "gradient of the final norm's input")
        else:
            r.make("gradient received", self.layer.hidden)
            self.layer.run(r, "gradient received", stays=True)
        return r

    def _ends(self, r: Replay, tied: bool) -> None:
        layer = self.layer
        r.make("gradient of the loss", _ONE)
        r.make("gradient of the logits", self.logits)
        r.pass_by("loss's numbers of each token", _LOSS_BYTES * self.tokens)
        r.free("logits (float32)", "target ids")
        if layer.gathers:
            r.make("output layer input, gathered again", layer.whole)
            r.make("gradient of the output layer's input, partial", layer.whole)
        r.make("gradient of the output layer's input", layer.hidden)
        r.make("gradient of the output layer's weight", self.table)
        r.free("gradient of the logits", "output layer input")
        if layer.gathers:
            r.free("output layer input, gathered again", "gradient of the output layer's input, partial")
        if not tied:  # else it waits for the embedding's
            r.free("gradient of the output layer's weight")
        r.make("gradient of the final norm's input", layer.hidden)
        r.make("gradients of a layer norm's weights", 2 * layer.vector)
        r.free("final layer-norm input", "final layer-norm statistics", "gradient of the output layer's input")
        r.free("gradients of a layer norm's weights")

    def embedding(self, first_rows: Sequence[Row], last: bool) -> Replay:
        """The embedding's backward, when nothing else of this microbatch is kept.

        first_rows: what the embedding keeps.  last: the loss is on this stage too.
        """
        layer = self.layer
        r = Replay(first_rows)
        if last:
            r.make("gradient of the loss", _ONE)
            r.make("gradient of the output layer's weight", self.table)
        else:
            r.make("gradient received", layer.hidden)
        r.make("gradient of the embedding's output", layer.hidden)
        r.make("gradient before dropout", layer.hidden)
        r.free("gradient of the embedding's output", "embedding dropout mask")
        if self.b > 1:
            r.make("gradient of this rank's positions", self.positions // (self.layer.t if layer.gathers else 1))
        r.make("gradient of the positions", self.positions)
        r.free("gradient of the positions", *["gradient of this rank's positions"] * (self.b > 1))
        if layer.gathers:
            r.make("gradient, gathered", layer.whole)
            r.free("gradient before dropout")
        r.make("places of the words", (8 + 1) * self.tokens)
        r.make("gradient of this rank's words", layer.whole)
        r.make("gradient of the embedding's weight", self.table)
        r.free(
            "places of the words",
            "gradient of this rank's words",
            "gradient, gathered" if layer.gathers else "gradient before dropout",
        )
        r.free("token ids")
        if last:
            r.make("sum of both gradients of the weight", self.table)
        return r
