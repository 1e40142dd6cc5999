# %% [markdown]
# # 14 · Experts, latents, states, long contexts
#
# Today's largest models send each token to a few experts, compress keys and values, replace them by a state, or split the
# sequence over GPUs. What does each of these keep?

# %%
# Setup: imports, and the numbers of the question
import actmem as am
from actmem_course.figures import (
    Checks, GuessLine, LiveFigure, Panel, Prediction, Reveal, bar_chart, choice, size_text, steps, worked,
)
from actmem_course.figures import ch13_experts as show
from actmem_more.llama_shape import llama_shape
from actmem_more.llama_terms import forced_routed_tokens, llama_rows

checks = Checks()
EXPERTS = llama_shape("qwen3-30b-a3b")
even, one_sided = (
    {
        row.term: row.bytes
        for row in llama_rows(
            EXPERTS,
            am.Parallel(8, True),
            routed_tokens=forced_routed_tokens(EXPERTS, am.Parallel(8, True), routing, 0),
        )
    }
    for routing in ("even", "one-sided")
)
of_experts = sum(even[term] for term in ("dispatched weights", "gate", "up", "down input"))
question = Prediction(
    f"A layer of Qwen3 30B-A3B on 8 ranks, 16 of its {EXPERTS.num_experts} experts on each; every "
    f"token goes to {EXPERTS.experts_per_token} of them. "
    f"The figure shows one rank's bytes when routing is balanced ({size_text(of_experts)} of its "
    f"{size_text(sum(even.values()))} are the experts'). "
    "Now every token goes to the same experts, all on one rank. How much does this rank keep?",
    sum(one_sided.values()) / 2**20,
    "MiB",
    "It gets 8 times as many pairs of a token and an expert, and keeps 8 times as much for them. "
    "What it keeps for its own tokens, such as all of attention, doesn't grow.",
    GuessLine(2**20),
)
BOTH = "even, and one-sided"
Reveal(
    question,
    Panel(
        lambda t, router: show.routed_bars(
            EXPERTS, t, ("even", "one-sided") if router == BOTH else ("even",)
        ),
        t=steps("t", "ranks", (1, 2, 4, 8, 16), 8),
        router=choice("router", ["even", BOTH], "even"),
    ),
    router=BOTH,
)

# %% [markdown]
# *30 minutes.* **You need:** [04 Sequence parallelism](04_sequence_parallelism.ipynb) and [08 After the
# paper](08_todays_layer.ipynb). **You will** ask chapter 2's question of four more parts of a layer. They don't build
# on each other; read what you need.
#
# **Letters used:** $s$ tokens, $b$ sequences, $h$ hidden size, $a$ heads, $t$ ranks that share a layer, $k$ key and value heads,
# $d$ elements of a head, $f$ width of the MLP, $E$ experts, $\kappa$ experts that a token takes, $c$ ranks that share a sequence,
# $u$ tokens in a chunk. (An expert is an MLP, so $f$ is its width. Qwen3's heads are 128 wide, twice $h/a$. All figures have
# sequences of 8,192 tokens.)

# %% [markdown]
# ## Experts
#
# A layer with **experts** has $E$ MLPs instead of one, and sends each token to $\kappa$ of them. A router scores the experts. The
# tokens are sorted by expert and dispatched. What the experts return is weighted and summed.
#
# Take one pair of a token and an expert. Does backward read
#
# - **gate, up, and the down product's input**? Yes, as in one MLP: $6f$ bytes per pair, $6sb\kappa f$ in all.
# - **the dispatched token**? Yes, for the weight gradients of gate and up. Plain code keeps it. The course's layer doesn't: backward
#   dispatches it again, with one more all-to-all, as sequence parallelism gathers again.
# - **the expert's output**? Not if the router's weight multiplies the down product's input: the product is linear, so the result
#   is the same, and the weight's gradient reads what is kept anyway.
# - **the routing indices**? Yes, a few bytes per pair.
#
# Qwen3 also normalises the query and key of each head before it rotates them. So the layer keeps Q and K once more.

# %% jupyter={"source_hidden": true}
from actmem_course.figures.ch08_todays_layer import llama_bars

LiveFigure(llama_bars(EXPERTS))

# %% [markdown]
# Here the ranks of a layer share the experts; none is cut. (Megatron's EP = $t$; if EP spans data-parallel ranks too, the
# worst case grows with them.) Each rank routes its own tokens, and an all-to-all brings every pair to its expert's
# rank. If the routers send evenly, a rank gets $sb\kappa/t$ pairs. In the worst case every token goes to the same $\kappa$ experts,
# all on one rank (if it holds as many), which gets all $sb\kappa$ pairs. Every rank must have room for that, or drop tokens. Count each
# term:

