"""Chapters 8 to 10: what today's layers keep, every choice of what to run again, and a model of one's own on the wall."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from actmem.config import ConfigError, ModelShape, Parallel
from actmem.formulas.activations import layer_rows
from actmem.formulas.flops import layer_overhead
from actmem.formulas.llama_terms import llama_rows
from actmem.llama_shape import LlamaShape
from actmem.plan.actions import LayerChoice, PricedLayer, Rates, choices, frontier, recompute_choices
from actmem.plan.plan_report import layout_text, plan_text
from actmem.plan.planned_models import PlannedModel, planned_model_of
from actmem.plan.rank_bill import Bill, rank_bill
from actmem.plan.search import bill_of, find_plans
from actmem.plan.step_time import DEVICES, GIBIBYTE, PRODUCT_SHARE, Cluster
from actmem.rows import Row, total
from actmem_course.others.others_keep import OTHERS, bytes_of_other
from actmem_course.show.bar_chart import bar_chart
from actmem_course.show.marks import STACKED, Axis, Drawing, bars, chart, downwards, points, scale
from actmem_course.show.memory_wall import limit
from actmem_course.show.style import (
    BLUE,
    FILLS,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    Fill,
    axis_end,
    axis_unit,
    size_text,
)

#: Mode → its words.
_BARS = {
    "none": "keep everything",
    "selective": "selective: core again",
    "elementwise": "elementwise: no product again",
    "full": "full: all again",
}
_NORMED_HEADS = ("Q", "K", "Q latent", "KV latent")
_KINDS = {
    "norm inputs": ("layer-norm input", ("norm 1 input", "norm 2 input")),
    "inputs of linears": (
        "input of a linear",
        (
            *("QKV projection input", "Q up-projection input", "KV up-projection input", "attention projection input"),
            *("gate and up input", "router input", "down input", "shared down input"),
        ),
    ),
    "Q, K, V": ("Q, K, V", ("Q", "K", "V")),
    "gate and up": ("GeLU input", ("gate", "up", "shared gate", "shared up")),
    "log-sum-exp": ("softmax", ("log-sum-exp",)),
    "Q, K before their norms": ("layer-norm input", ("Q before its norm", "K before its norm")),
    "latents": ("layer-norm input", ("Q latent", "KV latent")),
    "who goes to which expert": (
        "dropout mask",
        ("chosen experts", "routing weights", "dispatch order", "dispatched weights"),
    ),
    "statistics": (
        "extra",
        tuple(f"{name} statistics" for name in ("norm 1", "norm 2", *(f"{x} norm" for x in _NORMED_HEADS))),
    ),
}
#: Parts of today's layer, and the first words of the MLP's terms.
_PART_FILLS = {"norm": Fill(GREEN, "/"), "attention": Fill(BLUE, ""), "MLP": Fill(VERMILION, "x")}
_MLP = ("gate", "up", "down", "router", "chosen", "routing", "dispatch", "dispatched")
_NAMED = ("none", "selective", "elementwise", "full")
#: Parts of a bill, from the left; what frees bytes again is added to the transient.
PLAN_FILLS = {
    "weights": Fill(GREEN, ""),
    "gradients": Fill(SKY, "-"),
    "optimizer states": Fill(BLUE, "", "#FFFFFF"),
    "activations": Fill(VERMILION, "/"),
    "logits and loss": Fill(ORANGE, "x"),
    "communication buffers": Fill(PURPLE, "."),
    "transient": Fill(YELLOW, "+"),
}


def kept_today(shape: LlamaShape, parallel: Parallel = Parallel(), modes: Sequence[str] = tuple(_BARS)) -> Drawing:
    """What a layer of a Llama keeps: a bar a mode, stacked by kind of tensor; bytes of one layer on one rank in 16 bits.

    modes: those that are drawn; the others' places stay empty.
    """
    rows = {mode: {row.term: row.bytes for row in llama_rows(shape, parallel, mode)} for mode in _BARS}
    totals = {mode: total(llama_rows(shape, parallel, mode)) for mode in _BARS}
    unit, name = axis_unit(totals["none"])
    saved = {mode: 1 - totals[mode] / totals["none"] for mode in _BARS}
    beside = {"showarrow": False, "xanchor": "left"}
    finding = f"Selective recomputation frees {saved['selective']:.1%} of a Llama layer,<br>and what needs no product {saved['elementwise']:.0%}"
    if "selective" not in modes:
        finding = f"A Llama layer keeps {size_text(totals['none'])}"
    drawn = {mode: words for mode, words in _BARS.items() if mode in modes}
    return chart(
        finding,
        [
            bars(
                kind, drawn.values(), [sum(rows[mode].get(term, 0) for term in terms) / unit for mode in drawn], FILLS[fill],
                f"{kind}: %{{x:.3f}} {name}",
            )
            for kind, (fill, terms) in _KINDS.items()
            if rows["none"].keys() & set(terms)
        ],
        "Bars, bytes kept by one layer: " + ", ".join(f"{bar} {size_text(totals[mode])}" for mode, bar in drawn.items()) + ".",
        Axis(f"kept by one layer on one rank ({name})", axis_end(1.2 * totals["none"] / unit), unit),
        barmode="stack",
        yaxis=downwards(_BARS.values(), range=[-0.5, len(_BARS) - 0.5]),
        height=440,
        annotations=[
            {"x": totals[mode] / unit, "y": bar, "text": f" {size_text(totals[mode])}", **beside} for mode, bar in drawn.items()
        ],
    )  # fmt: skip


def llama_bars(shape: LlamaShape, recompute: str = "none") -> Drawing:
    """A bar for each term of ``llama_rows`` in forward order, and one for all; the axis counts inputs of the layer, 2sbh bytes each."""
    rows = [row for row in llama_rows(shape, recompute=recompute) if row.bytes]
    once = 2 * shape.seq_length * shape.micro_batch_size * shape.hidden_size
    kept = total(rows)
    sizes = ", ".join(f"{row.term} {row.bytes:,}" for row in rows)
    sizes_of = f"s={shape.seq_length}, h={shape.hidden_size}, f={shape.ffn_hidden_size}, k={shape.num_key_value_heads}"

    def bar(row: Row) -> dict:
        first = row.term.split()[0]
        block = "norm" if first == "norm" else "MLP" if first in _MLP else "attention"
        hover = f"<b>{row.term}</b>, {block}: {row.bytes:,} B<br>{row.source}"
        fill, text = _PART_FILLS[block], [size_text(row.bytes)]
        return bars(row.term, [row.term], [row.bytes / once], fill, hover, text, "auto")

    together = f"<b>together</b>: {kept:,} B"
    return chart(
        f"At the floor the layer keeps {size_text(kept)}: {kept / once:.1f} times its input",
        [
            bars(
                "together", ["together"], [kept / once], Fill(INK, "", "#FFFFFF"), together, [size_text(kept)], "auto"
            ),
            *map(bar, rows),
        ],
        f"Bars of what one layer keeps at {sizes_of}: {kept:,} bytes; {sizes}.",
        Axis("bytes kept, as multiples of the layer's input", axis_end(kept / once), once),
        height=max(420, 90 + 30 * len(rows)),
        bargap=0.25,
        showlegend=False,
        yaxis=downwards(("together", *(row.term for row in rows)), automargin=True),
        margin={"t": 60},
    )


def others_bars(shape: LlamaShape) -> Drawing:
    """What one layer of each implementation without stored scores keeps of a Llama's sizes in 16 bits, in sbh, ours last."""
    layers = [layer for layer in OTHERS if layer.dtype == "bfloat16" and "experts" not in layer.name]
    sbh = shape.seq_length * shape.micro_batch_size * shape.hidden_size
    kept = {layer.name: bytes_of_other(layer, shape) for layer in layers if "as²b" not in layer.formula}
    why = {layer.name: f"{layer.formula}<br>{'<br>'.join(wrap(layer.why, 60))}" for layer in layers}
    longest, shortest = max(kept.values()), min(kept.values())
    return chart(
        f"The same sizes, {longest / sbh:.0f} sbh or {shortest / sbh:.0f}: the code decides",
        [
            bars(name, [name], [size / sbh], _PART_FILLS["norm" if name.startswith("ours") else "MLP"],
                 f"<b>{name}</b>: {size:,} B<br>{why[name]}", [f"{size / sbh:.1f}"], "auto")
            for name, size in kept.items()
        ],
        "Bars, sbh that one layer keeps: " + ", ".join(f"{name} {size / sbh:.1f}" for name, size in kept.items()) + ".",
        Axis("bytes kept, as multiples of sbh", axis_end(longest / sbh), sbh),
        height=320,
        bargap=0.25,
        showlegend=False,
        yaxis=downwards(kept, automargin=True),
        margin={"t": 60},
    )  # fmt: skip


