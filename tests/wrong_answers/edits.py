"""Wrong answers that are ours with one piece replaced: exercise, words of the diagnosis, ours, the mistake, and so on in turn."""

import importlib
import inspect
import linecache

from actmem_course.judge.catalogue import LAB_NAMES

OUTSIDE = r"outside group: pass group=group to every call"
ANOTHER_GROUP = r"right with group=WORLD, but not on a group of"
STATES = "        ctx.save_for_backward(*inputs, *_states(inputs[0]))\n"
SAVED = "ctx.saved_tensors[:count], ctx.saved_tensors[count:]"

EDITS = [
    ("2.1", OUTSIDE, "_summed(grad, ctx.group), None", "_summed(grad, None), None"),
    ("2.2", OUTSIDE, "return _FBar.apply(x, group)", "return _FBar.apply(x, None)"),
    ("2.2", r"all_reduce .* on a tensor that autograd follows, and autograd does not record it",
     "return _FBar.apply(x, group)", "y = x.clone()\n    dist.all_reduce(y, group=group)\n    return y"),
    ("2.3", OUTSIDE, "f(x, group), weight", "f(x, None), weight"),
    ("2.4", OUTSIDE, "f_bar(F.linear(x, weight), group)", "f_bar(F.linear(x, weight), None)"),
    ("2.5", ANOTHER_GROUP, "= dist.get_world_size(group), dist.get_rank(group)", "= dist.get_world_size(), dist.get_rank()"),
    ("2.7", ANOTHER_GROUP, "num_attention_heads // dist.get_world_size(group)", "num_attention_heads // dist.get_world_size()"),
    ("2.8", r"first id after its own .* compare with <, not <=", "(index < logits.shape[-1])", "(index <= logits.shape[-1])"),
    ("2.8", r"last id before its own", "(index >= 0)", "(index >= -1)"),
    ("2.8", r"first id of its own: compare with >=", "(index >= 0)", "(index > 0)"),
    ("2.8", r"last id of its own: compare with < v/t", "(index < logits.shape[-1])", "(index < logits.shape[-1] - 1)"),
    ("2.8", r"the ranks in another order", "targets - dist.get_rank(group)", "targets - dist.get_rank()"),
    ("2.8", OUTSIDE, "dist.ReduceOp.MAX, group=group", "dist.ReduceOp.MAX"),
    ("3.1", OUTSIDE, "return _G.apply(x, group)", "return _G.apply(x, None)"),
    ("3.2", OUTSIDE, "return _GBar.apply(x, group)", "return _GBar.apply(x, None)"),
    ("3.4", ANOTHER_GROUP, "w.num_attention_heads // dist.get_world_size(group)", "w.num_attention_heads // dist.get_world_size()"),
    ("3.6", OUTSIDE, "w, name).grad, group=group)", "w, name).grad)"),
    ("4.2", r"right for one region, wrong for two in a row", STATES,
     "        ctx.save_for_backward(*inputs)\n        global kept\n        kept = _states(inputs[0])\n", SAVED, "ctx.saved_tensors, kept"),
    ("4.2", r"wrong for two side by side", STATES,
     "        ctx.save_for_backward(*inputs)\n        globals().setdefault('kept', []).append(_states(inputs[0]))\n",
     SAVED, "ctx.saved_tensors, kept.pop()"),
    ("5.4", r"recomputing saves nothing there", "left // more) if more else in_flight", "left // more)"),
    ("6.3", OUTSIDE, "group=model.tp.group", "group=None"),
    ("6.5", r"gradients with a norm of [\d.]+ reach the optimizer: pass MAX_NORM", "microbatches, MAX_NORM))", "microbatches, 1e9))"),
    ("6.5", r"microbatches of a step share sequences", "list(zip(tokens.chunk(NUM_MICROBATCHES), targets.chunk(NUM_MICROBATCHES)))",
     "[(tokens[i : i + 2], targets[i : i + 2]) for i in range(2)]"),
]  # fmt: skip


def lab_of(number):
    return next(name for name in LAB_NAMES if name.startswith(f"lab{number[0]}_"))


def edited(which):
    """The names of our solution with one of the edits, as a learner's file has them."""
    number, _, *pieces = EDITS[which]
    name = lab_of(number)
    source = inspect.getsource(importlib.import_module(f"actmem_course.judge.solutions.{name}"))
    for before, after in zip(pieces[::2], pieces[1::2]):
        assert before in source, f"{number}: our solution no longer has {before!r}"
        source = source.replace(before, after)
    file = f"/{name}_{which}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    names = {"__file__": file, "__name__": "learner"}
    exec(compile(source, file, "exec"), names)
    return names
