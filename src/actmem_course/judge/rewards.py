"""What each lab measures once it is solved: of the learner's functions, beside ours and the formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem.config import ModelShape, Parallel
from actmem.formulas import schedule
from actmem.formulas.activations import (
    RNG_STATE_BYTES,
    TABLE2,
    Configuration,
    gathered_input_bytes,
    layer_extra_rows,
    layer_rows,
)
from actmem.formulas.communication import layer_exchanges
from actmem.formulas.first_stage import stage_output_rows, stage_rows
from actmem.formulas.llama_terms import llama_rows
from actmem.layers.llama import attend
from actmem.layers.llama_parts import product, row_parallel
from actmem.llama_shape import LlamaShape
from actmem.measure.ledger import record
from actmem.models import PAPER_MODELS
from actmem.parallel.conjugates import f, f_bar
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.plan.search import bill_of
from actmem.recipes import Recompute
from actmem.rows import total
from actmem.verify import COUNTED_PARTS, verify_plan
from actmem_course.judge.cases.lab1_count_bytes import measured
from actmem_course.judge.cases.lab4_recompute import as_block, flops_of, layer_weights
from actmem_course.judge.cases.lab5_pipeline import on_paper
from actmem_course.judge.cases.lab7_todays_layer import most_shared
from actmem_course.judge.cases.lab8_plan import STATE_PARTS, asked, gib, judged_plan
from actmem_course.judge.cases.lab10_keep_less import CountingHost
from actmem_course.judge.kept import kept
from actmem_course.judge.reward import BarsReward, Measure, Piece, compared, cost, each_compared, sizes_text
from actmem_course.judge.solutions import lab2_tensor_parallel as ours2
from actmem_course.judge.solutions import lab3_sequence_parallel as ours3
from actmem_course.judge.solutions import lab4_recompute as ours4
from actmem_course.judge.solutions import lab7_todays_layer as ours7
from actmem_course.judge.solutions import lab9_the_ends as ours9
from actmem_course.judge.solutions import lab10_keep_less as ours10
from actmem_course.judge.solutions.lab8_plan import JOBS
from actmem_course.judge.workbench import Bench
from actmem_course.others.timeline import bubble_of, draw, timeline
from actmem_course.pieces import Dropouts, LayerWeights, layer, random_weights
from actmem_course.standard_library import standard_library

Functions = Mapping[str, Callable[..., Any]]
#: Of lab 6's training, in each mode.
NUM_STEPS = 8


def lab1_reward(b: Bench) -> BarsReward:
    """One layer of GPT-3 on one of 8 ranks in every configuration of table 2, as predicted and as counted."""
    shape = PAPER_MODELS["175B"].shape
    heads, micro_batch, h, s = shape.letters()
    cases = {
        "no parallelism": (1, False, "none"),
        "tensor": (8, False, "none"),
        "tensor + sequence": (8, True, "none"),
        "tensor + selective": (8, False, "selective"),
        "all three": (8, True, "selective"),
        "full recomputation": (8, False, "full"),
    }
    measures = []
    for name, case in cases.items():
        counted = sum(measured(shape, *case).values())
        predicted = b["rank_bytes"](s, micro_batch, h, heads, *case)
        measures.append(Measure(name, "B", {"yours": predicted, "measured": counted}))
        b.progress()
    crossover = b["crossover_seq_length"](h, heads)
    remark = f"From s={crossover:,} on, the core attention keeps more than all else in such a layer; GPT-3 has s={s:,}."
    what = "One layer of GPT-3 on one of 8 ranks, as you predict it and as a real layer keeps it"
    return BarsReward(what, tuple(measures), remark, one_scale=True)


#: What attention and MLP keep, in the rows of the formulas; lab 2 has no dropout and leaves out the layer norms.
_BLOCK_TERMS = (
    "QKV projection input", "Q", "K", "softmax output", "V", "attention projection input",
    "h→4h input", "GeLU input", "4h→h input",
)  # fmt: skip


def shape_for(b: Bench) -> ModelShape:
    """Small enough for laptops, with heads for every rank."""
    return ModelShape(
        seq_length=128, micro_batch_size=2, hidden_size=64 * max(4, b.size), num_attention_heads=2 * max(4, b.size)
    )


def _describe(shape: ModelShape, b: Bench, what: str) -> str:
    return f"{what} on rank {b.rank} of {b.size}: {sizes_text(shape)}, bfloat16, t={b.size}"


def lab2_reward(b: Bench) -> BarsReward:
    """Attention and MLP under tensor parallelism."""
    shape, t = shape_for(b), b.size
    weights, x = _weights_and_input(b, shape, shape.seq_length)

    def block(functions: dict):
        def run(y: Tensor, *parameters: Tensor) -> Tensor:
            w = LayerWeights(shape.num_attention_heads, *parameters)
            y = functions["attention"](
                y, w.qkv_weight, w.qkv_bias, w.projection_weight, w.projection_bias, w.num_attention_heads, b.group
            )
            return functions["mlp"](y, w.up_weight, w.up_bias, w.down_weight, w.down_bias, b.group)

        return run

    rows = layer_rows(shape, Parallel(t)) + layer_extra_rows(shape, Parallel(t), device_type=b.device)
    formula = total(row for row in rows if row.term in _BLOCK_TERMS)
    yours, ours = (cost(b, (block(functions), x, weights)) for functions in (b.functions, vars(ours2)))
    measures = compared(yours, ours, formula, layer_exchanges(shape, Parallel(t)))
    remark = "Divided by t: all but the inputs of the two column-parallel linears. Lab 3 is about those."
    return BarsReward(_describe(shape, b, "Attention and MLP, without dropout,"), measures, remark)


def lab3_reward(b: Bench) -> BarsReward:
    """The layer under tensor and sequence parallelism, with the linear that keeps its shard."""
    shape, t = shape_for(b), b.size
    weights, x = _weights_and_input(b, shape, shape.seq_length // t)

    def layer(functions: dict, linear: str = "shard_keeping_linear"):
        generators = [torch.Generator(b.device).manual_seed(seed) for seed in (1, 2)]

        def run(y: Tensor, *parameters: Tensor) -> Tensor:
            w = LayerWeights(shape.num_attention_heads, *parameters)
            return functions["layer"](y, w, Dropouts(0.1, *generators), functions[linear], b.group)

        return run

    parallel = Parallel(t, sequence_parallel=True)
    formula = total(layer_rows(shape, parallel) + layer_extra_rows(shape, parallel, device_type=b.device))
    forms = (layer(b.functions), layer(vars(ours3)), layer(b.functions, "gathering_linear"))
    yours, ours, plain = (cost(b, (form, x, weights)) for form in forms)
    measures = compared(yours, ours, formula, layer_exchanges(shape, parallel))
    remark = (
        f"(sbh/t)(34 + 5as/h) and what the paper leaves out, to the byte. With your gathering_linear it was {plain.bytes:,} B: "
        f"{gathered_input_bytes(shape, t):,} B more are predicted, {plain.bytes - formula:,} B more were kept."
    )
    return BarsReward(_describe(shape, b, "Your layer"), measures, remark if t > 1 else "")


def _weights_and_input(b: Bench, shape: ModelShape, tokens: int) -> tuple[tuple[Tensor, ...], Tensor]:
    h = shape.hidden_size
    weights = random_weights(h, shape.num_attention_heads, dtype=torch.bfloat16, device=b.device).part(b.rank, b.size)
    x = b.random(tokens, shape.micro_batch_size, h, seed=90).bfloat16()
    return tuple(weights.named().values()), x


def lab4_reward(b: Bench) -> BarsReward:
    """One layer without recomputation, with selective, with full: bytes and FLOPs."""
    shape = ModelShape(seq_length=256, micro_batch_size=1, hidden_size=128, num_attention_heads=4)
    sizes = (shape.seq_length, shape.micro_batch_size, shape.hidden_size)
    x, weights = b.random(*sizes, seed=30).bfloat16(), layer_weights(shape, torch.bfloat16, b.device)

    def modes(functions: Functions) -> dict[str, Piece]:
        blocks = {"none": layer, "selective": functions["selective_layer"], "full": functions["full_layer"]}
        return {mode: (as_block(block, shape), x, weights) for mode, block in blocks.items()}

    yours = modes(b.functions)
    formulas = [total(layer_rows(shape, recompute=mode)) + _extra_bytes(shape, mode, b.device) for mode in yours]
    plain, *others = (flops_of(block, x, *weights) for block, _, _ in yours.values())
    more = ", ".join(f"{mode} {100 * (flops / plain - 1):.1f}%" for mode, flops in zip(("selective", "full"), others))
    remark = f"More FLOPs, by torch's counter: {more}. The formula has one random-number state for each region."
    what = f"One layer on {b.device}: {sizes_text(shape)}, bfloat16"
    return BarsReward(what, each_compared(b, yours, modes(vars(ours4)), formulas), remark, one_scale=True)


def _extra_bytes(shape: ModelShape, recompute: str, device: str) -> int:
    """What the paper leaves out, as this lab's layer has it: its mask is made in the core, its dropouts draw from one stream."""
    region = Recompute.of(recompute).region
    if region != "none":
        statistics = [row for row in layer_extra_rows(shape, device_type=device) if "statistics" in row.term]
        return (
            RNG_STATE_BYTES["cpu"]
            + RNG_STATE_BYTES["cuda"] * (device == "cuda")
            + total(statistics) * (region == "core")
        )
    return total(layer_extra_rows(shape, device_type=device))