def frontier_figure(shape: ModelShape, gigabytes: int = 25) -> Drawing:
    """What a layer can keep for how much more time, and the lines that nothing beats; 16 bits, one A100.

    x: time added to the layer's forward and backward, in percent: products that run again, and copies that computing
    can't hide.  y: bytes kept on the device, in sbh.  gigabytes: that the link to the host takes a second, each way.
    """
    sbh = shape.seq_length * shape.micro_batch_size * shape.hidden_size
    layer = PricedLayer.of(shape)
    rate = DEVICES["a100"].flops_per_second * PRODUCT_SHARE
    rates = Rates(rate, gigabytes * 1e9, sum(layer.flops.values()) / rate)
    recompute = recompute_choices(layer)
    added = {mode: float(100 * layer_overhead(shape, mode)) for mode in _NAMED}
    kept = {mode: total(layer_rows(shape, recompute=mode)) / sbh for mode in _NAMED}
    hover = "+%{x:.2f}% time, %{y:.1f} sbh"

    def share(choice: LayerChoice) -> float:
        return 100 * choice.seconds(rates) / (3 * rates.forward)

    def said(choice: LayerChoice) -> str:
        parts = [f"{', '.join(choice.products) or 'no product'} again"]
        for action in ("offload", "compress"):
            terms = ", ".join(term for term, chosen in choice.actions.items() if chosen == action)
            parts += [f"{action}: {terms}"] if terms else []
        return "<br>".join(line for part in parts for line in wrap(part, 60))

    def of(name: str, chosen: list[LayerChoice], colour: str, **look: Any) -> dict:
        place = [share(choice) for choice in chosen], [choice.bytes / sbh for choice in chosen]
        return points(
            name, *place, colour, f"%{{customdata}}<br>{hover}", customdata=[said(one) for one in chosen], **look
        )

    def line(name: str, colour: str, symbol: str, *allowed: str) -> dict:
        best = frontier(choices(layer, ("recompute", *allowed)), share)
        best = [choice for choice in best if share(choice) <= 34]
        look = {"mode": "lines+markers", "line": {"color": colour}, "marker": {"size": 9, "symbol": symbol}}
        return of(name, best, colour, **look)

    lines = {
        "recompute": line("recompute", VERMILION, "circle"),
        "or offload": line("or offload", GREEN, "square", "offload"),
        "or compress": line("or compress", PURPLE, "triangle-up", "offload", "compress"),
    }
    free = {name: trace["y"][0] for name, trace in lines.items()}
    return chart(
        f"Without any more time a layer keeps {free['recompute']:.0f} sbh; {free['or offload']:.0f} with a host<br>"
        f"at {gigabytes} GB/s, {free['or compress']:.0f} if the rest is rounded to 8 bits",
        [
            of("every set of products", recompute, BLUE, marker={"color": BLUE, "size": 6, "symbol": "circle-open"}),
            *lines.values(),
            points(
                "the named modes", added.values(), kept.values(), INK, f"%{{text}}: {hover}", mode="markers+text", text=list(_NAMED),
                textposition="top right", marker={"color": INK, "symbol": "diamond", "size": 10}, cliponaxis=False,
            ),
        ],
        "Points, percent of time added and sbh kept: "
        + ", ".join(f"{mode} {added[mode]:.2f} and {kept[mode]:.1f}" for mode in _NAMED)
        + "; kept for no time: " + ", ".join(f"{name} {size:.1f}" for name, size in free.items()) + ".",
        xaxis=scale("time added to the layer (%)", -1, 34),
        yaxis=scale("kept on the device (sbh)", 0, 1.15 * kept["none"]),
        height=480,
    )  # fmt: skip


