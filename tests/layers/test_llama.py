"""Today's layer: the plain layer's numbers, the formula's bytes, on any number of ranks and with any set dropped."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from actmem.config import ConfigError, Parallel
from actmem.ledger.census import LiveStorages
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.measure_layer import layer_rows_of
from actmem.parallel.collectives import all_gather, all_reduce
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import column_parallel, load_dense, reduce_partial_gradients, shard
from actmem.parallel.weights import part_of
from actmem.rows import compare
from actmem_more.context import ContextParallel
from actmem_more.llama import LlamaLayer, LlamaStage
from actmem_more.llama_measured import measure_llama_layer
from actmem_more.llama_modules import matmul, rms_norm, rotary_tables, swiglu
from actmem_more.llama_shape import (
    LLAMA_MODELS,
    LatentHeads,
    LlamaShape,
    llama_layer_terms,
    llama_shape,
    own_context_shape,
)
from actmem_more.llama_terms import forced_routed_tokens, llama_matmuls, llama_recomputed_flops, llama_rows
from tests.gradients import gradient_pairs
from tests.tiers import covering, examples

SHAPE = LlamaShape(12, 3, 32, 8, 2, 40)
#: As Qwen3: a norm over each head's query and key, and heads that are wider than h/a.
NORMALISED = LlamaShape(12, 3, 32, 8, 2, 40, 6, qk_norm=True)
EXPERTS = LlamaShape(12, 3, 32, 8, 2, 40, num_experts=8, experts_per_token=3)
#: As DeepSeek-V3's first layers, and as its others.  A value may be wider than a query, or narrower.
LATENT = LlamaShape(12, 3, 32, 8, 8, 40, latent=LatentHeads(20, 14, 6, 4, 8))
SIGMOID = LATENT.with_sizes(
    num_experts=8, experts_per_token=3, num_shared_experts=2, sigmoid_router=True, latent=LatentHeads(12, 22, 2, 6, 10)
)
SHAPES = {
    "llama": SHAPE,
    "qwen3": NORMALISED,
    "mixtral": EXPERTS,
    "qwen3 with experts": NORMALISED.with_sizes(num_experts=8, experts_per_token=8),
    "deepseek's first": LATENT,
    "deepseek": SIGMOID,
}
ALL_TERMS = {kind: llama_layer_terms(shape).recipes for kind, shape in SHAPES.items()}
MODES = ("none", "selective", "elementwise", "full")
kinds = pytest.mark.parametrize("kind", SHAPES)


def sets(shape):
    terms = [recipe.term for recipe in llama_layer_terms(shape).recipes]
    return st.sets(st.sampled_from(terms)) | st.sampled_from(MODES)


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def turn(x):
    """Of ``[s, b, heads, d]``."""
    cos, sin = (table.to(x.dtype) for table in rotary_tables(*x.shape[::3]))
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def plain_heads(y, weights, shape):
    """Q, K and V of every query head."""
    a, k, d = shape.num_attention_heads, shape.num_key_value_heads, shape.d
    q, key, value = ((y @ weights[f"attention.{name}"].t()).unflatten(-1, (-1, d)) for name in "qkv")
    if shape.qk_norm:
        q, key = norm(q, weights["attention.q_norm.weight"]), norm(key, weights["attention.k_norm.weight"])
    return turn(q), turn(key).repeat_interleave(a // k, 2), value.repeat_interleave(a // k, 2)


def plain_latent_heads(y, weights, shape):
    a, sizes = shape.num_attention_heads, shape.latent
    of = {name.removeprefix("attention."): weight for name, weight in weights.items()}
    q = norm(y @ of["q_down.weight"].t(), of["q_latent_norm.weight"]) @ of["q_up"].t()
    q = q.unflatten(-1, (a, -1))
    latent, shared = (y @ of["kv_down.weight"].t()).split([sizes.key_value_rank, sizes.rope_head_size], -1)
    latent = norm(latent, of["kv_latent_norm.weight"])
    key, value = ((latent @ of[f"{name}_up"].t()).unflatten(-1, (a, -1)) for name in "kv")
    n = sizes.nope_head_size
    q = torch.cat([q[..., :n], turn(q[..., n:])], -1)
    return q, torch.cat([key, turn(shared[:, :, None]).repeat(1, 1, a, 1)], -1), value


def plain(x, weights, shape):
    """The same layer out of torch's plain operators, unsharded."""
    s = len(x)
    y = norm(x, weights["norm1.weight"])
    q, key, value = (plain_latent_heads if shape.latent else plain_heads)(y, weights, shape)
    scores = torch.einsum("sbad,ubad->basu", q, key) / q.shape[-1] ** 0.5
    scores = scores + torch.full((s, s), float("-inf"), dtype=x.dtype).triu(1)
    context = torch.einsum("basu,ubad->sbad", scores.softmax(-1), value).flatten(2)
    x = x + context @ weights["attention.projection"].t()
    y = norm(x, weights["norm2.weight"])

    def mlp(gate, up, down):
        return (F.silu(y @ gate.t()) * (y @ up.t())) @ down.t()

    three = [weights[f"mlp.{name}"] for name in ("gate", "up", "down")]
    if not shape.num_experts:
        return x + mlp(*three)
    scores, experts = (y @ weights["mlp.router.weight"].t()).topk(shape.experts_per_token, -1)
    shares = scores.softmax(-1)
    if shape.sigmoid_router:
        shares = scores.sigmoid() / scores.sigmoid().sum(-1, keepdim=True)
    for expert in range(shape.num_experts):  # every expert on every token
        share = (shares * (experts == expert)).sum(-1, keepdim=True)
        x = x + share * mlp(*(weight[expert] for weight in three))
    if shape.num_shared_experts:
        x = x + mlp(*(weights[f"mlp.shared.{name}"] for name in ("gate", "up", "down")))
    return x


