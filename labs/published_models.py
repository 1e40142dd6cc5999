"""A function that makes BERT as published runs had it, for ``actmem plan``, which has no name for this model."""

from functools import partial
from typing import Any

import torch
from torch import nn


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


def attention_of_2021(module: nn.Module, query: Any, key: Any, value: Any, *_: Any, **options: Any) -> tuple:
    """Compute attention as the package transformers did in 2021, with the signature that it calls today.

    Args:
        module: the attention module, of which only ``training`` is read.
        query: ``[b, a, s, d]``.
        key: ``[b, a, s, d]``.
        value: ``[b, a, s, d]``.
        options: "scaling", by which the scores are multiplied, and "dropout", the dropout's probability.

    Returns: the attention's output, ``[b, s, a, d]``, and None in place of the probabilities.
    """
    scores = query @ key.transpose(2, 3) * options["scaling"] + 0  # what is added is the mask, which hides nothing
    probabilities = torch.dropout(SoftmaxOf2021.apply(scores), options["dropout"], module.training)
    return (probabilities @ value).transpose(1, 2).contiguous(), None


def bert_large(s: int, b: int, l: int) -> tuple[nn.Module, dict[str, Any]]:  # noqa: E741
    """Make ``bert-large-uncased`` for classifying sequences, as transformers and torch ran it in January 2022.

    Args:
        s: tokens of one sequence.
        b: sequences of the batch.
        l: layers.

    Returns: the model, and the keyword arguments with which to call it.
    """
    from transformers import AttentionInterface, BertConfig, BertForSequenceClassification

    AttentionInterface.register("of_2021", attention_of_2021)
    fields: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
    config = BertConfig(**fields | {"num_hidden_layers": l, "attn_implementation": "of_2021"})
    ids = torch.zeros(b, s, dtype=torch.long)
    model = BertForSequenceClassification(config)
    # Before torch 2.0 this set gradients to 0 and freed none.
    model.zero_grad = partial(model.zero_grad, set_to_none=False)  # type: ignore[method-assign]
    return model, {"input_ids": ids, "labels": ids[:, 0].clone()}