def lab5_reward(b: Bench) -> BarsReward:
    """The learner's schedules on paper: what each rank holds, how long it takes."""
    p, n, m = 4, 8, 2
    plain, chunked = on_paper(b, p, n), on_paper(b, p, n, m)
    held, places = [], 2
    for rank, count in enumerate(schedule.peak_in_flight(plain)):
        held.append(Measure(f"in flight, rank {rank}", "", {"formula": min(p - rank, n), "yours": count}))
    for rank, actions in enumerate(schedule.one_forward_one_backward(p, n)):
        yours = len(list(b["microbatches_to_keep"](p, rank, n, places)))
        held.append(
            Measure(
                f"whole, rank {rank}", "", {"formula": len(schedule.moving_window(actions, places)), "yours": yours}
            )
        )
    whole = (
        f"Whole: the microbatches that keep everything if {places} places are free for them; the others are recomputed."
    )
    bubbles = ", ".join(
        f"{name} {bubble_of(timeline(ranks))}" for name, ranks in (("1F1B", plain), ("interleaved, m=2,", chunked))
    )
    short = schedule.interleaved(p, m, n, short_warmup=True)
    times = {
        name: [max(span.end for span in timeline(ranks, 4, 8, send)) / 4 for send in (0, 1)]
        for name, ranks in (("yours", chunked), ("short", short))
    }
    shorter = (
        f"A shorter warm-up of (p − r − 1) + (m − 1)p forwards takes {times['short'][0]:g} units of time, yours {times['yours'][0]:g}, and holds "
        f"{schedule.peak_in_flight(short)[0]} chunks on rank 0, yours {schedule.peak_in_flight(chunked)[0]}. If a send takes a quarter of a forward: "
        f"{times['short'][1]:g} and {times['yours'][1]:g}. The longer one hides the sends."
    )
    model = PAPER_MODELS["530B"]
    freed = total(stage_output_rows(model.shape, replace(model.parallel, num_model_chunks=1), 0))
    picture = draw(timeline(on_paper(b, p, p)))
    return BarsReward(
        f"Your 1F1B on {p} ranks, {n} microbatches", tuple(held),
        f"Bubble (idle over working time): {bubbles}.\n{whole}\n{shorter}\nFreeing outputs saves {freed:,} B on rank 0 of the 530B model.\n\n{picture}",
        one_scale=True,
    )  # fmt: skip