def whole_weights(shape):
    generator = torch.Generator().manual_seed(3)
    names = {name: parameter.shape for name, parameter in LlamaLayer(shape, seed=1).named_parameters()}
    return {
        name: torch.randn(size, generator=generator, dtype=torch.float64).mul_(0.3).add_(name.endswith("weight"))
        for name, size in names.items()
    }


def largest_error(shape, recompute, tp=TensorParallel(), context=ContextParallel()):
    """Over the output and every gradient, against the plain layer with the whole sequence, on this rank."""
    whole = {name: value.requires_grad_() for name, value in whole_weights(shape).items()}
    sizes = shape.seq_length, shape.micro_batch_size, shape.hidden_size
    full = torch.randn(sizes, generator=torch.Generator().manual_seed(5), dtype=torch.float64).requires_grad_()
    loss_weights = torch.linspace(-1, 1, full.numel(), dtype=torch.float64).view_as(full)
    expected = plain(full, whole, shape)
    (expected * loss_weights).sum().backward()

    layer = LlamaLayer(shape, tp, recompute=recompute, context=context, dtype=torch.float64)
    load_dense(layer, {name: value.detach() for name, value in whole.items()}, tp)

    def cut(z):
        z = context.own_tokens(z)
        return z.chunk(tp.size)[tp.rank] if tp.sequence_parallel else z

    x = cut(full.detach()).clone().requires_grad_()
    y = layer(x)
    (y * cut(loss_weights)).sum().backward()
    reduce_partial_gradients(layer, tp)
    for parameter in layer.parameters():
        all_reduce(parameter.grad, context.ranks, in_place=True)

    def join(z):
        return context.gathered(all_gather(z, tp) if tp.sequence_parallel else z)

    pairs = [(join(y.detach()), expected.detach()), (join(x.grad), full.grad), *gradient_pairs(layer, whole, tp)]
    more = 2 * shape.qk_norm + 4 * bool(shape.latent) + bool(shape.num_experts) + 3 * bool(shape.num_shared_experts)
    assert len(pairs) == 2 + 9 + more
    return max(((a - b).abs() / b.abs().clamp_min(1.0)).max().item() for a, b in pairs)


def differences(shape, recompute, tp=TensorParallel(), dtype=torch.bfloat16, routing="even", context=ContextParallel()):
    """Between the formula and the ledger, which ``measure_llama_layer`` compares with the census first."""
    parallel = Parallel(tp.size, tp.sequence_parallel, context_parallel_size=context.size)
    own = own_context_shape(shape, parallel, context.kind)
    routed = forced_routed_tokens(own, parallel, routing, tp.rank) if shape.num_experts else None
    predicted = llama_rows(shape, parallel, recompute, dtype.itemsize, routed, context.kind)
    measured = measure_llama_layer(shape, tp, recompute, dtype=dtype, routing=routing, context=context)
    comparison = compare(predicted, measured)
    return "" if comparison.exact else comparison.describe()


@kinds
@pytest.mark.parametrize("recompute", [*MODES, "all terms"])
def test_the_plain_layers_numbers(kind, recompute):
    if recompute == "all terms":
        recompute = {recipe.term for recipe in ALL_TERMS[kind]}
    assert largest_error(SHAPES[kind], recompute) < 1e-12


