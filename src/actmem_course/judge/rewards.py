"""What each lab measures once it is solved: of the learner's functions, beside the formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from actmem.config import PAPER_MODELS, ModelShape, Parallel
from actmem.formulas import schedule
from actmem.formulas.activations import (
    RNG_STATE_BYTES,
    TABLE2,
    Configuration,
    gathered_input_bytes,
    layer_extra_rows,
    layer_rows,
)
from actmem.formulas.communication import Exchange, layer_exchanges
from actmem.formulas.first_stage import stage_output_rows, stage_rows
from actmem.ledger.recorder import record
from actmem.recipes import Recompute
from actmem.rows import total
from actmem_course.judge.case import CaseRun
from actmem_course.judge.cases.lab1_count_bytes import measured
from actmem_course.judge.cases.lab4_recompute import as_block, flops_of, layer_weights
from actmem_course.judge.cases.lab5_pipeline import on_paper
from actmem_course.judge.cases.lab8_plan import STATE_PARTS, asked, gib, judged_plan
from actmem_course.judge.observations import SavedForBackward
from actmem_course.judge.outline import Lab, solution_module
from actmem_course.judge.saved_bytes import saved_bytes
from actmem_course.judge.solutions.lab8_plan import JOBS
from actmem_course.judge.workbench import Bench
from actmem_course.others.timeline import bubble_of, draw, timeline
from actmem_course.reference_layer import Dropouts, LayerWeights, layer, random_weights
from actmem_course.standard_library import standard_library
from actmem_tools.plan.search import bill_of
from actmem_tools.verify import COUNTED_PARTS, verify_plan

#: Who a bar belongs to, and its colour in the terminal.
SIDES = {"formula": "cyan", "measured": "cyan", "ours": "cyan", "yours": "green"}
BAR_WIDTH = 30
#: Of lab 6's training, in each mode.
NUM_STEPS = 8
#: What a reward measures: a function of x and weights.
Piece = tuple[Callable[..., Tensor], Tensor, Sequence[Tensor]]


@dataclass(frozen=True)
class Measure:
    """One quantity.  values: by side, see SIDES.  unit: ``B``, or nothing for a number."""

    name: str
    values: Mapping[str, int]
    unit: str = "B"


@dataclass(frozen=True)
class BarsReward:
    """Each quantity as bars, of which those of one unit have one scale; below them a remark.  what: in a line, what
    was measured."""

    what: str
    measures: Sequence[Measure]
    remark: str = ""

    def show(self, console: Console) -> None:
        """In the terminal: each bar with its measure's name, whose it is, and its value."""
        lines = []
        for measure in self.measures:
            top = max(max(other.values.values()) for other in self.measures if other.unit == measure.unit) or 1
            for i, (side, value) in enumerate(measure.values.items()):
                lines.append(("" if i else measure.name, side, value / top, f"{value:,} {measure.unit}".rstrip()))
        names, sides, _, texts = zip(*lines)
        left = console.width - sum(max(map(len, column)) + 1 for column in (names, sides, texts))
        width = max(6, min(BAR_WIDTH, left))
        table = Table.grid(padding=(0, 1))
        for _ in range(4):
            table.add_column(no_wrap=True)
        for i, (name, side, share, text) in enumerate(lines):
            if name and i:
                table.add_row()
            bar = "━" * max(1, round(width * share)) if share else ""
            table.add_row(Text(name), side, Text(bar, style=SIDES[side]), Text(text))
        console.print()
        console.print(Text(self.what, style="bold"))
        console.print(table)
        if self.remark:
            console.print(Text(self.remark))


def _sizes(shape: ModelShape) -> str:
    """A layer's sizes in the paper's letters."""
    a, b, h, s = shape.letters()
    return f"s={s} b={b} h={h} a={a}"


def _saved(
    b: Bench, pieces: Mapping[str, Piece], formulas: Iterable[int], others: Sequence[Tensor] = ()
) -> list[Measure]:
    """What each piece keeps.  formulas: the bytes of each, in the order of the pieces.  others: as in ``kept``."""
    return [
        Measure(f"saved, {name}", {"formula": formula, "yours": saved_bytes(b, *piece, others).bytes})
        for (name, piece), formula in zip(pieces.items(), formulas)
    ]


