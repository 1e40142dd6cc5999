"""Lab 2: its exercises, and the mistakes that the judge can name in each, written as edits of our solution."""

from actmem_course.judge.exercise import Exercise, Lab, Mistake, replacing, ways

LAB = Lab("lab2_tensor_parallel", "Lab 2: tensor parallelism", "03_tensor_parallelism", (
    Exercise("2.1", "f", "f and f̄", takes_group=True),
    Exercise("2.2", "f_bar", "f and f̄", takes_group=True),
    Exercise("2.3", "column_parallel_linear", "Columns, then rows", takes_group=True),
    Exercise("2.4", "row_parallel_linear", "Columns, then rows", takes_group=True),
    Exercise("2.5", "split_attention", "Attention: whole heads", takes_group=True),
    Exercise("2.6", "mlp", "Columns, then rows", takes_group=True),
    Exercise("2.7", "attention", "Attention: whole heads", takes_group=True),
    Exercise("2.8", "vocab_parallel_cross_entropy", "The loss, sharded", takes_group=True),
))  # fmt: skip

#: The largest subtracted from the target's logit too, in place of adding it back: as right, with other numbers.
_SHIFTED = {
    "target = logits.gather": "target = (logits - largest.unsqueeze(-1)).gather",
    "+ largest - sums[1]": "- sums[1]",
}


def _both(*edits: dict[str, str]) -> tuple[dict[str, str], ...]:
    """Edits of our loss, and of the other form of it."""
    return (*edits, *({**_SHIFTED, **edit} for edit in edits))


