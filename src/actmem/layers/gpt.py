"""The whole model, or the part of it that one pipeline stage holds (2205.05198 figure 2)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from actmem.config import ConfigError, ModelShape, check_divides, check_vocab_size
from actmem.drop import KEEP_ALL, Store
from actmem.layers.attention import causal_mask
from actmem.layers.transformer import ParallelLayerNorm, TransformerLayer, check_tokens
from actmem.parallel.groups import TensorParallel
from actmem.parallel.linear import column_parallel
from actmem.parallel.rng import DropoutMask, DropoutStreams
from actmem.parallel.vocab import VocabParallelCrossEntropy, VocabParallelEmbedding
from actmem.parallel.weights import ParallelModule, child_seed, own_weight
from actmem.recipes import Mode


class ModelPart(ParallelModule):
    """The part of a model that one pipeline stage holds.

    Each part has some of the layers. The first part also has the embedding, the last part the output layer and the
    loss.

    ``forward`` takes token ids on the first stage and activations on all later ones.

    Attributes:
        shape: the sizes of the whole model.
        tp: the ranks that share each layer.
        is_first: whether this part has the model's first layer, and so the embedding.
        is_last: whether this part has the model's last layer, and so the output layer and the loss.
        cross_entropy: the loss; only the last part has it.
    """

    shape: Any
    tp: TensorParallel
    is_first: bool
    is_last: bool
    cross_entropy: VocabParallelCrossEntropy

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy of this rank's microbatch, a scalar. Only the last part has a loss.

        Args:
            logits: ``[s, b, v/t]``.
            targets: ids ``[b, s]`` of the tokens to predict; positions with -100 are left out of the mean.
        """
        return self.cross_entropy(logits, targets.t())