def _block(b: Bench, piece: Piece, formula_bytes: int, exchanges: Sequence[Exchange]) -> list[Measure]:
    """What a block keeps and exchanges on this rank.  exchanges: those that the formula has for it.  Every rank must
    call it."""
    function, x, weights = piece
    measures = _saved(b, {"for backward": piece}, [formula_bytes])
    with b.watching() as seen:
        y = function(x.detach().clone().requires_grad_(), *(w.detach().clone().requires_grad_() for w in weights))
        y.backward(torch.ones_like(y))
    b.progress()
    if exchanges:
        sent = sum(c.payload_bytes for c in seen.collectives)
        measures += [
            Measure("sent", {"formula": sum(e.payload_bytes * e.count for e in exchanges), "yours": sent}),
            Measure("collectives", {"formula": sum(e.count for e in exchanges), "yours": len(seen.collectives)}, ""),
        ]
    return measures


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
        measures.append(Measure(name, {"yours": predicted, "measured": counted}))
        b.progress()
    crossover = b["crossover_seq_length"](h, heads)
    remark = f"From s={crossover:,} on, the core attention saves more than the rest of such a layer; GPT-3 has s={s:,}."
    what = "One layer of GPT-3 on one of 8 ranks, as you predict it and as a real layer keeps it"
    return BarsReward(what, measures, remark)


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
    return f"{what} on rank {b.rank} of {b.size}: {_sizes(shape)}, bfloat16, t={b.size}"


def lab2_reward(b: Bench) -> BarsReward:
    """Attention and MLP under tensor parallelism."""
    shape, t = shape_for(b), b.size
    weights, x = _weights_and_input(b, shape, shape.seq_length)

    def block(y: Tensor, *parameters: Tensor) -> Tensor:
        w = LayerWeights(shape.num_attention_heads, *parameters)
        y = b["attention"](
            y, w.qkv_weight, w.qkv_bias, w.projection_weight, w.projection_bias, w.num_attention_heads, b.group
        )
        return b["mlp"](y, w.up_weight, w.up_bias, w.down_weight, w.down_bias, b.group)

    rows = layer_rows(shape, Parallel(t)) + layer_extra_rows(shape, Parallel(t), device_type=b.device)
    formula = total(row for row in rows if row.term in _BLOCK_TERMS)
    measures = _block(b, (block, x, weights), formula, layer_exchanges(shape, Parallel(t)))
    remark = "Divided by t: all but the inputs of the two column-parallel linears. Lab 3 is about those."
    return BarsReward(_describe(shape, b, "Attention and MLP, without dropout,"), measures, remark)


