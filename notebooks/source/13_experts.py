# %% [markdown]
# # 13 · Experts and latent attention
#
# *35 minutes. Write your guess below (in a notebook: Shift+Enter first).*
#
# A layer of Qwen3 30B-A3B is a *mixture of experts* (MoE): it has 128 MLPs, its experts, and a router that sends each
# token to 8 of them. Eight ranks share the layer, 16 experts on each. If the router sends every token to the *same* 8
# experts, all on one rank: **how many MiB does this rank save for backward?**

# %% jupyter={"source_hidden": true}
# Setup: imports, and the numbers of the question
import actmem as am
from actmem.rows import total
from actmem_course.figures import (
    Checks, GuessLine, Panel, Prediction, Reveal, bar_chart, choice, size_text, steps, text_table,
    worked,
)
from actmem_course.figures import ch13_experts as show
from actmem_more.llama_shape import llama_shape
from actmem_more.llama_terms import forced_routed_tokens, llama_rows

checks = Checks()
EXPERTS, EIGHT = llama_shape("qwen3-30b-a3b"), am.Parallel(8, True)


def predicted(parallel, routing):
    """What rank 0 saves of a layer."""
    assigned = forced_routed_tokens(EXPERTS, parallel, routing, 0)
    return llama_rows(EXPERTS, parallel, routed_tokens=assigned)


balanced = predicted(EIGHT, "even")
of_experts = total(row for row in balanced if row.term in ("dispatched weights", "gate", "up", "down input"))
question = Prediction(
    f"The figure shows what one rank saves if routing is balanced: {size_text(total(balanced))}, of which "
    f"{size_text(of_experts)} are the experts'. How much does the rank save that takes every token?",
    total(predicted(EIGHT, "one-sided")) / 2**20,
    "MiB",
    "It gets 8 times as many token-expert assignments, and saves 8 times as much for them. "
    "What it saves for its own tokens, such as all of attention, doesn't grow.",
    GuessLine(2**20),
)


def bars(t, routing):
    """What a rank saves if routing is balanced, and if wanted what it saves if it takes every token."""
    saved = {way: total(predicted(am.Parallel(t, t > 1), option)) for way, option in show.ROUTINGS.items()}
    who = f"the most loaded of {t} ranks" if t > 1 else "one rank"
    title = f"{routing.capitalize()} routing: {who} saves {size_text(saved[routing])}"
    shown = {way: size if way in ("balanced", routing) else None for way, size in saved.items()}
    hidden = {way: "?" for way, size in shown.items() if size is None}
    return bar_chart(title, {"saved": shown}, "saved by one layer on the most loaded rank", notes=hidden)


Reveal(
    question,
    Panel(
        bars,
        t=steps("t", "ranks", (1, 2, 4, 8, 16), 8),
        routing=choice("routing", list(show.ROUTINGS), "balanced"),
    ),
    routing="one-sided",
)

