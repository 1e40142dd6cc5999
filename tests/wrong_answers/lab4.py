"""Wrong answers to lab 4: checkpoint functions and layers."""

import torch
from torch.autograd import Function

from actmem_course.judge.solutions.lab4_recompute import checkpoint, checkpoint_stopping_early, full_layer
from actmem_course.pieces import Dropouts, attention, core_attention, layer, layer_norm, mlp
from tests.wrong_answers.planted import planted

LAB = "lab4_recompute"


def faulty(**faults):
    """A checkpoint Function with faults: see where each is read."""

    class Checkpoint(Function):
        @staticmethod
        def forward(ctx, function, *inputs):
            ctx.function = function
            if faults.get("save") == "ctx":
                ctx.inputs = inputs
            else:
                ctx.save_for_backward(*inputs)
            if faults.get("state") == "after":
                with torch.no_grad():
                    result = function(*inputs)
                ctx.state = torch.get_rng_state()
                return result
            ctx.state = torch.get_rng_state()
            if faults.get("seed"):
                torch.manual_seed(0)
            with torch.no_grad():
                result = function(*inputs)
                return function(*inputs) if faults.get("twice") else result

        @staticmethod
        def backward(ctx, grad):
            inputs = ctx.inputs if faults.get("save") == "ctx" else ctx.saved_tensors
            needs = ctx.needs_input_grad[1:]
            inputs = [x.detach().requires_grad_(need) for x, need in zip(inputs, needs)]
            before = torch.get_rng_state()
            if faults.get("state") != "not set":
                torch.set_rng_state(ctx.state)
            with torch.set_grad_enabled(faults.get("grad") != "off"):
                y = ctx.function(*inputs)
            if faults.get("state") == "not put back":
                pass
            elif faults.get("state") == "saved one":
                torch.set_rng_state(ctx.state)
            else:
                torch.set_rng_state(before)
            if faults.get("backward") == "grad":
                wanted = [x for x, need in zip(inputs, needs) if need]
                found = iter(torch.autograd.grad(y, wanted, grad))
                return None, *(next(found) if need else None for need in needs)
            if faults.get("backward") == "sum":
                with torch.enable_grad():
                    y.sum().backward()
            else:
                torch.autograd.backward(y, grad)
            return None, *(None if faults.get("backward") == "dropped" else x.grad for x in inputs)

    return Checkpoint.apply


@planted(LAB, "4.1", r"keeps .* B for backward where .* the inputs, are enough|function runs once only", size=1)
def nothing_recomputed(function, *inputs):
    return function(*inputs)


@planted(LAB, "4.1", r"has no graph: what runs under no_grad records none", size=1)
def under_no_grad(function, *inputs):
    with torch.no_grad():
        return function(*inputs)


@planted(LAB, "4.1", r"no hook can see them", size=1)
def inputs_on_ctx(function, *inputs):
    return faulty(save="ctx")(function, *inputs)


@planted(LAB, "4.1", r"computed under no_grad", size=1)
def no_grad_in_backward(function, *inputs):
    return faulty(grad="off")(function, *inputs)


@planted(LAB, "4.1", r"parameters that function uses get no gradient", size=1)
def gradients_of_the_inputs_only(function, *inputs):
    return faulty(backward="grad")(function, *inputs)


@planted(LAB, "4.1", r"ignores the incoming gradient", size=1)
def backward_of_the_sum(function, *inputs):
    return faulty(backward="sum")(function, *inputs)


@planted(LAB, "4.1", r"the first input gets no gradient", size=1)
def gradients_dropped(function, *inputs):
    return faulty(backward="dropped")(function, *inputs)


@planted(LAB, "4.1", r"forward runs function 2 times", size=1)
def runs_twice_in_forward(function, *inputs):
    return faulty(twice=True)(function, *inputs)


@planted(LAB, "4.1", r"is changed in place", size=1)
def writes_to_its_input(function, *inputs):
    inputs[0].data.add_(1)
    return checkpoint(function, *inputs)


@planted(LAB, "4.1", r"result is None", size=1)
def no_return(function, *inputs):
    checkpoint(function, *inputs)


