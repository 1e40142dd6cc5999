"""Chapters 8 to 10: what today's layers keep, every choice of what to run again, and a model of one's own on the wall."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from itertools import product
from pathlib import Path
from textwrap import wrap
from typing import Any

from actmem.config import ModelShape, Parallel
from actmem.formulas.activations import layer_rows
from actmem.formulas.flops import layer_overhead
from actmem.rows import total
from actmem_course.others.others_keep import FRAMEWORKS, OTHERS, bytes_of_other
from actmem_course.show.bar_chart import bar_chart
from actmem_course.show.marks import Drawing, chart, points, scale
from actmem_course.show.style import BLUE, FILLS, GREEN, INK, PAINT, PURPLE, VERMILION, Fill, size_text
from actmem_more.actions import LayerChoice, PricedLayer, Rates, choices, frontier, recompute_choices
from actmem_more.llama_shape import LlamaShape
from actmem_more.llama_terms import forced_routed_tokens, llama_rows
from actmem_tools.plan.plan_report import layout_text, plan_text
from actmem_tools.plan.planned_models import planned_model_of
from actmem_tools.plan.search import Plan, bill_of, find_plans
from actmem_tools.plan.step_time import DEVICES, GIBIBYTE, PRODUCT_SHARE, Cluster

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
_PART_FILLS = {"norm": PAINT["green"], "attention": PAINT["blue"], "MLP": PAINT["red"]}
_MLP = ("gate", "up", "down", "router", "chosen", "routing", "dispatch", "dispatched")
_ROUTED = ("dispatched weights", "gate", "up", "down input")  # of experts: as much for each pair
_NAMED = ("none", "selective", "elementwise", "full")
#: Parts of a bill, from the left; what frees bytes again is added to the transient.
PLAN_FILLS = {
    "weights": PAINT["green"],
    "gradients": PAINT["sky"],
    "optimizer states": PAINT["blue"],
    "activations": PAINT["red"],
    "logits and loss": PAINT["orange"],
    "communication buffers": PAINT["purple"],
    "transient": PAINT["yellow"],
}


def kept_today(shape: LlamaShape, parallel: Parallel = Parallel(), modes: Sequence[str] = tuple(_BARS)) -> Drawing:
    """What a layer of a Llama keeps: a bar a mode, stacked by kind of tensor; bytes of one layer on one rank in 16 bits.

    modes: those that are drawn; the others' places stay empty.
    """
    rows = {mode: {row.term: row.bytes for row in llama_rows(shape, parallel, mode)} for mode in _BARS}
    totals = {mode: sum(each.values()) for mode, each in rows.items()}
    saved = {mode: 1 - totals[mode] / totals["none"] for mode in _BARS}
    finding = f"Selective recomputation frees {saved['selective']:.1%} of a Llama layer,<br>and what needs no product {saved['elementwise']:.0%}"
    if "selective" not in modes:
        finding = f"A Llama layer keeps {size_text(totals['none'])}"
    kinds = {kind: of for kind, of in _KINDS.items() if rows["none"].keys() & set(of[1])}
    parts = {
        kind: {
            bar: sum(rows[mode].get(term, 0) for term in terms) if mode in modes else None
            for mode, bar in _BARS.items()
        }
        for kind, (_, terms) in kinds.items()
    }
    return bar_chart(
        finding,
        parts,
        "kept by one layer on one rank",
        fills=[FILLS[fill] for fill, _ in kinds.values()],
        notes={bar: "?" for mode, bar in _BARS.items() if mode not in modes},
    )


def llama_bars(shape: LlamaShape, recompute: str = "none") -> Drawing:
    """A bar for each term of ``llama_rows`` in forward order, and one for all, in inputs of the layer, 2sbh bytes each."""
    rows = [row for row in llama_rows(shape, recompute=recompute) if row.bytes]
    once = 2 * shape.seq_length * shape.micro_batch_size * shape.hidden_size
    kept = total(rows)
    parts: dict[str, dict[str, float]] = {"together": {"together": kept / once}, **{part: {} for part in _PART_FILLS}}
    for row in rows:
        first = row.term.split()[0]
        parts["norm" if first == "norm" else "MLP" if first in _MLP else "attention"][row.term] = row.bytes / once
    what = "With nothing recomputed the layer" if recompute == "none" else f"With {recompute} recomputation it"
    return bar_chart(
        f"{what} keeps {size_text(kept)}: {kept / once:.1f} times its input",
        parts,
        "kept by one layer",
        "times its input",
        fills=[Fill(INK, "", "#FFFFFF"), *_PART_FILLS.values()],
        order=["together", *(row.term for row in rows)],
        notes={"together": size_text(kept), **{row.term: size_text(row.bytes) for row in rows}},
        about={row.term: f"{row.bytes:,} B<br>{row.source}" for row in rows},
    )


def others_bars(shape: LlamaShape) -> Drawing:
    """What a Llama layer of each implementation without stored scores keeps in 16 bits, in sbh, ours last."""
    compiled = [layer for layer in FRAMEWORKS if layer.name == "torchtitan's style, torch.compile"]
    llamas = [layer for layer in OTHERS if "experts" not in layer.name and "GPT-2" not in layer.name]
    layers = [layer for layer in compiled + llamas if layer.dtype == "bfloat16" and "as²b" not in layer.formula]
    layers.sort(key=lambda layer: -bytes_of_other(layer, shape))
    sbh = shape.seq_length * shape.micro_batch_size * shape.hidden_size
    kept = {layer.name: bytes_of_other(layer, shape) / sbh for layer in layers}
    return bar_chart(
        f"A Llama layer keeps {kept['Hugging Face Llama, sdpa']:.0f} sbh or {kept['ours']:.0f}: the code decides",
        {who: {name: size for name, size in kept.items() if name.startswith("ours") == (who == "ours")} for who in ("others", "ours")},
        "kept by one layer",
        "sbh",
        fills=[_PART_FILLS["MLP"], _PART_FILLS["norm"]],
        about={layer.name: f"{layer.formula}<br>{'<br>'.join(wrap(layer.why, 60))}" for layer in layers},
    )  # fmt: skip


def routed_bars(shape: LlamaShape, t: int, routings: Sequence[str] = ("even", "one-sided")) -> Drawing:
    """What a layer with experts keeps on the fullest of t ranks, by how its router spreads the tokens; others' places stay empty."""
    parallel = Parallel(t, t > 1)
    parts: dict[str, dict[str, float | None]] = {"experts": {}, "the rest": {}}
    for routing in ("even", "one-sided"):
        tokens = forced_routed_tokens(shape, parallel, routing, 0)
        rows, shown = llama_rows(shape, parallel, routed_tokens=tokens), routing in routings
        name = f"{routing} router" + f": {tokens:,} pairs" * shown
        experts = total(row for row in rows if row.term in _ROUTED)
        parts["experts"][name], parts["the rest"][name] = (experts, total(rows) - experts) if shown else (None, None)
    each = f"Even routing: each of {t} ranks keeps" if t > 1 else "One rank keeps"
    title = f"{each} {size_text(total(llama_rows(shape, parallel)))}"
    if "one-sided" in routings:
        title = f"One of {t} ranks takes all tokens, and must have room for them" if t > 1 else (
            "One rank takes all tokens, whatever the router does"
        )  # fmt: skip
    return bar_chart(title, parts, f"kept by one layer on the fullest of {t} ranks")


