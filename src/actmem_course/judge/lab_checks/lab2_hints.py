"""Hints of lab 2, from a nudge to nearly the answer."""

_FUNCTION = (
    "Write a torch.autograd.Function: forward(ctx, x, group) and backward(ctx, grad), which returns one gradient for each "
    "argument of forward, None for group. Call it with YourFunction.apply(x, group)."
)

F = (
    "Every rank multiplies the same x by its own slice of a weight. Which ranks' results depend on x, and so where does x's "
    "gradient come from?",
    "Forward has nothing to do. In backward each rank holds the gradient from its own slice; x's gradient is the sum.",
    _FUNCTION,
    "forward: ctx.group = group; return x.view_as(x).  backward: result = grad.clone(); dist.all_reduce(result, group=ctx.group); "
    "return result, None.",
)
F_BAR = (
    "The ranks hold partial sums. After they are added up, every rank runs the same code on the same numbers.",
    "So in backward every rank already receives the whole gradient. What is the derivative of x₀ + x₁ by x₁?",
    _FUNCTION,
    "forward: ctx.group is not needed; result = x.clone(); dist.all_reduce(result, group=group); return result.  backward: return grad, None.",
)
COLUMN = (
    "Output features are independent of each other: each rank computes its own from the same x.",
    "Only x is shared, so only its gradient needs the other ranks. You have written the operator that does that.",
    "return F.linear(f(x, group), weight, bias).",
)
ROW = (
    "Input features are shared: each rank's product is a part of a sum.",
    "The bias is not part of that sum. How often is it added if every rank passes it to F.linear?",
    "return f_bar(F.linear(x, weight), group) + bias.",
)
SPLIT_ATTENTION = (
    "Attention of one head needs the Q, K and V of that head, and nothing from the others.",
    "The rows of qkv_weight are [3, a, h/a]: three blocks, each with all heads. Cut each of the three into t parts.",
    "The projection takes the heads' outputs side by side, so its input features, dimension 1, belong to heads.",
    "qkv_weight.view(3, t, h // t, h)[:, rank].reshape(3 * h // t, h), and projection_weight.chunk(t, dim=1)[rank].",
)
MLP_BLOCK = (
    "gelu works on each feature by itself, so it can run on features that are shared among the ranks.",
    "First linear column-parallel, second row-parallel: then nothing needs to be exchanged between them.",
    "y = gelu(column_parallel_linear(x, up_weight, up_bias, group)), then row_parallel_linear(y, down_weight, down_bias, group).",
)
ATTENTION_BLOCK = (
    "The same pattern as the MLP: column-parallel in, row-parallel out, and between them each head's own work.",
    "A rank holds a/t heads: that is the number for split_heads.",
    "q, k, v = split_heads(column_parallel_linear(x, qkv_weight, qkv_bias, group), num_attention_heads // t)",
    "Then merge_heads(core_attention(q, k, v), x.shape[1]) through row_parallel_linear.",
)
CROSS_ENTROPY = (
    "loss = log Σ exp(z) − z[target]. Which of the two parts needs all ranks' logits, and how many numbers are left "
    "once each rank has added up its own?",
    "Three things cross ranks, sb numbers each: the largest logit (MAX, so that exp doesn't overflow), the sum of the "
    "exponentials, and the target's logit, to which ranks that do not hold it add 0.",
    "This rank's ids start at rank · v/t. mine = (index >= 0) & (index < v/t) with index = targets − start; clamp the index before gather.",
    "Write a Function: its backward needs no exchange. It is (softmax − onehot) · grad.unsqueeze(-1), with onehot 1 only where mine.",
)
