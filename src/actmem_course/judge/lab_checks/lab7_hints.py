"""Hints of lab 7, from a nudge to nearly the answer."""

LLAMA_LAYER_BYTES = (
    "Ask of each operation what its gradient reads, as in lab 1. Which of the tensors are [s, b, h], which are f wide, and which have "
    "only k heads?",
    "Sequence parallelism divides what is whole between the blocks, so everything is divided by t. One pair of terms is not always.",
    "Five tensors of 2sbh/t and Q with as much; gate, up and the down product's input 2sbf/t each; statistics 4sb/t, log-sum-exp 4asb/t.",
    "K and V: 2sbkd with d = h/a, divided by t with t <= k. With t > k a rank still holds one whole head: divide by min(t, k).",
)
RMS_NORM = (
    "Write a torch.autograd.Function. Which two numbers does backward need of each element and of each token?",
    "inverse = torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps). ctx.save_for_backward(x, weight, inverse), with x as it came: "
    "a wide copy would be twice as large.",
    "In backward: normed = wide(x) * inverse. The gradient of weight is the sum of grad · normed over all tokens.",
    "Let grad = wide(grad) * wide(weight). 1/rms depends on x too: inverse * (grad - normed * (grad * normed).mean(-1, keepdim=True)), "
    "then .to(x.dtype).",
)
SWIGLU = (
    "silu(gate) * up as two operators keeps gate, up and silu(gate). Which of the three can backward make from the others?",
    "A torch.autograd.Function that saves gate and up; backward computes sigmoid(gate) again.",
    "The gradient of up is grad · silu(gate). That of gate is grad · up · silu'(gate).",
    "silu(x) = x·σ, so silu' = σ + x·σ·(1 − σ), with σ = sigmoid(x).",
)
RECIPE_LINEAR = (
    "A linear needs its input for one thing only, the gradient of its weight. From what can backward make that input again?",
    "Forward of a torch.autograd.Function records no graph: run the recipe and the product there, and save weight and the sources.",
    "Backward: leaves = [s.detach().requires_grad_() for s in sources]; with torch.enable_grad(): x = ctx.recipe(*leaves). Not the linear.",
    "grad.flatten(0, -2).t() @ x.flatten(0, -2) is the weight's gradient; torch.autograd.grad(x, leaves, grad @ weight) gives the sources'.",
)
SPLIT_GROUPED_HEADS = (
    "Query heads are cut as in exercise 2.5, t parts. Into how many parts can k heads be cut, if each part is at least one whole head?",
    "min(t, k) parts. Which of them do this rank's query heads read?",
    "Rank r has the query heads r·a/t and up, head i reads i // (a/k): so it is part r · min(t, k) // t.",
    "parts = min(t, k); own = rank * parts // t; k_weight.chunk(parts)[own], v_weight.chunk(parts)[own].",
)
SUM_SHARED_GRADIENTS = (
    "With t <= k there is nothing to do. With t > k: from which query heads does the gradient of a key head come, and who has those?",
    "t/k neighbours hold the same head, rank * k // t, and each has a part of its gradient. The sum must reach all of them.",
    "No new process group is needed: make a tensor of zeros with a place for each of the k heads, [k, *grad.shape].",
    "heads[own] = weight.grad; dist.all_reduce(heads, group=group); weight.grad.copy_(heads[own]).",
)