# fmt: off
LAB.mistakes["2.3"] = (
    Mistake("bias is used on rank 0 only", "each rank's bias is that of its own features, so add it on every rank",
        {"weight, bias": "weight, bias if dist.get_rank(group) == 0 else None"}),
    Mistake("f_bar is called where f belongs", "call f on x", {"F.linear(f(x, group)": "F.linear(f_bar(x, group)"}),
    Mistake("f is not called on x, so nothing sums x's gradient over the ranks", "call f on x, before the matmul",
        *ways("F.linear(f(x, group), weight, bias)", "F.linear(x, weight, bias)", "F.linear(x, f(weight, group), bias)",
            "f(F.linear(x, weight, bias), group)")),
    Mistake("bias is missing", "add it after the matmul",
        {"F.linear(f(x, group), weight, bias)": "F.linear(f(x, group), weight)"}),
)
LAB.mistakes["2.4"] = (
    Mistake("bias is used on rank 0 only, so the copies on the other ranks drift apart",
        "add it on every rank, after the sum over the ranks",
        {"(x, weight), group) + bias": "(x, weight, bias if dist.get_rank(group) == 0 else None), group)"}),
    Mistake("the sum over the ranks is divided by t", "take the sum, not the mean",
        {"group) + bias": "group) / dist.get_world_size(group) + bias"}),
    *replacing("f_bar(F.linear(x, weight), group) + bias",
        ("bias is missing", "it belongs after the sum over the ranks, once", "f_bar(F.linear(x, weight), group)"),
        ("half of bias is added before f_bar, which is right for two ranks only",
            "add bias after the sum over the ranks, once", "f_bar(F.linear(x, weight, bias / 2), group)"),
        ("bias is added before the sum, t times, and subtracted t − 1 times after it",
            "add it once, after the sum over the ranks",
            "f_bar(F.linear(x, weight, bias), group) - (dist.get_world_size(group) - 1) * bias")),
    Mistake("bias comes before f_bar", "add it after the sum over the ranks, once: before it, it counts t times",
        {"group) + bias": "group) + f_bar(bias, group)"}),
    Mistake("x is gathered, but this rank's weight takes this rank's features only",
        "multiply x as it is: what the ranks' matmuls give are the terms of a sum",
        {"f_bar(F.linear(x": "(F.linear(torch.cat([x] * dist.get_world_size(group), -1)"}),
    Mistake("bias / t is added before the sum over the ranks", "add bias once, after the sum",
        {"), group) + bias": ", bias / dist.get_world_size(group)), group)"}),
)
LAB.mistakes["2.5"] = (
    Mistake("the slice begins at the number of a head, not at its row", "head n begins at row n · h/a",
        {"return mine.reshape(3 * h // t, h), projection_weight.chunk(t, dim=1)[rank":
            "own = slice(num_attention_heads // t * rank, num_attention_heads // t * rank + h // t)\n"
            "    return torch.cat([part[own] for part in qkv_weight.chunk(3)]), projection_weight[:, own"}),
    Mistake("every t-th column of the projection is taken", "the columns of this rank's heads are contiguous",
        {"projection_weight.chunk(t, dim=1)[rank]": "projection_weight[:, rank::t]"}),
    Mistake("the projection part is a shard of projection_weight's transpose", "take columns of the weight as it is",
        {"projection_weight.chunk(t, dim=1)": "projection_weight.t().chunk(t, dim=1)"}),
    Mistake("every rank takes rank 0's heads", "take those of dist.get_rank(group)",
        {"dist.get_rank(group)\n    h =": "0\n    h ="}),
    Mistake("heads are cut apart", "each rank has every t-th row, and needs whole heads",
        {"t, h // t, h)[": "h // t, t, h)[:, ", ".chunk(t, dim=1)[rank": "[:, rank::t"}),
)
LAB.mistakes["2.6"] = (
    Mistake("down_bias is used on rank 0 only, so the copies on the other ranks drift apart",
        "add it on every rank, after the sum over the ranks",
        {"row_parallel_linear(y, down_weight, down_bias":
            "f_bar(F.linear(y, down_weight, down_bias if dist.get_rank(group) == 0 else None)"}),
    Mistake("the first linear's outputs are summed over the ranks, but each rank has other features there",
        "sum the second linear's only, which are the terms of a sum",
        {"gelu(column": "gelu(f_bar(column", "up_bias, group))": "up_bias, group), group))",
         "row_parallel_linear(y, down_weight, down_bias, group)": "F.linear(y, down_weight, down_bias)"}),
    Mistake("up_weight and down_weight are swapped", "they fit only because they are transposed",
        {"up_weight,": "down_weight.t(),", "down_weight,": "up_weight.t(),"}),
    Mistake('F.gelu is called without approximate="tanh"',
        "use gelu of actmem_course.reference_layer, which has the tanh formula", {"gelu(column": "F.gelu(column"}),
    Mistake("down_bias / t is added before the sum over the ranks", "add down_bias once, after the sum",
        {"row_parallel_linear(y, down_weight, down_bias":
            "f_bar(F.linear(y, down_weight, down_bias / dist.get_world_size(group))"}),
    Mistake("x is added to the result", "return the MLP's result without x, which the layer adds later",
        {"row_parallel_linear(y": "x + row_parallel_linear(y"}),
    Mistake("the gelu is missing", "it belongs between the two linears", {"y = gelu(": "y = ("}),
    Mistake("the gelu is not between the two linears", "call it on the first linear's result, with its bias",
        {"y = gelu(column_parallel_linear(x": "y = (column_parallel_linear(gelu(x)"}),
    Mistake("another activation than gelu is used", "use gelu of actmem_course.reference_layer",
        {"y = gelu(": "y = F.silu("}, {"y = gelu(": "y = F.relu("}),
    Mistake("up_bias is missing", "it belongs before the gelu",
        {"x, up_weight, up_bias,": "x, up_weight, 0 * up_bias,"}),
    Mistake("down_bias is missing", "it belongs after the sum over the ranks",
        {"y, down_weight, down_bias,": "y, down_weight, 0 * down_bias,"}),
    Mistake("row_parallel_linear is called where column_parallel_linear belongs",
        "the first linear shards its output features", {"gelu(column_parallel_linear(": "gelu(row_parallel_linear("}),
    Mistake("nothing sums the second linear over the ranks", "row_parallel_linear does, before it adds its bias",
        {"return row_parallel_linear(y": "return column_parallel_linear(y"}),
    Mistake("f is not called on x, so nothing sums x's gradient over the ranks", "column_parallel_linear does it",
        {"column_parallel_linear(x, up_weight, up_bias, group)": "F.linear(x, up_weight, up_bias)"}),
    Mistake("down_bias comes before the sum over the ranks", "add it once, after the sum: before it, it counts t times",
        {"row_parallel_linear(y, down_weight, down_bias": "f_bar(F.linear(y, down_weight, down_bias)"}),
)
LAB.mistakes["2.7"] = (
    Mistake("projection_bias is used on rank 0 only, so the copies on the other ranks drift apart",
        "add it on every rank, after the sum over the ranks",
        {"row_parallel_linear(context, projection_weight, projection_bias":
            "f_bar(F.linear(context, projection_weight, projection_bias if dist.get_rank(group) == 0 else None)"}),
    Mistake("Q, K and V are taken in another order",
        "split_heads gives Q, K, V, as core_attention takes them",
        *ways("q, k, v),", "k, q, v),", "q, v, k),")),
    Mistake("tokens and heads are mixed", "a reshape does not put the heads before the tokens. Use split_heads",
        {"q, k, v = split_heads(column_parallel_linear(x, qkv_weight, qkv_bias, group), heads_here":
            "parts = column_parallel_linear(x, qkv_weight, qkv_bias, group).chunk(3, -1)\n"
            "    q, k, v = (p.reshape(-1, len(x), p.shape[-1] // heads_here) for p in parts"}),
    Mistake("there is no causal mask, so a token attends to later ones", "use core_attention",
        {"core_attention(q, k, v), x": "F.scaled_dot_product_attention(q, k, v), x"}),
    Mistake("the scores are not divided by the root of the head size, once", "use core_attention, which does it",
        {"core_attention(q, k, v), x": "core_attention(q * q.shape[-1] ** 0.5, k, v), x"},
        {"core_attention(q, k, v), x": "core_attention(q * q.shape[-1] ** -0.5, k, v), x"},
        {"core_attention(q, k, v), x": "core_attention(q * (q.shape[-1] / x.shape[-1]) ** 0.5, k, v), x"},
        {"core_attention(q": "core_attention(q * (q.shape[-1] * dist.get_world_size(group) / x.shape[-1]) ** 0.5"}),
    Mistake("this rank's part is split into 1 or 2 heads, but it holds a/t",
        "divide a by the number of ranks", *ways("num_attention_heads // dist.get_world_size(group)", "1", "2")),
    Mistake("this rank's part is split into a heads, but it holds a/t", "divide a by the number of ranks",
        {"num_attention_heads // dist.get_world_size(group)": "num_attention_heads"}),
    Mistake("rows of Q, K and V are read head by head, as in Megatron-LM; here all of Q come first", "use split_heads",
        {", heads_here": ".unflatten(-1, (heads_here, 3, -1)).transpose(-2, -3).flatten(-3), heads_here"}),
    Mistake("a reshape does not put the sequence first again, so heads and tokens are mixed", "use merge_heads",
        {"merge_heads(core_attention(q, k, v), x.shape[1]":
            "core_attention(q, k, v).reshape(x.shape[0], x.shape[1], -1"}),
    Mistake("the dimensions of context are merged in another order", "use merge_heads: [b·n, s, d] to [s, b, n·d]",
        *ways("merge_heads(core_attention(q, k, v), x.shape[1])",
            "core_attention(q, k, v).unflatten(0, (-1, heads_here)).permute(2, 0, 3, 1).flatten(2)",
            "core_attention(q, k, v).unflatten(0, (heads_here, -1)).permute(2, 1, 0, 3).flatten(2)")),
    Mistake("merge_heads is given another number than that of the sequences", "its second argument is x.shape[1]",
        {", x.shape[1])": ", heads_here)"}, {", x.shape[1])": ", x.shape[0])"}),
    Mistake("x is added to the result", "return attention's result without x, which the layer adds later",
        {"row_parallel_linear(context": "x + row_parallel_linear(context"}),
    Mistake("qkv_bias is missing", "it belongs before the core attention",
        {"x, qkv_weight, qkv_bias,": "x, qkv_weight, 0 * qkv_bias,"}),
    Mistake("projection_bias is missing", "it belongs after the sum over the ranks",
        {"context, projection_weight, projection_bias,": "context, projection_weight, 0 * projection_bias,"}),
    Mistake("the weights are sharded once more", "they are this rank's already, as split_attention gives them",
        {"    heads_here =":
            "    qkv_weight, _ = split_attention(qkv_weight, projection_weight, num_attention_heads, group)\n"
            "    heads_here ="},
        {"x, qkv_weight, qkv": "x, qkv_weight.chunk(dist.get_world_size(group))[0], qkv"}),
    Mistake("row_parallel_linear is called where column_parallel_linear belongs", "Q, K, V shard their outputs",
        {"split_heads(column_parallel_linear(": "split_heads(row_parallel_linear("}),
    Mistake("nothing sums the projection over the ranks", "row_parallel_linear does, before it adds its bias",
        {"return row_parallel_linear(context": "return column_parallel_linear(context"}),
    Mistake("f is not called on x, so nothing sums x's gradient over the ranks", "column_parallel_linear does it",
        {"column_parallel_linear(x, qkv_weight, qkv_bias, group)": "F.linear(x, qkv_weight, qkv_bias)"}),
    Mistake("projection_bias comes before the sum over the ranks", "add it once, after the sum",
        {"row_parallel_linear(context, projection_weight, projection_bias":
            "f_bar(F.linear(context, projection_weight, projection_bias)"}),
)
LAB.mistakes["2.8"] = (
    Mistake("a rank's range of ids is off by one at an end", "rank r holds the ids from r·v/t to (r + 1)·v/t − 1",
        *_both({"(index < logits.shape[-1])": "(index <= logits.shape[-1])"}, {"(index >= 0)": "(index >= -1)"},
        {"(index < logits.shape[-1])": "(index < logits.shape[-1] - 1)"}, {"(index >= 0)": "(index > 0)"})),
    Mistake("ranks that do not hold the target's logit add another logit instead", "they must add 0",
        *_both({"squeeze(-1) * mine": "squeeze(-1)"},
        {"squeeze(-1) * mine": "squeeze(-1)", "index.clamp(0, logits.shape[-1] - 1)": "(index % logits.shape[-1])"})),
    Mistake("the target ids are not shifted by this rank's first id", "subtract r·v/t",
        *_both({"targets - dist.get_rank(group) * logits.shape[-1]": "targets"},
        {"get_rank(group) * logits.shape[-1]": "get_rank(group) * dist.get_world_size(group)"})),
    Mistake("each rank subtracts its own part of the target's logit, which is 0 on all ranks but one",
        "sum it over the ranks first", *_both({"- sums[1]": "- target"})),
    Mistake("each rank subtracts the largest of its own logits, and these differ", "all-reduce the largest first (MAX)",
        *_both({"        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)\n": ""})),
    Mistake("only this rank's logits are normalised", "the sum of the exponentials must run over all ranks",
        {"return sums[0].log() + largest": "return logits.logsumexp(-1)"}),
    Mistake("the largest logit is subtracted and not added back", "add it to the logarithm",
        {"sums[0].log() + largest": "sums[0].log()"}),
    Mistake("the ranks' logarithms are added up", "add the sums of the exponentials, and take one logarithm",
        {"exponentials.sum": "logits.logsumexp", ".log() + largest": ""}),
    Mistake("the logarithm of the sum is missing", "",
        {"return sums[0].log() + largest -": "return (sums[0].log() + largest).exp() -"},
        {"return sums[0].log()": "return sums[0]"}),
    Mistake("the sum of the exponentials is averaged over the ranks", "all-reduce with SUM, and divide by nothing",
        {"return sums[0].log()": "return (sums[0] / dist.get_world_size(group)).log()"}),
    Mistake("the target's logit is not subtracted", "", {"+ largest - sums[1]": "+ largest"}),
    Mistake("the ranks' largest logits are added up", "reduce them with dist.ReduceOp.MAX",
        {"dist.ReduceOp.MAX, group=group)": "group=group)"}),
    Mistake("the losses are added up or averaged over the positions", "return one loss per position",
        {"sums[0].log() + largest - sums[1]": "(sums[0].log() + largest - sums[1]).mean().expand(targets.shape)"}),
    Mistake("the gradient of logits is that of this rank's own softmax", "divide by the sum over all ranks",
        {"exponentials / sums[0].unsqueeze(-1)": "logits.softmax(-1)"}),
    Mistake("no gradient comes back through the sum of the exponentials", "its all-reduce needs a backward",
        {"ctx.saved_tensors": "[0 * ctx.saved_tensors[0], *ctx.saved_tensors[1:]]"}),
    Mistake("the gradient of logits is that of the softmax alone", "subtract 1 at the target",
        {".scatter_(-1, index, mine.unsqueeze(-1).to(softmax.dtype))": ""}),
    Mistake("every rank subtracts 1 from a gradient", "only the rank that holds the target may",
        {"index.clamp(0, logits.shape[-1] - 1": "(index * mine", "mine.unsqueeze(-1).to(softmax.dtype)": "1.0"},
        {"mine.unsqueeze(-1).to(softmax.dtype)": "1.0"}),
    Mistake("the gradient of logits ignores the incoming gradient", "multiply by it",
        *ways("(softmax - onehot) * grad.unsqueeze(-1)", "(softmax - onehot)", "(softmax - onehot) / grad.numel()")),
)
# fmt: on