def plan_of_request(model: PlannedModel, cluster: Cluster, global_batch_size: int) -> tuple[Bill | None, str, bool]:
    """The bill of the fastest plan or, if none fits, of the nearest; what it is in words; whether it fits."""
    try:
        found = find_plans(model, cluster, global_batch_size, 1)
    except ConfigError as error:
        return None, str(error), False
    if found.plans:
        best = found.plans[0]
        return bill_of(model, best), f"{plan_text(best)}: {best.seconds.total:,.1f} s a step", True
    near = found.nearest[0]
    bill = rank_bill(model, near.layout, near.recompute, near.num_microbatches, near.pipeline_rank)
    return bill, f"nothing fits; nearest: {layout_text(near.layout)}, {near.recompute}", False


#: Of a step, in the figure of plans.
_SEQUENCES = 512


def plan_wall(name: str, memory: int, gpus: Sequence[int] = (16, 64, 256)) -> Drawing:
    """A bar for each number of GPUs: the fullest rank's bill by part, against the memory of one GPU in GiB."""
    model = planned_model_of(name)
    plans = {f"{count:,} GPUs": plan_of_request(model, Cluster(count, memory * GIBIBYTE), _SEQUENCES) for count in gpus}
    traces = []
    for part, fill in PLAN_FILLS.items():
        sizes = [bill.by_part().get(part, 0) if bill else 0 for bill, _, _ in plans.values()]
        if any(sizes):
            hover = f"<b>%{{y}}</b>, {part}: %{{customdata}}"
            said = [f"{size_text(size)}<br>{plan}" for size, (_, plan, _) in zip(sizes, plans.values())]
            traces.append(bars(part, plans, [max(size, 0) / GIBIBYTE for size in sizes], fill, hover, customdata=said))
    across, beyond = limit(f"{memory} GiB", memory, len(plans))
    fitting = ", ".join(count for count, (_, _, fits) in plans.items() if fits)
    verdict = f"fits on {fitting or 'none of them'}"
    largest = max([memory, *(bill.bytes / GIBIBYTE for bill, _, _ in plans.values() if bill)])
    return chart(
        f"{model.name} with {memory} GiB a GPU {verdict}",
        [*traces, across],
        f"Stacked bars of {model.name}, {memory} GiB a GPU; it {verdict}. "
        + "; ".join(f"{count}: {plan}" for count, (_, plan, _) in plans.items())
        + ".",
        bargap=0.35,
        xaxis=scale("fullest GPU of the fastest plan, GiB", 0, 1.05 * largest),
        yaxis={"autorange": "reversed"},
        yaxis2=beyond,
        margin={"b": 130},
        **STACKED,
    )