class GPT(ModelPart):
    """A GPT: embedding, layers, final layer norm, output layer and loss; or the part of it for one pipeline stage.

    The part with layer 0 also holds the embedding. The part with the last layer also holds the final norm and the
    output layer, whose weight is the word embedding's. If these are different parts, each holds a copy of that weight
    (see ``actmem.pipeline``). Parameters have the same names in every part.

    Args:
        shape: the sizes of the whole model.
        tp: the t ranks that share each layer.
        layers: the numbers of the layers held here, consecutive and from 0, such as ``range(0, 12)``; None: all layers.
        recompute: what backward recomputes: "none", "selective", "elementwise", "full", another mode of
            ``recipes.RECOMPUTE_MODES``, a set of tensors' names to drop, or a dict from names to actions such as
            "offload".
        stores: the Store for each action that needs one, such as ``{"offload": HostMemory()}``.
        p: the dropouts' probability.
        seed: seed of weights and dropout. Give all ranks the same seed: then the initial weights are the same for every
            t, every pipeline and every dtype (see ``parallel.weights``). Nothing is drawn from torch's default
            generator.
        vocab_size: words of the vocabulary, if ``shape.vocab_size`` is padded so that t divides it; the padding has no
            part in the loss. None: nothing is padded.
        factory: dtype and device of the weights.

    Args of ``forward``: token ids ``[b, s]`` on the first part; on later parts activations ``[s, b, h]``, or
        ``[s/t, b, h]`` under sequence parallelism. Sequences may be shorter than s; under sequence parallelism t must
        divide their length.
    Returns: logits ``[s, b, v/t]`` on the last part, for ``loss(logits, targets)``; on earlier parts activations.
    Saves: the tensors of its layers; on the first part the embedding's dropout mask; on the last part the inputs of the
        final norm and the output layer, and the float32 logits (2205.05198 section 4.3). And three kinds that the paper
        leaves out: token ids, target ids, the final norm's statistics (``formulas.stages``).
    Raises: ConfigError if t does not divide the vocabulary (see ``config.padded_vocab_size``), if t ranks can't share a
        layer, or if a sequence is longer than s.
    """

    def __init__(
        self,
        shape: ModelShape,
        tp: TensorParallel = TensorParallel(),
        *,
        layers: range | None = None,
        recompute: Mode = "none",
        stores: Mapping[str, Store] | None = None,
        p: float = 0.1,
        seed: int = 1234,
        vocab_size: int | None = None,
        **factory,
    ):
        super().__init__()
        check_vocab_size(shape.vocab_size, tp.size)
        layers = range(shape.num_layers) if layers is None else layers
        self.is_first, self.is_last = ends_of(layers, shape.num_layers)
        self.shape, self.tp = shape, tp
        device = factory.get("device") or "cpu"
        # A different seed for each part, or two stages would draw the same masks.
        streams = DropoutStreams(child_seed(seed, layers[0]), tp, device)
        if self.is_first or self.is_last:
            self.words = VocabParallelEmbedding(
                shape.vocab_size, shape.hidden_size, tp, seed=child_seed(seed, "words"), **factory
            )
        if self.is_first:
            sizes = shape.seq_length, shape.hidden_size
            self.positions = own_weight(tp, child_seed(seed, "positions"), *sizes, **factory)
            self.embedding_dropout = DropoutMask(p, streams.between_blocks)
        modes = {"recompute": recompute, "stores": stores, "p": p, "streams": streams, **factory}
        self.layers = nn.ModuleDict(
            {str(i): TransformerLayer(shape, tp, seed=child_seed(seed, "layers", i), **modes) for i in layers}
        )
        self.register_buffer("mask", self.constants(device)["mask"], persistent=False)
        if self.is_last:
            self.final_norm = ParallelLayerNorm(shape.hidden_size, tp, **factory)
            self.output = OutputLayer(tp)
            self.cross_entropy = VocabParallelCrossEntropy(tp, vocab_size=vocab_size)

    def constants(self, device: torch.device | str | None) -> dict[str, Tensor]:
        """Make the buffer ``mask``, the causal mask, on ``device`` (None: the CPU).

        All layers and steps share the mask, so it is not an activation.
        """
        return {"mask": causal_mask(self.shape.seq_length, device or "cpu", next(self.parameters()).dtype)}

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x, self.mask)
        if not self.is_last:
            return x
        x = KEEP_ALL.input("final layer-norm input", x)
        x = KEEP_ALL("output layer input", self.final_norm, x, by_product="final layer-norm statistics")
        return self.output(x, self.words.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the activations of token ids ``[b, s]``: word vector + position vector, then dropout.

        Returns: ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism.
        """
        length = check_tokens(tokens.t(), 1, self.shape.seq_length)
        if self.tp.sequence_parallel:
            check_divides("sequence length", length, "tensor_parallel_size", self.tp.size)
        x = self.words(tokens.t())
        first = self.tp.rank * x.shape[0] if self.tp.sequence_parallel else 0
        x = x + self.positions[first : first + x.shape[0]].unsqueeze(1)
        return self.embedding_dropout(x, KEEP_ALL, "embedding dropout mask").apply(x)


def ends_of(layers: range, num_layers: int) -> tuple[bool, bool]:
    """Return whether a pipeline stage has the model's first layer, and whether it has the last.

    Args:
        layers: the numbers of the stage's layers, from 0.
        num_layers: how many layers the whole model has.

    Raises: ConfigError if ``layers`` are not consecutive layers of the model.
    """
    if not layers or layers.step != 1 or layers[0] < 0 or layers[-1] >= num_layers:
        raise ConfigError("layers", f"{layers} must be a part of range(0, {num_layers})")
    return layers[0] == 0, layers[-1] == num_layers - 1


class OutputLayer(nn.Module):
    """Column-parallel linear from activations to logits, with the word embedding's weight and no bias.

    Args:
        tp: the t ranks that share the vocabulary.

    Args of ``forward``: x ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism; the weight ``[v/t, h]``.
    Returns: ``[s, b, v/t]``.
    Saves: x in the shape in which it is given.
    """

    def __init__(self, tp: TensorParallel):
        super().__init__()
        self.tp = tp

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return column_parallel(x, self.tp, weight)[0]