# %%
from actmem_more.llama_measured import measure_llama_layer

for t, routing in ((1, "even"), (8, "even"), (8, "one-sided")):
    parallel = am.Parallel(t, True)
    predicted = llama_rows(
        EXPERTS, parallel, routed_tokens=forced_routed_tokens(EXPERTS, parallel, routing, 0)
    )
    with am.emulated_rank(t):
        checks.add_rows(
            f"Qwen3 30B-A3B, t = {t}, {routing}",
            predicted,
            measure_llama_layer(EXPERTS, am.tensor_parallel(sequence_parallel=True), routing=routing),
        )
checks.show()

# %% [markdown]
# ## Latent attention
#
# DeepSeek-V3 makes the keys and values of its 128 heads from one narrow latent per token, and the queries from another. At
# inference only the latent is cached, beside one small key with positions that all heads share. Does training save as much? No.
# A flash kernel's backward reads whole keys and values, for every head, and the latents come on top. But you can choose:
# `recompute={"K", "V"}` keeps the latent and recomputes keys and values from it, with one product.

# %% jupyter={"source_hidden": true}
from actmem.recipes import Recompute
from actmem.rows import total
from actmem_more.llama_terms import llama_products, llama_recomputed_flops

LATENT = llama_shape("deepseek-v3")
rows = {row.term: row.bytes for row in llama_rows(LATENT)}
products = llama_products(LATENT)
tokens = LATENT.seq_length * LATENT.micro_batch_size
latent = {"recompute nothing": sum(rows.values())}
for terms in ({"K", "V"}, {"Q", "K", "V"}):
    again = Recompute.of(terms)
    flops = llama_recomputed_flops(LATENT, again)
    latent[f"recompute {', '.join(sorted(terms))}: {flops / (3 * sum(products.values())):.1%} more FLOPs"] = (
        total(llama_rows(LATENT, recompute=again))
    )
with am.emulated_rank(8):
    checks.add_rows(
        "DeepSeek-V3, one of 8 ranks",
        llama_rows(LATENT, am.Parallel(8, True)),
        measure_llama_layer(LATENT, am.tensor_parallel(sequence_parallel=True)),
    )
display(checks.show())
LiveFigure(
    bar_chart(
        f"Cached at inference: {rows['KV latent'] // tokens:,} bytes a token; kept to train: "
        f"{(rows['K'] + rows['V']) // tokens:,} of keys and values",
        {"kept": latent},
        "kept by one layer of DeepSeek-V3",
    )
)

# %% [markdown]
# ## A state instead of keys
#
# Gated DeltaNet, Mamba and other recurrent layers have no keys to cache. They carry a state $S$, a $d \times d$ matrix for each
# head. With one row $q_i$, $k_i$, $v_i$ for token $i$, the simplest form is
#
# $$S_i = S_{i-1} + k_i^\top v_i, \qquad o_i = q_i S_i$$
#
# To generate text you need only the last $S$. But to train? $dq_i$ reads $S_i$, so autograd through a loop over tokens keeps one
# state *per token*: $4sbhd$ bytes in float32 ($h = ad$), where flash attention keeps about $8sbh$. With $d$ = 128 that is 64 times
# as much. So keep one state for each chunk of $u$ tokens, as chapter 12 does with an MLP. Inside a chunk, with $S$ the state before
# it and $D$ the gradient of the state after it,
#
# $$O = \mathrm{tril}(QK^\top)\,V + QS, \qquad dQ = \mathrm{tril}(dO\,V^\top)\,K + dO\,S^\top$$
#
# $$dK = \mathrm{tril}(dO\,V^\top)^\top Q + V D^\top, \qquad dV = \mathrm{tril}(QK^\top)^\top dO + KD, \qquad D \leftarrow D + Q^\top dO$$

# %%
import torch
from torch.autograd import Function


class Chunked(Function):
    @staticmethod
    def forward(ctx, q, k, v, u):  # [a, s, d] each
        state, states, out = q.new_zeros(len(q), q.shape[2], q.shape[2]), [], []
        for qu, ku, vu in zip(q.split(u, 1), k.split(u, 1), v.split(u, 1)):
            states.append(state)
            out.append(qu @ state + (qu @ ku.mT).tril() @ vu)
            state = state + ku.mT @ vu
        ctx.u = u
        ctx.save_for_backward(q, k, v, torch.stack(states))
        return torch.cat(out, 1)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, states = ctx.saved_tensors
        found, later = [], torch.zeros_like(states[0])  # the gradient of the state after a chunk
        parts = zip(*(x.split(ctx.u, 1) for x in (q, k, v, grad)), states)
        for qu, ku, vu, gu, state in reversed(list(parts)):
            scores, grad_scores = (qu @ ku.mT).tril(), (gu @ vu.mT).tril()
            grad_q = grad_scores @ ku + gu @ state.mT
            grad_k = grad_scores.mT @ qu + vu @ later.mT
            found.append((grad_q, grad_k, scores.mT @ gu + ku @ later))
            later = later + qu.mT @ gu
        return *(torch.cat(parts, 1) for parts in zip(*reversed(found))), None