def lab6_reward(b: Bench) -> BarsReward:
    """Train under every mode: what one microbatch keeps, and the losses."""
    heads = 2 * max(4, b.size)
    shape = ModelShape(128, 2, 16 * heads, heads, num_layers=2, vocab_size=256)
    text, measures, curves = standard_library(200_000, b.device), [], []
    for mode in TABLE2:
        b.progress(f"mode {mode.name}: {NUM_STEPS} steps")
        curves.append(b["train"](shape, mode, text, NUM_STEPS, b.group, device=b.device))
        kept_bytes = {"formula": _mode_bytes(b, shape, mode), "yours": _kept_bytes(b, shape, mode)}
        measures.append(Measure(f"kept, {mode.name}", "B", kept_bytes))
    apart = max(max(step) - min(step) for step in zip(*curves))
    remark = (
        f"Loss {curves[0][0]:.3f} → {curves[0][-1]:.3f} in {NUM_STEPS} steps; between the modes' curves at most {apart:.1e}.\n"
        "Bytes are of one microbatch in bfloat16 with dropout 0.1; losses are in float32 without dropout."
    )
    if b.size > 1:
        remark += f"\nIn mode none each of the {b.size} ranks trains the whole model. What curves differ by is rounding: in float64 (6.5) nothing."
    what = f"A GPT of {shape.num_layers} layers on rank {b.rank} of {b.size}: {sizes_text(shape)} v={shape.vocab_size}"
    return BarsReward(what, tuple(measures), remark, one_scale=True)


