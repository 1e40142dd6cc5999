"""Lab 6: its exercises, and the mistakes that the judge can name in each, written as edits of our solution."""

from actmem_course.judge.exercise import Exercise, Lab, Mistake, replacing, ways

LAB = Lab("lab6_train", "Lab 6: train under every mode", "07_time", (
    Exercise(
        "6.1", "make_model", "Table 2: six ways to train a layer", takes_group=True, chapter="05_recomputation",
    ),
    Exercise("6.2", "gradient_norm", "Gradients of a whole step", takes_group=True),
    Exercise("6.3", "training_step", "Gradients of a whole step", takes_group=True),
    Exercise("6.4", "train", "Gradients of a whole step", takes_group=True),
))  # fmt: skip

# fmt: off
LAB.mistakes["6.1"] = (
    Mistake("GPT's p is the probability to drop, as dropout is", "pass dropout itself, not 1 − dropout",
        {"p=dropout": "p=1.0 - dropout"}),
)
LAB.mistakes["6.2"] = (
    Mistake("only this rank's parameters are counted", "sum the squares of those that are sharded over the ranks",
        {"dist.all_reduce(cut, group=model.tp.group)": "pass"}),
    Mistake("parameters that are replicated are counted t times",
        "sum the squares of the sharded ones over the ranks, add the others once",
        {'hasattr(parameter, "partition_dim")': "True"}),
    Mistake("norms are added up", "add squares, and take the root of the sum",
        {"parameter.grad.double().square().sum()": "parameter.grad.double().norm()"},
        {"square().sum": "norm", "math.sqrt(": "float("},
        {"dist.all_reduce(cut, group=model.tp.group)":
            "cut = cut.sqrt(); dist.all_reduce(cut, group=model.tp.group); cut = cut.square()"}),
    Mistake("replicated and sharded parameters are told apart wrongly", "what has a partition_dim, even 0, is sharded",
        {'hasattr(parameter, "partition_dim")': 'getattr(parameter, "partition_dim", None)'},
        {'hasattr(parameter, "partition_dim")': "parameter.dim() > 1"},
        {'hasattr(parameter, "partition_dim")': 'getattr(parameter, "partition_dim", None) != 0'},
        {'hasattr(parameter, "partition_dim")': 'getattr(parameter, "partition_dim", None) == 0'}),
    Mistake("the squares of the replicated parameters are summed over the ranks, those of the sharded are not",
        "it is the other way round", {"dist.all_reduce(cut,": "dist.all_reduce(whole,"}),
    Mistake("absolute values are added up", "the 2-norm adds squares",
        {"parameter.grad.double().square().sum()": "parameter.grad.double().abs().sum()"}),
    *replacing("return math.sqrt(cut + whole)",
        ("the root is missing", "this is the sum of the squares", "return float(cut + whole)"),
        ("parameters that are replicated are left out", "", "return math.sqrt(cut)"),
        ("the squares are averaged over the ranks, not summed", "", "return math.sqrt(cut / model.tp.size + whole)")),
    Mistake("a model that is not shared (model.tp.size is 1) is summed over all ranks", "run no collective there",
        {"if model.tp.size > 1:\n        dist.all_reduce(cut, group=model.tp.group": "dist.all_reduce(cut"}),
    Mistake("the norm is right on rank 0 only", "every rank needs it, so all-reduce",
        {"dist.all_reduce(cut,": "dist.reduce(cut, dist.get_global_rank(model.tp.group, 0),"}),
    Mistake("this is the norm of the parameters", "expected that of their .grad",
        {"parameter.grad.double()": "parameter.detach().double()"}),
    Mistake("the largest element of each gradient is taken", "the 2-norm adds up the squares of all",
        {"parameter.grad.double().square().sum()": "parameter.grad.double().abs().max() ** 2"}),
)
LAB.mistakes["6.3"] = (
    Mistake("the gradients of the step before are still there", "call optimizer.zero_grad() before the first backward",
        {"optimizer.zero_grad()": "pass"}),
    Mistake("reduce_partial_gradients is missing",
        "under sequence parallelism some parameters saw only this rank's tokens. Call it once: after the last "
        "backward, before gradient_norm", {"    reduce_partial_gradients(model, model.tp)": "    pass"}),
    Mistake("reduce_partial_gradients runs after gradient_norm, so the norm is that of incomplete gradients. Call "
        "it once", "after the last backward, before gradient_norm",
        {"reduce_partial_gradients(model, model.tp)": "pass",
         "gradient_norm(model)": "gradient_norm(model); reduce_partial_gradients(model, model.tp)"},
        {"reduce_partial_gradients(model, model.tp)": "pass",
         "optimizer.step()\n": "reduce_partial_gradients(model, model.tp)\n    optimizer.step()\n"}),
    Mistake("the gradients are not scaled down where their norm is larger than max_norm", "",
        {"if norm > max_norm": "if False"}),
    *replacing("parameter.grad *= max_norm / norm",
        ("the gradients are scaled up, by norm / max_norm", "scale them by max_norm / norm",
            "parameter.grad *= norm / max_norm"),
        ("the gradients are scaled by max_norm / norm twice", "scale them once",
            "parameter.grad *= (max_norm / norm) ** 2"),
        ("each element of a gradient is clipped to max_norm by itself",
            "scale the gradients down by max_norm / norm, with the norm of the whole, complete gradient "
            "(gradient_norm)", "parameter.grad.clamp_(-max_norm, max_norm)")),
    Mistake("the gradient is too large by the number of microbatches",
        "divide each loss by their number before backward", {" / len(microbatches)\n": "\n"},
        {" / len(microbatches)\n": "\n", "return total": "return total / len(microbatches)"}),
    Mistake("steps are too short", "the losses are divided by the number of microbatches twice",
        {"loss.backward()": "(loss / len(microbatches)).backward()"}),
    Mistake("only the last microbatch counts", "call zero_grad once, before the first, so that gradients add up",
        *ways("  loss.", "  optimizer.zero_grad(); loss.", "  optimizer.zero_grad(); (loss * len(microbatches)).")),
    Mistake("only the last microbatch counts", "", {"in microbatches:": "in microbatches[-1:]:"}),
    Mistake("only the first microbatch counts", "", {"in microbatches:": "in microbatches[:1]:"}),
    Mistake("reduce_partial_gradients runs after each backward, so that sums are summed again. Call it once",
        "after the last backward, before gradient_norm",
        {"        loss.backward()": "        loss.backward(); reduce_partial_gradients(model, model.tp)"},
        {"    reduce_partial_gradients(model, model.tp)\n": "",
         "        loss.backward()": "        loss.backward(); reduce_partial_gradients(model, model.tp)"}),
    Mistake("the partial gradients are averaged over the ranks", "each has other tokens, so add them up",
        {"model.tp)":
            "model.tp); [p.grad.div_(model.tp.size) for p in model.parameters() if getattr(p, "
            '"partial_gradient", False)]'}),
    Mistake("gradients of replicated parameters are summed over the ranks in each mode, but without sequence "
        "parallelism each rank has the whole of them", "call reduce_partial_gradients, which sums the partial ones",
        {"reduce_partial_gradients(model, model.tp)":
            "[dist.all_reduce(p.grad, group=model.tp.group) for p in model.parameters() if model.tp.size > 1 and "
            'not hasattr(p, "partition_dim")]'}),
    Mistake("gradients of sharded parameters are summed over the ranks, but each rank has its own part, with its "
        "whole gradient", "call reduce_partial_gradients instead (this is not a data-parallel group)",
        {"reduce_partial_gradients(model, model.tp)":
            "[dist.all_reduce(p.grad, group=model.tp.group) for p in model.parameters() if model.tp.size > 1]"},
        {", model.tp)":
            ", model.tp); [dist.all_reduce(p.grad, group=model.tp.group) for p in model.parameters() if "
            "model.tp.size > 1]"}),
    Mistake("gradients are scaled up to max_norm", "scale them only if the norm is larger than max_norm",
        {"if norm > max_norm:": "if True:"}),
    Mistake("gradients are scaled by the norm of this rank's parameters, so ranks scale differently",
        "scale each by max_norm / norm, with the norm of the whole, complete gradient (gradient_norm)",
        {"gradient_norm(model)": "math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters()))"}),
    Mistake("each parameter's gradient is scaled by its own norm",
        "scale all of them by max_norm / norm, with the norm of the whole, complete gradient (gradient_norm)",
        {"max_norm / norm": "min(1.0, max_norm / (parameter.grad.norm().item() + 1e-30))"},
        {"parameter.grad *= max_norm / norm": "torch.nn.utils.clip_grad_norm_([parameter], max_norm)"}),
    Mistake("the gradient is clipped after each microbatch", "clip the sum, once, after the last",
        {"backward()":
            "backward(); norm = gradient_norm(model); [p.grad.mul_(min(1.0, max_norm / norm)) for p in "
            "model.parameters()]"}),
    Mistake("the result is the sum of the microbatches' losses", "return their mean",
        {"return total": "return total * len(microbatches)"}),
    Mistake("the result is the mean of the losses, divided by the number of microbatches once more", "",
        {"return total": "return total / len(microbatches)"}),
    Mistake("the result is the last microbatch's loss", "return the mean of all",
        {"return total": "return loss.item() * len(microbatches)"}),
    Mistake("the result is the last microbatch's loss, divided by the number of microbatches", "return the mean of all",
        {"return total": "return loss.item()"}),
    Mistake("the result is the first microbatch's loss", "return the mean of all",
        {"total += loss.item()": "total = total or loss.item() * len(microbatches)"}),
    Mistake("optimizer.zero_grad() comes after the backwards", "it belongs before the first backward",
        {"    reduce_partial_gradients(model, ": "    optimizer.zero_grad()\n    reduce_partial_gradients(model, "}),
)
# fmt: on
