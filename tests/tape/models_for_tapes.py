"""Models that tapes are tried on; each factory takes its sizes by the letters and returns the model and its inputs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import dropout
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils.checkpoint import checkpoint

from actmem.parallel.groups import TensorParallel
from actmem_more.chunked_loss import LinearCrossEntropy
from actmem_tools.tape.extrapolate_blocks import adapter_code
from tests.models_of_others import Of


class OddMLP(nn.Module):
    """Sizes with f + 3, numbers of a few bytes, and a loss of its own."""

    def __init__(self, h, f):
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(h, f), nn.Linear(f + 3, h), nn.Parameter(torch.ones(()))

    def forward(self, x):
        y = torch.cat([self.up(x), x[..., :3]], -1) * torch.tensor(2.0)
        return F.mse_loss(self.down(torch.relu(y).square()) * self.scale, x)


def odd_mlp(s, b, h, f):
    return OddMLP(h, f), (torch.randn(b, s, h),)


def next_token(s, b, h, v):
    """Sizes with s − 1."""

    def run(m, ids):
        logits = m["output"](m["words"](ids))
        return {"loss": F.cross_entropy(logits[:, :-1].reshape(-1, v), ids[:, 1:].reshape(-1))}

    return Of(run, words=nn.Embedding(v, h), output=nn.Linear(h, v)), (torch.randint(0, v, (b, s)),)


def checkpointed(s, b, h, f):
    block = nn.Sequential(nn.Linear(h, f), nn.GELU(), nn.Linear(f, h))
    run = lambda m, x: checkpoint(m["block"], x, use_reentrant=False)  # noqa: E731
    return Of(run, block=block), (torch.randn(b, s, h, requires_grad=True),)


def positive(s, b, h):
    """What it keeps depends on values."""

    def run(m, x):
        y = m["linear"](x)
        return y[y > 0]

    return Of(run, linear=nn.Linear(h, h)), (torch.randn(b, s, h),)


def by_length(s, b, h):
    """What it runs depends on a size."""

    def run(m, x):
        y = m["linear"](x)
        return y.relu() if x.shape[1] > 10 else y.tanh() + 1

    return Of(run, linear=nn.Linear(h, h)), (torch.randn(b, s, h),)


def llama(s, b, h, a, k, f, v, num_layers=2):
    from transformers import LlamaConfig, LlamaForCausalLM

    heads: dict[str, Any] = {"num_attention_heads": a, "num_key_value_heads": k}
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    sizes: dict[str, Any] = {"hidden_size": h, "intermediate_size": f, "vocab_size": v}
    ids = torch.randint(0, v, (b, s))
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_layers, **sizes, **heads, **ends))
    return model.bfloat16(), {"input_ids": ids, "labels": ids}


class Block(nn.Module):
    def __init__(self, h, f):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(h), nn.Sequential(nn.Linear(h, f), nn.GELU(), nn.Linear(f, h))

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Stack(nn.Module):
    """Blocks between an embedding and a loss; ``odd`` makes the third of another kind."""

    def __init__(self, h, f, v, layers, odd=False):
        super().__init__()
        self.words, self.output = nn.Embedding(v, h), nn.Linear(h, v, bias=False)
        self.blocks = nn.ModuleList(Block(h, 3 * f if odd and i == 2 else f) for i in range(layers))

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return {"loss": F.cross_entropy(self.output(x).flatten(0, 1).float(), ids.flatten())}


def stack(s, b, h, f, v, num_layers):
    return Stack(h, f, v, num_layers), {"ids": torch.randint(0, v, (b, s))}


def short_stack(s, b, h, num_layers):
    return stack(s, b, h, 3 * h, 300, num_layers)


def unused_stack(s, b, h, num_layers):
    """Each block has a weight that forward doesn't use."""
    model, inputs = short_stack(s, b, h, num_layers)
    for block in model.blocks:
        block.register_parameter("unused", nn.Parameter(torch.zeros(h)))
    return model, inputs


def adapted_stack(s, b, h, f, v, num_layers):
    """LoRA of rank 2 beside frozen linears."""
    model, inputs = stack(s, b, h, f, v, num_layers)
    exec(adapter_code("blocks", 2), {"model": model})
    return model, inputs


def odd_stack(s, b, h, f, v, num_layers):
    return Stack(h, f, v, num_layers, odd=True), {"ids": torch.randint(0, v, (b, s))}


class _RunsAgain(Block):
    """Checkpointed by itself, as Hugging Face's layers after ``gradient_checkpointing_enable``."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def checkpointed_stack(s, b, h, num_layers):
    model, inputs = short_stack(s, b, h, num_layers)
    model.blocks = nn.ModuleList(_RunsAgain(h, 3 * h) for _ in range(num_layers))
    return model, inputs


class _ChunkedStack(Stack):
    """The output layer and the loss in four chunks of each sequence."""

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        losses = LinearCrossEntropy(TensorParallel(), chunk=ids.numel() // 4)
        return {"loss": losses(x, self.output.weight, ids).mean()}


def chunked_stack(s, b, h, num_layers):
    return _ChunkedStack(h, 3 * h, 300, num_layers), {"ids": torch.randint(0, 300, (b, s))}


def aligned_stack(s, b, h, num_layers):
    """Its kernel wants rows of whole 16 bytes."""
    if h % 8:
        raise RuntimeError("strides should be multiple of 16 bytes")
    return short_stack(s, b, h, num_layers)


def never_stack(s, b, h, num_layers):
    return 1 // 0


def _attending(call, s, b, h, a, num_layers):
    def run(m, x):
        q, k, v = m["project"](x).unflatten(-1, (3, a, -1)).permute(2, 0, 3, 1, 4)
        return x + call(q, k, v).transpose(1, 2).flatten(-2)

    return nn.Sequential(*(Of(run, project=nn.Linear(h, 3 * h)) for _ in range(num_layers))), (torch.randn(b, s, h),)


def attention_stack(s, b, h, a, num_layers):
    return _attending(lambda q, k, v: attention(q, k, v, is_causal=True), s, b, h, a, num_layers)


def dropout_by_name(s, b, h, a, num_layers):
    return _attending(lambda q, k, v: attention(q, k, v, dropout_p=0.1, is_causal=True), s, b, h, a, num_layers)


def dropout_by_position(s, b, h, a, num_layers):
    return _attending(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.1, True), s, b, h, a, num_layers)


def dropped_stack(s, b, h, num_layers=1):
    """A norm, a linear layer and a dropout beside the input."""
    run = lambda m, x: x + dropout(m["project"](m["norm"](x)), 0.1, True)  # noqa: E731
    blocks = (Of(run, norm=nn.RMSNorm(h), project=nn.Linear(h, h)) for _ in range(num_layers))
    return nn.Sequential(*blocks), (torch.randn(b, s, h),)


def biased_stack(s, b, h, num_layers):
    """The first block makes what all blocks read, as T5's does."""

    def block(m, x, bias):
        bias = m["bias"](x.mean(0)) if bias is None else bias
        return m["project"](x).sin() + bias, bias

    def run(m, x):
        bias = None
        for each in m["blocks"]:
            x, bias = each(x, bias)
        return x

    parts = [{"project": nn.Linear(h, h)} | ({} if i else {"bias": nn.Linear(h, h)}) for i in range(num_layers)]
    return Of(run, blocks=nn.ModuleList(Of(block, **each) for each in parts)), (torch.randn(b, s, h),)