def _mode_bytes(b: Bench, shape: ModelShape, mode: Configuration) -> int:
    """What one microbatch keeps on a rank, by formula, with what the paper leaves out."""
    parallel = mode.parallel(b.size)
    return total(stage_rows(shape, parallel, 0, mode.recompute, device_type=b.device))


def _kept_bytes(b: Bench, shape: ModelShape, mode: Configuration) -> int:
    """What one microbatch keeps on this rank, counted."""
    model = b["make_model"](shape, mode, b.group, dropout=0.1, dtype=torch.bfloat16, device=b.device)
    tokens = torch.zeros(shape.micro_batch_size, shape.seq_length, dtype=torch.int64, device=b.device)
    with record(model) as ledger:
        loss = model.loss(model(tokens), tokens)
    del loss
    return ledger.total_bytes


def lab7_reward(b: Bench) -> BarsReward:
    """The layer with its linears' inputs kept, and with their recipes' sources in place of them."""
    t = b.size
    a = 2 * t * max(1, 4 // t)
    shape = LlamaShape(128, 2, 32 * a, a, most_shared(t), 80 * a)
    tp = tensor_parallel(b.group) if t > 1 else TensorParallel()
    x, weights = b.random(128, 2, shape.hidden_size, seed=40).bfloat16(), _weights(b, shape)

    def forms(functions: Functions) -> dict[str, Piece]:
        inputs_kept = {**functions, "recipe_linear": _keeps_its_input}
        both = {"inputs kept": inputs_kept, "recipes": functions}
        return {form: (_llama_layer(shape, tp, own), x, weights) for form, own in both.items()}

    # Whoever keeps a norm's sources keeps no statistics of it: the recipe makes them again.
    recipes = (row for row in llama_rows(shape, Parallel(t), recompute="elementwise") if "statistics" not in row.term)
    formulas = total(llama_rows(shape, Parallel(t))), total(recipes)
    measures = each_compared(b, forms(b.functions), forms(vars(ours7)), formulas)
    plain: Functions = {
        "rms_norm": _plain_norm,
        "swiglu": lambda gate, up: F.silu(gate) * up,
        "recipe_linear": _keeps_its_input,
    }
    plain_bytes = kept(b, _llama_layer(shape, tp, plain), x, weights).bytes
    remark = f"The same layer out of torch's operators, with the norm in float32, keeps {plain_bytes:,} B."
    what = f"A Llama layer on rank {b.rank} of {t}: s=128 b=2 h={shape.hidden_size} a={shape.num_attention_heads}"
    what += f" k={shape.num_key_value_heads} f={shape.ffn_hidden_size}, bfloat16, t={t}"
    return BarsReward(what, measures, remark)


def _llama_layer(shape: LlamaShape, tp: TensorParallel, functions: Functions) -> Callable[..., Tensor]:
    """Under tensor parallelism, without rotation; Q, K and V from one product, gate and up from another."""
    norm, linear, d = functions["rms_norm"], functions["recipe_linear"], shape.d

    def entered(x: Tensor, weight: Tensor) -> Tensor:
        return f(norm(x, weight, 1e-5), tp)

    def run(x: Tensor, norm1, qkv, projection, norm2, gate_up, down) -> Tensor:
        y = linear(entered, qkv, x, norm1).unflatten(-1, (-1, d)).permute(1, 2, 0, 3)  # [b, heads, s, d]
        q = shape.num_attention_heads // tp.size
        y = attend(*y.split([q, *[(y.shape[1] - q) // 2] * 2], 1))
        x = x + row_parallel(y, projection, tp)
        gate, up = linear(entered, gate_up, x, norm2).chunk(2, -1)
        return x + f_bar(linear(functions["swiglu"], down, gate, up), tp)

    return run


def _keeps_its_input(recipe: Callable[..., Tensor], weight: Tensor, *sources: Tensor) -> Tensor:
    return product(recipe(*sources), weight)


def _plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _weights(b: Bench, shape: LlamaShape) -> tuple[Tensor, ...]:
    h, own, held = shape.hidden_size, shape.hidden_size // b.size, max(1, shape.num_key_value_heads // b.size) * shape.d
    wide = shape.ffn_hidden_size // b.size
    sizes = ((h,), (own + 2 * held, h), (h, own), (h,), (2 * wide, h), (h, wide))
    return tuple((b.random(*size, seed=50 + i) / h**0.5).bfloat16() for i, size in enumerate(sizes))


def lab8_reward(b: Bench) -> BarsReward:
    """The learner's plan of the first job, run on an emulated rank: its bill's lines beside the counted ones."""
    job = next(iter(JOBS))
    model, cluster = asked(job)
    plan = judged_plan(job, b["plan_of"](job))
    b.progress("one emulated rank runs your plan")
    compared = verify_plan(model, plan)
    largest = sorted(compared.matches, key=lambda line: -(line.predicted or 0))[:8]
    measures = [
        Measure(line.term, "B", {"formula": line.predicted or 0, "measured": line.measured or 0}) for line in largest
    ]
    rest = [line for line in compared.matches if line not in largest]
    sums = [sum(getattr(line, side) or 0 for line in rest) for side in ("predicted", "measured")]
    measures.append(Measure(f"{len(rest)} more lines", "B", dict(zip(("formula", "measured"), sums))))
    parts = bill_of(model, plan).by_part()
    remark = (
        f"Of {gib(cluster.usable_bytes)} the plan takes {gib(plan.bytes)}; weights, gradients and optimizer states are "
        f"{gib(sum(parts[part] for part in STATE_PARTS))} of them. Counted: {', '.join(COUNTED_PARTS)}; buffers and the transient come on top."
    )
    return BarsReward(
        f"Your plan of the {job} model, run on one emulated rank", tuple(measures), remark, one_scale=True
    )


def lab9_reward(b: Bench) -> BarsReward:
    """The loss and the log-probabilities of a vocabulary 32 times as wide as the hidden size, in 16 bits."""
    s, micro_batch, h, chunk = 64, 2, 64, 32
    v, tokens = 32 * h * b.size, s * micro_batch
    x, weight = (b.random(*size, seed=60 + i).bfloat16() for i, size in enumerate(((s, micro_batch, h), (v, h))))
    own, logits = b.shards(weight)[b.rank], F.linear(x, weight)
    targets = torch.arange(tokens, device=b.device).view(s, micro_batch)

    def ends(functions: Functions) -> dict[str, Piece]:
        return {
            "the loss": (lambda z: functions["cross_entropy"](z, targets), logits, ()),
            "the loss in chunks": (lambda y, w: functions["linear_cross_entropy"](y, w, targets, chunk), x, (weight,)),
            f"the loss on {b.size} ranks": (
                lambda y, w: functions["parallel_linear_cross_entropy"](y, w, targets, chunk, b.group), x, (own,)
            ),
            "log-probabilities and entropy": (
                lambda z: torch.add(*functions["log_probs_and_entropy"](z, targets, chunk)), logits, ()
            ),
        }  # fmt: skip

    # Beside its large tensor each keeps ids of 8 bytes and one sum a token, the last one the entropy as well.
    formulas = [size * tokens for size in (2 * v + 12, 2 * h + 12, 2 * h + 12, 2 * v + 16)]
    measures = each_compared(b, ends(b.functions), ends(vars(ours9)), formulas)
    plain = kept(b, lambda z: F.cross_entropy(z.float().flatten(0, 1), targets.flatten()), logits).bytes
    remark = f"F.cross_entropy of float32 logits keeps {plain:,} B."
    what = f"The loss on rank {b.rank} of {b.size}: s={s} b={micro_batch} h={h} v={v}, bfloat16, {chunk} tokens a chunk"
    return BarsReward(what, measures, remark)


def lab10_reward(b: Bench) -> BarsReward:
    """A frozen linear, an adapter, an MLP in tiles, and a checkpoint on the host, in 16 bits."""
    s, micro_batch, h, f, r = 128, 2, 64, 256, 4
    x, up, down = (
        b.random(*size, seed=70 + i).bfloat16() for i, size in enumerate(((s, micro_batch, h), (f, h), (h, f)))
    )
    low, back = b.random(r, h, seed=73).float(), b.random(f, r, seed=74).float()
    codes, scale = up.to(torch.int8), torch.ones_like(up[:, :1])

    def pieces(functions: Functions) -> dict[str, Piece]:
        def from_host(y: Tensor, u: Tensor, d: Tensor) -> Tensor:
            return functions["offloading_checkpoint"](lambda z: ours10.mlp(z, u, d), y, CountingHost())

        return {
            "a frozen linear": (lambda y: functions["frozen_linear"](y, codes, scale), x, ()),
            "with an adapter": (lambda y, a, c: functions["lora_linear"](y, up, a, c, 8.0), x, (low, back)),
            "the MLP in tiles": (lambda y, u, d: functions["tiled_mlp"](y, u, d, 16), x, (up, down)),
            "the MLP from the host": (from_host, x, (up, down)),
        }

    formulas = (0, 2 * s * micro_batch * (h + r), 2 * s * micro_batch * h, 0)
    held = (codes, scale, up, down)
    measures = each_compared(b, pieces(b.functions), pieces(vars(ours10)), formulas, held)
    plain = kept(b, ours10.mlp, x, (up, down)).bytes
    remark = f"The MLP out of torch's operators keeps {plain:,} B, 2sbh + 4sbf."
    what = f"Frozen weights, adapters and MLPs: s={s} b={micro_batch} h={h} f={f} r={r}, bfloat16"
    return BarsReward(what, measures, remark)