def lab3_reward(b: Bench) -> BarsReward:
    """The layer under tensor and sequence parallelism, with the linear that keeps its shard."""
    shape, t = shape_for(b), b.size
    weights, x = _weights_and_input(b, shape, shape.seq_length // t)

    def layer_with(linear: str) -> Callable[..., Tensor]:
        generators = [torch.Generator(b.device).manual_seed(seed) for seed in (1, 2)]

        def run(y: Tensor, *parameters: Tensor) -> Tensor:
            w = LayerWeights(shape.num_attention_heads, *parameters)
            return b["layer"](y, w, Dropouts(0.1, *generators), b[linear], b.group)

        return run

    parallel = Parallel(t, sequence_parallel=True)
    formula = total(layer_rows(shape, parallel) + layer_extra_rows(shape, parallel, device_type=b.device))
    exchanges = layer_exchanges(shape, parallel)
    measures = _block(b, (layer_with("shard_keeping_linear"), x, weights), formula, exchanges)
    plain = saved_bytes(b, layer_with("gathering_linear"), x, weights).bytes
    remark = (
        f"(sbh/t)(34 + 5as/h) and what the paper leaves out, to the byte. With gathering_linear it was {plain:,} B: "
        f"{gathered_input_bytes(shape, t):,} B more are predicted, {plain - formula:,} B more were saved."
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

    blocks = {"none": layer, "selective": b["selective_layer"], "full": b["full_layer"]}
    modes: dict[str, Piece] = {mode: (as_block(block, shape), x, weights) for mode, block in blocks.items()}
    formulas = [total(layer_rows(shape, recompute=mode)) + _extra_bytes(shape, mode, b.device) for mode in modes]
    plain, *others = (flops_of(block, x, *weights) for block, _, _ in modes.values())
    more = ", ".join(f"{mode} {100 * (flops / plain - 1):.1f}%" for mode, flops in zip(("selective", "full"), others))
    remark = f"More FLOPs, by torch's counter: {more}. The formula has one random-number state for each region."
    what = f"One layer on {b.device}: {_sizes(shape)}, bfloat16"
    return BarsReward(what, _saved(b, modes, formulas), remark)


def _extra_bytes(shape: ModelShape, recompute: str, device: str) -> int:
    """What the paper leaves out, as this lab's layer has it: its mask is made in the core, its dropouts draw from
    one stream."""
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
        held.append(Measure(f"in flight, rank {rank}", {"formula": min(p - rank, n), "yours": count}, ""))
    for rank, actions in enumerate(schedule.one_forward_one_backward(p, n)):
        yours = len(list(b["microbatches_to_keep"](p, rank, n, places)))
        kept_whole = {"formula": len(schedule.moving_window(actions, places)), "yours": yours}
        held.append(Measure(f"whole, rank {rank}", kept_whole, ""))
    whole = (
        f"Whole: the microbatches that keep everything if {places} places are free for them; the others are recomputed."
    )
    bubbles = ", ".join(
        f"{name} {bubble_of(timeline(ranks))}" for name, ranks in (("1F1B", plain), ("interleaved, m=2,", chunked))
    )
    model = PAPER_MODELS["530B"]
    freed = total(stage_output_rows(model.shape, replace(model.parallel, num_model_chunks=1), 0))
    picture = draw(timeline(on_paper(b, p, p)))
    return BarsReward(
        f"Your 1F1B on {p} ranks, {n} microbatches", held,
        f"Bubble (idle over working time): {bubbles}.\n{whole}\n"
        f"Freeing outputs saves {freed:,} B on rank 0 of the 530B model.\n\n{picture}",
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
        measures.append(Measure(f"saved, {mode.name}", kept_bytes))
    apart = max(max(step) - min(step) for step in zip(*curves))
    remark = (
        f"Loss {curves[0][0]:.3f} → {curves[0][-1]:.3f} in {NUM_STEPS} steps; "
        f"between the modes' curves at most {apart:.1e}.\n"
        "Bytes are of one microbatch in bfloat16 with dropout 0.1; losses are in float32 without dropout."
    )
    if b.size > 1:
        remark += (
            f"\nIn mode none each of the {b.size} ranks trains the whole model. "
            "What curves differ by is rounding: in float64 (6.5) nothing."
        )
    what = f"A GPT of {shape.num_layers} layers on rank {b.rank} of {b.size}: {_sizes(shape)} v={shape.vocab_size}"
    return BarsReward(what, measures, remark)


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


def lab8_reward(b: Bench) -> BarsReward:
    """The learner's plan of the first job, run on an emulated rank: its bill's lines beside the counted ones."""
    job = next(iter(JOBS))
    model, cluster = asked(job)
    plan = judged_plan(job, b["plan_of"](job))
    b.progress("one emulated rank runs your plan")
    compared = verify_plan(model, plan)
    largest = sorted(compared.matches, key=lambda line: -(line.predicted or 0))[:8]
    measures = [
        Measure(line.term, {"formula": line.predicted or 0, "measured": line.measured or 0}) for line in largest
    ]
    rest = [line for line in compared.matches if line not in largest]
    sums = [sum(getattr(line, side) or 0 for line in rest) for side in ("predicted", "measured")]
    measures.append(Measure(f"{len(rest)} more lines", dict(zip(("formula", "measured"), sums))))
    parts = bill_of(model, plan).by_part()
    remark = (
        f"Of {gib(cluster.usable_bytes)} the plan takes {gib(plan.bytes)}; weights, gradients and optimizer states are "
        f"{gib(sum(parts[part] for part in STATE_PARTS))} of them. Counted: {', '.join(COUNTED_PARTS)}; "
        "buffers and the transient come on top."
    )
    return BarsReward(f"Your plan of the {job} model, run on one emulated rank", measures, remark)


def kept_reward(lab: Lab, b: Bench) -> BarsReward:
    """Of the other labs: what each function keeps where its case counts it, beside ours."""
    measures = []
    for exercise in lab.exercises:
        yours, ours = CaseRun(b), CaseRun(b.with_functions(vars(solution_module(lab.name))))
        for run in (yours, ours):
            exercise.check(run)
            b.progress()
        for name, seen in ours.seen.items():
            if isinstance(seen, SavedForBackward):
                sides = {"ours": seen.value.bytes, "yours": yours.seen[name].value.bytes}
                measures.append(Measure(f"{exercise.number} {name.replace('bytes', exercise.function)}", sides))
    return BarsReward(f"What your functions save for backward on rank {b.rank} of {b.size}, beside ours", measures)


def reward_of(lab: Lab, b: Bench) -> BarsReward:
    """What is measured once all exercises are passed; called on every rank."""
    own = {
        "lab1_count_bytes": lab1_reward,
        "lab2_tensor_parallel": lab2_reward,
        "lab3_sequence_parallel": lab3_reward,
        "lab4_recompute": lab4_reward,
        "lab5_pipeline": lab5_reward,
        "lab6_train": lab6_reward,
        "lab8_plan": lab8_reward,
    }.get(lab.name)
    return own(b) if own else kept_reward(lab, b)