@lru_cache(maxsize=32)
def _choices_of(shape: ModelShape, *allowed: str) -> tuple[LayerChoice, ...]:
    """They are the same for every rate of the link, which is what moves."""
    return tuple(choices(PricedLayer.of(shape), allowed))


def frontier_figure(shape: ModelShape, gigabytes: int = 25) -> Drawing:
    """What a layer can keep for how much more time, and the lines that nothing beats; 16 bits, one A100.

    x: time added to the layer's forward and backward, in percent, by products that run again and by copies that
    computing can't hide; what needs no product counts as free.  y: bytes kept on the device, in sbh.  gigabytes: that the
    link to the host takes a second, each way.
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
        best = frontier(_choices_of(shape, "recompute", *allowed), share)
        best = [choice for choice in best if share(choice) <= 34]
        look = {"mode": "lines+markers", "line": {"color": colour}, "marker": {"size": 9, "symbol": symbol}}
        return of(name, best, colour, **look)

    lines = {
        "recompute": line("recompute", VERMILION, "circle"),
        "or offload": line("or offload", GREEN, "square", "offload"),
        "or 8 bits": line("or 8 bits", PURPLE, "triangle-up", "offload", "compress"),
    }
    free = {name: trace["y"][0] for name, trace in lines.items()}
    return chart(
        f"At no cost in products or waiting: {free['recompute']:.0f} sbh by recomputing,<br>"
        f"{free['or offload']:.0f} with offload at {gigabytes} GB/s, {free['or 8 bits']:.0f} with 8 bits too",
        [
            of("one set of products", recompute, BLUE, marker={"color": BLUE, "size": 6, "symbol": "circle-open"}),
            *lines.values(),
            points(
                "the named modes", added.values(), kept.values(), INK, f"%{{text}}: {hover}", mode="markers+text", text=list(_NAMED),
                textposition="top right", marker={"color": INK, "symbol": "diamond", "size": 10}, cliponaxis=False,
            ),
        ],
        "Points, percent of time added and sbh kept: "
        + ", ".join(f"{mode} {added[mode]:.2f} and {kept[mode]:.1f}" for mode in _NAMED)
        + "; kept for no product and no wait: " + ", ".join(f"{name} {size:.1f}" for name, size in free.items()) + ".",
        xaxis=scale("time added by products and copies (%)", -1, 34),
        yaxis=scale("kept on the device (sbh)", 0, 1.15 * kept["none"]),
        height=480,
    )  # fmt: skip


#: Of a step, in the figure of plans.
_SEQUENCES = 512
#: The requests of ``plan_wall``: model, GiB of a GPU, GPUs.  A search takes seconds and a key should take none, so what each
#: finds is stored: by ``python -m actmem_course.show.today``.
PLANNED = list(product(("llama3-8b", "llama3-70b", "qwen3-32b", "175b"), (40, 80, 141), (16, 64, 256)))
PLANS = "plans.tsv"


def plan_line(name: str, memory: int, gpus: int) -> str:
    """A request, whether a plan fits, the fastest or else the nearest in words, and its fullest rank's bytes for each of PLAN_FILLS."""
    model = planned_model_of(name)
    found = find_plans(model, Cluster(gpus, memory * GIBIBYTE), _SEQUENCES, 1)
    fastest = found.plans[0] if found.plans else None
    best = fastest or found.nearest[0]
    words = f"nothing fits; nearest: {layout_text(best.layout)}, {best.recompute}"
    if fastest:
        words = f"{plan_text(fastest)}: {fastest.seconds.total:,.1f} s a step"
    parts = bill_of(model, best).by_part()
    sizes = (max(parts.get(part, 0), 0) for part in PLAN_FILLS)
    return "\t".join(map(str, (name, memory, gpus, bool(found.plans), words, *sizes)))


