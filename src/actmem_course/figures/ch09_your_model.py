"""Chapter 9: a layer in plain operators beside one with three changes, and what to change where a plan doesn't fit."""

from __future__ import annotations

from actmem_course.figures.bars import bar_chart
from actmem_course.figures.marks import Drawing
from actmem_course.figures.style import FILLS
from actmem_course.figures.units import size_text
from actmem_more.llama_shape import LlamaShape
from actmem_more.llama_terms import llama_rows
from actmem_tools.plan.plan_report import layout_text
from actmem_tools.plan.planned_models import planned_model_of
from actmem_tools.plan.search import Plan, find_plans
from actmem_tools.plan.step_time import GIBIBYTE, Cluster

WRITTEN, CHANGED = "in plain operators", "with three changes"
#: Part of a layer → its fill, and the terms of ``llama_rows`` in it.
_PARTS = {
    "norms": ("layer-norm input", ("norm 1 input", "norm 1 statistics", "norm 2 input", "norm 2 statistics")),
    "inputs of linears": (
        "input of a linear",
        ("QKV projection input", "attention projection input", "gate and up input", "down input"),
    ),
    "Q, K, V": ("Q, K, V", ("Q", "K", "V", "log-sum-exp")),
    "gate and up": ("GeLU input", ("gate", "up")),
}


def written_bytes(shape: LlamaShape) -> dict[str, int]:
    """Bytes that one Llama layer in plain operators saves in 16 bits, by part.

    A norm saves its input in float32, what it is normalised to, and a number per token.  Keys and values are copied for
    each query head.  The MLP also saves silu(gate).
    """
    tokens = shape.seq_length * shape.micro_batch_size
    once, wide = 2 * tokens * shape.hidden_size, 2 * tokens * shape.ffn_hidden_size
    sizes = 6 * once + 8 * tokens, 3 * once + wide, 3 * once + 4 * tokens * shape.num_attention_heads, 3 * wide
    return dict(zip(_PARTS, sizes))


def changed_bytes(shape: LlamaShape) -> dict[str, int]:
    """The same of a layer that saves nothing twice."""
    rows = {row.term: row.bytes for row in llama_rows(shape)}
    return {part: sum(rows[term] for term in terms) for part, (_, terms) in _PARTS.items()}


def code_bars(shape: LlamaShape, shown: str = CHANGED) -> Drawing:
    """What all layers save: in plain operators, and unless ``shown`` is that, with three changes."""
    written, changed = written_bytes(shape), changed_bytes(shape)
    saved = f"{shape.num_layers} layers in plain operators save {size_text(shape.num_layers * sum(written.values()))}"
    if shown == CHANGED:
        saved += f",<br>with three changes {size_text(shape.num_layers * sum(changed.values()))}"
    parts = {
        part: {
            WRITTEN: shape.num_layers * written[part],
            CHANGED: shape.num_layers * changed[part] if shown == CHANGED else None,
        }
        for part in _PARTS
    }
    return bar_chart(
        saved,
        parts,
        "saved for backward",
        fills=[FILLS[fill] for fill, _ in _PARTS.values()],
        notes={} if shown == CHANGED else {CHANGED: "?"},
    )


#: What to change if a plan doesn't fit: words, sizes of the layout or an axis to double with half the replicas, and
#: mode.
_AID: dict[str, tuple[dict[str, int], str, str]] = {
    "sequence parallelism": ({"sequence_parallel": True}, "", ""),
    "one sequence a microbatch": ({"micro_batch_size": 1}, "", ""),
    "elementwise recomputation": ({}, "", "elementwise"),
    "full recomputation": ({}, "", "full"),
    "shard gradients too (ZeRO-2)": ({"zero_stage": 2}, "", ""),
    "shard weights too (ZeRO-3)": ({"zero_stage": 3}, "", ""),
    "twice the pipeline stages, half the replicas": ({}, "pipeline_parallel_size", ""),
    "two ranks a sequence, half the replicas": ({}, "context_parallel_size", ""),
}
_START: dict[str, int] = {
    "tensor_parallel_size": 8, "pipeline_parallel_size": 2, "data_parallel_size": 4, "context_parallel_size": 1,
    "num_model_chunks": 1, "micro_batch_size": 2, "sequence_parallel": False, "zero_stage": 1,
}  # fmt: skip
#: Of a step.
_SEQUENCES = 512


def first_aid(name: str, memory: int) -> Drawing:
    """A plan that doesn't fit: what the fullest GPU holds as one change comes after the other.

    From one plain layout of 64 GPUs with ``memory`` GiB each.  Each time the change comes next that then frees a GiB
    for the least time.  Bytes and seconds are the planner's.
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
        held[words] = here[0].bytes
    over = start.bytes - limit
    room = f"{size_text(over)} too much" if over > 0 else f"fits, with {size_text(-over)} to spare"
    return bar_chart(
        f"{model.name}, {layout_text(start.layout)}: {room}.<br>Each bar adds a change, the cheapest first",
        {"held": held},
        "held by the fullest GPU",
        limit=("what a plan may use", limit),
    )
