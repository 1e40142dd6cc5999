"""Mistakes of lab 7 that are edits of our solution."""

from actmem_course.judge.mistake import Mistake, replacing

MISTAKES: dict[str, tuple[Mistake, ...]] = {}

# fmt: off
MISTAKES["7.2"] = (
    Mistake("this is a layer norm", "RMSNorm does not subtract the mean",
        {"_RMSNorm.apply(x, weight, eps)": "F.layer_norm(x, x.shape[-1:], weight, None, eps)"}),
    Mistake("this divides by the standard deviation", "RMSNorm does not subtract the mean",
        {"square().mean(-1, keepdim=True)": "var(-1, keepdim=True)"}),
    Mistake("the mean is over all tokens, but each token has its own", "mean(-1, keepdim=True)",
        {".mean(-1, keepdim=True) + eps": ".mean() + eps"}),
    Mistake("right where h is 8, and wrong where it is 12", "take the mean over the last dimension",
        {"square().mean(-1, keepdim=True)": "square().sum(-1, keepdim=True) / 8"}),
    Mistake("eps is added to the root", "it belongs to the mean of the squares, under the root",
        {"torch.rsqrt(wide(x).square().mean(-1, keepdim=True": "1 / (wide(x).square().mean(-1, keepdim=True).sqrt("}),
    Mistake("the result is multiplied by 1 + weight", "multiply it by weight",
        {"* inverse_rms * wide(weight))": "* inverse_rms * (1 + wide(weight)))"}),
    Mistake("1/rms is taken for a constant, but depends on all of x", "subtract normed · mean(grad·normed)",
        {"inverse_rms * (grad - normed * (grad * normed).mean(-1, keepdim=True))": "inverse_rms * grad"}),
    Mistake("right where h is 8, and backward is wrong where it is 12", "take the mean over the last dimension",
        {"(grad * normed).mean(-1, keepdim=True)": "(grad * normed).sum(-1, keepdim=True) / 8"}),
    Mistake("the mean lacks the factor weight", "multiply the gradient by weight first",
        {"(grad * normed).mean(": "(grad / wide(weight) * normed).mean("}),
    Mistake("the gradient of x has the factor weight twice", "",
        {"grad_x = inverse_rms *": "grad_x = inverse_rms * wide(weight) *"}),
    Mistake("the gradient of x is the incoming gradient, unchanged", "",
        {"grad = wide": "given, grad = grad, wide", "grad_x.to(x.dtype)": "given"}),
    Mistake("the gradient of weight comes from x", "weight multiplies x/rms",
        {"(wide(grad) * normed).flatten": "(wide(grad) * wide(x)).flatten"}),
    Mistake("weight is not used", "multiply by it at the end",
        {"(wide(x) * inverse_rms * wide(weight))": "(wide(x) * inverse_rms)"}),
    Mistake("eps is left out", "add it to the mean of the squares, under the root",
        {"keepdim=True) + eps)": "keepdim=True))"}),
    Mistake("x is multiplied by its rms", "divide by it", {"inverse_rms = torch.rsqrt(": "inverse_rms = torch.sqrt("}),
    Mistake("the gradient of x lacks the factor 1/rms", "x is divided by it in forward",
        {"grad_x = inverse_rms * (grad - ": "grad_x = (grad - "}),
    Mistake("what comes through the mean has the wrong sign", "subtract normed · mean(grad·normed)",
        {"(grad - normed": "(grad + normed"}),
    Mistake("the gradient of x lacks the factor weight", "multiply the gradient by weight first",
        {"grad = wide(grad) * wide(weight)": "grad = wide(grad)"}),
)
MISTAKES["7.3"] = (
    *replacing("return F.silu(gate) * up",
        ("gate and up are swapped", "apply silu to gate", "return F.silu(up) * gate"),
        ("gelu is applied in place of silu", "", 'return F.gelu(gate, approximate="tanh") * up'),
        ("silu is applied to the product", "it belongs to gate alone", "return F.silu(gate * up)"),
        ("up is added", "it must multiply", "return F.silu(gate) + up"),
        ("the result lacks the factor gate", "", "return torch.sigmoid(gate) * up"),
        ("the result lacks the factor σ(gate)", "", "return gate * up")),
    *replacing("slope = sigmoid * (1 + gate * (1 - sigmoid))",
        ("σ(gate) is used as the slope of silu", "the factor gate depends on gate too", "slope = sigmoid"),
        ("the slope of σ, σ(1 − σ), is used as the slope of silu", "silu is gate · σ",
            "slope = sigmoid * (1 - sigmoid)"),
        ("silu itself is used as its slope", "", "slope = sigmoid * gate")),
    Mistake("the gradient of gate is the incoming gradient, unchanged", "", {"grad * up * slope": "grad"}),
    Mistake("the gradient of up lacks the factor silu(gate)", "", {"slope, grad * gate * sigmoid": "slope, grad"}),
    Mistake("the gradient of gate lacks the factor up", "the derivative of silu(gate) · up by gate is up · silu'(gate)",
        {"grad * up * slope": "grad * slope"}),
    Mistake("the gradient of gate has the factor gate in place of up",
        "the derivative of silu(gate) · up by gate is up · silu'(gate)", {"grad * up * slope": "grad * gate * slope"}),
    Mistake("the slope of silu is wrong", "it is σ · (1 + gate · (1 − σ)), with σ = sigmoid(gate)",
        {"1 + gate * (1 - sigmoid)": "1 + gate * sigmoid"}, {"1 + gate * (1 - sigmoid)": "1 - gate * (1 - sigmoid)"},
        {"1 + gate * (1 - sigmoid)": "1 + (1 - sigmoid)"}, {"1 + gate * (1 - sigmoid)": "gate * (1 - sigmoid)"}),
    Mistake("backward takes the sigmoid of up", "it is that of gate",
        {"sigmoid = torch.sigmoid(gate)": "sigmoid = torch.sigmoid(up)"}),
    Mistake("the gradient of up has another factor than silu(gate)", "multiply by gate · σ(gate)",
        {"grad * gate * sigmoid": "grad * gate"}, {"grad * gate * sigmoid": "grad * sigmoid"}),
    Mistake("the gradients ignore the incoming gradient", "multiply both by it",
        {"grad * up * slope, grad * gate * sigmoid": "up * slope, gate * sigmoid"}),
)
MISTAKES["7.4"] = (
    Mistake("the recipe is left out", "the first source is the linear's input",
        {"return F.linear(recipe(*sources), weight)": "return F.linear(sources[0], weight)"}),
    Mistake("the gradient of weight comes from the first source", "the linear's input is recipe(*sources)",
        {"x.detach().flatten(0, -2)": "sources[0].flatten(0, -2)"}),
    Mistake("the gradient of a source is that of the linear's input", "go on through the recipe",
        {"torch.autograd.grad(x, leaves, grad @ weight)":
            "[grad @ weight if s.dim() > 1 else (grad @ weight).sum((0, 1)) for s in sources]"}),
    Mistake("the gradients ignore the incoming gradient", "start from it",
        {"grad @ weight)": "torch.ones_like(grad) @ weight)"},
        {"grad_weight = grad.flatten": "grad_weight = torch.ones_like(grad).flatten"}),
)
MISTAKES["7.5"] = (
)
MISTAKES["7.6"] = (
    Mistake("the sum is added to .grad, which has this rank's own part already", "it takes its place",
        {"weight.grad.copy_(heads[own])": "weight.grad.add_(heads[own])"}),
    Mistake("the weights are added up, not their gradients", "",
        {"heads[own] = weight.grad": "heads[own] = weight.detach()"}),
    Mistake("the gradients of ranks rank % k, rank % k + k, … are added up; neighbours share a head", "rank · k // t",
        {"own = rank * num_key_value_heads // t": "own = rank % num_key_value_heads"}),
)
# fmt: on
