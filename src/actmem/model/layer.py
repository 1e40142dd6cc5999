"""One transformer layer in every mode of table 2 (2205.05198 figures 2, 4 and 5)."""

from __future__ import annotations

from torch import Tensor, nn

from actmem.config import ModelShape, Parallel, check_layer, check_recompute
from actmem.model.attention import SelfAttention, causal_mask
from actmem.model.mlp import MLP
from actmem.parallel.groups import TensorParallel
from actmem.parallel.linear import mark_partial_gradient
from actmem.parallel.rng import DropoutMask, DropoutStreams
from actmem.recompute import checkpoint


class TransformerLayer(nn.Module):
    """x + dropout(attention(norm(x))), then the same with the MLP.

    In and out: ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism.
    recompute: one of config.RECOMPUTE_MODES.  Keeps what formulas.activations.layer_rows
    lists, and formulas.extras beside it.  Raises ConfigError where t cannot share the layer.
    """

    def __init__(
        self,
        shape: ModelShape,
        tp: TensorParallel = TensorParallel(),
        *,
        recompute: str = "none",
        p: float = 0.1,
        streams: DropoutStreams | None = None,
        **factory,
    ):
        super().__init__()
        check_layer(shape, Parallel(tp.size, tp.sequence_parallel))
        self.recompute = check_recompute(recompute)
        self.streams = streams or DropoutStreams(seed=1234, tp=tp, device=factory.get("device") or "cpu")
        # After f_bar every rank holds the same tokens; after g_bar each holds its own.
        block_stream = self.streams.sharded if tp.sequence_parallel else self.streams.replicated
        self.norm1 = parallel_layer_norm(shape.hidden_size, tp, **factory)
        self.attention = SelfAttention(shape, tp, p, self.streams, recompute, **factory)
        self.attention_dropout = DropoutMask(p, block_stream)
        self.norm2 = parallel_layer_norm(shape.hidden_size, tp, **factory)
        self.mlp = MLP(shape, tp, **factory)
        self.mlp_dropout = DropoutMask(p, block_stream)
        self.seq_length = shape.seq_length

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask: from ``causal_mask``, when several layers share one; else the layer makes its own."""
        if self.recompute not in ("full", "paper-full"):
            return self._forward(x, mask)
        inputs = (x,) if mask is None else (x, mask)
        generators = [self.streams.replicated, self.streams.sharded]
        return checkpoint(self._forward, *inputs, generators=generators, stop_early=self.recompute == "full")

    def _forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            mask = causal_mask(self.seq_length, x.device)
        drop = self.attention_dropout(x)
        x = x + drop.drop(self.attention(self.norm1(x), mask))
        # Drawn before the MLP, so that a second run of the layer ends before the MLP's last
        # matrix product: backward reads the mask, not the product.
        drop = self.mlp_dropout(x)
        return x + drop.drop(self.mlp(self.norm2(x)))


def parallel_layer_norm(hidden_size: int, tp: TensorParallel, **factory) -> nn.LayerNorm:
    """A layer norm over h.  Keeps its input and two numbers a token; works on s/t tokens under
    sequence parallelism, which leaves its own gradients partial."""
    norm = nn.LayerNorm(hidden_size, **factory)
    mark_partial_gradient(norm.weight, tp)
    mark_partial_gradient(norm.bias, tp)
    return norm