def all_modes(shape, tp, context=ContextParallel()):
    """The largest error of numbers, and every difference of bytes, on this rank."""
    errors = [largest_error(shape, recompute, tp, context) for recompute in MODES]
    dtypes = (torch.bfloat16, torch.float32)
    wrong = [differences(shape, mode, tp, dtype, context=context) for mode in MODES for dtype in dtypes]
    return max(errors), "".join(wrong)


def on_ranks(shape, sequence_parallel, members=None):
    group = torch.distributed.new_group(members) if members else None
    if members and torch.distributed.get_rank() not in members:
        return 0.0, ""
    return all_modes(shape, tensor_parallel(group, sequence_parallel=sequence_parallel))


# k = 2: with four ranks two hold the same key and value head.
@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("size", "sequence_parallel", "kind", "members"),
    [*covering([2, 4], [False, True], SHAPES, [None]), (4, True, "deepseek", [3, 1]), (4, True, "qwen3", [3, 1])],
)
def test_on_ranks(pools, size, sequence_parallel, kind, members):
    for error, wrong in pools[size].run(on_ranks, SHAPES[kind], sequence_parallel, members):
        assert error < 1e-12 and wrong == ""


@st.composite
def llama_shapes(draw):
    ranks, even = st.integers(1, 20), st.sampled_from([2, 4, 6])
    latents = st.builds(LatentHeads, ranks, ranks, st.integers(1, 9), even, st.integers(1, 12))
    k, groups, half = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 8))
    sizes = [draw(st.integers(1, top)) for top in (24, 3, 40, 60)]
    experts = draw(st.none() | st.integers(1, 6))
    taken = None if experts is None else draw(st.integers(1, experts))
    s, b, h, f = sizes
    shared, sigmoid = (draw(st.none() | st.integers(1, 3)), draw(st.booleans())) if experts else (None, False)
    latent = draw(st.none() | latents)
    a, d, qk_norm = (k, None, False) if latent else (k * groups, 2 * half, draw(st.booleans()))
    return LlamaShape(s, b, h, a, k, f, d, qk_norm, experts, taken, shared, sigmoid, latent)


@examples(15, at_night=30)
@given(llama_shapes(), st.data(), st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
def test_bytes_of_any_shape_and_set(shape, data, dtype):
    recompute = data.draw(sets(shape))
    assert differences(shape, recompute, dtype=dtype) == ""


#: torch's counter knows the flash kernels of GPUs only.
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def flash_flops(shape):
    """Of the shape's widths: latent attention fills the narrower one up with zeros."""

    def count(q, k, v, *rest, out_shape=None, **options):
        assert q[-1] == v[-1] == max(shape.d, shape.value_size)
        return 2 * q[0] * q[1] * q[2] * k[2] * (shape.d + shape.value_size)

    return count


def each_kind_with_a_set():
    return st.sampled_from(list(SHAPES)).flatmap(lambda kind: st.tuples(st.just(kind), sets(SHAPES[kind])))


@pytest.mark.slow
@examples(15, at_night=30)
@given(each_kind_with_a_set())
@example(("llama", {"Q", "QKV projection input", "log-sum-exp"}))  # one node reads Q, and what is made from Q
@example(("qwen3", {"Q before its norm", "Q"}))
@example(("deepseek", {"Q", "K", "V", "KV up-projection input"}))
@example(("deepseek", {"K", "KV latent", "shared gate"}))
def test_gradients_and_flops_of_any_set(kind_and_set):
    kind, recompute = kind_and_set
    shape = SHAPES[kind]

    def step(mode):
        layer = LlamaLayer(shape, recompute=mode, seed=2)
        x = torch.randn(12, 3, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with FlopCounterMode(display=False, custom_mapping={FLASH: flash_flops(shape)}) as counter:
            layer(x).square().sum().backward()
        return counter.get_total_flops(), [x.grad, *(p.grad for p in layer.parameters())]

    base, wanted = step("none")
    flops, gradients = step(recompute)
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))
    assert flops - base == llama_recomputed_flops(shape, recompute)
    matmuls = llama_matmuls(shape)
    last = matmuls["down"] + matmuls.get("shared down", 0)
    assert llama_recomputed_flops(shape, "full") == sum(matmuls.values()) - last


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype", "t"), covering(LLAMA_MODELS, [torch.bfloat16, torch.float32], [16, 8, 4, 2, 1], of=1), ids=str
)
def test_named_shapes_are_exact_on_emulated_ranks(model, dtype, t):
    shape = llama_shape(model)
    routings = ("even", "one-sided") if shape.num_experts else ("even",)
    if (shape.num_experts or t) % t:
        assert (model, t) == ("mixtral-8x7b", 16)
        with pytest.raises(ConfigError, match="^num_experts: 8 must be divisible"):
            llama_rows(shape, Parallel(t))
        return
    with emulated_rank(t):
        for sequence_parallel, mode, routing in itertools.product((False, True), MODES, routings):
            tp = tensor_parallel(sequence_parallel=sequence_parallel)
            assert differences(shape, mode, tp, dtype, routing) == "", (mode, routing)


