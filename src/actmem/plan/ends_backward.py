"""Backward of the model's two ends, operation by operation: loss and output layer, and the lookup of words."""

from __future__ import annotations

from dataclasses import dataclass

from actmem.plan.replay import Replay

#: Bytes a token that the loss's backward makes beside the logits' gradient, most of them at once: which targets count (1),
#: their share (4), their place among this rank's words (8), whether they are there (1), and three numbers of float32.
_LOSS_BYTES = 1 + 4 + 8 + 1 + 3 * 4
#: The loss's own gradient: one number, held to the end.
_ONE = 4


@dataclass(frozen=True)
class EndsBackward:
    """Of one microbatch on one rank.  words: of the vocabulary on this rank.  gathers: under sequence parallelism."""

    tokens: int
    words: int
    hidden_size: int
    gathers: bool
    tensor_parallel_size: int

    @property
    def table(self) -> int:
        """Bytes of the words' gradient, in 16 bits."""
        return 2 * self.words * self.hidden_size

    @property
    def whole(self) -> int:
        """Bytes of all tokens' activations."""
        return 2 * self.tokens * self.hidden_size

    @property
    def hidden(self) -> int:
        """Bytes of this rank's."""
        return self.whole // (self.tensor_parallel_size if self.gathers else 1)

    def loss_and_output(self, r: Replay, tied: bool) -> None:
        """From the loss to "gradient of the block's input", the output layer's.  tied: its weight waits for the embedding's gradient."""
        r.make("gradient of the loss", _ONE)
        r.make("gradient of the logits", 2 * self.tokens * self.words)
        r.pass_by("loss's numbers of each token", _LOSS_BYTES * self.tokens)
        r.free("logits (float32)", "target ids")
        if self.gathers:
            r.make("output layer input, gathered again", self.whole)
            r.make("gradient of the output layer's input, partial", self.whole)
        r.make("gradient of the block's input", self.hidden)
        r.make("gradient of the output layer's weight", self.table)
        r.free("gradient of the logits", "output layer input")
        if self.gathers:
            r.free("output layer input, gathered again", "gradient of the output layer's input, partial")
        if not tied:
            r.free("gradient of the output layer's weight")

    def start_of_embedding(self, r: Replay, last: bool, tied: bool) -> None:
        """What is there when backward reaches the embedding, and its output's gradient."""
        if last:
            r.make("gradient of the loss", _ONE)
        else:
            r.make("gradient received", self.hidden)
        if tied:
            r.make("gradient of the output layer's weight", self.table)
        r.make("gradient of the embedding's output", self.hidden)

    def lookup(self, r: Replay, gradient: str, tied: bool) -> None:
        """Backward of the lookup, whose output's gradient on this rank is ``gradient``."""
        if self.gathers:
            r.make("gradient, gathered", self.whole)
            r.free(gradient)
            gradient = "gradient, gathered"
        r.make("places of the words", (8 + 1) * self.tokens)
        r.make("gradient of this rank's words", self.whole)
        r.make("gradient of the embedding's weight", self.table)
        r.free("places of the words", "gradient of this rank's words", gradient, "token ids")
        if tied:
            r.make("sum of both gradients of the weight", self.table)
