"""Models of published runs that have no name in ``actmem plan``: factories for its command line, with transformers."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class SoftmaxOf2021(torch.autograd.Function):
    """Softmax that saves its input beside its output, as torch's did before 1.11 (March 2022)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the softmax of the last dimension."""
        y = torch.softmax(x, -1)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """Return the input's gradient."""
        x, y = ctx.saved_tensors
        return torch._softmax_backward_data(grads[0], y, -1, x.dtype)


def attention_of_2021(module, query, key, value, mask, scaling=1.0, dropout=0.0, **_):
    """Attention as transformers ran it then, in the form in which it takes attention functions today."""
    scores = query @ key.transpose(2, 3) * scaling
    probabilities = torch.dropout(SoftmaxOf2021.apply(scores + mask), dropout, module.training)
    return (probabilities @ value).transpose(1, 2).contiguous(), None


def bert_large(s: int, b: int, l: int) -> tuple[nn.Module, dict[str, Any]]:  # noqa: E741
    """``bert-large-uncased`` with a class for each sequence, as transformers and torch ran it in January 2022."""
    from transformers import AttentionInterface, AttentionMaskInterface, BertConfig, BertForSequenceClassification
    from transformers.masking_utils import eager_mask

    AttentionInterface.register("of_2021", attention_of_2021)
    AttentionMaskInterface.register("of_2021", eager_mask)
    fields: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    config = BertConfig(**fields | {"num_hidden_layers": l, "attn_implementation": "of_2021"})
    ids = torch.zeros(b, s, dtype=torch.long)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0].clone()}
    model = BertForSequenceClassification(config)
    # Before torch 2.0 this set gradients to 0 and freed none.
    model.zero_grad = partial(model.zero_grad, set_to_none=False)  # type: ignore[method-assign]
    return model, inputs


class LlamaOfTorchtitan(nn.Module):
    """A Llama as torchtitan trained it until June 2024: its logits, in float32, live until the next forward ends."""

    def __init__(self, **fields: int):
        from transformers import LlamaConfig, LlamaModel

        super().__init__()
        config = LlamaConfig(use_cache=False, **fields)
        self.inner = LlamaModel(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        self.logits = self.output(self.inner(ids).last_hidden_state).float()
        return {"loss": cross_entropy(self.logits.flatten(0, 1), ids.flatten())}


def llama3_8b(s: int, b: int, l: int) -> tuple[nn.Module, dict[str, Any]]:  # noqa: E741
    """Llama 3 8B as torchtitan trained it in June 2024."""
    fields = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
    return LlamaOfTorchtitan(**fields, num_hidden_layers=l, vocab_size=128256), _ids(s, b)


def llama2_7b(s: int, b: int, l: int) -> tuple[nn.Module, dict[str, Any]]:  # noqa: E741
    """Llama 2 7B as torchtitan trained it in March 2024."""
    fields = {"hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008}
    return LlamaOfTorchtitan(**fields, num_hidden_layers=l, vocab_size=32000), _ids(s, b)


def _ids(s: int, b: int) -> dict[str, Any]:
    return {"ids": torch.zeros(b, s, dtype=torch.long)}