def stored_plans() -> list[str]:
    """A line for each of PLANNED.  A page has the file in an archive."""
    return resources.files(__package__).joinpath(PLANS).read_text(encoding="utf-8").splitlines()


def stored_plan(name: str, memory: int, gpus: int) -> tuple[dict[str, int], str, bool]:
    """One of PLANNED: bytes of the fullest rank by part, the plan in words, whether it fits."""
    line = stored_plans()[PLANNED.index((name, memory, gpus))]
    fits, words, *sizes = line.split("\t")[3:]
    return dict(zip(PLAN_FILLS, map(int, sizes))), words, fits == "True"


def plan_wall(name: str, memory: int, gpus: Sequence[int] = (16, 64, 256)) -> Drawing:
    """A bar for each number of GPUs: the fullest rank's bill by part, against the memory of one GPU in GiB; requests of PLANNED."""
    plans = {f"{count:,} GPUs": stored_plan(name, memory, count) for count in gpus}
    parts = {part: {count: sizes[part] for count, (sizes, _, _) in plans.items()} for part in PLAN_FILLS}
    fitting = ", ".join(count for count, (_, _, fits) in plans.items() if fits)
    return bar_chart(
        f"{name} with {memory} GiB a GPU fits on {fitting or 'none of them'}",
        {part: sizes for part, sizes in parts.items() if any(sizes.values())},
        "fullest GPU of the fastest plan, or of the nearest where none fits",
        fills=[fill for part, fill in PLAN_FILLS.items() if any(parts[part].values())],
        about={count: "<br>".join(wrap(plan, 60)) for count, (_, plan, _) in plans.items()},
        limit=("memory of a GPU", memory * GIBIBYTE),
    )


