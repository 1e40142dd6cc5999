"""Hints of lab 4, from a nudge to nearly the answer."""

CHECKPOINT = (
    "What must remain of the first run? Its result, and what it takes to run it again.",
    "Write an autograd Function whose first argument is function: forward(ctx, function, *inputs) and backward(ctx, grad). In forward "
    "autograd records nothing anyway; save the inputs with ctx.save_for_backward.",
    "In backward make inputs that start a graph of their own: x.detach().requires_grad_(…), with ctx.needs_input_grad saying which "
    "need it. Run function on them under torch.enable_grad().",
    "Then torch.autograd.backward(y, grad), which fills .grad of those inputs and of the parameters; return None for function, and "
    "x.grad of each input.",
)
RANDOM_NUMBERS = (
    "Dropout draws from the default generator. What does the second run draw?",
    "Read the generator's state before the first run (torch.get_rng_state()), keep it, and set it before the second "
    "(torch.set_rng_state).",
    "The rest of the model must not notice: after the second run the generator must be in the state that it had just before that run.",
    "In backward: before = torch.get_rng_state(); torch.set_rng_state(saved); y = function(*inputs); torch.set_rng_state(before). On a "
    "GPU the same with torch.cuda.get_rng_state and set_rng_state.",
)
SELECTIVE_LAYER = (
    "layer(x, w, dropouts, core) calls core(q, k, v, dropout) in place of core_attention.",
    "Your core runs core_attention under checkpoint. checkpoint's inputs are tensors: dropout isn't one, so let the function that you "
    "pass close over it.",
    "checkpoint(lambda q, k, v: core_attention(q, k, v, dropout), q, k, v).",
)
FULL_LAYER = (
    "The region is the whole layer, and its input is x.",
    "The weights are parameters that the function uses; they need not be among the inputs.",
    "return checkpoint(lambda y: layer(y, w, dropouts), x).",
)
STOPPING_EARLY = (
    "The second run can stop once every tensor that the first run wanted to keep has been recomputed. Who knows which these are?",
    "torch.autograd.graph.saved_tensors_hooks(pack, unpack): let the first run record its graph as usual, but give autograd a number "
    "in place of each tensor. unpack(number) is called when backward reads it.",
    "The first time, unpack runs function again under hooks of its own, whose pack collects the tensors in order. When there are as many as in "
    "the first run, raise an exception of your own and catch it around the second run.",
    "Hold inputs and generator states with keep(*inputs, state), so that they can be seen; kept.tensors() gives them back. Free "
    "each tensor once it is read: found.pop(number).",
)
