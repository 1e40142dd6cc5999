"""Multi-head latent attention: heads made from two narrow latents, one of which inference caches.

Source: 2405.04434 section 2.1.

    x ─ down ─ Q latent ── norm ─ up ─ queries, each with a part that is rotated by its position
    x ─ down ─ KV latent ─ norm ─ up ─ keys and values
                   └─ a key with positions, which all heads share

The down matmuls are not sharded. Without sequence parallelism every rank computes the latents of all tokens. With
sequence parallelism each rank computes the latents of its own tokens, and the latents are gathered, which are narrower
than the tokens.

**Values narrower than keys.** torch's flash kernel for CPUs needs queries, keys and values of one width. With two
widths ``scaled_dot_product_attention`` falls back to unfused operations, which save the scores, as²b of them. Many
implementations pad the values with zeros, and then save a wider V and a wider output. Here the zeros are added before
each call of the kernel and removed after it, so V and the output are saved without them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from actmem.drop import KEEP_ALL, NamedForward
from actmem.keep import differentiates_once
from actmem.parallel.conjugates import f_or_g
from actmem.parallel.groups import TensorParallel
from actmem.parallel.linear import column_parallel
from actmem.parallel.weights import ParallelModule, child_seed, own_weight
from actmem_more.llama_modules import ReplicatedLinear, RMSNorm, rotary_tables, rotate, row_parallel
from actmem_more.llama_shape import LlamaShape
from actmem_more.torch_private import flash_on_cpu, flash_on_cpu_backward


class LatentAttention(ParallelModule):
    """Multi-head latent attention, with a/t heads on each rank.

    A head's query and key have n elements without a position and r elements that are rotated by position; its value has
    v elements. Element i of the r is rotated together with element i + r/2, as in the Llama layer. DeepSeek rotates
    neighbouring elements, which gives the same result with the weights' rows in another order. YaRN, which DeepSeek
    uses for long contexts, is left out; it changes the rotary tables and a constant.

    Args:
        shape: the sizes of the layer; its ``latent`` must be set.
        tp: the t ranks that share the heads.
        seed: seed from which the weights are drawn, the same on all t ranks.
        factory: dtype and device of the weights.

    Args of ``forward``: x ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism; ``terms``, the NamedForward of
        the layer's forward pass, which says which tensors are not saved.
    Returns: a tensor of the shape of x.
    """

    def __init__(self, shape: LlamaShape, tp: TensorParallel, *, seed: int, **factory):
        super().__init__()
        assert shape.latent
        h, heads, sizes, self.tp = shape.hidden_size, shape.num_attention_heads, shape.latent, tp
        self.rank, self.nope = sizes.key_value_rank, sizes.nope_head_size
        self.heads = heads // tp.size
        self.q_down = ReplicatedLinear(h, sizes.query_rank, tp, seed=child_seed(seed, "q_down"), **factory)
        self.q_latent_norm = RMSNorm(sizes.query_rank, tp, **factory)
        width = self.rank + sizes.rope_head_size
        self.kv_down = ReplicatedLinear(h, width, tp, seed=child_seed(seed, "kv_down"), **factory)
        self.kv_latent_norm = RMSNorm(self.rank, tp, **factory)

        def cut(name: str, width: int, rank: int) -> nn.Parameter:
            return own_weight(tp, child_seed(seed, name), self.heads * width, rank, dim=0, **factory)

        self.q_up = cut("q_up", shape.d, sizes.query_rank)
        self.k_up, self.v_up = cut("k_up", self.nope, self.rank), cut("v_up", sizes.value_head_size, self.rank)
        value_width = self.heads * sizes.value_head_size
        self.projection = own_weight(tp, child_seed(seed, "projection"), h, value_width, dim=1, **factory)
        self.seq_length, self.rope_head_size = shape.seq_length, sizes.rope_head_size
        for name, table in self.constants(factory.get("device")).items():
            self.register_buffer(name, table, persistent=False)

    def constants(self, device: torch.device | str | None) -> dict[str, Tensor]:
        """Make the rotary tables, the buffers ``cos`` and ``sin``, on ``device``."""
        cos, sin = rotary_tables(self.seq_length, self.rope_head_size)
        return {"cos": cos.to(device), "sin": sin.to(device)}

    def forward(self, x: Tensor, terms: NamedForward = KEEP_ALL) -> Tensor:
        q = terms("Q latent", self.q_down, x)
        q = terms("Q up-projection input", self.q_latent_norm, q, by_product="Q latent norm statistics")
        q = terms("Q", self.queries, q)
        latent = terms("KV latent", self.kv_down, x)
        y = terms("KV up-projection input", self.normed, latent, by_product="KV latent norm statistics")
        k, v = terms(("K", "V"), self.keys_and_values, y, latent)
        y = terms("attention projection input", attend_uneven, q, k, v, by_product="log-sum-exp")
        return terms("attention output", lambda y: row_parallel(y, self.projection, self.tp), y)

    def up(self, latent: Tensor, *weights: Tensor) -> list[Tensor]:
        """Return a latent multiplied by column-parallel weights, which make this rank's heads from it.

        Args:
            latent: ``[s, b, rank]``, or ``[s/t, b, rank]`` under sequence parallelism.
            weights: each ``[a/t · width, rank]``, with ``width`` elements for each head.

        Returns: for each weight ``[s, b, a/t, width]``.
        """
        parts = column_parallel(latent, self.tp, *weights)
        return [part.view(*part.shape[:2], self.heads, -1) for part in parts]

    def queries(self, latent: Tensor) -> Tensor:
        """Return this rank's queries, computed from the normalised Q latent.

        Args:
            latent: ``[s, b, rank]``, or ``[s/t, b, rank]`` under sequence parallelism.

        Returns: ``[b, a/t, s, n + r]``, the last r elements rotated by position.
        """
        (q,) = self.up(latent, self.q_up)
        return self.joined(q[..., : self.nope], q[..., self.nope :])

    def normed(self, latent: Tensor) -> Tensor:
        """Return the normalised KV latent without its last r elements; those are the part of the key that heads share.

        Saves: a view of the KV latent, which keeps the r elements too, and 4 bytes a token.
        """
        return self.kv_latent_norm(latent[..., : self.rank])

    def keys_and_values(self, normed: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of this rank's heads.

        Args:
            normed: the normalised KV latent; V and the first n elements of each key are computed from it.
            latent: the KV latent; its last r elements, rotated here, are the last r elements of every key.

        Returns: K ``[b, a/t, s, n + r]`` and V ``[b, a/t, s, v]``.
        """
        k, v = self.up(normed, self.k_up, self.v_up)
        shared = f_or_g(latent[..., self.rank :].contiguous(), self.tp)  # [s, b, r]
        return self.joined(k, shared[:, :, None]), v.permute(1, 2, 0, 3)

    def joined(self, plain: Tensor, turned: Tensor) -> Tensor:
        """Return the heads of ``plain``, each with ``turned``, rotated by position, appended.

        Args:
            plain: ``[s, b, a/t, n]``, elements without a position.
            turned: ``[s, b, a/t, r]``, or ``[s, b, 1, r]`` if all heads share it.

        Returns: ``[b, a/t, s, n + r]``, a view of one new tensor.
        """
        cos, sin = self.cos[: len(plain)], self.sin[: len(plain)]  # type: ignore[index]
        turned = rotate(turned, cos, sin).expand(*plain.shape[:3], -1)
        return torch.cat([plain, turned], dim=-1).permute(1, 2, 0, 3)


