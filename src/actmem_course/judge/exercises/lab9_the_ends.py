"""Lab 9: its exercises, and the mistakes that the judge can name in each, written as edits of our solution."""

from actmem_course.judge.exercise import Exercise, Lab, Mistake

LAB = Lab("lab9_the_ends", "Lab 9: the loss", "10_the_loss", (
    Exercise("9.1", "cross_entropy", "What the loss saves"),
    Exercise("9.2", "linear_cross_entropy", "A chunk at a time"),
), one_process=True)  # fmt: skip

# fmt: off
LAB.mistakes["9.1"] = (
    Mistake("the target's logit is missing", "subtract it", {"return normaliser - target": "return normaliser"}),
    Mistake("the gradient of logits is that of the softmax alone", "subtract 1 at the target",
        {"slope.new_full((*targets.shape, 1), -1))": "slope.new_full((*targets.shape, 1), 0))"}),
    Mistake("the gradient adds 1 at the target", "subtract it",
        {"slope.new_full((*targets.shape, 1), -1))": "slope.new_full((*targets.shape, 1), 1))"}),
    Mistake("the gradient of logits is that of the target's logit alone", "none comes through the exponentials",
        {"(wide(logits) - normaliser.unsqueeze(-1)).exp(": "torch.zeros_like(wide(logits)"}),
    Mistake("the gradient of logits ignores the incoming gradient", "multiply by it",
        {"(slope * grad.unsqueeze(-1)).to(logits.dtype), None": "slope.to(logits.dtype), None"}),
    Mistake("every token's gradient subtracts 1 at all tokens' targets", "subtract it at its own",
        {".scatter_add_(-1, targets.unsqueeze(-1), slope.new_full((*targets.shape, 1), -1))":
            "[..., targets.flatten()] -= 1"}),
    Mistake("each token's gradient is multiplied by the mean of the incoming ones", "multiply by its own",
        {"unsqueeze(-1)).to(logits": "mean()).to(logits"}),
    Mistake("the incoming gradient's s and b are swapped", "",
        {"unsqueeze(-1)).to(logits": "t().reshape(grad.shape).unsqueeze(-1)).to(logits"}),
)
LAB.mistakes["9.2"] = (
    Mistake("forward goes chunk by chunk, and autograd saves every chunk's logits", "recompute them in backward",
        {"return _LinearCrossEntropy.apply(x, weight, targets, chunk":
            "parts = zip(x.flatten(0, 1).split(chunk), targets.flatten().split(chunk))\n"
            "    return torch.cat([cross_entropy(F.linear(rows, weight), ids) for rows, ids in "
            "parts]).view(targets.shape"}),
    Mistake("the gradients are those of the softmax alone", "subtract 1 at the target",
        {"slope[torch.arange(len(ids), device=ids.device), ids] -= 1": "pass"}),
    Mistake("the gradient of weight is the last chunk's alone", "add up those of all chunks",
        {"+= slope.t() @ rows\n        return": "= slope.t() @ rows\n        return"}),
    Mistake("a gradient ignores the incoming gradient", "multiply each token's by it",
        {"slope = (slope * upstream.unsqueeze(-1)).to(x.dtype)": "slope = slope.to(x.dtype)"},
        {"slope.t() @ rows\n        return": "(slope / upstream.unsqueeze(-1)).t() @ rows\n        return"},
        {"@ weight)\n            grad_weight += slope.t() @ rows\n        return":
            "/ upstream.unsqueeze(-1) @ weight)\n            grad_weight += slope.t() @ rows\n        return"}),
    Mistake("the gradients are those of the target's logit alone", "none comes through the exponentials",
        {"[torch.arange": ".zero_()[torch.arange"}),
    Mistake("tokens don't have their own incoming gradients", "multiply each token's by its own, in backward",
        {"slope.t() @ rows\n        return":
            "(slope / upstream.unsqueeze(-1) * grad.mean()).t() @ rows\n        return"},
        {"1\n            slope = (slope * upstream.unsqueeze(-1": "1\n            slope = (slope * grad.mean("},
        {"1\n            slope = (slope * upstream.unsqueeze(-1)":
            "1\n            slope = (slope * grad.flatten()[0]"},
        {"1\n            slope = (slope * upstream": "1\n            slope = (slope * grad.flatten()[: len(ids)]"}),
    Mistake("each token has the mean loss of its chunk", "expected its own",
        {"losses).view": "[part.mean().expand_as(part) for part in losses]).view"}),
    Mistake("the gradients add 1 at the target", "subtract it", {", ids] -= 1": ", ids] += 1"}),
    Mistake("rows of x and ids are flattened in different orders", "in both, s comes before b",
        {"losses = [], []\n": "losses = [], []\n        x = x.transpose(0, 1)\n"},
        {"targets.flatten().": "targets.t().flatten()."}),
    Mistake("the matmul runs in 32 bits", "F.linear(x, weight) gives logits in the dtype of x; widen those",
        {"wide(F.linear(rows, weight))": "F.linear(wide(rows), wide(weight))"}),
)
# fmt: on
