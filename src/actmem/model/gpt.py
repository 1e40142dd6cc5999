"""The whole model, or the part of it that one pipeline stage holds (2205.05198 figure 2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from actmem.config import ConfigError, ModelShape, check_divides
from actmem.model.attention import causal_mask
from actmem.model.layer import TransformerLayer, parallel_layer_norm
from actmem.parallel.groups import TensorParallel
from actmem.parallel.linear import column_parallel, mark_partial_gradient
from actmem.parallel.rng import DropoutMask, DropoutStreams
from actmem.parallel.vocab import VocabParallelCrossEntropy, VocabParallelEmbedding


class GPT(nn.Module):
    """Embedding, layers, final layer norm, output layer and loss; or a range of the layers.

    layers: numbers of the layers held here, default all.  The part with layer 0 also
    holds the embedding, the part with the last layer the final norm and the output layer, which
    shares the word embedding; where the two are apart, each holds a copy (see
    ``actmem.pipeline``).  Parameters have the same names in every part.

    ``forward(x)`` takes token ids ``[b, s]`` on the first part and activations on the others,
    and gives logits ``[s, b, v/t]`` on the last and activations on the others; activations are
    ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism.  ``loss(logits, targets)`` ends it.
    Beyond its layers it keeps what 2205.05198 section 4.3 lists: the embedding's dropout
    mask, and on the last part the final norm's input, the output layer's input, the logits.

    Weights come from torch's default generator: ranks with one seed draw the same shards, ranks with
    different seeds different position tables.  To train, fill all ranks from one unsharded
    model with ``load_dense``.
    """

    def __init__(
        self,
        shape: ModelShape,
        tp: TensorParallel = TensorParallel(),
        *,
        layers: range | None = None,
        recompute: str = "none",
        p: float = 0.1,
        seed: int = 1234,
        **factory,
    ):
        super().__init__()
        check_divides("vocab_size", shape.vocab_size, "tensor_parallel_size", tp.size)
        layers = range(shape.num_layers) if layers is None else layers
        if not layers or layers.step != 1 or layers[0] < 0 or layers[-1] >= shape.num_layers:
            raise ConfigError("layers", f"{layers} must be a part of range(0, {shape.num_layers})")
        self.shape, self.tp = shape, tp
        self.is_first, self.is_last = layers[0] == 0, layers[-1] == shape.num_layers - 1
        device = factory.get("device") or "cpu"
        # Another seed for each part, or two stages would repeat one pattern.
        streams = DropoutStreams(seed + 7919 * layers[0], tp, device)
        if self.is_first or self.is_last:
            self.words = VocabParallelEmbedding(shape.vocab_size, shape.hidden_size, tp, **factory)
        if self.is_first:
            self.positions = nn.Parameter(torch.empty(shape.seq_length, shape.hidden_size, **factory))
            nn.init.normal_(self.positions, std=0.02)
            mark_partial_gradient(self.positions, tp)
            block_stream = streams.sharded if tp.sequence_parallel else streams.replicated
            self.embedding_dropout = DropoutMask(p, block_stream)
        self.layers = nn.ModuleDict(
            {str(i): TransformerLayer(shape, tp, recompute=recompute, p=p, streams=streams, **factory) for i in layers}
        )
        # One mask for all layers, made once: a constant, so no activation.
        self.register_buffer("mask", causal_mask(shape.seq_length, device), persistent=False)
        if self.is_last:
            self.final_norm = parallel_layer_norm(shape.hidden_size, tp, **factory)
            self.output = OutputLayer(tp)
            self.cross_entropy = VocabParallelCrossEntropy(tp)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x, self.mask)
        return self.output(self.final_norm(x), self.words.weight) if self.is_last else x

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids ``[b, s]`` to activations: word + position, then dropout."""
        x = self.words(tokens.t())
        first = self.tp.rank * x.shape[0] if self.tp.sequence_parallel else 0
        x = x + self.positions[first : first + x.shape[0]].unsqueeze(1)
        return self.embedding_dropout(x).drop(x)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of logits ``[s, b, v/t]`` against target ids ``[b, s]``: a scalar."""
        return self.cross_entropy(logits, targets.t())


class OutputLayer(nn.Module):
    """Activations to logits with the word embedding's weight: column-parallel, no bias.

    In: ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism.  Out: ``[s, b, v/t]``.
    Keeps its input as given.
    """

    def __init__(self, tp: TensorParallel):
        super().__init__()
        self.tp = tp

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return column_parallel(x, weight, None, self.tp)