#: What to change if a plan doesn't fit: words, sizes in Layout, mode.  Each is one change of what the figure starts from.
_AID: dict[str, tuple[dict[str, int], str]] = {
    "sequence parallelism": ({"sequence_parallel": True}, "none"),
    "one sequence a microbatch": ({"micro_batch_size": 1}, "none"),
    "what needs no product again (elementwise)": ({}, "elementwise"),
    "everything again (full)": ({}, "full"),
    "divide gradients too (ZeRO-2)": ({"zero_stage": 2}, "none"),
    "divide weights too (ZeRO-3)": ({"zero_stage": 3}, "none"),
    "twice the pipeline stages, half the replicas": ({"pipeline_parallel_size": 4, "data_parallel_size": 2}, "none"),
    "two ranks a sequence, half the replicas": ({"context_parallel_size": 2, "data_parallel_size": 2}, "none"),
}
_START: dict[str, int] = {
    "tensor_parallel_size": 8, "pipeline_parallel_size": 2, "data_parallel_size": 4, "context_parallel_size": 1,
    "num_model_chunks": 1, "micro_batch_size": 2, "sequence_parallel": False, "zero_stage": 1,
}  # fmt: skip


def first_aid(name: str, memory: int) -> Drawing:
    """It doesn't fit: what each single change frees on the fullest GPU, and what it costs a step; the cheapest on top.

    From one plain layout of 64 GPUs with ``memory`` GiB each.  Bytes and seconds are the planner's.
    """
    model = planned_model_of(name)
    plans = {}
    for words, (sizes, mode) in {"": ({}, "none"), **_AID}.items():
        if "context_parallel_size" in sizes and not model.context_parallel:
            continue
        # With room for everything, so that also what does not fit has its seconds.
        roomy = Cluster(64, 100 * memory * GIBIBYTE)
        plans[words] = find_plans(model.with_modes([mode]), roomy, _SEQUENCES, 1, {**_START, **sizes}, False).plans[0]
    start = plans.pop("")
    freed = {words: start.bytes - plan.bytes for words, plan in plans.items()}
    slower = {words: plan.seconds.total / start.seconds.total - 1 for words, plan in plans.items()}
    helps = sorted((words for words in plans if freed[words] > 0), key=lambda words: slower[words] / freed[words])
    over = start.bytes - Cluster(64, memory * GIBIBYTE).usable_bytes
    room = f"{size_text(over)} too much" if over > 0 else f"fits, with {size_text(-over)} to spare"
    return bar_chart(
        f"{model.name}, {layout_text(start.layout)}: {room}.<br>From the top: time for each GiB, cheapest first",
        {"freed": {f"{words}: {100 * slower[words]:+.1f}% time": freed[words] for words in helps}},
        "freed on the fullest GPU",
    )
