"""Right answers written in another way than ours pass: no false alarm."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from actmem.lab.judge.exercise import load_lab
from actmem.lab.pieces import core_attention, layer, layer_norm, merge_heads, split_heads
from actmem.lab.solutions.lab2_tensor_parallel import f, f_bar
from actmem.lab.solutions.lab3_sequence_parallel import g_bar, gathering_linear, shard_keeping_linear
from actmem.lab.solutions import lab6_train as lab6
from actmem.model.gpt import GPT
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import reduce_partial_gradients, shard
from actmem.recompute import checkpoint as our_checkpoint
from tests.labs.judged import judged, judged_alone

RIGHT = []


def right(lab, *numbers):
    def register(function):
        RIGHT.extend((lab, number, function) for number in numbers)
        return function

    return register


LAB2 = "lab2_tensor_parallel"



def mesh_of(group):
    return torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")


@right(LAB2, "2.1")
def f_by_dtensor(x, group):
    return DTensor.from_local(x, mesh_of(group), [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


@right(LAB2, "2.1")
def f_by_functional_collectives(x, group):
    class F_(Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return functional.all_reduce(grad, "sum", group)

    return F_.apply(x)


@right(LAB2, "2.1")
def f_by_a_hook(x, group):
    y = x.view_as(x)
    y.register_hook(lambda grad: functional.all_reduce(grad, "sum", group))
    return y


@right(LAB2, "2.1")
def f_by_reduce_scatter_and_all_gather(x, group):
    class F_(Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            part = grad.new_empty(grad.shape[0] // dist.get_world_size(group), *grad.shape[1:])
            dist.reduce_scatter_tensor(part, grad.contiguous(), group=group)
            whole = torch.empty_like(grad)
            dist.all_gather_into_tensor(whole, part, group=group)
            return whole

    return F_.apply(x)


@right(LAB2, "2.2")
def f_bar_by_dtensor(x, group):
    partial = DTensor.from_local(x, mesh_of(group), [Partial()], run_check=False)
    return partial.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])


@right(LAB2, "2.2")
def f_bar_by_functional_collectives(x, group):
    class F_(Function):
        @staticmethod
        def forward(ctx, x):
            return functional.wait_tensor(functional.all_reduce(x, "sum", group))

        @staticmethod
        def backward(ctx, grad):
            return grad

    return F_.apply(x)


@right(LAB2, "2.2")
def f_bar_by_detaching(x, group):
    # The sum of the others is a constant for this rank's gradient.
    total = x.detach().clone()
    dist.all_reduce(total, group=group)
    return x + (total - x.detach())


@right(LAB2, "2.3")
def column_by_one_function(x, weight, bias, group):
    class Column(Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x, weight)
            return x @ weight.t() + bias

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            grad_x = grad @ weight
            work = dist.all_reduce(grad_x, group=group, async_op=True)
            grad_weight = torch.einsum("sbo,sbi->oi", grad, x)
            work.wait()
            return grad_x, grad_weight, grad.sum((0, 1))

    return Column.apply(x, weight, bias)


@right(LAB2, "2.3")
def column_by_einsum(x, weight, bias, group):
    return torch.einsum("sbi,oi->sbo", f(x, group), weight) + bias


@right(LAB2, "2.4")
def row_by_one_function(x, weight, bias, group):
    class Row(Function):
        @staticmethod
        def forward(ctx, x, weight, bias):
            ctx.save_for_backward(x, weight)
            return functional.wait_tensor(functional.all_reduce(x @ weight.t(), "sum", group)) + bias

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad @ weight, torch.einsum("sbo,sbi->oi", grad, x), grad.sum((0, 1))

    return Row.apply(x, weight, bias)


@right(LAB2, "2.5")
def heads_dealt_in_turn(qkv_weight, projection_weight, num_attention_heads, group):
    rank, t = dist.get_rank(group), dist.get_world_size(group)
    h = qkv_weight.shape[1]
    mine = qkv_weight.view(3, num_attention_heads, -1, h)[:, rank::t].reshape(-1, h)
    return mine, projection_weight.view(h, num_attention_heads, -1)[:, rank::t].reshape(h, -1)


@right(LAB2, "2.8")
def loss_from_log_sum_exps(logits, targets, group):
    own = logits.logsumexp(-1)
    others = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(others, own.detach(), group=group)
    others[dist.get_rank(group)] = own
    index = targets - dist.get_rank(group) * logits.shape[-1]
    mine = (index >= 0) & (index < logits.shape[-1])
    target = logits.gather(-1, index.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1) * mine
    return torch.stack(others).logsumexp(0) - f_bar(target, group)


LAB3 = "lab3_sequence_parallel"


@right(LAB3, "3.1")
def g_by_dtensor(x, group):
    sharded = DTensor.from_local(x, mesh_of(group), [Shard(0)], run_check=False)
    return sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


@right(LAB3, "3.1")
def g_by_functional_collectives(x, group):
    return functional.all_gather_tensor_autograd(x, 0, group)


@right(LAB3, "3.1")
def g_by_torchs_differentiable_all_gather(x, group):
    class G(Function):
        @staticmethod
        def forward(ctx, x):
            parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, x.contiguous(), group=group)
            return torch.cat(parts)

        @staticmethod
        def backward(ctx, grad):
            result = torch.empty_like(grad.chunk(dist.get_world_size(group))[0])
            dist.reduce_scatter(result, [part.contiguous() for part in grad.chunk(dist.get_world_size(group))], group=group)
            return result

    return G.apply(x)


@right(LAB3, "3.2")
def g_bar_by_dtensor(x, group):
    partial = DTensor.from_local(x, mesh_of(group), [Partial()], run_check=False)
    return partial.redistribute(placements=[Shard(0)]).to_local(grad_placements=[Shard(0)])


@right(LAB3, "3.2")
def g_bar_by_functional_collectives(x, group):
    return functional.reduce_scatter_tensor_autograd(x, "sum", 0, group)


@right(LAB3, "3.3")
def gathering_linear_that_keeps_the_shard(x, weight, bias, group):
    return shard_keeping_linear(x, weight, bias, group)


@right(LAB3, "3.5")
def shard_keeping_by_torchs_checkpoint(x, weight, bias, group):
    return checkpoint(gathering_linear, x, weight, bias, group, use_reentrant=False)


@right(LAB3, "3.5")
def shard_keeping_by_torchs_reentrant_checkpoint(x, weight, bias, group):
    return checkpoint(gathering_linear, x, weight, bias, group, use_reentrant=True)


@right(LAB3, "3.5")
def shard_keeping_by_our_checkpoint(x, weight, bias, group):
    return our_checkpoint(lambda y: gathering_linear(y, weight, bias, group), x)


@right(LAB3, "3.4")
def layer_with_f_bar_and_a_split(x, w, dropouts, linear, group):
    # The residual is added before the dropout's product is scaled: other order, same numbers.
    heads = w.num_attention_heads // dist.get_world_size(group)
    normed = torch.nn.functional.layer_norm(x, x.shape[-1:]) * w.norm1_weight + w.norm1_bias
    context = merge_heads(core_attention(*split_heads(linear(normed, w.qkv_weight, w.qkv_bias, group), heads), dropouts.core), x.shape[1])
    x = dropouts.block(w.projection_bias + g_bar(context @ w.projection_weight.t(), group)) + x
    y = F.gelu(linear(layer_norm(x, w.norm2_weight, w.norm2_bias), w.up_weight, w.up_bias, group), approximate="tanh")
    return dropouts.block(w.down_bias + g_bar(y @ w.down_weight.t(), group)) + x


@right(LAB3, "3.6")
def gradients_summed_in_one_collective(w, group):
    partial = [tensor for name, tensor in w.named().items() if "norm" in name or name in ("projection_bias", "down_bias")]
    flat = torch.cat([tensor.grad.flatten() for tensor in partial])
    dist.all_reduce(flat, group=group)
    for tensor, part in zip(partial, flat.split([tensor.numel() for tensor in partial])):
        tensor.grad = part.view_as(tensor).clone()


@right(LAB3, "3.7")
def one_generator_for_both_under_sequence_parallelism(seed, sequence_parallel, device, group):
    core = torch.Generator(device).manual_seed(seed * 7919 + 1 + dist.get_rank(group))
    return core, core if sequence_parallel else torch.Generator(device).manual_seed(seed)


LAB4 = "lab4_recompute"


@right(LAB4, "4.1", "4.2", "4.5")
def checkpoint_of_torch(function, *inputs):
    return checkpoint(function, *inputs, use_reentrant=False)


@right(LAB4, "4.1", "4.2")
def reentrant_checkpoint_of_torch(function, *inputs):
    return checkpoint(function, *inputs, use_reentrant=True)


@right(LAB4, "4.1", "4.2")
def checkpoint_by_fork_rng(function, *inputs):
    class Checkpoint(Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.save_for_backward(*inputs)
            ctx.state = torch.get_rng_state()
            return function(*inputs)

        @staticmethod
        def backward(ctx, grad):
            inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
            with torch.random.fork_rng(), torch.enable_grad():
                torch.set_rng_state(ctx.state)
                y = function(*inputs)
            y.backward(grad)
            return tuple(x.grad for x in inputs)

    return Checkpoint.apply(*inputs)


@right(LAB4, "4.1", "4.5")
def our_checkpoint_with_the_default_generator(function, *inputs):
    return our_checkpoint(function, *inputs, generators=[torch.default_generator])


@right(LAB4, "4.3")
def selective_by_torch(x, w, dropouts):
    return layer(x, w, dropouts, lambda *arguments: checkpoint(core_attention, *arguments, use_reentrant=False))


@right(LAB4, "4.3")
def selective_by_the_stopping_checkpoint(x, w, dropouts):
    def core(q, k, v, dropout):
        return our_checkpoint(lambda *qkv: core_attention(*qkv, dropout), q, k, v, generators=[torch.default_generator])

    return layer(x, w, dropouts, core)


@right(LAB4, "4.4")
def full_by_torch(x, w, dropouts):
    return checkpoint(layer, x, w, dropouts, use_reentrant=False)


@right(LAB4, "4.4")
def full_by_torchs_reentrant_checkpoint(x, w, dropouts):
    return checkpoint(layer, x, w, dropouts, use_reentrant=True)


LAB5 = "lab5_pipeline"


@right(LAB5, "5.1")
def one_forward_one_backward_by_counting(pipeline_parallel_size, rank, num_microbatches):
    order, forwards, backwards = [], 0, 0
    while backwards < num_microbatches:
        if forwards < num_microbatches and forwards - backwards < pipeline_parallel_size - rank:
            order.append(("F", forwards))
            forwards += 1
        else:
            order.append(("B", backwards))
            backwards += 1
    return order


@right(LAB5, "5.2")
def interleaved_with_fewer_ahead(pipeline_parallel_size, rank, num_model_chunks, num_microbatches):
    # Where sending takes no time, p − r − 1 beyond the chunks' own rounds are enough, and hold less.
    p, m, n = pipeline_parallel_size, num_model_chunks, num_microbatches
    order = [(chunk, first + i) for first in range(0, n, p) for chunk in range(m) for i in range(p)]
    forwards, backwards = [("F", c, i) for c, i in order], [("B", m - 1 - c, i) for c, i in order]
    ahead = p - rank - 1 + (m - 1) * p
    steady = [action for pair in zip(forwards[ahead:], backwards) for action in pair]
    return forwards[:ahead] + steady + backwards[n * m - ahead :]


@right(LAB5, "5.3")
def free_output_by_one_element(output):
    output.data = output.data.new_empty(1).expand(output.shape)


@right(LAB5, "5.4")
def how_many_fit_by_trying(budget_bytes, in_flight, full_bytes, recomputed_bytes):
    fits = [k for k in range(in_flight + 1) if k * full_bytes + (in_flight - k) * recomputed_bytes <= budget_bytes]
    return max(fits, default=-1)


@right(LAB5, "5.5")
def microbatches_to_keep_by_period(pipeline_parallel_size, rank, num_microbatches, places):
    period = min(pipeline_parallel_size - rank, num_microbatches)
    return [i for i in range(num_microbatches) if i % period < places]


LAB6 = "lab6_train"


@right(LAB6, "6.1")
def batch_one_after_another(text, step, seq_length, batch_size):
    rows = [(step * batch_size + i) * seq_length % (len(text) - seq_length) for i in range(batch_size)]
    pieces = torch.stack([text[start : start + seq_length + 1] for start in rows])
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


@right(LAB6, "6.1")
def batch_without_repeats(text, step, seq_length, batch_size):
    generator = torch.Generator().manual_seed(10_007 * step)
    starts = torch.randperm(len(text) - seq_length, generator=generator)[:batch_size]
    windows = text.unfold(0, seq_length + 1, 1)[starts]
    return windows[..., :-1], windows[..., 1:]


@right(LAB6, "6.1")
def batch_from_one_rank(text, step, seq_length, batch_size):
    torch.manual_seed(step)
    starts = torch.randint(0, len(text) - seq_length, (batch_size,))
    dist.broadcast(starts, 0)
    return text[starts[:, None] + torch.arange(seq_length)], text[starts[:, None] + torch.arange(1, seq_length + 1)]


@right(LAB6, "6.2")
def make_model_by_rows_of_the_whole(shape, mode, group, *, dropout=0.0, **factory):
    with torch.random.fork_rng():
        torch.manual_seed(99)
        state = GPT(shape, **factory).state_dict()
    tp = TensorParallel() if not mode.tensor_parallel else tensor_parallel(group, sequence_parallel=mode.sequence_parallel)
    model = GPT(shape, tp, recompute=mode.recompute, p=dropout, **factory)
    for name, parameter in model.named_parameters():
        part = shard(state[name], getattr(parameter, "partition_dim", None), tp)
        parameter.data.copy_(part)
    return model


@right(LAB6, "6.3")
def gradient_norm_of_gathered_gradients(model):
    gradients = []
    for parameter in model.parameters():
        gradient, dim = parameter.grad, getattr(parameter, "partition_dim", None)
        if dim is not None and model.tp.size > 1:
            parts = [torch.empty_like(gradient) for _ in range(model.tp.size)]
            dist.all_gather(parts, gradient.contiguous(), group=model.tp.group)
            gradient = torch.cat(parts, dim)
        gradients.append(gradient)
    return torch.nn.utils.get_total_norm(gradients).item()


@right(LAB6, "6.3")
def gradient_norm_by_dtensor(model):
    if model.tp.size == 1:
        return torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    mesh, square = mesh_of(model.tp.group), 0.0
    for parameter in model.parameters():
        dim = getattr(parameter, "partition_dim", None)
        placement = Replicate() if dim is None else Shard(dim)
        square += DTensor.from_local(parameter.grad, mesh, [placement], run_check=False).norm().full_tensor() ** 2
    return square.sqrt()


@right(LAB6, "6.3")
def gradient_norm_with_shares_of_the_whole_ones(model):
    t = model.tp.size
    square = sum(p.grad.square().sum() / (1 if hasattr(p, "partition_dim") else t) for p in model.parameters())
    return functional.all_reduce(square, "sum", model.tp.group).sqrt().item() if t > 1 else square.sqrt().item()


@right(LAB6, "6.4")
def step_with_torchs_clipping(model, optimizer, microbatches, max_norm):
    losses = []
    for tokens, targets in microbatches:
        losses.append(model.loss(model(tokens), targets))
        losses[-1].backward()
    for parameter in model.parameters():
        parameter.grad.div_(len(microbatches))
    reduce_partial_gradients(model, model.tp)
    norm = torch.tensor(lab6.gradient_norm(model), dtype=torch.float64)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).mean().item()


@right(LAB6, "6.4")
def step_with_one_backward(model, optimizer, microbatches, max_norm):
    model.zero_grad()
    loss = torch.stack([model.loss(model(tokens), targets) for tokens, targets in microbatches]).mean()
    loss.backward()
    for parameter in model.parameters():
        if getattr(parameter, "partial_gradient", False) and model.tp.size > 1:
            dist.all_reduce(parameter.grad, group=model.tp.group)
    scale = min(1.0, max_norm / lab6.gradient_norm(model))
    torch._foreach_mul_([parameter.grad for parameter in model.parameters()], scale)
    optimizer.step()
    return float(loss)


@right(LAB6, "6.5")
def train_with_a_batch_for_each_microbatch(shape, mode, text, num_steps, group, **factory):
    model = lab6.make_model(shape, mode, group, **factory)
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())}], lr=lab6.LEARNING_RATE, foreach=False)
    n, losses = lab6.NUM_MICROBATCHES, []
    for step in range(num_steps):
        microbatches = [lab6.batch(text, step * n + i, shape.seq_length, shape.micro_batch_size) for i in range(n)]
        losses += [lab6.training_step(model, optimizer, microbatches, lab6.MAX_NORM)]
    return losses


@pytest.mark.parametrize(("lab", "number", "function"), RIGHT, ids=lambda value: getattr(value, "__name__", value))
def test_passes(pools, lab, number, function):
    alone = load_lab(lab).one_process
    for verdict in [judged_alone(lab, number, function)] if alone else pools[2].run(judged, lab, number, function):
        assert verdict.status == "passed", verdict.diagnosis
