"""The backward pass of one pipeline stage of today's decoder: its fullest moments, as ``gpt_backward`` has the paper's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actmem.config import Parallel
from actmem.llama_shape import LlamaShape
from actmem.plan.ends_backward import EndsBackward
from actmem.plan.fused_replay import WEIGHT_GRADIENT
from actmem.plan.llama_layer_backward import LlamaLayerBackward
from actmem.plan.replay import Replay
from actmem.rows import Row


class LlamaBackward:
    """shape: of one layer, which is replayed.  words: of the vocabulary on this rank.  routed_tokens: of its experts."""

    def __init__(self, shape: LlamaShape, parallel: Parallel, words: int, recompute: str, routed_tokens: int = 0):
        self.layer = LlamaLayerBackward(shape, parallel, recompute, routed_tokens)
        tokens, t = shape.seq_length * shape.micro_batch_size, parallel.tensor_parallel_size
        self.final_norm = replace(self.layer.norms[0], kept="final RMSNorm input", statistics="final RMSNorm statistic")
        self.ends = EndsBackward(tokens, words, shape.hidden_size, self.layer.gathers, t)

    def last_layer(self, layer_rows: Sequence[Row], end_rows: Sequence[Row], tied: bool) -> Replay:
        """From the beginning of backward through the stage's last layer; arguments as of ``GPTBackward.last_layer``."""
        r, layer = Replay([*layer_rows, *end_rows]), self.layer
        if end_rows:
            self.ends.loss_and_output(r, tied)
            self.final_norm.backward(r, "gradient of the block's input", "gradient of the final norm's input")
            r.free(WEIGHT_GRADIENT)
            layer.run(r, "gradient of the final norm's input")
        else:
            r.make("gradient received", layer.hidden)
            layer.run(r, "gradient received", stays=True)
        return r

    def embedding(self, first_rows: Sequence[Row], last: bool, tied: bool) -> Replay:
        """The embedding's backward, when nothing else of this microbatch is kept."""
        r = Replay(first_rows)
        self.ends.start_of_embedding(r, last, tied)
        self.ends.lookup(r, "gradient of the embedding's output", tied)
        return r
