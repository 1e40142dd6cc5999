"""Mistakes of lab 3 that are edits of our solution."""

from actmem_course.judge.mistake import Mistake, ways

MISTAKES: dict[str, tuple[Mistake, ...]] = {}

# fmt: off
MISTAKES["3.3"] = (
    Mistake("bias is multiplied by t", "nothing is summed after it, so add it once",
        {"g(x, group), weight, bias": "g(x, group), weight, dist.get_world_size(group) * bias"}),
    Mistake("the result has this rank's tokens only, not all s", "call g on x first: the weight must meet all tokens",
        {"return F.linear(g(x, group), weight, bias)": "return F.linear(x, weight, bias)"}),
    Mistake("bias is missing", "it belongs after the linear, once",
        {"g(x, group), weight, bias": "g(x, group), weight"}),
    Mistake("bias comes twice", "it belongs after the linear, once",
        {"F.linear(g(x, group), weight, bias)": "F.linear(g(x, group), weight, bias) + bias"}),
    Mistake("g is called on the result", "call it on x, so that this rank's weight meets all tokens",
        {"F.linear(g(x, group), weight, bias)": "g(F.linear(x, weight, bias), group)"}),
)
MISTAKES["3.4"] = (
    Mistake("a layer norm is not inside the residual branch",
        "it belongs inside the branch, before g: x is added as it was before the norm",
        {"y = linear(layer_norm(x, w.norm1_weight, w.norm1_bias)":
            "x = layer_norm(x, w.norm1_weight, w.norm1_bias)\n    y = linear(x"},
        {"y = linear(layer_norm(x, w.norm1_weight, w.norm1_bias)":
            "x = layer_norm(x, w.norm1_weight, w.norm1_bias)\n    y = linear(x",
         "y = gelu(linear(layer_norm(x, w.norm2_weight, w.norm2_bias)":
            "x = layer_norm(x, w.norm2_weight, w.norm2_bias)\n    y = gelu(linear(x"},
        {"layer_norm(x, w.norm1_weight, w.norm1_bias)": "x",
         "= x + dropouts.block(y": "= layer_norm(x + dropouts.block(y), w.norm1_weight, w.norm1_bias",
         "layer_norm(x, w.norm2_weight, w.norm2_bias)": "x",
         " x + dropouts.block(y": " layer_norm(x + dropouts.block(y), w.norm2_weight, w.norm2_bias"}),
    Mistake("a layer norm is missing", "it belongs inside the residual branch, before g",
        {"layer_norm(x, w.norm1_weight, w.norm1_bias)": "x"}, {"layer_norm(x, w.norm2_weight, w.norm2_bias)": "x"}),
    Mistake("the gelu is missing", "it belongs between the two linears",
        {"gelu(linear(layer_norm(x, w.norm2_weight, w.norm2_bias), w.up_weight, w.up_bias, group)":
            "linear(layer_norm(x, w.norm2_weight, w.norm2_bias), w.up_weight, w.up_bias, group"}),
    Mistake("another activation than gelu is used", "use gelu of actmem_course.reference_layer",
        {"y = gelu(": "y = F.relu("}, {"y = gelu(": "y = F.silu("}),
    Mistake('F.gelu is called without approximate="tanh"',
        "use gelu of actmem_course.reference_layer, which has the tanh formula", {"y = gelu(": "y = F.gelu("}),
    Mistake("gelu comes before the MLP's first linear", "it belongs between the two linears",
        {"gelu(linear(layer_norm(x, w.norm2_weight, w.norm2_bias), w.up_weight, w.up_bias, group)":
            "linear(gelu(layer_norm(x, w.norm2_weight, w.norm2_bias)), w.up_weight, w.up_bias, group"}),
    Mistake("up_bias comes after the gelu", "it belongs right after the matmul",
        {"w.up_bias, group))": "0 * w.up_bias, group)) + w.up_bias"}),
    Mistake("a bias is missing",
        "qkv_bias and up_bias belong after the matmul, the others after the sum over the ranks",
        {"w.qkv_bias": "0 * w.qkv_bias"}, {"w.up_bias": "0 * w.up_bias"}, {" + w.projection_bias": ""},
        {" + w.down_bias": ""}, {" + w.projection_bias": "", " + w.down_bias": ""}),
    Mistake("a bias is used on rank 0 only, so the copies on the other ranks drift apart",
        "add it on every rank, after the sum over the ranks",
        {"), group) + w.projection_bias": ", w.projection_bias if dist.get_rank(group) == 0 else None), group)"}),
    Mistake("a bias comes before g_bar", "add it after the sum over the ranks, once: before the sum it counts t times",
        {"), group) + w.projection_bias": ", w.projection_bias), group)"},
        {"w.down_weight), group) + w.down_bias": "w.down_weight, w.down_bias), group)"}),
    Mistake("dropouts.block comes before a bias", "it belongs after g_bar and the bias, before x is added",
        {"dropouts.block(y)": "y",
         "F.linear(context, w.projection_weight": "dropouts.block(F.linear(context, w.projection_weight)",
         "F.linear(y, w.down_weight": "dropouts.block(F.linear(y, w.down_weight)"}),
    Mistake("norm1's and norm2's weight and bias are swapped", "norm1's come first",
        {"norm1_weight, w.norm1_bias": "norm0_weight, w.norm0_bias", "norm2": "norm1", "norm0": "norm2"}),
    Mistake("one norm's weight and bias are used for both norms", "each norm has its own", {"norm2": "norm1"},
        {"norm1_": "norm2_"}),
    Mistake("the addition of x is missing", "add it once",
        {"    x = x + dropouts.block(y)": "    x = dropouts.block(y)"},
        {"return x + dropouts.block(y)": "return dropouts.block(y)"}),
    Mistake("the MLP's result is added to the layer's input", "add it to x after attention's result is added",
        {"x = x + dropouts": "first, x = x, x + dropouts", "return x +": "return first +"}),
    Mistake("the second layer norm is applied to the layer's input", "apply it to x after attention's result is added",
        {"x = x + dropouts": "first, x = x, x + dropouts", "x, w.norm2": "first, w.norm2"}),
    Mistake("dropouts.block is missing", "it belongs after the bias, before x is added",
        {"x + dropouts.block(y)": "x + y"}, {"    x = x + dropouts.block(y)": "    dropouts.block(y)\n    x = x + y"},
        {"return x + dropouts.block(y)": "return x + y"}),
    Mistake("dropouts.block comes after the addition of x", "it belongs after the bias, before x is added",
        {"x + dropouts.block(y)": "dropouts.block(x + y)"},
        {"    x = x + dropouts.block(y)": "    x = dropouts.block(x + y)"},
        {"return x + dropouts.block(y)": "return dropouts.block(x + y)"}),
    Mistake("dropouts.core is applied to a block's result", "it is for the attention weights; use dropouts.block here",
        {"    x = x + dropouts.block(y)": "    x = x + dropouts.core(y)"},
        {"return x + dropouts.block(y)": "return x + dropouts.core(y)"},
        {"x + dropouts.block(y)": "x + dropouts.core(y)"}),
    Mistake("merge_heads is given the number of tokens", "its second argument is the number of sequences, x.shape[1]",
        {", x.shape[1])": ", x.shape[0])"}),
    Mistake("dropouts.block is used for the attention weights", "it is for what is added to x; use dropouts.core here",
        {"dropouts.core)": "dropouts.block)"}),
    Mistake("dropouts.core and dropouts.block are swapped", "core is for the attention weights",
        {"dropouts.core": "dropouts.kore", "dropouts.block": "dropouts.core", "dropouts.kore": "dropouts.block"}),
    Mistake("dropouts.core is not used", "it is core_attention's fourth argument", {", dropouts.core)": ")"},
        {", dropouts.core)": ")", "x + dropouts.block(y)": "x + y"}),
    Mistake("a rank's part is split into a heads; it holds a/t", "divide a by the number of ranks",
        {"w.num_attention_heads // dist.get_world_size(group)": "w.num_attention_heads"}),
    Mistake("Q, K and V are taken in another order", "split_heads gives Q, K, V, as core_attention takes them",
        *ways("split_heads(y, heads_here)", "[split_heads(y, heads_here)[i] for i in (1, 0, 2)]",
            "[split_heads(y, heads_here)[i] for i in (0, 2, 1)]",
            "[split_heads(y, heads_here)[i] for i in (2, 1, 0)]")),
    Mistake("there is no causal mask, so a token attends to later ones", "use core_attention",
        {"core_attention(*split_heads(y, heads_here), dropouts.core":
            "dropouts.core(F.scaled_dot_product_attention(*split_heads(y, heads_here))"}),
    Mistake("a block's result is sharded without a sum over the ranks", "call g_bar, which reduce-scatters with SUM",
        {"g_bar(": "(lambda x, group: x.chunk(dist.get_world_size(group))[dist.get_rank(group)])(",
         "def (lambda x, group: x.chunk(dist.get_world_size(group))[dist.get_rank(group)])": "def g_bar"}),
)
MISTAKES["3.5"] = (
    Mistake("the gradient is summed over the ranks before it is multiplied by weight, but each rank has its own "
        "weight", "multiply first, then reduce-scatter",
        {"_scattered(grad @ weight, ctx.group)": "_scattered(grad, ctx.group) @ weight"}),
    Mistake("every rank uses rank 0's gradient", "gather nothing: a rank has the gradients of its features already",
        {"grad @ weight": "_gathered(grad, ctx.group)[: len(grad)] @ weight"}),
    Mistake("the gradient of weight comes from this rank's tokens only, and the weight meets all tokens, so x must "
        "be gathered again", "",
        {"flatten(0, 1).t() @ full":
            "chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)].flatten(0, 1).t() @ x"}),
    Mistake("the gradient of bias comes from this rank's tokens only, and the bias is added to all tokens", "",
        {"sum((0, 1)": "chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)].sum((0, 1)"}),
    Mistake("the gradient of x is sharded without a sum over ranks", "g's backward must reduce-scatter once, with SUM",
        {"_scattered(grad @ weight, ctx.group)":
            "(grad @ weight).chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)]"}),
    Mistake("the gradient of x is a mean over the ranks, not a sum", "reduce-scatter once, with SUM",
        {"weight, ctx": "weight, ctx.group) / dist.get_world_size(ctx"}),
    Mistake("the gradient of weight is computed from this rank's own part of x, t times",
        "join the ranks' parts along dimension 0",
        {"full = _gathered(x, ctx.group)\n": "full = torch.cat([x] * dist.get_world_size(ctx.group))\n"}),
    Mistake("bias is missing", "it belongs after the linear, once",
        {"F.linear(_gathered(x, group), weight, bias)": "F.linear(_gathered(x, group), weight)"}),
)
MISTAKES["3.6"] = (
    Mistake("projection_bias and down_bias are left out", "each rank's copy saw s/t tokens: sum their gradients, too",
        {'"projection_bias", "norm2_weight", "norm2_bias", "down_bias")': '"norm2_weight", "norm2_bias")'}),
    Mistake("no .grad has changed", "an all-reduce works in place: give it the .grad itself, or copy the result back",
        {".grad, group=group)": ".grad.clone(), group=group)"}),
)
# fmt: on
