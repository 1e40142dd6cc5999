"""Hints of lab 3, from a nudge to nearly the answer."""

_COLLECTIVES = (
    "dist.all_gather_into_tensor(result, x.contiguous(), group=group) fills a result with t times as many rows; "
    "dist.reduce_scatter_tensor(result, x.contiguous(), group=group) fills one with 1/t of the rows. Make result with x.new_empty."
)

G = (
    "Forward: which ranks have the tokens that this rank lacks?",
    "Backward: every rank used this rank's tokens, so their gradient is a sum over the ranks; and each rank wants only its own "
    "tokens' share of that sum. One collective does both.",
    _COLLECTIVES,
    "A Function whose forward gathers along dimension 0 and whose backward reduce-scatters grad; ctx.group = group, and backward "
    "returns None for group.",
)
G_BAR = (
    "g_bar is g in reverse: what g does in backward, g_bar does in forward.",
    "Each rank's partial sum reached all tokens. Where are the gradients of the other ranks' tokens?",
    _COLLECTIVES,
    "A Function whose forward reduce-scatters x and whose backward all-gathers grad.",
)
GATHERING_LINEAR = (
    "g replaces f; the rest is lab 2's column-parallel linear.",
    "Leave the rest to autograd: there is no Function to write.",
    "return F.linear(g(x, group), weight, bias).",
)
LAYER = (
    "Layer norms, dropouts and the two additions work on this rank's tokens. Attention and MLP work on all tokens and on a part "
    "of the features. Enter each block with linear, leave it with g_bar.",
    "y = linear(layer_norm(x, w.norm1_weight, w.norm1_bias), w.qkv_weight, w.qkv_bias, group); then split_heads with a/t heads, "
    "core_attention with dropouts.core, merge_heads.",
    "Leave a block with g_bar(F.linear(y, w.projection_weight), group) + w.projection_bias: the bias once, after the sum.",
    "x = x + dropouts.block(that), and the same again with norm2, linear with up, gelu, and down.",
)
SHARD_KEEPING_LINEAR = (
    "Autograd keeps what F.linear was given: the gathered input. What is it needed for in backward?",
    "Only for the gradient of weight. It can be gathered a second time from the shards, which every rank has anyway.",
    "A Function: forward saves x and weight (ctx.save_for_backward), gathers, and returns F.linear(gathered, weight, bias). "
    "Don't keep what it gathered.",
    "backward: grad_x is the reduce-scatter of grad @ weight; weight's gradient is grad.flatten(0, 1).t() @ gathered.flatten(0, 1), "
    "gathered again from the saved x; bias's is grad.sum((0, 1)).",
)
SUM_PARTIAL_GRADIENTS = (
    "Which parameters are replicated, and which of those work on s/t tokens?",
    "Layer norms work on this rank's tokens. So do two of the biases: those that are added after g_bar.",
    "Six in all: the weights and biases of both norms, projection_bias, down_bias. qkv_bias and up_bias are cut among the ranks and "
    "see all tokens.",
    "for name in (…six names…): dist.all_reduce(getattr(w, name).grad, group=group).",
)
DROPOUT_GENERATORS = (
    "For each of the two dropouts ask: do the ranks hold the same tensor there, or different ones?",
    "Attention weights: different heads on every rank, in both modes. After f_bar: the same tensor on every rank. After g_bar: "
    "different tokens on every rank.",
    "Same stream: the same seed on every rank. Different streams: let the seed depend on the rank; and take care that no rank's "
    "core seed is another's block seed.",
    "core.manual_seed(seed + 1000 * (rank + 1)); block.manual_seed(seed) without sequence_parallel, and with it "
    "seed + 1000 * (rank + t + 1).",
)
