"""Mistakes of lab 9 that are edits of our solution."""

from actmem_course.judge.mistake import Mistake

# fmt: off
MISTAKES: dict[str, tuple[Mistake, ...]] = {
    "9.1": (
        Mistake("the result is the log-probability of the target", "the loss is its negative",
            {"return normaliser - target": "return target - normaliser"}),
        Mistake("the target's logit is missing", "subtract it", {"return normaliser - target": "return normaliser"}),
        Mistake("for logits of a thousand, exp overflows", "subtract the largest first, or use logsumexp",
            {"logsumexp(-1)\n        ": "exp().sum(-1).log()\n        "}),
        Mistake("the result is the mean over all tokens", "expected one loss a token",
            {"return normaliser - target": "return (normaliser - target).mean()"}),
        Mistake("the gradient of logits is that of the softmax alone", "subtract 1 at the target",
            {"slope.new_full((*targets.shape, 1), -1))": "slope.new_full((*targets.shape, 1), 0))"}),
        Mistake("the gradient adds 1 at the target", "subtract it",
            {"slope.new_full((*targets.shape, 1), -1))": "slope.new_full((*targets.shape, 1), 1))"}),
        Mistake("the gradient of logits is that of the target's logit alone",
            "none comes through the sum of the exponentials",
            {"(wide(logits) - normaliser.unsqueeze(-1)).exp(": "torch.zeros_like(wide(logits)"}),
        Mistake("the gradient of logits ignores the incoming gradient", "multiply by it",
            {"(slope * grad.unsqueeze(-1)).to(logits.dtype), None": "slope.to(logits.dtype), None"}),
        Mistake("the gradient of logits is that of a mean", "each token's loss is its own",
            {"logits.dtype),": "logits.dtype) / grad.numel(),"}),
        Mistake("every token's gradient subtracts 1 at all tokens' targets", "subtract it at its own",
            {".scatter_add_(-1, targets.unsqueeze(-1), slope.new_full((*targets.shape, 1), -1))":
                "[..., targets.flatten()] -= 1"}),
        Mistake("the 1 at the target is not multiplied by the incoming gradient", "subtract it before",
            {".scatter_add_(-1, targets.unsqueeze(-1), slope.new_full((*targets.shape, 1), -1))\n"
             "        return (slope * grad.unsqueeze(-1))": " = slope * grad.unsqueeze(-1)\n"
                "        slope.scatter_add_(-1, targets.unsqueeze(-1), slope.new_full((*targets.shape, 1), -1))\n"
                "        return slope"}),
        Mistake("right in float64; the logsumexp is rounded to 16 bits, saved or in backward, so that each "
            "probability is off by percents", "leave it in 32",
            {"logits, targets, normaliser)": "logits, targets, normaliser.to(logits.dtype))"}),
        Mistake("each token's gradient is multiplied by the mean of the incoming ones", "multiply by its own",
            {"unsqueeze(-1)).to(logits": "mean()).to(logits"}),
        Mistake("the incoming gradient's s and b are swapped", "",
            {"unsqueeze(-1)).to(logits": "t().reshape(grad.shape).unsqueeze(-1)).to(logits"}),
    ),
    "9.2": (
        Mistake("the logits of all tokens are made at once, and saved",
            "make those of ``chunk`` tokens at a time, and recompute them in backward",
            {"_LinearCrossEntropy.apply(x, weight, targets, chunk": "cross_entropy(F.linear(x, weight), targets"}),
        Mistake("forward goes chunk by chunk, and autograd saves every chunk's logits",
            "recompute them in backward, in a torch.autograd.Function",
            {"return _LinearCrossEntropy.apply(x, weight, targets, chunk":
                "parts = zip(x.flatten(0, 1).split(chunk), targets.flatten().split(chunk))\n"
                "    return torch.cat([cross_entropy(F.linear(rows, weight), ids) for rows, ids in "
                "parts]).view(targets.shape"}),
        Mistake("for logits of a thousand, exp overflows", "subtract the largest first, or use logsumexp",
            {"logsumexp(-1))\n            losses": "exp().sum(-1).log())\n            losses"}),
        Mistake("the result is the log-probability of the target", "the loss is its negative",
            {"normalisers[-1] - logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1)":
                "logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - normalisers[-1]"}),
        Mistake("the gradients are those of the softmax alone", "subtract 1 at the target",
            {"slope[torch.arange(len(ids), device=ids.device), ids] -= 1": "pass"}),
        Mistake("the gradient of weight is the last chunk's alone", "add up those of all chunks",
            {"+= slope.t() @ rows\n        return": "= slope.t() @ rows\n        return"}),
        Mistake("a gradient ignores the incoming gradient", "multiply each token's by it",
            {"(slope * upstream.unsqueeze(-1)).to(x.dtype)\n"
             "            grads_x.append(slope @ weight)\n"
             "            grad_weight += slope.t() @ rows\n"
             "        return": "slope.to(x.dtype)\n"
                "            grads_x.append(slope @ weight)\n"
                "            grad_weight += slope.t() @ rows\n"
                "        return"},
            {"slope.t() @ rows\n        return": "(slope / upstream.unsqueeze(-1)).t() @ rows\n        return"},
            {"@ weight)\n            grad_weight += slope.t() @ rows\n        return":
                "/ upstream.unsqueeze(-1) @ weight)\n            grad_weight += slope.t() @ rows\n        return"}),
        Mistake("the gradients are those of the target's logit alone",
            "none comes through the sum of the exponentials", {"[torch.arange": ".zero_()[torch.arange"}),
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
        Mistake("the 1 at the target is not multiplied by the incoming gradient", "subtract it before",
            {"[torch.arange(len(ids), device=ids.device), ids] -= 1\n"
             "            slope = (slope * upstream.unsqueeze(-1))": " = slope * upstream.unsqueeze(-1)\n"
                "            slope[torch.arange(len(ids), device=ids.device), ids] -= 1\n"
                "            slope = slope"}),
        Mistake("rows of x and ids are flattened in different orders", "in both, s comes before b",
            {"losses = [], []\n": "losses = [], []\n        x = x.transpose(0, 1)\n"},
            {"targets.flatten().": "targets.t().flatten()."}),
        Mistake("the matmul runs in 32 bits", "F.linear(x, weight) gives logits in the dtype of x; widen those",
            {"wide(F.linear(rows, weight))": "F.linear(wide(rows), wide(weight))"}),
    ),
    "9.3": (
        Mistake("the gradient of x is this rank's own part, that of its words", "add up the ranks' parts",
            {"dist.all_reduce(grad_x, group=ctx.group)": ""}),
        Mistake("the gradient of weight is summed over the ranks", "leave it as it is: each rank's rows are its own",
            {"return grad_x": "dist.all_reduce(grad_weight, group=ctx.group)\n        return grad_x"},
            {"\n        grad_x = torch":
                "\n            dist.all_reduce(grad_weight, group=ctx.group)\n        grad_x = torch"}),
        Mistake("the gradients are those of the softmax alone", "subtract 1 at the target, on the rank that holds it",
            {"(ids.unsqueeze(-1) == own_rows).int()": "0"}),
        Mistake("this rank's logits alone are normalised", "the sum of the exponentials is over all ranks",
            {"normaliser = sums[0].log() + largest": "normaliser = part"}),
        Mistake("the largest logit is subtracted and not added back", "add it to the logarithm",
            {"normaliser = sums[0].log() + largest": "normaliser = sums[0].log()"}),
        Mistake("ranks that don't hold the target add another logit instead", "they must add 0",
            {"torch.cat(picked) * mine.flatten()": "torch.cat(picked)"},
            {"clamp(0, len(weight) - 1": "where(mine, 0", " * mine.flatten()": ""}),
        Mistake("the ids are not shifted by the first id of this rank", "",
            {"own_ids = targets - dist.get_rank(group) * len(weight)": "own_ids = targets"}),
        Mistake("for logits of a thousand, exp overflows", "subtract the largest of all ranks first",
            {"part.clone()\n        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group": "torch.zeros_like(part"}),
        Mistake("each rank subtracts its own largest logit before the sum", "all must subtract the same",
            {"\n        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)": ""}),
        Mistake("ranks that don't hold the target subtract 1 at another word", "they must subtract 0",
            {" == own_rows": ".clamp(own_rows[0], own_rows[-1]) == own_rows"},
            {"unsqueeze(-1) ": "where((ids >= own_rows[0]) & (ids <= own_rows[-1]), own_rows[0]).unsqueeze(-1) "}),
        Mistake("backward normalises this rank's logits alone", "save the logsumexp over all ranks",
            {"weight, targets, normaliser)": "weight, targets, part)"}),
        Mistake("only the rank that holds the target subtracts the target's logit", "sum the logit over the ranks",
            {"(normaliser - sums[1])": "(normaliser - torch.cat(picked) * mine.flatten())"}),
        Mistake("the ranks' logsumexps are put together", "add up their exponentials, and take the logarithm of that",
            {"(normaliser - sums[1])": "(largest - sums[1])"},
            {"(part - largest).exp()": "part", ".log() + largest": ""}),
        Mistake("a rank's range of ids is too wide at an end", "rank r holds the ids from r·v/t to (r + 1)·v/t − 1",
            {"mine = (own_ids >= 0) & (own_ids < len(weight))": "mine = own_ids < len(weight)"},
            {" len(weight))": "= len(weight))"}),
        Mistake("the target's logit is the largest over the ranks",
            "where it is negative, the others' 0 wins. Add them up",
            {"sums = torch.stack(((part - largest).exp(), torch.cat(picked) * mine.flatten()))\n"
             "        dist.all_reduce(sums, group=group":
                "top, sums = torch.cat(picked) * mine.flatten(), (part - largest).exp()\n"
                "        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)\n"
                "        dist.all_reduce(sums, group=group)\n"
                "        sums = torch.stack((sums, top)"}),
        Mistake("the ranks' largest logits are added up", "reduce them with dist.ReduceOp.MAX",
            {"dist.ReduceOp.MAX, group=group)": "group=group)"}),
        Mistake("all_reduce overwrites this rank's largest with that of all ranks", "give it a copy",
            {"largest = part.clone()": "largest = part"}),
        Mistake("each chunk's all-reduce adds up the earlier chunks again, which are sums already",
            "reduce each chunk once, or all after the loop",
            {"\n        grad_x = torch": "\n"
                "            for part in grads_x:\n"
                "                dist.all_reduce(part, group=ctx.group)\n"
                "        grad_x = torch",
             "dist.all_reduce(grad_x, group=ctx.group)": "pass"}),
        Mistake("backward takes every rank's words for 0 to v/t − 1", "they begin at r·v/t",
            {" + dist.get_rank(ctx.group) * len(weight)": ""}),
    ),
    "9.4": (
        Mistake("each token has the mean of all entropies", "each has its own",
            {"entropy.clone().view(tokens.shape)": "entropy.mean().expand(tokens.shape).clone()"}),
        Mistake("the first is the loss", "the log-probability is its negative",
            {"torch.cat(chosen": "-torch.cat(chosen"}),
        Mistake("the entropy has the wrong sign", "it is −Σ p log p",
            {"entropies.append(-(log_p": "entropies.append((log_p"}),
        Mistake("the entropy lacks the factor p", "", {"-(log_p.exp() * log_p).sum(-1)": "-log_p.sum(-1)"}),
        Mistake("the entropy is in bits", "take the natural logarithm",
            {"-(log_p.exp() * log_p).sum(-1)": "-(log_p.exp() * log_p).sum(-1) / 0.6931471805599453"}),
        Mistake("the entropy is a mean over the words", "it is a sum",
            {"-(log_p.exp() * log_p).sum(-1)": "-(log_p.exp() * log_p).mean(-1)"}),
        Mistake("the entropy takes logits for log p", "log p is the logit less logsumexp",
            {"-(log_p.exp() * log_p).sum(-1)": "-(log_p.exp() * wide(rows)).sum(-1)"}),
        Mistake("the entropy has the logsumexp twice", "log p has it already",
            {"-(log_p.exp() * log_p).sum(-1)": "normalisers[-1] - (log_p.exp() * log_p).sum(-1)"}),
        Mistake("the two are swapped", "log-probabilities first",
            {"torch.cat(chosen).view(tokens.shape), entropy.clone(":
                "entropy.clone().view(tokens.shape), torch.cat(chosen"}),
        Mistake("the gradient of the entropy lacks what comes through the other probabilities",
            "a logit moves all of them, so it is −p (log p + H)", {"up_entropy * (log_p + h)": "up_entropy * log_p"},
            {"up_entropy * (log_p + h)": "up_entropy * (log_p + 1)"}),
        Mistake("the gradient of the entropy has a wrong sign", "it is −p (log p + H)",
            {"(up_chosen + up_entropy * (log_p + h))": "(up_chosen - up_entropy * (log_p + h))"},
            {"up_entropy * (log_p + h)": "up_entropy * (log_p - h)"}),
        Mistake("the entropy gives no gradient", "it is −p (log p + H)",
            {"(up_chosen + up_entropy * (log_p + h))": "up_chosen"}),
        Mistake("the gradient of the log-probabilities is that of the token's logit alone", "subtract p",
            {"slope = -log_p.exp() * (up_chosen + up_entropy": "slope = -log_p.exp() * (up_entropy"}),
        Mistake("a part of the gradient of log p is not multiplied by the incoming gradient",
            "multiply both the 1 at the token and p by it", {"up_chosen)": "torch.ones_like(up_chosen))"},
            {"(up_chosen + up_entropy * (log_p + h))": "(1 + up_entropy * (log_p + h))"}),
        Mistake("the gradient of the log-probabilities lacks the 1 of the token itself", "",
            {"slope.scatter_add_(-1, ids, up_chosen)": "slope"}),
        Mistake("right in float64; the logsumexp is rounded to 16 bits, saved or in backward, so that each "
            "probability is off by percents", "leave it in 32", {", entropy)": ".to(logits.dtype), entropy)"}),
        Mistake("the gradient of the log-probabilities has the wrong sign", "1 at the token, less p",
            {"up_chosen +": "-up_chosen +", "up_chosen)": "-up_chosen)"}),
        Mistake("the two incoming gradients are swapped", "they come in the order of the results",
            {"def backward(ctx, grad_chosen, grad_entropy)": "def backward(ctx, grad_entropy, grad_chosen)"}),
        Mistake("the token's own gradient overwrites what is there", "add it",
            {"slope.scatter_add_(-1, ids, up_chosen)": "slope.scatter_(-1, ids, up_chosen)"}),
    ),
    "9.5": (
        Mistake("if a word occurs several times, only its first gradient arrives", "add that of every token",
            {"ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)":
                "words = ids.flatten().unique()\n"
                "        first = [ids.flatten().tolist().index(word) for word in words.tolist()]\n"
                "        ctx.main_grad.index_add_(0, words, wide(grad).flatten(0, 1)[first]"}),
        Mistake("if a word occurs several times, only one of its gradients arrives",
            "main_grad[ids] += … writes each row once. Use index_add_",
            {".index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)": "[ids.flatten()] += wide(grad).flatten(0, 1"}),
        Mistake("main_grad is overwritten, and earlier microbatches have left their gradients there", "add to it",
            {"index_add_": "index_copy_"},
            {".index_add_(0, ids.flatten(), wide(grad).flatten(0, 1)": "[ids] = wide(grad"},
            {"index_add_": "zero_().index_add_"}),
        Mistake("the gradient is subtracted", "main_grad holds gradients, and the optimizer subtracts them",
            {"flatten(0, 1))": "flatten(0, 1), alpha=-1)"}),
        Mistake("main_grad is unchanged", "backward adds each token's gradient to the row of its id",
            {"ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1))": ""}),
        Mistake("a word's gradients are averaged over its repetitions", "they add up",
            {"wide(grad)":
                "(wide(grad) / torch.bincount(ids.flatten(), minlength=len(ctx.main_grad))[ids].unsqueeze(-1))"}),
        Mistake("the gradient is divided by the number of tokens", "if the loss is a mean, it has divided already",
            {"wide(grad)": "(wide(grad) / ids.numel())"}),
        Mistake("ids and gradients are flattened in different orders", "row k of the one goes with id k of the other",
            {"flatten(), wide": "t().flatten(), wide"}),
        Mistake("ids and gradients are flattened in different orders", "id k belongs to row k",
            {"flatten(0, 1))": "transpose(0, 1).flatten(0, 1))"}),
        Mistake("each gradient is added twice", "",
            {"flatten(0, 1))":
                "flatten(0, 1))\n        ctx.main_grad.index_add_(0, ids.flatten(), wide(grad).flatten(0, 1))"}),
        Mistake("word 0 gets no gradient, as if it were padding", "here it is a word like the others",
            {"wide(grad)": "(wide(grad) * (ids != 0).unsqueeze(-1))"}),
        Mistake("with two microbatches in flight, autograd finds that main_grad has changed since it was saved, and "
            "refuses", "hold it as an attribute of ctx",
            {")\n        ctx.main_grad = main_grad": ", main_grad)",
             "(ids,) = ctx.saved_tensors\n        ctx.": "ids, main_grad = ctx.saved_tensors\n        "}),
        Mistake("gradients are added up in 16 bits", "widen each, and add it to main_grad in its own dtype",
            {"index_add_(0, ids.flatten(), wide(grad).flatten(0, 1":
                "add_(torch.zeros_like(ctx.main_grad, dtype=grad.dtype).index_add_(0, ids.flatten(), "
                "grad.flatten(0, 1)"},
            {"index_add_(0, ids.flatten(), wide(grad).flatten(0, 1":
                "copy_(ctx.main_grad.to(grad.dtype).index_add_(0, ids.flatten(), grad.flatten(0, 1)"}),
        Mistake("only the last sequence's gradients arrive", "flatten ids and gradients",
            {".flatten(), wide(grad).flatten(0, 1)": "[:, -1], wide(grad)[:, -1]"}),
    ),
}
# fmt: on