# %% [markdown]
# *An elective: chapters 1 to 5 are enough.* Experts hold more parameters than a token uses. Multi-head latent attention
# (MLA) makes the cache of inference small. Which of them makes training cheaper?
#
# **Letters:**
#
# - $s$ tokens, $b$ sequences, $h$ hidden size, $t$ ranks that share a layer
# - $a$ query heads and $k$ key heads of $d$ elements
# - $E$ experts, $\kappa$ experts that a token takes, $f$ width of one expert
#
# **The rest of these layers:** RMSNorm, no dropout, and a flash kernel for attention, which saves Q, K, V, its output
# and one number per query and head, not the scores. Qwen3 also normalizes each head's query and key, so it saves them
# before their norms too. It has 4 key heads: of 8 ranks each has a whole copy of one, so K before its norm, K and V take
# 2 MiB each there, not 1. All MLPs are gated: $\mathrm{down}(\mathrm{silu}(\mathrm{gate}) \cdot \mathrm{up})$.
#
# ## Experts
#
# A layer with **experts** has $E$ MLPs instead of one. The router scores them for each token and picks $\kappa$.
# Tokens are sorted by expert and dispatched; what the experts return is weighted and summed. Take one token-expert
# assignment. Which tensors does the backward pass read?
#
# - **Gate, up, and down's input**: yes, as in any MLP. That's $6f$ bytes per assignment, $6sb\kappa f$ in all.
#   (Megatron's `--recompute-granularity selective --recompute-modules moe_act`, with `--moe-grouped-gemm`, recomputes down's
#   input.)
# - **The dispatched token**: yes, for the weight gradients of gate and up. Plain code and Megatron save it, $2h$ bytes per
#   assignment, for Qwen3 nearly as much as $6f$. The course's layer doesn't: the backward pass dispatches it again, with
#   one more all-to-all.
# - **The expert's output**: only if you weight it after the down matmul. Weight down's *input* instead. The result is
#   the same because the matmul is linear, and you've saved that input anyway.
# - **The routing indices**: a few bytes per assignment.
# - **The router's scores**: plain code's float32 softmax saves $4sbE$.
#
# Beyond that, a layer saves as much as a dense MLP of width $\kappa f$.
#
# Now share the layer by **expert parallelism** on the ranks that share
# attention by TP and SP (Megatron: `--expert-model-parallel-size` $t$ with `--expert-tensor-parallel-size 1
# --moe-token-dispatcher-type alltoall`). Each of $t$ ranks holds $E/t$ whole experts and routes its own tokens. An
# all-to-all brings each assignment to its expert's rank, another one brings the result back. With balanced routing, a
# rank gets $sb\kappa/t$ assignments. In the worst case one rank gets all $sb\kappa$. Each rank needs room for that, or
# drops tokens above a *capacity factor* (`--moe-expert-capacity-factor`). A load-balancing loss makes the worst case
# rarer, not smaller. The picture
# has $t = 4$:

# %% jupyter={"source_hidden": true}
Panel(
    lambda routing: show.experts(EXPERTS, routing),
    routing=choice("routing", list(show.ROUTINGS), "balanced"),
)

# %% [markdown]
# Predict both, and measure:

# %%
from actmem_more.llama_measured import measure_llama_layer

for t, routing in ((1, "balanced"), (8, "balanced"), (8, "one-sided")):
    option = show.ROUTINGS[routing]
    with am.emulated_rank(t):
        tp = am.tensor_parallel(sequence_parallel=True)
        checks.add_rows(
            f"Qwen3 30B-A3B, t = {t}, {routing} routing",
            predicted(am.Parallel(t, True), option),
            measure_llama_layer(EXPERTS, tp, routing=option),
        )
checks.show()

# %% [markdown]
# > **Why do this?** $E$ experts' parameters for $\kappa$ experts' FLOPs and activations. **Why not?** Compare with a
# > dense model of the same FLOPs, not of the same size: it saves just as much, needs no all-to-all, and has no worst
# > case. And the weights and optimizer states of all $E$ experts take memory.
#
# ## Latent attention
#
# DeepSeek-V3 makes the keys and values of its 128 heads from one narrow latent per token, and the queries from
# another. At inference, you cache only the latent, with one small key for positions that all heads share. Does
# training save as little?
#
# No. The kernel's backward reads whole keys and values of every head, and the latents come on top. But you have a
# choice that other attention doesn't give you: save the latent, and recompute keys and values from it by one narrow
# matmul. (With `--multi-latent-attention`, Megatron's `--recompute-granularity selective --recompute-modules mla_up_proj` recomputes
# the queries too.) In the picture,
#
# - $q$ and $c$ are the widths of the latents of queries, and of keys and values
# - a head's query and key have $n$ elements and $r$ rotary ones, its value has $v$
# - the *shared* expert is one more expert that every token takes

# %% jupyter={"source_hidden": true}
Panel(
    lambda recomputed: show.latent_layer(recomputed),
    recomputed=choice("recomputed", list(show.RECOMPUTED), "nothing"),
)

# %% [markdown]
# Predict what each choice saves and costs, and measure two of them:

# %%
from actmem.recipes import Recompute
from actmem_more.llama_terms import llama_matmuls, llama_recomputed_flops

