"""Mistakes of lab 7 that are edits of our solution."""

from actmem_course.judge.mistake import Mistake

# fmt: off
MISTAKES: dict[str, tuple[Mistake, ...]] = {
    "7.2": (
        Mistake("this is a layer norm", "RMSNorm does not subtract the mean",
            {"_RMSNorm.apply(x, weight, eps)": "F.layer_norm(x, x.shape[-1:], weight, None, eps)"}),
        Mistake("this divides by the standard deviation", "RMSNorm does not subtract the mean",
            {"square().mean(-1, keepdim=True)": "var(-1, keepdim=True)"}),
        Mistake("the mean is over all tokens, but each token has its own", "mean(-1, keepdim=True)",
            {".mean(-1, keepdim=True) + eps": ".mean() + eps"}),
        Mistake("right where h is 8, and wrong where it is 12",
            "take the mean over the last dimension, whatever its size",
            {"square().mean(-1, keepdim=True)": "square().sum(-1, keepdim=True) / 8"}),
        Mistake("eps is added to the root", "it belongs to the mean of the squares, under the root",
            {"torch.rsqrt(wide(x).square().mean(-1, keepdim=True":
                "1 / (wide(x).square().mean(-1, keepdim=True).sqrt("}),
        Mistake("the result is multiplied by 1 + weight", "multiply it by weight",
            {"* inverse_rms * wide(weight))": "* inverse_rms * (1 + wide(weight)))"}),
        Mistake("1/rms is treated as a constant, but it depends on every element of x",
            "subtract normed · mean(grad · normed)",
            {"inverse_rms * (grad - normed * (grad * normed).mean(-1, keepdim=True))": "inverse_rms * grad"}),
        Mistake("right where h is 8, and backward is wrong where it is 12",
            "take the mean over the last dimension, whatever its size",
            {"(grad * normed).mean(-1, keepdim=True)": "(grad * normed).sum(-1, keepdim=True) / 8"}),
        Mistake("the mean lacks the factor weight", "multiply the gradient by weight first",
            {"(grad * normed).mean(": "(grad / wide(weight) * normed).mean("}),
        Mistake("the gradient of x has the factor weight twice", "",
            {"grad_x = inverse_rms *": "grad_x = inverse_rms * wide(weight) *"}),
        Mistake("the gradient of x is the incoming gradient, unchanged", "",
            {"grad = wide": "given, grad = grad, wide", "grad_x.to(x.dtype)": "given"}),
        Mistake("the gradient of weight comes from x", "weight multiplies x/rms",
            {"(wide(grad) * normed).flatten": "(wide(grad) * wide(x)).flatten"}),
    ),
    "7.3": (
        Mistake("gate and up are swapped", "silu is applied to up",
            {"return F.silu(gate) * up": "return F.silu(up) * gate"}),
        Mistake("gelu is applied in place of silu", "",
            {"return F.silu(gate) * up": 'return F.gelu(gate, approximate="tanh") * up'}),
        Mistake("silu is applied to the product", "it belongs to gate alone",
            {"return F.silu(gate) * up": "return F.silu(gate * up)"}),
        Mistake("up is added", "it must multiply", {"return F.silu(gate) * up": "return F.silu(gate) + up"}),
        Mistake("the result lacks the factor gate", "",
            {"return F.silu(gate) * up": "return torch.sigmoid(gate) * up"}),
        Mistake("the result lacks the factor σ(gate)", "", {"return F.silu(gate) * up": "return gate * up"}),
        Mistake("the gradients of gate and up are swapped", "return that of the first argument first",
            {"grad * up * slope, grad * gate * sigmoid": "grad * gate * sigmoid, grad * up * slope"}),
        Mistake("σ(gate) is used as the slope of silu", "the factor gate depends on gate too",
            {"slope = sigmoid * (1 + gate * (1 - sigmoid))": "slope = sigmoid"}),
        Mistake("the slope of σ, σ(1 − σ), is used as the slope of silu", "silu is gate · σ",
            {"slope = sigmoid * (1 + gate * (1 - sigmoid))": "slope = sigmoid * (1 - sigmoid)"}),
        Mistake("silu itself is used as its slope", "",
            {"slope = sigmoid * (1 + gate * (1 - sigmoid))": "slope = sigmoid * gate"}),
        Mistake("the gradient of gate is the incoming gradient, unchanged", "", {"grad * up * slope": "grad"}),
        Mistake("the gradient of up lacks the factor silu(gate)", "",
            {"slope, grad * gate * sigmoid": "slope, grad"}),
    ),
    "7.4": (
        Mistake("the recipe is left out", "the first source is the linear's input",
            {"return F.linear(recipe(*sources), weight)": "return F.linear(sources[0], weight)"}),
        Mistake("forward keeps the recipe's graph, with its result",
            "keep the sources alone, and run recipe again in backward",
            {"recipe = recipe\n"
             "        ctx.save_for_backward(weight, *sources)\n"
             "        return F.linear(recipe(*sources":
                "leaves = [source.detach().requires_grad_() for source in sources]\n"
                "        with torch.enable_grad():\n"
                "            ctx.x = recipe(*ctx.leaves)\n"
                "        ctx.save_for_backward(weight)\n"
                "        return F.linear(ctx.x.detach(",
             "weight, *sources = ctx.saved_tensors\n"
             "        leaves = [source.detach().requires_grad_() for source in sources]\n"
             "        with torch.enable_grad():\n"
             "            x = ctx.recipe(*leaves)":
                "(weight,) = ctx.saved_tensors\n        x, leaves = ctx.x, ctx.leaves"}),
        Mistake("the gradient of weight comes from the first source", "the linear's input is recipe(*sources)",
            {"x.detach().flatten(0, -2)": "sources[0].flatten(0, -2)"}),
        Mistake("the gradient of a source is that of the linear's input", "go on through the recipe",
            {"torch.autograd.grad(x, leaves, grad @ weight)":
                "[grad @ weight if s.dim() > 1 else (grad @ weight).sum((0, 1)) for s in sources]"}),
    ),
    "7.5": (
        Mistake("with more ranks than key heads a rank has head rank // k", "its query heads read head rank · k // t",
            {"parts // t":
                "parts // t if t <= num_key_value_heads else min(rank // num_key_value_heads, num_key_value_heads "
                "- 1)"}),
        Mistake("projection_weight is cut along its outputs; heads are its inputs", "dimension 1",
            {".chunk(t, dim=1)[rank": "[rank * (n := projection_weight.shape[1] // t) : (rank + 1) * n"},
            {"projection_weight.chunk(t, dim=1)[rank]": "projection_weight.chunk(t)[rank]"}),
        Mistake("every rank has the first key and value heads", "its query heads read those from rank · k // t on",
            {"own = rank * parts // t": "own = 0"}),
        Mistake("every rank has one key and value head", "with k > t it needs k/t, all that its query heads read",
            {"weight.chunk(parts)[own]": "weight.chunk(num_key_value_heads)[rank * num_key_value_heads // t]"}),
        Mistake("key and value heads are repeated for each query head that reads them", "a rank holds each once",
            {"v_weight.chunk(parts)[own]": "v_weight.chunk(parts)[own].unflatten(0, (num_key_value_heads // parts, "
                "-1)).repeat_interleave(num_attention_heads // max(num_key_value_heads, t), 0).flatten(0, 1)",
             "k_weight.chunk(parts)[own]": "k_weight.chunk(parts)[own].unflatten(0, (num_key_value_heads // parts, "
                "-1)).repeat_interleave(num_attention_heads // max(num_key_value_heads, t), 0).flatten(0, 1)"}),
        Mistake("k_weight and v_weight are cut into t parts, which cuts a head",
            "with t > k a rank takes one whole head, the same as its neighbours",
            {"parts = min(t, num_key_value_heads)": "parts = t"}),
        Mistake("every rank has all key and value heads", "it needs those that its own query heads read",
            {"weight.chunk(parts)[own]": "weight"}),
        Mistake("with as many key and value heads as query heads every rank has all of them",
            "it needs those that its own query heads read",
            {"num_key_value_heads)": "num_key_value_heads) if num_key_value_heads < num_attention_heads else 1"}),
        Mistake("of min(t, k) parts of k_weight and v_weight a rank has part rank % k",
            "its query heads read part rank · k // t, because neighbours share a head",
            {"own = rank * parts // t": "own = rank % parts"}),
        Mistake("with more ranks than key heads every rank has head 0", "its query heads read head rank · k // t",
            {"own = rank * parts // t": "own = 0 if t > num_key_value_heads else rank * parts // t"}),
        Mistake("q_weight is cut along its inputs; heads are its outputs", "dimension 0",
            {"q_weight.chunk(t)[rank]": "q_weight.chunk(t, dim=1)[rank]"}),
        Mistake("a rank has a part of every query head", "give it whole heads",
            {"chunk(t)[rank]": "unflatten(0, (num_attention_heads, -1))[:, rank :: t].flatten(0, 1)"}),
        Mistake("a rank has every t-th query head", "give it a/t that follow each other, from r·a/t on",
            {"chunk(t)[rank]": "unflatten(0, (num_attention_heads, -1))[rank::t].flatten(0, 1)"}),
        Mistake("a head is cut as if it had h/a elements",
            "divide the rows of q_weight by a, because h need not be a·d",
            {".chunk(t)[rank":
                "[rank * (n := num_attention_heads // t * (q_weight.shape[1] // num_attention_heads)) : (rank + "
                "1) * n"}),
    ),
    "7.6": (
        Mistake("the sum is made, and .grad stays as it was", "write the sum there",
            {"weight.grad.copy_(heads[own])": "pass"}),
        Mistake("the sum is added to .grad, which has this rank's own part already", "it takes its place",
            {"weight.grad.copy_(heads[own])": "weight.grad.add_(heads[own])"}),
        Mistake("the weights are added up, not their gradients", "",
            {"heads[own] = weight.grad": "heads[own] = weight.detach()"}),
        Mistake("the gradients of ranks rank % k, rank % k + k, … are added up; neighbours share a head",
            "rank · k // t", {"own = rank * num_key_value_heads // t": "own = rank % num_key_value_heads"}),
    ),
}
# fmt: on