def not_detached(retain_graph):
    """A checkpoint Function whose second run begins at inputs that have a graph."""

    class Checkpoint(Function):
        @staticmethod
        def forward(ctx, function, *inputs):
            ctx.function = function
            ctx.save_for_backward(*inputs)
            return function(*inputs)

        @staticmethod
        def backward(ctx, grad):
            inputs = ctx.saved_tensors
            for x in inputs:
                if x.requires_grad:
                    x.retain_grad()
            with torch.enable_grad():
                y = ctx.function(*inputs)
            y.backward(grad, retain_graph=retain_graph)
            return None, *(x.grad for x in inputs)

    return Checkpoint.apply


@planted(LAB, "4.1", r"inputs that still have their graph, so its backward continues", size=1)
def inputs_with_their_graph(function, *inputs):
    return not_detached(retain_graph=False)(function, *inputs)


@planted(LAB, "4.1", r"inputs that still have their graph, so its backward continues", size=1)
def inputs_with_their_graph_retained(function, *inputs):
    return not_detached(retain_graph=True)(function, *inputs)


@planted(LAB, "4.2", r"inputs that still have their graph, so its backward continues", size=1)
def inputs_with_their_graph_and_dropout(function, *inputs):
    return not_detached(retain_graph=False)(function, *inputs)


@planted(LAB, "4.2", r"draws other random numbers than the first", size=1)
def state_not_restored(function, *inputs):
    return faulty(state="not set")(function, *inputs)


@planted(LAB, "4.2", r"from the generator's state after the first run", size=1)
def state_saved_too_late(function, *inputs):
    return faulty(state="after")(function, *inputs)


@planted(LAB, "4.2", r"is where the second run left it", size=1)
def state_left_behind(function, *inputs):
    return faulty(state="not put back")(function, *inputs)


@planted(LAB, "4.2", r"in the state that was saved in forward", size=1)
def saved_state_left_behind(function, *inputs):
    return faulty(state="saved one")(function, *inputs)


@planted(LAB, "4.2", r"forward must not seed or draw", size=1)
def seeds_before_the_first_run(function, *inputs):
    return faulty(seed=True)(function, *inputs)


def from_the_seed(put_back):
    """A checkpoint Function that seeds the generator anew in place of its state."""

    class Checkpoint(Function):
        @staticmethod
        def forward(ctx, function, *inputs):
            ctx.function, ctx.seed = function, torch.initial_seed()
            ctx.save_for_backward(*inputs)
            return function(*inputs)

        @staticmethod
        def backward(ctx, grad):
            inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
            now = torch.get_rng_state()
            torch.manual_seed(ctx.seed)
            with torch.enable_grad():
                y = ctx.function(*inputs)
            if put_back:
                torch.set_rng_state(now)
            y.backward(grad)
            return None, *(x.grad for x in inputs)

    return Checkpoint.apply


@planted(LAB, "4.2", r"starts from the seed, not from the state", size=1)
def seeds_again(function, *inputs):
    return from_the_seed(put_back=True)(function, *inputs)


@planted(LAB, "4.2", r"starts from the seed, not from the state", size=1)
def seeds_again_and_stays_there(function, *inputs):
    return from_the_seed(put_back=False)(function, *inputs)


@planted(LAB, "4.2", r"function runs once only.*4\.1 comes first", size=1)
def nothing_to_replay(function, *inputs):
    return function(*inputs)


@planted(LAB, "4.3", r"the gradient of .* is wrong in|the gradient of .* wrong values", size=1)
def selective_from_the_seed(x, w, dropouts):
    return layer(
        x,
        w,
        dropouts,
        lambda q, k, v, dropout: from_the_seed(True)(lambda *qkv: core_attention(*qkv, dropout), q, k, v),
    )


@planted(LAB, "4.4", r"the gradient of .* is wrong in|the gradient of .* wrong values", size=1)
def full_from_the_seed(x, w, dropouts):
    return from_the_seed(True)(lambda y: layer(y, w, dropouts), x)


@planted(LAB, "4.3", r"as without recomputation", size=1)
def selective_without_checkpoint(x, w, dropouts):
    return layer(x, w, dropouts)


@planted(LAB, "4.3", r"layer's input only .*: that is full recomputation", size=1)
def selective_around_the_layer(x, w, dropouts):
    return checkpoint(lambda y: layer(y, w, dropouts), x)


