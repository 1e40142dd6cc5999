"""Today's layer: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no dropout, no biases.

It is built as the paper's layer in ``transformer.py``: attention and MLP, with the same collectives around them.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actmem.config import Parallel
from actmem.drop import KEEP_ALL, NamedForward, Store, store_of_each
from actmem.keep import stays_eager
from actmem.layers.gpt import ModelPart, OutputLayer, ends_of
from actmem.layers.transformer import check_tokens
from actmem.parallel.groups import TensorParallel
from actmem.parallel.linear import column_parallel
from actmem.parallel.vocab import VocabParallelCrossEntropy, VocabParallelEmbedding
from actmem.parallel.weights import ParallelModule, Part, child_seed, fresh_seed, own_weight
from actmem.recipes import Mode, Recompute
from actmem.recompute import checkpoint
from actmem_more.context import ContextParallel, attend_part, to_tokens
from actmem_more.experts import ExpertMLP, Routing
from actmem_more.latent import LatentAttention
from actmem_more.llama_modules import GatedMLP, RMSNorm, rotary_tables, rotate, row_parallel
from actmem_more.llama_shape import LlamaShape, llama_layer_terms, own_context_shape
from actmem_more.store import EightBits, HostMemory


class LlamaLayer(nn.Module):
    """Today's layer: x + attention(norm(x)), then the same with the gated MLP, or with experts.

    Rotary θ and the norms' ε are Llama 3's. With another model's shape the bytes are right, but not the values.

    Args:
        shape: the sizes of the layer, with the whole sequence.
        tp: the t ranks that share the layer's weights.
        recompute: what backward recomputes: "none", "selective", "elementwise", "full", another mode of
            ``recipes.RECOMPUTE_MODES``, a set of tensors' names to drop, or a dict from names to actions such as
            "offload".
        host: the HostMemory to which tensors are offloaded; give all layers of a model the same HostMemory. None: the
            layer makes one.
        seed: seed of the weights, the same on all t ranks. None draws a seed from torch's default CPU generator, which
            must then be in the same state on all t ranks.
        routing: how tokens choose experts: "learned" (by the router's scores), "even" or "one-sided" (whatever the
            scores are, so that an emulated rank can run the layer).
        context: the ranks that share the sequence, and how.
        experts: the ranks that share the experts; None: the t ranks.
        factory: dtype and device of the weights.

    Args of ``forward``: x ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism. With c context-parallel ranks s
        counts only this rank's tokens, those of ``context.own_tokens``.
    Returns: a tensor of the shape of x.
    Saves: the tensors that ``actmem_more.llama_terms.llama_rows`` lists and nothing else, if a flash kernel runs the
        attention.
    Raises: ConfigError if the ranks can't share the layer, if a sequence is longer than s, and under context
        parallelism if it is shorter.
    """

    def __init__(
        self,
        shape: LlamaShape,
        tp: TensorParallel = TensorParallel(),
        *,
        recompute: Mode = "none",
        host: HostMemory | None = None,
        seed: int | None = None,
        routing: Routing = "learned",
        context: ContextParallel = ContextParallel(),
        experts: TensorParallel | None = None,
        **factory,
    ):
        super().__init__()
        parallel = parallel_of(tp, context, experts)
        self.seq_length = own_context_shape(shape, parallel, context.kind).seq_length
        self.recompute = Recompute.of(recompute)
        terms = llama_layer_terms(shape, context.is_ulysses)
        self.dropped = terms.dropped(self.recompute)
        stores: dict[str, Store] = {"offload": host or HostMemory(), "compress": EightBits()}
        self.stores = store_of_each(terms.stored(self.recompute), stores)
        seed = fresh_seed() if seed is None else seed
        self.shape, self.tp, self.context = shape, tp, context
        self.norm1 = RMSNorm(shape.hidden_size, tp, **factory)
        self.attention = (
            LatentAttention(shape, tp, seed=child_seed(seed, "attention"), **factory)
            if shape.latent
            else GroupedQueryAttention(shape, tp, context, seed=child_seed(seed, "attention"), **factory)
        )
        self.norm2 = RMSNorm(shape.hidden_size, tp, **factory)
        seed = child_seed(seed, "mlp")
        self.mlp: GatedMLP | ExpertMLP
        if shape.num_experts:
            self.mlp = ExpertMLP(shape, tp, seed=seed, routing=routing, experts=experts, **factory)
        else:
            self.mlp = GatedMLP(shape.hidden_size, shape.ffn_hidden_size, tp, seed=seed, **factory)
        self.mlp_input = "router input" if shape.num_experts else "gate and up input"

    def forward(self, x: Tensor) -> Tensor:
        check_tokens(x, self.tp.sequence_parts, self.seq_length, whole=self.context.size > 1)
        if self.recompute.region == "layer" and not self.recompute.stop_early:
            return checkpoint(self._forward, x, stop_early=False, module=self)
        if not torch.is_grad_enabled() or not (self.dropped or self.stores):
            return self._forward(x)
        return self._by_terms(x)

    @stays_eager
    def _by_terms(self, x: Tensor) -> Tensor:
        with NamedForward(self.dropped, self.stores) as terms:
            return self._forward(x, terms)

    def _forward(self, x: Tensor, terms: NamedForward = KEEP_ALL) -> Tensor:
        x = terms.input("norm 1 input", x)
        y = terms("QKV projection input", self.norm1, x, by_product="norm 1 statistics")
        x = terms("norm 2 input", torch.add, x, self.attention(y, terms))
        y = terms(self.mlp_input, self.norm2, x, by_product="norm 2 statistics")
        return terms.check_parameters(self, x + self.mlp(y, terms))


class GroupedQueryAttention(ParallelModule):
    """Attention with fewer key and value heads (k) than query heads (a): each of the k serves a/k query heads.

    Each rank has a/t query heads. With t <= k it has k/t key and value heads. With t > k it has one key and value head,
    the same head as t/k − 1 neighbouring ranks. Each of these ranks computes the head's gradient from its own query
    heads, and ``linear.reduce_partial_gradients`` sums these gradients over the ranks.

    Args:
        shape: the sizes of the layer, with the whole sequence.
        tp: the t ranks that share the heads.
        context: the c ranks that share the sequence.
        seed: seed from which the weights are drawn, the same on all t ranks.
        factory: dtype and device of the weights.

    Args of ``forward``: x ``[s/c, b, h]``, or ``[s/(tc), b, h]`` under sequence parallelism; ``terms``, the
        NamedForward of the layer's forward pass, which says which tensors are not saved.
    Returns: a tensor of the shape of x.
    """

    def __init__(self, shape: LlamaShape, tp: TensorParallel, context: ContextParallel, *, seed: int, **factory):
        super().__init__()
        h, self.head_size, self.tp, self.context = shape.hidden_size, shape.d, tp, context
        parts = min(tp.size, shape.num_key_value_heads)
        part = Part(parts, tp.rank * parts // tp.size)
        held = shape.key_value_size // part.size
        query_width = shape.query_size // tp.size
        self.q = own_weight(tp, child_seed(seed, "q"), query_width, h, dim=0, **factory)
        self.k = own_weight(tp, child_seed(seed, "k"), held, h, dim=0, part=part, **factory)
        self.v = own_weight(tp, child_seed(seed, "v"), held, h, dim=0, part=part, **factory)
        self.projection = own_weight(tp, child_seed(seed, "projection"), h, query_width, dim=1, **factory)
        if shape.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(self.head_size, tp, of_heads=True, **factory) for _ in "qk")
        self.qk_norm = shape.qk_norm
        self.seq_length = shape.seq_length
        for name, table in self.constants(factory.get("device")).items():
            self.register_buffer(name, table, persistent=False)
        self.core = FlashCore()

    def constants(self, device: torch.device | str | None) -> dict[str, Tensor]:
        """Make the buffers ``cos`` and ``sin`` on ``device``: the rotary tables for this rank's tokens."""
        tables = rotary_tables(self.seq_length, self.head_size)
        tables_here = [self.context.own_tokens(table) if self.context.size > 1 else table for table in tables]
        return {name: table.to(device) for name, table in zip(("cos", "sin"), tables_here)}

    def forward(self, x: Tensor, terms: NamedForward = KEEP_ALL) -> Tensor:
        if self.qk_norm:
            q, k, v = terms(("Q before its norm", "K before its norm", "V"), self.heads, x)
            q = terms("Q after its norm", self.q_norm, q, by_product="Q norm statistics")
            q = terms("Q", self.turned, q, self.context.enter_query)
            k = terms("K after its norm", self.k_norm, k, by_product="K norm statistics")
            k = terms("K", self.turned, k, self.context.enter_key)
        else:
            q, k, v = terms(("Q", "K", "V"), self.turned_heads, x)
        if self.context.is_ulysses:
            y = terms("attention output before all-to-all", self.core, q, k, v, by_product="log-sum-exp")
            y = terms("attention projection input", self.to_tokens, y)
        else:
            y = terms("attention projection input", self.attend, q, k, v, by_product="log-sum-exp")
        return terms("attention output", lambda y: row_parallel(y, self.projection, self.tp), y)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of the layer's input x.

        Returns: Q ``[s/c, b, a/t, d]`` and K ``[s/c, b, k/t, d]``, not yet rotated, and V ``[b, k/t, s, d]``, in the
            layout of the attention kernel.
        """
        parts = column_parallel(x, self.tp, self.q, self.k, self.v)
        q, k, v = (part.view(*part.shape[:2], -1, self.head_size) for part in parts)
        return q, k, self.context.enter_key(v).permute(1, 2, 0, 3)

    def turned(self, x: Tensor, enter: Callable[[Tensor], Tensor]) -> Tensor:
        """Return queries or keys, rotated by position, in the layout of the attention kernel.

        Args:
            x: ``[s/c, b, heads, d]``.
            enter: ``context.enter_query`` for queries, ``context.enter_key`` for keys.

        Returns: ``[b, heads, s, d]``, a view of a new tensor; s/c in place of s if ``enter`` leaves the tokens on their
            ranks.
        """
        return enter(rotate(x, self.cos[: len(x)], self.sin[: len(x)])).permute(1, 2, 0, 3)  # type: ignore[index]

    def turned_heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q ``[b, a/t, s, d]`` and K, V ``[b, k/t, s, d]`` of the layer's input x, with Q and K rotated.

        Under "gather" Q, K and V have s/c tokens in place of s; under "gather-plain" only Q has.
        """
        q, k, v = self.heads(x)
        return self.turned(q, self.context.enter_query), self.turned(k, self.context.enter_key), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the causal attention of this rank's queries over the whole sequence: ``[s/c, b, heads·d]``.

        Args:
            q: ``[b, heads, s/c, d]``.
            k: ``[b, kv heads, s/c, d]``, or ``[b, kv heads, s, d]`` under "gather-plain".
            v: a tensor of the shape of k.
        """
        return attend_part(q, k, v, self.context) if self.context.size > 1 else attend(q, k, v)

    def to_tokens(self, y: Tensor) -> Tensor:
        """Run the all-to-all after attention under "ulysses": all tokens of some heads in, own tokens of all heads out.

        Args:
            y: ``[s, b, a/(tc)·d]``.

        Returns: ``[s/c, b, a/t·d]``.
        """
        return to_tokens(y.unflatten(2, (-1, self.head_size)), self.context.ranks).flatten(2)


class FlashCore(nn.Module):
    """Causal attention over all tokens of some heads; used under "ulysses".

    It is a module so that a ledger lists its result apart from the projection's input, which has the same values after
    an all-to-all.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the causal attention of q, k and v ``[b, heads, s, d]``; k and v may have fewer heads than q.

    Returns: ``[s, b, heads·d]``, a view of the tensor that the kernel saves.
    """
    grouped = q.shape[1] != k.shape[1]
    context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return context.permute(2, 0, 1, 3).flatten(2)


def parallel_of(tp: TensorParallel, context: ContextParallel, experts: TensorParallel | None) -> Parallel:
    """Return a Parallel with the sizes of these groups of ranks, as the formulas need it.

    Args:
        tp: the ranks that share a layer's weights.
        context: the ranks that share a sequence.
        experts: the ranks that share the experts; None: the ranks of ``tp``.
    """
    size = experts.size if experts else None
    return Parallel(tp.size, tp.sequence_parallel, context_parallel_size=context.size, expert_parallel_size=size)


class LlamaStage(ModelPart):
    """A Llama model, or the part of it for one pipeline stage; used as ``GPT`` is.

    The part with layer 0 has the embedding, the part with the last layer the final norm, the output layer and the loss.
    The output layer has a weight of its own. With ``tied_embeddings`` it has the embedding's weight, and if embedding
    and output layer are on different stages, each stage has a copy of the weight.

    Args:
        shape: the sizes of the whole model, with the whole sequence.
        tp: the t ranks that share each layer's weights.
        layers: the numbers of this part's layers, consecutive and from 0, such as ``range(0, 16)``; None: all layers.
        recompute: what backward recomputes: a mode's name such as "full", a set of tensors' names to drop, or a dict
            from names to actions such as "offload".
        host: the HostMemory to which all layers offload tensors; None: the model makes one.
        routing: how tokens choose experts: "learned", "even" or "one-sided".
        context: the ranks that share the sequence, and how.
        experts: the ranks that share the experts; None: the t ranks.
        factory: dtype and device of the weights.

    Args of ``forward``: token ids ``[b, s/c]`` on the first part; on later parts activations ``[s/c, b, h]``, with s/t
        in place of s under sequence parallelism.
    Returns: logits ``[s/c, b, v/t]`` on the last part, activations on earlier parts.
    """

    def __init__(
        self,
        shape: LlamaShape,
        tp: TensorParallel = TensorParallel(),
        *,
        layers: range | None = None,
        recompute: Mode = "none",
        host: HostMemory | None = None,
        routing: Routing = "learned",
        context: ContextParallel = ContextParallel(),
        experts: TensorParallel | None = None,
        **factory,
    ):
        super().__init__()
        layers = range(shape.num_layers) if layers is None else layers
        self.is_first, self.is_last = ends_of(layers, shape.num_layers)
        self.tp = tp
        parallel = parallel_of(tp, context, experts)
        self.shape = own_context_shape(shape, parallel, context.kind)
        if self.is_first or (self.is_last and shape.tied_embeddings):
            self.words = VocabParallelEmbedding(shape.vocab_size, shape.hidden_size, tp, seed=1, **factory)
        options = dict(recompute=recompute, host=host or HostMemory(), routing=routing, context=context, **factory)
        options["experts"] = experts
        self.layers = nn.ModuleList(LlamaLayer(shape, tp, seed=i, **options) for i in layers)
        if self.is_last:
            self.final_norm = RMSNorm(shape.hidden_size, tp, **factory)
            if not shape.tied_embeddings:
                self.head = VocabParallelEmbedding(shape.vocab_size, shape.hidden_size, tp, seed=2, **factory)
            self.output, self.cross_entropy = OutputLayer(tp), VocabParallelCrossEntropy(tp)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.words(x.t())
        for layer in self.layers:
            x = layer(x)
        if self.is_last:
            x = KEEP_ALL.input("final RMSNorm input", x)
            x = KEEP_ALL("output layer input", self.final_norm, x, by_product="final RMSNorm statistic")
            x = self.output(x, (self.words if self.shape.tied_embeddings else self.head).weight)
        return x