q, k, v = (torch.randn(4, 48, 16, dtype=torch.float64) for _ in "qkv")
quadratic = (q @ k.mT).tril() @ v
checks.add(
    "chunks of 8 give the quadratic form's output",
    [(True, torch.allclose(Chunked.apply(q, k, v, 8), quadratic))],
    "",
)
checks.show()

# %% jupyter={"source_hidden": true}
from torch import nn


def by_token(q, k, v):
    state, out = q.new_zeros(len(q), q.shape[2], q.shape[2]), []
    for i in range(q.shape[1]):
        state = state + k[:, i, :, None] * v[:, i, None, :]
        out.append(q[:, i, None] @ state)
    return torch.cat(out, 1)


def kept_by(way):
    mixing = nn.Module()
    mixing.forward = way
    with am.record(mixing) as ledger:
        y = mixing(*heads)
    del y
    return ledger.total_bytes


a, s, d = 4, 48, 16
heads = [torch.randn(a, s, d, requires_grad=True) for _ in "qkv"]
checks.add("a state a token: 12sh + 4shd", [(12 * s * a * d + 4 * s * a * d * d, kept_by(by_token))])
for u in (8, 16):
    checks.add(
        f"a state in {u} tokens: 12sh + 4shd/u",
        [(12 * s * a * d + 4 * s * a * d * d // u, kept_by(lambda *x: Chunked.apply(*x, u)))],
    )
heads = [torch.randn(a, s, d, dtype=torch.float64, requires_grad=True) for _ in "qkv"]
ways = (lambda q, k, v: (q @ k.mT).tril() @ v, by_token, lambda *x: Chunked.apply(*x, 8))
quadratic, *others = [torch.autograd.grad(way(*heads).square().sum(), heads) for way in ways]
apart = [
    int((one - two).abs().gt(1e-12 * two.abs().max()).sum())
    for found in others
    for one, two in zip(found, quadratic)
]
checks.add(
    "gradients of a loop and of chunks",
    [(0, count) for count in apart],
    "numbers that differ from the quadratic form's",
)
checks.show()

# %% [markdown]
# In 16 bits with states in float32 a chunked layer keeps $6sbh + 4sbhd/u$, and its output, $2sbh$, for the projection. With $u = d$
# that is $12sbh$, 1.5 times what attention keeps. But its work grows with $s$, not with $s^2$. Mamba's kernel keeps one state per
# 2,048 tokens, and recomputes the others.°
#
# ## Context parallelism
#
# Tensor parallelism stops dividing K and V at $k$ heads, and sequence parallelism divides only what lies between the blocks.
# So for long sequences, cut the sequence over $c$ ranks from end to end, through attention too. Each keeps $1/c$ of everything,
# K and V included, for any $k$. But its queries still need all the keys before them. Here are two ways to get them:
#
# - **Gather** K and V along the sequence, as Llama 3 does, keep only the shard, and gather again in backward: chapter 4's $g$.
#   (*Plain*, in the figure, keeps what it gathered: K and V whole on every rank.) Rank $i$ holds chunks $i$ and $2c - 1 - i$ of
#   $2c$, one that sees few keys and one that sees many, so that all ranks have the same work.
# - **Ulysses** exchanges tokens for heads: an all-to-all before attention, another after it. The kernel keeps its output by
#   heads, the projection by tokens: one more copy, which *elementwise* drops. The course's layer cuts no head, so $t \cdot c$ must divide $k$;
#   others repeat key heads.
#
# The bars are Llama 3 70B ($k = 8$), on 8 ranks and on 16. After each layout: MiB sent in one layer
# to the ranks that share it + to those that share the sequence (Ulysses sends Q and the output as well). With $c$ = 2 tensor
# parallelism sends the vectors of $s/2$ tokens:

# %% jupyter={"source_hidden": true}
from actmem.formulas.communication import wire_bytes
from actmem_more.context import layer_groups
from actmem_more.llama_terms import context_exchanges, llama_exchanges

shape = llama_shape("llama3-70b")
ways = {}
for t, c, kind in (
    (8, 1, ""),
    (4, 2, "gather"),
    (4, 2, "gather-plain"),
    (4, 2, "ulysses"),
    (16, 1, ""),
    (8, 2, "gather"),
):
    parallel, way = am.Parallel(t, True, context_parallel_size=c), kind or "gather"
    among_t, among_c = llama_exchanges(shape, parallel), context_exchanges(shape, parallel, way)
    sent = " + ".join(f"{wire_bytes(exchanges) / 2**20:,.0f}" for exchanges in (among_t, among_c))
    ways[f"t = {t}, c = {c}{kind and ', ' + kind}: {sent} MiB sent"] = total(
        llama_rows(shape, parallel, context_kind=way)
    )
with am.emulated_rank(16):
    tensor, context = layer_groups(2, sequence_parallel=True)
    checks.add_rows(
        "Llama 3 70B, t = 8, c = 2",
        llama_rows(shape, am.Parallel(8, True, context_parallel_size=2)),
        measure_llama_layer(shape, tensor, context=context),
    )
display(checks.show())
LiveFigure(
    bar_chart(
        "16 ranks: c = 2 keeps a little less than t = 16, and sends less than half",
        {"kept": ways},
        "kept by one rank of a layer",
    )
)

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# ## Work it out
#
# Mixtral 8x7B has 8 experts of width 14,336, and each token takes 2. You train it with 8,192 tokens on 8 ranks, one expert on
# each. How much do the experts of a layer keep on a rank if routing is balanced, and how much at worst? Use $6f$ bytes per pair.

# %% jupyter={"source_hidden": true}
from actmem_more.llama_terms import expert_mlp_rows

MIXTRAL = llama_shape("mixtral-8x7b")
tokens, f, taken = MIXTRAL.seq_length, MIXTRAL.ffn_hidden_size, MIXTRAL.experts_per_token
even, worst = (
    total(expert_mlp_rows(MIXTRAL, am.Parallel(8, True), routed_tokens=n))
    for n in (tokens * taken // 8, tokens)
)
worked(
    f"There are {tokens:,} · {taken} pairs. Even: {tokens * taken // 8:,} on a rank, 6 · {f:,} bytes "
    f"each: {size_text(6 * f * tokens * taken // 8)}. With the router and the routing indices it is "
    f"{size_text(even)}.",
    f"A token takes {taken} different experts, so the worst is every token once: {tokens:,} pairs, "
    f"{size_text(6 * f * tokens)}; with the rest {size_text(worst)}.",
    f"With two or more experts on a rank the worst case doubles: {taken * tokens:,} pairs.",
)

# %% [markdown]
# ## Check yourself
#
# <details><summary><b>1.</b> Do more experts make a layer keep more?</summary>
#
# No. What counts is how many each token takes, $\kappa$. $E$ is only in the router's scores.
# </details>
#
# <details><summary><b>2.</b> DeepSeek caches a narrow latent at inference. Why doesn't training keep just that?</summary>
#
# Backward of attention reads whole keys and values. You can recompute them from the latent, but that runs a product.
# </details>
#
# <details><summary><b>3.</b> <i>t</i> = 16 and 8 key heads, or <i>t</i> = 8 and <i>c</i> = 2: which keeps less?</summary>
#
# The second. With $t$ = 16 two ranks hold the same key head. With $c$ = 2 each holds half of its tokens.
# </details>
#
# ## What people get wrong here
#
# - **"Sparse models keep less."** Less than a dense MLP with as many parameters (width $Ef$), yes. But a token goes through $\kappa$
#   experts, and each keeps $6f$ bytes for it: as much as a dense MLP of width $\kappa f$.
# - **"Recurrent layers keep one state."** When they generate. In training they keep one per token, unless you chunk them.
# - **"The router is even on average, so plan for the average."** The fullest rank decides, in the worst microbatch.
# - **"Context parallelism divides the weights too."** It divides activations only; ZeRO divides weights.
#
# ## Now measure it
#
# `python labs/measure_today.py --emulate 8 --model qwen3-30b-a3b` compares every mode; `--context 2` puts half of each sequence on a
# rank.
#
# **Sources.** 2401.04088 for Mixtral · 2412.19437 for DeepSeek-V3 · 2412.06464 for Gated DeltaNet · 2407.21783, section 3.3.2, for gathered keys · 2309.14509 for
# Ulysses · 2512.14080, SonicMoE, for experts that keep only their inputs and the up-projection's outputs · code:
# `src/actmem_more/experts.py`, `src/actmem_more/latent.py`, `src/actmem_more/context.py`.
#
# ## Now fit your model
#
# Plan a model with experts for the worst case:
#
# ```
# actmem plan qwen3-30b-a3b --gpus 64 --memory 80 --global-batch 512 --tensor 8 --routing one-sided
# ```
#
# This is the last chapter. You started with four bars that didn't fit on a GPU. Now you can say which tensors are in them, which
# you can divide, drop or move, and what that costs. Do it for your own: `actmem plan config.json --at s=8192,b=1 --gpus 8
# --memory 80`.
