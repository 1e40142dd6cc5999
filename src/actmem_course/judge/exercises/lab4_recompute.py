"""Lab 4: its exercises, and the mistakes that the judge can name in each, written as edits of our solution."""

from actmem_course.judge.exercise import Exercise, Lab, Mistake, replacing, ways

LAB = Lab("lab4_recompute", "Lab 4: recomputation", "05_recomputation", (
    Exercise("4.1", "checkpoint", "How a checkpoint function works, in four steps"),
    Exercise("4.2", "checkpoint", "How a checkpoint function works, in four steps", case="checkpoint_of_dropout"),
    Exercise("4.3", "selective_layer", "How a checkpoint function works, in four steps"),
    Exercise("4.4", "full_layer", "How a checkpoint function works, in four steps"),
), one_process=True)  # fmt: skip

# fmt: off
LAB.mistakes["4.1"] = (
    Mistake("the parameters that function uses get no gradient",
        "use torch.autograd.backward, which reaches all",
        {"torch.autograd.backward(y, grad)\n        return None, *(x.grad":
            "wanted = [x for x in inputs if x.requires_grad]\n"
            "        found = iter(torch.autograd.grad(y, wanted, grad))\n"
            "        return None, *(next(found) if x.requires_grad else None"}),
    Mistake("the incoming gradient is left out", "start from it: torch.autograd.backward(y, grad)",
        {".autograd.backward(y, grad)\n        return": ".autograd.backward(y, torch.ones_like(y))\n        return"}),
)
LAB.mistakes["4.2"] = (
    Mistake("after backward the generator is where the second run left it, so later dropouts repeat numbers",
        "restore the state from before the second run", {"_restore(before)\n        torch.autograd": "torch.autograd"}),
)
LAB.mistakes["4.3"] = (
    Mistake("checkpoint takes tensors only, and dropout is not one", "close over dropout in a lambda q, k, v",
        {"(lambda q, k, v: core_attention(q, k, v, dropout), q, k, v)": "(core_attention, q, k, v, dropout)"}),
    *replacing("layer(x, w, dropouts, core)",
        ("only the layer's input is saved, which is full recomputation",
            "selective recomputes the core attention alone, and saves 34sbh",
            "checkpoint(lambda y: layer(y, w, dropouts), x)"),
        ("x is added to the layer's result", "layer adds it already, in its two residual branches",
            "x + layer(x, w, dropouts, core)"),
        ("the layer runs without dropout", "pass dropouts on to layer", "layer(x, w, Dropouts(0.0), core)"),
        ("dropout runs at a rate of its own, 0.1", "pass the dropouts that you are given on to layer",
            "layer(x, w, Dropouts(0.1), core)")),
    Mistake("the core attention runs without its dropout", "layer hands core a dropout: pass it on to core_attention",
        {"core_attention(q, k, v, dropout), q, k, v)": "core_attention(q, k, v), q, k, v)"}),
    Mistake("dropouts.block is used for the attention weights",
        "layer gives core the dropout to use, as fourth argument",
        {"core_attention(q, k, v, dropout), q, k, v)": "core_attention(q, k, v, dropouts.block), q, k, v)"}),
    Mistake("the core attention's result is dropped, not its weights", "pass dropout on to core_attention",
        {"checkpoint(lambda q, k, v: core_attention(q, k, v, dropout), q, k, v":
            "dropout(checkpoint(core_attention, q, k, v)"}),
    Mistake("core returns None", "is a return missing?", {"return checkpoint(lambda": "checkpoint(lambda"}),
    Mistake("dropout comes twice", "core_attention applies it to the weights, so apply it to nothing else",
        {"checkpoint(lambda q, k, v: core_attention(q, k, v, dropout), q, k, v":
            "dropout(checkpoint(lambda q, k, v: core_attention(q, k, v, dropout), q, k, v)"}),
    Mistake("no gradient reaches the QKV projection", "detach nothing before checkpoint or after: it does so itself",
        {", q, k, v)": ", *(z.detach().requires_grad_() for z in (q, k, v)))"}),
    Mistake("q, k or v is detached before checkpoint",
        "hand it over as it is: checkpoint detaches by itself",
        *ways(", k, v)", ".detach(), k, v)", ", k.detach(), v)", ", k, v.detach())")),
)
LAB.mistakes["4.4"] = (
    Mistake("checkpoint takes tensors only, and w and dropouts are not", "close over them in a lambda y",
        {"checkpoint(lambda y: layer(y, w, dropouts), x)": "checkpoint(layer, x, w, dropouts)"}),
    Mistake("x is added to the layer's result", "layer adds it already, in its two residual branches",
        {"checkpoint(lambda y": "x + checkpoint(lambda y"}),
    Mistake("the layer runs twice, the second time on its own result", "run it once",
        {"layer(y, w, dropouts)": "layer(layer(y, w, dropouts), w, dropouts)"}),
    Mistake("the core attention runs without its dropout", "layer hands core a dropout: pass it on to core_attention",
        {"y, w, dropouts": "y, w, dropouts, lambda q, k, v, dropout: core_attention(q, k, v)"}),
    Mistake("the layer runs without dropout", "pass dropouts on to layer",
        {"layer(y, w, dropouts)": "layer(y, w, Dropouts(0.0))"}),
    Mistake("dropout runs at a rate of its own, 0.1", "pass the dropouts that you are given on to layer",
        {"layer(y, w, dropouts)": "layer(y, w, Dropouts(0.1))"}),
)
# fmt: on
