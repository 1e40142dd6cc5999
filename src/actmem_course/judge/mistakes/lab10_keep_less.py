"""Mistakes of lab 10 that are edits of our solution."""

from actmem_course.judge.mistake import Mistake

# fmt: off
MISTAKES: dict[str, tuple[Mistake, ...]] = {
    "10.1": (
        Mistake("backward multiplies by the transposed weight", "y = x Wᵀ, so the gradient of x is grad @ W",
            {"return grad @ (codes * scale)": "return F.linear(grad, codes * scale)"}),
        Mistake("the weight is divided by 127",
            "scale is what one step of a code is worth, so the weight is codes * scale",
            {"codes * scale": "codes * scale / 127"}),
        Mistake("scale is rounded to a whole number, in the dtype of codes, and 0.01 is 0 there",
            "codes * scale has the dtype of scale",
            {"codes * scale": "(codes * scale.to(codes.dtype)).to(scale.dtype)"}),
        Mistake("x is rounded to whole numbers", "only the weight is stored in 8 bits",
            {"return F.linear(x, codes * scale)": "return F.linear(x.round(), codes * scale)"}),
        Mistake("the scale is missing in forward", "the weight is codes * scale",
            {"return F.linear(x, codes * scale)": "return F.linear(x, codes.to(x.dtype))"}),
        Mistake("backward reads another weight than codes * scale",
            "grad @ (codes * scale), with each row's own scale, once",
            {"return grad @ (codes * scale)": "return grad @ codes.to(grad.dtype)"},
            {"return grad @ (codes * scale)": "return (grad * scale.t()) @ (codes * scale)"},
            {"return grad @ (codes * scale)": "return grad @ (codes * scale[0])"},
            {"return grad @ (codes * scale)": "return grad @ (codes * scale.mean())"},
            {"return grad @ (codes * scale)": "return grad @ (codes / scale)"},
            {"return grad @ (codes * scale)": "return grad @ (codes * scale).abs()"}),
        Mistake("every row is multiplied by the same scale", "each of the o rows has its own",
            {"return F.linear(x, codes * scale)": "return F.linear(x, codes * scale.mean())"},
            {"return F.linear(x, codes * scale)": "return F.linear(x, codes * scale[0])"}),
        Mistake("forward and gradient are right; the widened weight is saved",
            "save codes and scale, and multiply them again in backward",
            {"return _FrozenLinear.apply(x, codes, scale)": "return F.linear(x, codes * scale)"}),
        Mistake("x is saved", "only the gradient of a weight reads it, and this weight gets none",
            {"(codes, scale": "(codes, scale, x", "scale = ctx": "scale, _ = ctx"},
            {"_FrozenLinear.apply(x, codes, scale": "F.linear(x, (codes * scale).requires_grad_()"}),
        Mistake("forward and gradient are right; the widened weight stays in a variable, where no hook can see it",
            "multiply codes and scale each time, and let the product go",
            {"return _FrozenLinear": 'if id(codes) not in globals().setdefault("widened", {}):\n'
                "        widened[id(codes)] = codes * scale\n"
                "    return _FrozenLinear",
             "return F.linear(x, codes * scale":
                "ctx.key = id(codes)\n        return F.linear(x, widened[ctx.key].to(x.dtype)",
             "(codes * scale": "widened[ctx.key].to(grad.dtype"}),
        Mistake("the codes are divided by the scale", "multiply",
            {"return F.linear(x, codes * scale)": "return F.linear(x, codes / scale)"}),
    ),
    "10.2": (
        Mistake("alpha is not divided by r as it is",
            "the adapter is scaled by alpha / r: r is the number of rows of a, and nothing is rounded",
            {"ctx.scale = alpha / len(a)": "ctx.scale = alpha"},
            {"ctx.scale = alpha / len(a)": "ctx.scale = alpha / len(a) ** 0.5"},
            {"ctx.scale = alpha / len(a)": "ctx.scale = alpha // len(a)"},
            {"ctx.scale = alpha / len(a)": "ctx.scale = alpha / a.shape[1]"}),
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
        Mistake("a tensor as large as the frozen weight is made: weight + alpha/r · b @ a, a wide copy of weight, or "
            "its gradient", "none is needed: multiply by weight as it is, and by a and b one after the other",
            {") + ctx.scale * F.linear(low, b": " + ctx.scale * (b @ a)"},
            {"return grad_x, None, grad_a": "return grad_x, grad.flatten(0, 1).t() @ x.flatten(0, 1), grad_a"}),
        Mistake("the adapter is merged into weight and taken out again",
            "others read weight, and rounding stays in it. Multiply x by a, and that by b",
            {"return F.linear(x, weight) + ctx.scale * F.linear(low, b.to(x.dtype))":
                "weight.addmm_(b.to(x.dtype), a.to(x.dtype), alpha=ctx.scale)\n"
                "        y = F.linear(x, weight)\n"
                "        weight.addmm_(b.to(x.dtype), a.to(x.dtype), alpha=-ctx.scale)\n"
                "        return y"}),
        Mistake("x is saved in 32 bits, and so is F.linear(x, a)",
            "write a torch.autograd.Function that saves both in the dtype of x, and rounds a and b again in backward",
            {"_LoraLinear.apply(x, weight, a, b, alpha":
                "F.linear(x, weight) + (alpha / len(a) * F.linear(F.linear(x.to(a.dtype), a), b)).to(x.dtype"}),
        Mistake("16-bit copies of a and b are saved",
            "write a torch.autograd.Function that saves a and b, and rounds them again in backward",
            {"_LoraLinear.apply(x, weight, a, b, alpha":
                "F.linear(x, weight) + alpha / len(a) * F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype)"}),
        Mistake("backward runs the frozen matmul again, which nothing needs", "save x and F.linear(x, a)",
            {"return _LoraLinear.apply(x, weight, a, b, alpha": "from torch.utils.checkpoint import checkpoint\n"
                "    lora = lambda x, a, b: F.linear(x, weight) + alpha / len(a) * F.linear(F.linear(x, "
                "a.to(x.dtype)), b.to(x.dtype))\n"
                "    return checkpoint(lora, x, a, b, use_reentrant=False"}),
        Mistake("the gradient of a has the factor alpha/r not at all, or twice", "once",
            {"grad_a = grad_low": "grad_a = 1 / ctx.scale * grad_low"},
            {"grad_a = grad_low": "grad_a = ctx.scale * grad_low"}),
    ),
    "10.3": (
        Mistake("a weight's gradient is the last tile's alone", "add up those of all tiles",
            {"grad_up += of_up\n            grad_down += of_down": "grad_up, grad_down = of_up, of_down"},
            {"grad_up += of_up\n": "grad_up = of_up\n"}, {"grad_down += of_down\n": "grad_down = of_down\n"}),
        Mistake("the gradients of up and down are the means over the tiles", "they are sums",
            {"grad_up.to(up.dtype), grad_down": "(grad_up / len(grads_x)).to(up.dtype), (grad_down / len(grads_x))"}),
        Mistake("right in float64; in bfloat16 the gradients of many tiles are added up in 16 bits, where one more "
            "than 256 alike adds nothing", "add up in wide(up) and wide(down)",
            {"wide(up)), torch.zeros_like(wide(down)": "up), torch.zeros_like(down"}),
        Mistake("the MLP runs for the whole sequence at once", "run it for ``tile`` positions at a time",
            {"return _TiledMlp.apply(x, up, down, tile)": "return mlp(x, up, down)"}),
        Mistake("autograd saves the inside of every tile",
            "save x alone, and recompute each tile's inside in backward",
            {"_TiledMlp.apply(x, up, down, tile": "torch.cat([mlp(rows, up, down) for rows in x.split(tile)]"}),
        Mistake("each tile's gradient of x is written where the first tile's belongs",
            "it belongs to its own positions",
            {"return torch.cat(grads_x)": "whole = torch.zeros_like(x)\n"
                "        for of_rows in grads_x:\n"
                "            whole[: len(of_rows)] = of_rows\n"
                "        return whole"}),
        Mistake("the weights' gradients of all tiles live until they are added up",
            "add each tile's to one sum as it comes",
            {" += of_up\n            grad_down += of_down": ", grad_down = [*grad_up, of_up], [*grad_down, of_down]",
             "torch.zeros_like(wide(up)), torch.zeros_like(wide(down))": "[], []",
             "grad_up.to(up.dtype), grad_down": "sum(map(wide, grad_up)).to(up.dtype), sum(map(wide, grad_down))"}),
        Mistake("the gradient of down reads F.linear(x, up)", "it needs what GeLU makes of that",
            {"+= of_down": "+= upstream.flatten(0, 1).t() @ F.linear(rows, up).flatten(0, 1)"}),
        Mistake("every tile takes the first rows of the incoming gradient", "each has its own",
            {"torch.autograd.grad(y, inputs, upstream)": "torch.autograd.grad(y, inputs, grad[: len(y)])"}),
        Mistake("GeLU is made by its tanh formula", "mlp has the exact one, F.gelu(x)",
            {"[mlp(rows, up, down) for": '[F.linear(F.gelu(F.linear(rows, up), approximate="tanh"), down) for'},
            {"y = mlp(*inputs)": 'y = F.linear(F.gelu(F.linear(*inputs[:2]), approximate="tanh"), inputs[2])'}),
        Mistake("GeLU between the two matmuls is missing in forward", "call mlp",
            {"[mlp(rows, up, down) for": "[F.linear(F.linear(rows, up), down) for"}),
        Mistake("the gradients of x and up lack GeLU's derivative, at F.linear(x, up)", "",
            {"of_rows, of_up, of_down = torch.autograd.grad(y, inputs, upstream":
                "of_up = (upstream @ down).flatten(0, 1)\n"
                "            of_down = torch.autograd.grad(y, inputs, upstream)[2]\n"
                "            of_rows, of_up = (upstream @ down) @ up, of_up.t() @ rows.flatten(0, 1"}),
    ),
    "10.4": (
        Mistake("where x needs no gradient, the weights that function uses get none either",
            "apply must be given a tensor that needs one",
            {"x if x.requires_grad else x.detach().requires_grad_()": "x"}),
        Mistake("where x needs no gradient, nothing is offloaded, and autograd saves what the gradients of function's "
            "weights read", "",
            {"return _OffloadingCheckpoint":
                "if not x.requires_grad:\n        return function(x)\n    return _OffloadingCheckpoint"}),
        Mistake("the weights that function uses get no gradient",
            "torch.autograd.grad reaches only what it is given; torch.autograd.backward reaches all",
            {"torch.autograd.backward(y, grad)\n        return None, None, x.grad":
                "return None, None, *torch.autograd.grad(y, x, grad)"}),
        Mistake("the result is on the host, not x", "backward runs function from its input",
            {'ctx.function, ctx.fetch = function, host.put(x, "x")\n        return function(x)':
                'y = function(x)\n        ctx.function, ctx.fetch = function, host.put(y, "y")\n        return y'}),
        Mistake("with two regions, backward takes the last one's x for both",
            "hold what put returned in the region's own ctx",
            {'ctx.function, ctx.fetch = function, host.put(x, "x")':
                'globals()["latest"] = host.put(x, "x")\n        ctx.function = function',
             "ctx.fetch(": "latest("}),
        Mistake("with two regions side by side, backward takes the other one's x",
            "a stack is right for a chain only. Hold what put returned in the region's own ctx",
            {'ctx.function, ctx.fetch = function, host.put(x, "x")':
                'globals().setdefault("stack", []).append(host.put(x, "x"))\n        ctx.function = function',
             "ctx.fetch(": "stack.pop()("}),
        Mistake("function runs once, and autograd saves what backward needs",
            "run it in the forward of a torch.autograd.Function, and recompute them in backward",
            {"return _OffloadingCheckpoint":
                'host.put(x, "x")\n    return function(x)\n    return _OffloadingCheckpoint'}),
        Mistake("all that function saves goes to the host, and function runs once",
            "put x alone, and run function again in backward",
            {"return _OffloadingCheckpoint":
                'with torch.autograd.graph.saved_tensors_hooks(lambda y: host.put(y, "y"), lambda fetch: fetch()):\n'
                "        return function(x)\n"
                "    return _OffloadingCheckpoint"}),
        Mistake("the host holds x rounded to 16 bits", "put it in the dtype that it has",
            {'host.put(x, "x")\n': 'host.put(x.bfloat16(), "x")\n', "ctx.fetch()": "ctx.fetch().to(grad.dtype)"}),
    ),
}
# fmt: on
