"""Lab 10: its exercises, and the mistakes that the judge can name in each, written as edits of our solution."""

from actmem_course.judge.exercise import Exercise, Lab, Mistake, replacing, ways

LAB = Lab("lab10_keep_less", "Lab 10: save less", "11_adapters", (
    Exercise("10.1", "frozen_linear", "A frozen weight"),
    Exercise("10.2", "lora_linear", "An adapter"),
    Exercise("10.3", "tiled_mlp", "Step 4: the MLP in tiles", chapter="12_long_sequences"),
), one_process=True)  # fmt: skip

# fmt: off
LAB.mistakes["10.1"] = (
    Mistake("backward multiplies by the transposed weight", "y = x Wᵀ, so the gradient of x is grad @ W",
        {"return grad @ (codes * scale)": "return F.linear(grad, codes * scale)"}),
    Mistake("scale is rounded to a whole number, in the dtype of codes, and 0.01 is 0 there",
        "codes * scale has the dtype of scale", {"codes * scale": "(codes * scale.to(codes.dtype)).to(scale.dtype)"}),
    *replacing("return F.linear(x, codes * scale)",
        ("x is rounded to whole numbers", "only the weight is stored in 8 bits",
            "return F.linear(x.round(), codes * scale)"),
        ("the scale is missing in forward", "the weight is codes * scale", "return F.linear(x, codes.to(x.dtype))"),
        ("the codes are divided by the scale", "multiply", "return F.linear(x, codes / scale)")),
    Mistake("backward reads another weight than codes * scale",
        "grad @ (codes * scale), with each row's own scale, once",
        *ways("grad @ (codes * scale", "grad @ codes.to(grad.dtype", "(grad * scale.t()) @ (codes * scale",
            "grad @ (codes * scale[0]", "grad @ (codes * scale.mean()", "grad @ (codes / scale",
            "grad @ (codes * scale).abs(")),
    Mistake("every row is multiplied by the same scale", "each of the o rows has its own",
        *ways(" F.linear(x, codes * scale", " F.linear(x, codes * scale.mean()", " F.linear(x, codes * scale[0]")),
)
LAB.mistakes["10.2"] = (
    Mistake("alpha is not divided by r as it is",
        "scale the adapter by alpha / r, with r the rows of a; round nothing",
        *ways(" / len(a)", "", " / len(a) ** 0.5", " // len(a)", " / a.shape[1]")),
    Mistake("the adapter isn't scaled in forward", "multiply it by alpha/r",
        {"+ ctx.scale * F.linear(low": "+ F.linear(low"}),
    Mistake("the frozen matmul is scaled too", "alpha/r belongs to the adapter alone",
        {"F.linear(x, weight) + ctx.scale * F.linear(low, b.to(x.dtype":
            "ctx.scale * (F.linear(x, weight) + F.linear(low, b.to(x.dtype)"}),
    Mistake("the gradient of b has the factor alpha/r not at all, or twice", "once",
        {"grad_b = scaled": "grad_b = grad"}, {"grad_b = scaled": "grad_b = ctx.scale * scaled"}),
    Mistake("the gradient that goes through b to a and x has the factor alpha/r not at all, or twice", "once",
        {"grad_low = scaled @": "grad_low = grad @"}, {"grad_low = scaled @": "grad_low = ctx.scale * scaled @"}),
    Mistake("the gradient of x is that of the frozen matmul alone", "add the adapter's",
        {" + grad_low @ a.to(x.dtype)": ""}),
    Mistake("the gradient of x is that of the adapter alone", "the frozen matmul passes one on, too",
        {"grad_x = grad @ weight + grad_low": "grad_x = grad_low"}),
    Mistake("the adapter is merged into weight and taken out again",
        "others read weight, and rounding stays in it. Multiply x by a, and that by b",
        {"return F.linear(x, weight) + ctx.scale * F.linear(low, b.to(x.dtype))":
            "weight.addmm_(b.to(x.dtype), a.to(x.dtype), alpha=ctx.scale)\n        y = F.linear(x, weight)\n"
            "        weight.addmm_(b.to(x.dtype), a.to(x.dtype), alpha=-ctx.scale)\n        return y"}),
    Mistake("the gradient of a has the factor alpha/r not at all, or twice", "once",
        *ways("grad_a =", "grad_a = 1 / ctx.scale *", "grad_a = ctx.scale *")),
)
LAB.mistakes["10.3"] = (
    Mistake("a weight's gradient is the last tile's alone", "add up those of all tiles",
        {"grad_up += of_up\n            grad_down += of_down": "grad_up, grad_down = of_up, of_down"},
        {"grad_up += of_up\n": "grad_up = of_up\n"}, {"grad_down += of_down\n": "grad_down = of_down\n"}),
    Mistake("the gradient of down reads F.linear(x, up)", "it needs what GeLU makes of that",
        {"+= of_down": "+= upstream.flatten(0, 1).t() @ F.linear(rows, up).flatten(0, 1)"}),
    Mistake("every tile takes the first rows of the incoming gradient", "each has its own",
        {"torch.autograd.grad(y, inputs, upstream)": "torch.autograd.grad(y, inputs, grad[: len(y)])"}),
    Mistake("GeLU is made by its tanh formula", "mlp has the exact one, F.gelu(x)",
        {"[mlp(rows, up, down) for": '[F.linear(F.gelu(F.linear(rows, up), approximate="tanh"), down) for'},
        {"y = mlp(*inputs)": 'y = F.linear(F.gelu(F.linear(*inputs[:2]), approximate="tanh"), inputs[2])'}),
    Mistake("GeLU's slope is missing in backward", "multiply the gradient of GeLU's result by it",
        {"y = mlp(*inputs)":
            "z = F.linear(*inputs[:2])\n                y = F.linear(z + (F.gelu(z) - z).detach(), inputs[2])"}),
    Mistake("GeLU between the two matmuls is missing in forward", "call mlp",
        {"[mlp(rows, up, down) for": "[F.linear(F.linear(rows, up), down) for"}),
)
# fmt: on