def test_a_tied_output_layer_reads_the_embedding():
    """Its gradient is what two weights of the same values get together; each end of a pipeline holds a copy."""
    plain = SHAPE.with_sizes(vocab_size=16)
    shape = plain.with_sizes(tied_embeddings=True)
    ids = torch.randint(0, 16, (3, 12), generator=torch.Generator().manual_seed(1))
    tied, two = (LlamaStage(one, dtype=torch.float64) for one in (shape, plain))
    two.load_state_dict({**tied.state_dict(), "head.weight": tied.words.weight})
    for model in (tied, two):
        model.loss(model(ids), ids).backward()
    torch.testing.assert_close(tied.words.weight.grad, two.words.weight.grad + two.head.weight.grad, rtol=1e-12, atol=0)
    ends = [LlamaStage(shape.with_sizes(num_layers=2), layers=range(i, i + 1), dtype=torch.float64) for i in (0, 1)]
    assert all(torch.equal(end.words.weight, tied.words.weight) and not hasattr(end, "head") for end in ends)


@kinds
def test_t_ranks_draw_what_one_rank_draws(kind):
    whole = dict(LlamaLayer(SHAPES[kind], seed=9).named_parameters())
    for t in (2, 4, 8):
        for rank in range(t):
            tp = TensorParallel(None, t, rank)
            for name, parameter in LlamaLayer(SHAPES[kind], tp, seed=9).named_parameters():
                dim = getattr(parameter, "partition_dim", None)
                assert torch.equal(parameter, shard(whole[name], dim, part_of(parameter, tp))), (t, rank, name)


@kinds
def test_autocast_runs_matmuls_in_16_bits_and_gives_float32_gradients(kind):
    """The products ran in bfloat16, the weights are float32: backward has to read them in the products' dtype."""
    torch.manual_seed(1)
    layer, x = LlamaLayer(SHAPES[kind], seed=1), torch.randn(12, 3, 32)
    exact = torch.autograd.grad(layer(x).sum(), list(layer.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    found = torch.autograd.grad(y.sum(), list(layer.parameters()))
    for one, other in zip(exact, found):
        assert other.dtype is torch.float32
        assert (one - other).norm() <= 0.1 * one.norm() + 0.05


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "deepseek"])
def test_frozen_weights_keep_no_inputs(kind):
    """As the paper's layer: what only a weight's gradient reads is not kept where there is none."""
    layer = LlamaLayer(SHAPES[kind], seed=1)
    x = torch.randn(12, 3, 32, requires_grad=True)
    trained = {row.term: row.bytes for row in layer_rows_of(layer, x)}
    frozen = {row.term: row.bytes for row in layer_rows_of(layer.requires_grad_(False), x)}
    ends = "projection input", "gate and up input", "down input", "router input"
    read_by_weights = {term for term in trained if term.endswith(ends)}
    # The kernel keeps its own result, and who goes to which expert is read by other gradients too.
    assert read_by_weights & frozen.keys() <= {"attention projection input"}
    assert all(frozen[term] == trained[term] for term in frozen)
    assert len(read_by_weights) >= 3


def test_one_token_and_none_have_gradients():
    """Of an input ``[h]``, and of no rows: what an expert without tokens gets."""
    weight = torch.randn(6, requires_grad=True)
    matrix = torch.randn(4, 6, requires_grad=True)
    for size in [(6,), (0, 6)]:
        x = torch.randn(size, requires_grad=True)
        ways = [
            norm(x, weight) @ matrix.t(),
            matmul(rms_norm(x, weight), matrix),
            column_parallel(rms_norm(x, weight), TensorParallel(), matrix)[0],
        ]
        expected, *found = (torch.autograd.grad(y.sum(), (x, weight, matrix)) for y in ways)
        for one in found:
            torch.testing.assert_close(one, expected)


def test_backward_of_swiglu_never_holds_more_than_its_two_gradients():
    gate, up = (torch.randn(4, 3, 5, requires_grad=True) for _ in range(2))
    y, gradient = swiglu(gate, up), torch.ones(4, 3, 5)
    alive = LiveStorages([gate, up, y, gradient])
    alive.peak_bytes = 0
    with alive:
        y.backward(gradient)
    assert alive.peak_bytes == 2 * gradient.nbytes
