"""A pipeline stage of today's decoder: this library's own layers between the paper's embedding, output layer and loss."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from actmem.config import Parallel
from actmem.drop import KEEP_ALL
from actmem.layers.context import ContextParallel
from actmem.layers.experts import Routing
from actmem.layers.gpt import OutputLayer
from actmem.layers.llama import LlamaLayer
from actmem.layers.llama_parts import RMSNorm
from actmem.llama_shape import LlamaShape, own_context_shape
from actmem.measure.parts import measure_parts
from actmem.parallel.groups import TensorParallel
from actmem.parallel.vocab import VocabParallelCrossEntropy, VocabParallelEmbedding
from actmem.parallel.weights import ParallelModule
from actmem.recipes import Recompute
from actmem.rows import Row


class LlamaStage(ParallelModule):
    """The layers of ``layers``; the part with layer 0 has the embedding, the part with the last layer the end.

    shape: with the whole sequence; context-parallel ranks take their parts of it.  The output layer has a weight of its own.  routing: of experts; fake scores can't choose.  Token ids ``[b, s]`` or activations come in; activations,
    or on the last part the loss, go out.
    """

    def __init__(
        self,
        shape: LlamaShape,
        num_layers: int,
        vocab_size: int,
        layers: range,
        tp: TensorParallel,
        recompute: Recompute | str = "none",
        routing: Routing = "even",
        context: ContextParallel = ContextParallel(),
        **factory,
    ):
        super().__init__()
        self.tp, self.vocab_size = tp, vocab_size
        self.shape = own_context_shape(shape, Parallel(tp.size, tp.sequence_parallel), context.size, context.kind)
        self.is_first, self.is_last = layers.start == 0, layers.stop == num_layers
        if self.is_first:
            self.words = VocabParallelEmbedding(vocab_size, shape.hidden_size, tp, seed=1, **factory)
        options = {"recompute": recompute, "routing": routing, "context": context, **factory}
        self.layers = nn.ModuleList(LlamaLayer(shape, tp, seed=i, **options) for i in layers)
        if self.is_last:
            self.final_norm = RMSNorm(shape.hidden_size, tp, **factory)
            self.head = VocabParallelEmbedding(vocab_size, shape.hidden_size, tp, seed=2, **factory)
            self.output, self.cross_entropy = OutputLayer(tp), VocabParallelCrossEntropy(tp)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.words(x.t())
        for layer in self.layers:
            x = layer(x)
        if self.is_last:
            x = KEEP_ALL.input("final RMSNorm input", x)
            x = KEEP_ALL("output layer input", self.final_norm, x, also="final RMSNorm statistic")
            logits = self.output(x, self.head.weight)
            targets = torch.randint(0, self.vocab_size, (logits.shape[1], logits.shape[0]))
            x = self.cross_entropy(logits, targets.t())
        return x

    def stage_input(self, dtype: torch.dtype) -> Tensor:
        """What arrives: token ids, or random activations of the stage before."""
        s, b = self.shape.seq_length, self.shape.micro_batch_size
        if self.is_first:
            return torch.randint(0, self.vocab_size, (b, s))
        return torch.randn(s // self.tp.sequence_parts, b, self.shape.hidden_size, dtype=dtype, requires_grad=True)


def measure_llama_stage(
    parts: list[LlamaStage],
    whole_parts: list[LlamaStage],
    actions: Iterable[tuple[str, int, int]],
    whole: Iterable[tuple[int, int]] = (),
    dtype: torch.dtype = torch.bfloat16,
) -> list[Row]:
    """What the rank keeps after the last of ``actions``, as ``measure_stage`` counts it for the paper's model."""
    run = lambda part: part(part.stage_input(dtype))  # noqa: E731
    return measure_parts(parts, whole_parts, actions, run, set(whole))