@planted(LAB, "4.3", r"more than the core attention is dropped", size=1)
def selective_around_attention(x, w, dropouts):
    y = layer_norm(x, w.norm1_weight, w.norm1_bias)
    x = x + dropouts.block(checkpoint(lambda y: attention(y, w, dropouts.core), y))
    return x + dropouts.block(mlp(layer_norm(x, w.norm2_weight, w.norm2_bias), w))


@planted(
    LAB, "4.3", r"checkpoint takes tensors only, and dropout is not one: close over it, lambda q, k, v: core", size=1
)
def selective_with_dropout_as_an_input(x, w, dropouts):
    return layer(x, w, dropouts, lambda q, k, v, dropout: checkpoint(core_attention, q, k, v, dropout))


@planted(
    LAB, "4.3", r"checkpoint takes tensors only, and dropout is not one: close over it, lambda q, k, v: core", size=1
)
def selective_stopping_early_with_dropout_as_an_input(x, w, dropouts):
    return layer(x, w, dropouts, lambda *arguments: checkpoint_stopping_early(core_attention, *arguments))


@planted(LAB, "4.3", r"it runs without dropout: pass dropouts on", size=1)
def selective_without_any_dropout(x, w, dropouts):
    return layer(
        x, w, Dropouts(0.0), lambda q, k, v, dropout: checkpoint(lambda *qkv: core_attention(*qkv, dropout), q, k, v)
    )


@planted(LAB, "4.3", r"the core attention runs without its dropout: .* pass dropout on to core_attention", size=1)
def selective_without_dropout(x, w, dropouts):
    return layer(x, w, dropouts, lambda q, k, v, dropout: checkpoint(core_attention, q, k, v))


@planted(LAB, "4.4", r"run the whole layer under checkpoint", size=1)
def full_around_the_core(x, w, dropouts):
    return layer(
        x, w, dropouts, lambda q, k, v, dropout: checkpoint(lambda *qkv: core_attention(*qkv, dropout), q, k, v)
    )


@planted(
    LAB, "4.4", r"checkpoint takes tensors only, and w and dropouts are not: close over them, lambda y: layer", size=1
)
def full_with_all_as_inputs(x, w, dropouts):
    return checkpoint(layer, x, w, dropouts)


@planted(
    LAB, "4.4", r"checkpoint takes tensors only, and w and dropouts are not: close over them, lambda y: layer", size=1
)
def full_with_dropouts_as_an_input(x, w, dropouts):
    return checkpoint(lambda y, dropouts: layer(y, w, dropouts), x, dropouts)


@planted(LAB, "4.4", r"the core attention runs without its dropout", size=1)
def full_without_dropout_in_the_core(x, w, dropouts):
    return checkpoint(lambda y: layer(y, w, dropouts, lambda q, k, v, dropout: core_attention(q, k, v)), x)


@planted(LAB, "4.4", r"it runs without dropout: pass dropouts on", size=1)
def full_without_any_dropout(x, w, dropouts):
    return checkpoint(lambda y: layer(y, w, Dropouts(0.0)), x)


@planted(LAB, "4.5", r"second run goes on to the end of function", size=1)
def runs_to_the_end(function, *inputs):
    return checkpoint(function, *inputs)


@planted(LAB, "4.5", r"starts from the seed, not from the state", size=1)
def stops_nowhere_and_seeds_again(function, *inputs):
    return from_the_seed(put_back=True)(function, *inputs)


@planted(LAB, "4.5", r"starts from the seed, not from the state", size=1)
def stops_nowhere_and_stays_at_the_seed(function, *inputs):
    return from_the_seed(put_back=False)(function, *inputs)


_inputs_of: dict = {}


@planted(LAB, "4.2", r"right for one region, wrong for two of the same function")
def keeps_the_state_with_the_function(function, *inputs):
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            _inputs_of[function] = torch.get_rng_state()
            ctx.save_for_backward(*tensors)
            return function(*tensors)

        @staticmethod
        def backward(ctx, grad):
            state = torch.get_rng_state()
            torch.set_rng_state(_inputs_of[function])
            leaves = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
            with torch.enable_grad():
                result = function(*leaves)
            torch.set_rng_state(state)
            torch.autograd.backward(result, grad)
            return tuple(leaf.grad for leaf in leaves)

    return Keeps.apply(*inputs)


@planted(LAB, "4.4", r"with a rate of its own, 0.1")
def full_layer_with_a_rate_of_its_own(x, w, dropouts):
    return full_layer(x, w, Dropouts(0.1))