def attend_uneven(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention whose values may be narrower than its keys.

    On a GPU this calls ``scaled_dot_product_attention``, whose memory-efficient kernel takes two widths (not measured).

    Args:
        q: queries ``[b, heads, s, d]``.
        k: keys ``[b, heads, s, d]``.
        v: values ``[b, heads, s, d_v]``, with d_v <= d.

    Returns: ``[s, b, heads·d_v]``.
    Saves: q, k, v, the result, and 4 bytes a query.
    """
    if q.device.type == "cpu" and q.shape[-1] != v.shape[-1]:
        context = _UnevenAttention.apply(q, k, v)
    else:
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return context.permute(2, 0, 1, 3).flatten(2)


def _widened(width: int, *tensors: Tensor) -> list[Tensor]:
    return [F.pad(x, (0, width - x.shape[-1])) for x in tensors]


class _UnevenAttention(Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.width, ctx.scale = max(q.shape[-1], v.shape[-1]), q.shape[-1] ** -0.5
        context, log_sum_exp = flash_on_cpu(*_widened(ctx.width, q, k, v), 0.0, True, scale=ctx.scale)
        # In the layout of the kernel's output, [b, s, heads, d_v], but without the zeros.
        context = (
            context[..., : v.shape[-1]].transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
        )
        ctx.save_for_backward(q, k, v, context, log_sum_exp)
        return context

    @staticmethod
    @differentiates_once
    def backward(ctx, grad: Tensor):
        q, k, v, context, log_sum_exp = ctx.saved_tensors
        grad, *wide = _widened(ctx.width, grad, q, k, v, context)
        grads = flash_on_cpu_backward(grad, *wide, log_sum_exp, 0.0, True, scale=ctx.scale)
        return tuple(grad[..., : x.shape[-1]] for grad, x in zip(grads, (q, k, v)))
