"""One transformer layer in every mode of table 2 (2205.05198 figures 2, 4 and 5)."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actmem.config import ConfigError, ModelShape, Parallel, check_layer
from actmem.drop import KEEP_ALL, NamedForward, Store, store_of_each
from actmem.keep import stays_eager
from actmem.layers.attention import SelfAttention, causal_mask
from actmem.parallel.groups import TensorParallel
from actmem.parallel.linear import ColumnParallelLinear, RowParallelLinear
from actmem.parallel.rng import DropoutMask, DropoutStreams
from actmem.parallel.weights import ParallelModule, child_seed, fresh_seed, mark_partial_gradient
from actmem.recipes import PAPER_LAYER, Mode, Recompute
from actmem.recompute import checkpoint


class ParallelLayerNorm(ParallelModule, nn.LayerNorm):
    """Layer norm over h that also works under sequence parallelism.

    Under sequence parallelism each rank sees only its own tokens, so the gradients of scale and shift are partial: they
    must be summed over the ranks (``linear.reduce_partial_gradients``).

    Args:
        hidden_size: h.
        tp: the ranks that share the layer.
        factory: dtype and device of scale and shift.

    Saves: its input, and mean and 1/deviation of each token.
    """

    def __init__(self, hidden_size: int, tp: TensorParallel, **factory):
        super().__init__(hidden_size, **factory)
        self.weight, self.bias = mark_partial_gradient(self.weight, tp), mark_partial_gradient(self.bias, tp)


class MLP(nn.Module):
    """The MLP: a column-parallel linear h→4h, GeLU, and a row-parallel linear 4h→h.

    Each rank has 4h/t columns between the two linears, so GeLU needs no collective.

    Args:
        shape: the sizes of the layer.
        tp: the t ranks that share the layer.
        seed: seed from which the weights are drawn, the same on all t ranks; None draws a seed from torch's CPU
            generator.
        factory: dtype and device of the weights.

    Args of ``forward``: x ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism; ``terms``, the NamedForward of
        the layer's forward pass, which says which tensors are not saved.
    Returns: a tensor of the shape of x.
    Saves: in 16 bits, its input 2sbh (2sbh/t under sequence parallelism), the GeLU input 8sbh/t and the second linear's
        input 8sbh/t.
    Raises: ConfigError if t does not divide 4h.
    Source: 2205.05198 section 4.1.
    """

    def __init__(self, shape: ModelShape, tp: TensorParallel, *, seed: int | None = None, **factory):
        super().__init__()
        h, seed = shape.hidden_size, fresh_seed() if seed is None else seed
        self.up = ColumnParallelLinear(h, 4 * h, tp, seed=child_seed(seed, "up"), **factory)
        self.down = RowParallelLinear(4 * h, h, tp, seed=child_seed(seed, "down"), **factory)

    def forward(self, x: Tensor, terms: NamedForward = KEEP_ALL) -> Tensor:
        x = terms("GeLU input", self.up, x)
        return self.down(terms("4h→h input", lambda x: F.gelu(x, approximate="tanh"), x))


class TransformerLayer(nn.Module):
    """One transformer layer: x + dropout(attention(norm(x))), then the same with the MLP in place of attention.

    torch.compile works on it; dropout and recomputed code stay eager.

    Args:
        shape: the sizes of the layer.
        tp: the t ranks that share the layer.
        recompute: what backward recomputes: "none", "selective", "elementwise", "full", another mode of
            ``recipes.RECOMPUTE_MODES``, a ``recipes.Recompute``, a set of tensors' names to drop, or a dict from names
            to actions such as "offload".
        p: the dropouts' probability.
        streams: the random-number streams from which the dropouts draw; None: the layer makes its own.
        stores: the Store for each action that needs one, such as ``{"offload": HostMemory()}``; give all layers of a
            model the same stores.
        seed: seed of the weights, and of the dropout streams if none are given. None draws a seed from torch's default
            CPU generator, which must then be in the same state on all t ranks.
        factory: dtype and device of the weights.

    Args of ``forward``: x ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism; sequences may be shorter than
        s. A mask from ``causal_mask``; None: the layer makes one.
    Returns: a tensor of the shape of x.
    Saves: the tensors that ``formulas.activations.layer_rows`` lists (those that the paper counts) and those of
        ``layer_extra_rows`` (norm statistics, mask, random-number states).
    Raises: ConfigError if t ranks can't share the layer, or if a sequence is longer than s.
    """

    def __init__(
        self,
        shape: ModelShape,
        tp: TensorParallel = TensorParallel(),
        *,
        recompute: Mode = "none",
        p: float = 0.1,
        streams: DropoutStreams | None = None,
        stores: Mapping[str, Store] | None = None,
        seed: int | None = None,
        **factory,
    ):
        super().__init__()
        check_layer(shape, Parallel(tp.size, tp.sequence_parallel))
        self.recompute = Recompute.of(recompute)
        # A region is recomputed as a whole; the terms of a set are rebuilt one by one.
        self.dropped = PAPER_LAYER.dropped(self.recompute) if self.recompute.region == "terms" else frozenset()
        self.stores = store_of_each(PAPER_LAYER.stored(self.recompute), stores or {})
        seed = fresh_seed() if seed is None else seed
        device = factory.get("device") or "cpu"
        self.streams = streams or DropoutStreams(child_seed(seed, "dropout"), tp, device)
        self.norm1 = ParallelLayerNorm(shape.hidden_size, tp, **factory)
        self.attention = SelfAttention(
            shape, tp, p, self.streams, self.recompute, seed=child_seed(seed, "attention"), **factory
        )
        self.attention_dropout = DropoutMask(p, self.streams.between_blocks)
        self.norm2 = ParallelLayerNorm(shape.hidden_size, tp, **factory)
        self.mlp = MLP(shape, tp, seed=child_seed(seed, "mlp"), **factory)
        self.mlp_dropout = DropoutMask(p, self.streams.between_blocks)
        self.seq_length, self.ranks_of_sequence = shape.seq_length, tp.sequence_parts

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the layer's output for x.

        Args:
            x: ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism.
            mask: from ``causal_mask``, one for all layers of a model; None: the layer makes a mask in each call.
        """
        if self.recompute.region == "terms":
            return self._by_terms(x, mask)
        if self.recompute.region != "layer":  # "core" is a checkpoint inside SelfAttention
            return self._forward(x, mask)
        inputs = (x,) if mask is None else (x, mask)
        generators = [self.streams.replicated, self.streams.sharded]
        stop_early = self.recompute.stop_early
        return checkpoint(self._forward, *inputs, generators=generators, stop_early=stop_early, module=self)

    @stays_eager
    def _by_terms(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self._forward(x, mask)

    def _forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        s = check_tokens(x, self.ranks_of_sequence, self.seq_length)
        mask = causal_mask(s, x.device) if mask is None else mask[:s, :s]
        with NamedForward(self.dropped, self.stores) if torch.is_grad_enabled() else NamedForward() as terms:
            x, mask = terms.input("layer-norm 1 input", x), terms.input("causal mask", mask)
            dropout = self.attention_dropout(x, terms, "attention dropout mask")
            y = terms("QKV projection input", self.norm1, x, by_product="layer-norm 1 statistics")
            y = dropout.apply(self.attention(y, mask, terms), terms)
            x = terms("layer-norm 2 input", torch.add, x, y)
            # Before the MLP, so that recomputation can stop before its last matmul: backward reads the mask, not that.
            dropout = self.mlp_dropout(x, terms, "MLP dropout mask")
            y = terms("h→4h input", self.norm2, x, by_product="layer-norm 2 statistics")
            # The result needs no name: nothing in this layer is computed from it.
            return terms.check_parameters(self, x + dropout.apply(self.mlp(y, terms)))


def check_tokens(x: Tensor, parts: int, seq_length: int, *, whole: bool = False) -> int:
    """Check the length of a layer's input, and return the length of its unsharded sequences, in tokens.

    Args:
        x: ``[s/parts, b, …]``, one shard of the sequences.
        parts: into how many shards the sequences are split: 1, or t under sequence parallelism.
        seq_length: the longest sequence, in tokens, for which the model was made.
        whole: True refuses sequences shorter than ``seq_length`` too.

    Raises: ConfigError if x has no token, if the sequences are longer than ``seq_length``, and with ``whole`` if the
        sequences are shorter.
    """
    length = x.shape[0] * parts
    if x.shape[0] == 0 or x.shape[1] == 0:
        raise ConfigError("batch", f"must have at least one token, got sizes {list(x.shape)}")
    if length > seq_length or (whole and length < seq_length):
        raise ConfigError("seq_length", f"the model was made for {seq_length} tokens a sequence, got {length}")
    return length
