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
    ("2.1", r"started with async_op=True, and its handle is never waited for", "dist.all_reduce(result, group=group)", "dist.all_reduce(result, group=group, async_op=True)"),
    ("2.1", r"is rank 0's part; it should be the sum of the ranks' parts", "_summed(grad, ctx.group), None", "_sent(grad, ctx.group), None",
     "# 2.2", "def _sent(x, group):\n    x = x.clone()\n    dist.broadcast(x, dist.get_global_rank(group, 0), group=group)\n    return x\n# 2.2"),
    ("2.1", r"own part; it should be .*: the all-reduce ran, but what is returned is not its result", "return _summed(grad, ctx.group), None", "_summed(grad, ctx.group)\n        return grad, None"),
    ("2.2", r"the largest of the ranks' parts \(MAX\); it should be the sum.*: f_bar's forward all-reduces, with SUM",
     "return _summed(x, group)\n", "y = x.clone()\n        dist.all_reduce(y, dist.ReduceOp.MAX, group=group)\n        return y\n"),
    ("2.2", r"the smallest of the ranks' parts \(MIN\)",
     "return _summed(x, group)\n", "y = x.clone()\n        dist.all_reduce(y, dist.ReduceOp.MIN, group=group)\n        return y\n"),
    ("2.2", r"digits, which are those of float32: exchange it in the dtype that it has", "return _summed(x, group)\n", "return _summed(x.float(), group).to(x.dtype)\n"),
    ("2.2", r"digits, which are those of bfloat16", "return _summed(x, group)\n", "return _summed(x.bfloat16(), group).to(x.dtype)\n"),
    ("2.2", r"half|1/t", "return _summed(x, group)\n", "return _summed(x, group) / 2\n"),
    ("2.3", r"f comes after bias: it belongs at the entry", "F.linear(f(x, group), weight, bias)", "f(F.linear(x, weight, bias), group)"),
    ("2.3", r"bias is divided by t: each rank adds the whole", "weight, bias)\n\n\n# 2.4", "weight, bias / dist.get_world_size(group))\n\n\n# 2.4"),
    ("2.3", r"bias comes twice|bias is added t times", "return F.linear(f(x, group), weight, bias)", "return F.linear(f(x, group), weight, bias) + bias"),
    ("2.4", r"without the bias|lacks the bias|bias is missing", "f_bar(F.linear(x, weight), group) + bias", "f_bar(F.linear(x, weight), group)"),
    ("2.6", r"the gradients are not: f comes twice", "gelu(column_parallel_linear(x, up", "gelu(column_parallel_linear(f(x, group), up"),
    ("2.6", r"gelu comes twice", "y = gelu(column_parallel_linear(x, up_weight, up_bias, group))", "y = gelu(gelu(column_parallel_linear(x, up_weight, up_bias, group)))"),
    ("2.6", r"up_bias comes twice|up_bias is added t times", "column_parallel_linear(x, up_weight, up_bias, group)", "column_parallel_linear(x, up_weight, up_bias, group) + up_bias"),
    ("2.7", r"divided by the root of the head size twice", "core_attention(q, k, v), x", "core_attention(q * q.shape[-1] ** -0.5, k, v), x"),
    ("2.7", r"qkv_bias is missing", "column_parallel_linear(x, qkv_weight, qkv_bias, group)", "column_parallel_linear(x, qkv_weight, 0 * qkv_bias, group)"),
    ("2.7", r"f comes twice", "split_heads(column_parallel_linear(x,", "split_heads(column_parallel_linear(f(x, group),"),
    ("2.8", r"right for small logits.* subtract the largest", "largest = logits.amax(-1)", "largest = 0 * logits.amax(-1)"),
    ("3.2", r"largest of the ranks' parts", "reduce_scatter_tensor(result, x.contiguous(), group", "reduce_scatter_tensor(result, x.contiguous(), dist.ReduceOp.MAX, group"),
    ("3.3", r"linear is applied before the gathering", "F.linear(g(x, group), weight, bias)", "g(F.linear(x, weight, bias), group)"),
    ("3.4", r"projection_bias is missing: it belongs after the sum", " + w.projection_bias", ""),
    ("3.4", r"down_bias is missing: it belongs after the sum", " + w.down_bias", ""),
    ("3.4", r"projection_bias comes before attention's g_bar: it belongs after", "g_bar(F.linear(context, w.projection_weight), group) + w.projection_bias", "g_bar(F.linear(context, w.projection_weight, w.projection_bias), group)"),
    ("3.4", r"down_bias comes before the MLP's g_bar: it belongs after", "g_bar(F.linear(y, w.down_weight), group) + w.down_bias", "g_bar(F.linear(y, w.down_weight, w.down_bias), group)"),
    ("3.4", r"dropouts\.core is applied to attention's result", "x = x + dropouts.block(y)", "x = x + dropouts.core(y)"),
    ("3.4", r"dropouts\.core is applied to the MLP's result", "return x + dropouts.block(y)", "return x + dropouts.core(y)"),
    ("3.4", r"dropouts\.block after attention comes before attention's g_bar: it belongs after the bias",
     "y = g_bar(F.linear(context, w.projection_weight), group) + w.projection_bias", "y = g_bar(dropouts.block(F.linear(context, w.projection_weight)), group) + w.projection_bias",
     "x = x + dropouts.block(y)", "x = x + y"),
    ("3.4", r"dropouts\.block after the MLP comes before the MLP's g_bar: it belongs after the bias",
     "y = g_bar(F.linear(y, w.down_weight), group) + w.down_bias", "y = g_bar(dropouts.block(F.linear(y, w.down_weight)), group) + w.down_bias",
     "return x + dropouts.block(y)", "return x + y"),
    ("3.4", r"gelu comes twice", "y = gelu(linear(", "y = gelu(gelu(linear(", "w.up_bias, group))", "w.up_bias, group)))"),
    ("3.4", r"gelu comes before the MLP's g: it belongs between the two linears", "y = gelu(linear(layer_norm(x, w.norm2_weight, w.norm2_bias), w.up_weight, w.up_bias, group))", "y = linear(gelu(layer_norm(x, w.norm2_weight, w.norm2_bias)), w.up_weight, w.up_bias, group)"),
    ("3.4", r"x is added twice to the MLP's result", "return x + dropouts.block(y)", "return x + x + dropouts.block(y)"),
    ("1.1", r"Q is divided by a, which it has nothing to do with", '"Q": 2 * sbh', '"Q": 2 * sbh // a'),
    ("1.1", r"GeLU input is divided by a and has the extra factor|GeLU input", '"GeLU input": 8 * sbh', '"GeLU input": 8 * sbh // a'),
    ("1.1", r"softmax output lacks the factor a", "scores = s * b * h, a * s * s * b", "scores = s * b * h, s * s * b"),
    ("1.2", r"softmax dropout mask is counted, but recompute='selective' drops it", 'if recompute == "none" else 0', 'if recompute == "none" else a * s * s * b // t'),
    ("1.2", r"one of: .*attention dropout mask is left out.*MLP dropout mask is left out", "10 * sbh // cut", "9 * sbh // cut"),
    ("1.3", r"one of four: the input of silu and its result", "4 * 2 * s * b * f", "3 * 2 * s * b * f"),
    ("1.3", r"two tensors of \[s, b, f\] are left out", "4 * 2 * s * b * f", "2 * 2 * s * b * f"),
    ("1.3", r"f is taken for 4h", "4 * 2 * s * b * f", "4 * 2 * s * b * 4 * h"),
    ("1.4", r"rounded, and there the core attention keeps no more", "(5 * num_attention_heads) + 1", "(5 * num_attention_heads)"),
    ("4.1", r"right, but in another order than the inputs", "(x.grad for x in inputs)", "(x.grad for x in reversed(inputs))"),
    ("6.4", r"clipped after each microbatch; clip once", "        total += loss.item()\n", "        total += loss.item()\n        reduce_partial_gradients(model, model.tp) if len(microbatches) == 0 else None\n        _clip(model, max_norm)\n",
     "# 6.5", "def _clip(model, max_norm):\n    norm = gradient_norm(model)\n    if norm > max_norm:\n        for parameter in model.parameters():\n            parameter.grad *= max_norm / norm\n\n\n# 6.5"),
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