#: What to change if a plan doesn't fit: words, sizes of the layout or an axis to double with half the replicas, and mode.
_AID: dict[str, tuple[dict[str, int], str, str]] = {
    "sequence parallelism": ({"sequence_parallel": True}, "", ""),
    "one sequence a microbatch": ({"micro_batch_size": 1}, "", ""),
    "elementwise recomputation": ({}, "", "elementwise"),
    "full recomputation": ({}, "", "full"),
    "divide gradients too (ZeRO-2)": ({"zero_stage": 2}, "", ""),
    "divide weights too (ZeRO-3)": ({"zero_stage": 3}, "", ""),
    "twice the pipeline stages, half the replicas": ({}, "pipeline_parallel_size", ""),
    "two ranks a sequence, half the replicas": ({}, "context_parallel_size", ""),
}
_START: dict[str, int] = {
    "tensor_parallel_size": 8, "pipeline_parallel_size": 2, "data_parallel_size": 4, "context_parallel_size": 1,
    "num_model_chunks": 1, "micro_batch_size": 2, "sequence_parallel": False, "zero_stage": 1,
}  # fmt: skip


def first_aid(name: str, memory: int) -> Drawing:
    """It doesn't fit: what the fullest GPU holds as one change comes after the other, and the time of a step.

    From one plain layout of 64 GPUs with ``memory`` GiB each.  Each time the change comes next that then frees a GiB for the
    least time.  Bytes and seconds are the planner's.
    """
    model = planned_model_of(name)
    # With room for everything, so that also what does not fit has its seconds.
    roomy = Cluster(64, 100 * memory * GIBIBYTE)

    def plans_of(sizes: dict[str, int], mode: str) -> list[tuple[Plan, dict[str, int], str]]:
        found = find_plans(model.with_modes([mode]), roomy, _SEQUENCES, 1, sizes, False).plans
        return [(plan, sizes, mode) for plan in found]

    (here,) = plans_of(_START, "none")
    start, limit = here[0], Cluster(64, memory * GIBIBYTE).usable_bytes
    held = {layout_text(start.layout): start.bytes}
    left = {words: aid for words, aid in _AID.items() if aid[1] != "context_parallel_size" or model.context_parallel}
    while True:
        plan, sizes, mode = here
        price, following = {}, {}
        for words, (changed, doubled, again) in left.items():
            halved = (
                {doubled: 2 * sizes[doubled], "data_parallel_size": sizes["data_parallel_size"] // 2} if doubled else {}
            )
            if doubled and not halved["data_parallel_size"]:
                continue
            for offer in plans_of({**sizes, **changed, **halved}, again or mode):
                if offer[0].bytes < plan.bytes:
                    following[words] = offer
                    price[words] = (offer[0].seconds.total - plan.seconds.total) / (plan.bytes - offer[0].bytes)
        if not price:
            break
        words = min(price, key=lambda each: price[each])
        here = following[words]
        del left[words]
        longer = f"{100 * (here[0].seconds.total / start.seconds.total - 1):+.1f}%".replace("-", "−")
        held[f"{words}: {longer} time"] = here[0].bytes
    over = start.bytes - limit
    room = f"{size_text(over)} too much" if over > 0 else f"fits, with {size_text(-over)} to spare"
    return bar_chart(
        f"{model.name}, {layout_text(start.layout)}: {room}.<br>Each bar adds a change, the cheapest first",
        {"held": held},
        "held by the fullest GPU",
        limit=("what a plan may use", limit),
    )


if __name__ == "__main__":
    Path(__file__).with_name(PLANS).write_text(
        "".join(f"{plan_line(*request)}\n" for request in PLANNED), encoding="utf-8"
    )