LATENT = llama_shape("deepseek-v3")
rows, flops = llama_rows(LATENT), 3 * sum(llama_matmuls(LATENT).values())  # forward and backward
plain = llama_rows(LATENT.with_sizes(latent=None, head_size=128))
lines = [
    ("nothing, without latents", size_text(total(plain)), ""),
    ("nothing", size_text(total(rows)), ""),
]
for name, terms in (("K, V", {"K", "V"}), ("Q, K, V", {"Q", "K", "V"})):
    again = Recompute.of(terms)
    more = llama_recomputed_flops(LATENT, again) / flops
    saved = size_text(total(llama_rows(LATENT, recompute=again)))
    lines.append((name, saved, f"{more:.1%}"))
print(text_table(("recompute", "one layer saves", "more FLOPs"), lines, " rr"))

of_token = {row.term: row.bytes // (LATENT.seq_length * LATENT.micro_batch_size) for row in rows}
to_train = of_token["K"] + of_token["V"]
print(f"cached per token: {of_token['KV latent']:,} bytes")
print(f"K and V saved per token to train: {to_train:,} bytes")

for recompute in ("none", Recompute.of({"K", "V"})):
    with am.emulated_rank(8):
        checks.add_rows(
            f"DeepSeek-V3, one of 8 ranks, recompute {'nothing' if recompute == 'none' else 'K and V'}",
            llama_rows(LATENT, EIGHT, recompute),
            measure_llama_layer(LATENT, am.tensor_parallel(sequence_parallel=True), recompute),
        )
checks.show()

# %% [markdown]
# > **Why do this?** At inference the cache shrinks; in training, recomputing K and V frees much for few FLOPs.
# > **Why not?** If you recompute nothing, the layer saves *more* than with plain heads of 128.
#
# ## Work it out
#
# Mixtral 8x7B has 8 experts of width 14,336, and a token takes 2. You train it with 8,192 tokens on 8 ranks, one
# expert on each. How much do a layer's experts save on one rank if routing is balanced, and how much at worst? Use
# $6f$ bytes per assignment.

# %% jupyter={"source_hidden": true}
from actmem_more.llama_terms import expert_mlp_rows

MIXTRAL = llama_shape("mixtral-8x7b")
tokens, f, taken = MIXTRAL.seq_length, MIXTRAL.ffn_hidden_size, MIXTRAL.experts_per_token
average, worst = (
    total(expert_mlp_rows(MIXTRAL, EIGHT, routed_tokens=n)) for n in (tokens * taken // 8, tokens)
)
worked(
    f"There are {tokens:,} · {taken} assignments. Balanced: {tokens * taken // 8:,} on a rank, 6 · {f:,} bytes "
    f"each: {size_text(6 * f * tokens * taken // 8)}. With the router and the routing indices it is "
    f"{size_text(average)}.",
    f"A token takes {taken} different experts, so the worst is every token once: {tokens:,} assignments, "
    f"{size_text(6 * f * tokens)}; with the rest {size_text(worst)}.",
    f"With two or more experts on a rank the worst case doubles: {taken * tokens:,} assignments.",
)

# %% jupyter={"source_hidden": true}
checks

# %% [markdown]
# > **Take away**
# > 1. A token saves $6f$ bytes for each expert it takes, in plain code $6f + 2h$. The number of experts doesn't matter.
# > 2. Plan for the most loaded rank in the worst microbatch, not for the average.
# > 3. A small cache doesn't mean few saved bytes in training, unless you recompute K and V.
# >
# > **At work tomorrow:** plan your MoE for the worst case (and add $2h$ per assignment if your code saves dispatched
# > tokens):
# > `actmem plan qwen3-30b-a3b --gpus 64 --memory 80 --global-batch 512 --tensor 8 --routing one-sided`
#
# **Sources.** Mixtral 2401.04088 · DeepSeek 2405.04434, 2412.19437 · SonicMoE 2512.14080, for experts that save even
# less · `src/actmem_more/experts.py`, `latent.py`.
#
# **Measure more:** `python labs/measure_today.py --emulate 8 --model qwen3-30b-a3b` compares every mode. Next:
# [chapter 14](14_allocator_and_eight_bits.ipynb), what the allocator and eight bits add.
