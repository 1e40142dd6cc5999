"""From entries to the screen: which table a section gets, its title, and what has to be said below."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from actmem import paper
from actmem.formulas.disagreements import disagreements
from actmem.lab.paper.entries import Entry
from actmem.lab.paper.memory import num_microbatches
from actmem.models import PAPER_MODELS
from actmem.show.paper_tables import disagreements_list, exact_table, flops_table, percent_table, ranks_table


def parts_of(section: str, entries: Sequence[Entry]) -> list[RenderableType]:
    """What to print for one section: tables, and the lines below them."""
    return _PARTS[section](entries) if entries else [_EMPTY[section]]


#: Said where none of the chosen models is in a section.
_EMPTY = {
    "table4": "Table 4 is about the 22B model only.",
    "figure9": "Figure 9 is about pipeline ranks, and the 22B model has one stage.",
}


def sizes(name: str) -> str:
    """One line of table 3, in the paper's letters."""
    model, (a, b, h, s) = PAPER_MODELS[name], PAPER_MODELS[name].shape.letters()
    t, p, m = model.parallel.tensor_parallel_size, model.parallel.pipeline_parallel_size, model.parallel.num_model_chunks
    return f"{name}  a={a} h={h} L={model.shape.num_layers} t={t} p={p} m={m} B={model.global_batch_size} b={b}"


def _headings() -> dict[str, str]:
    return {name: sizes(name) for name in PAPER_MODELS}


def _figure1(entries: Sequence[Entry]) -> list[RenderableType]:
    title = "Figure 1: bytes on one GPU of the first stage, against its 80 GiB"
    below = (
        "Baseline: tensor parallelism only; both methods: with sequence parallelism and selective recomputation. "
        "The figure prints no numbers and names no optimizer: taken here is Megatron's Adam, 18 bytes a parameter."
    )
    return [exact_table(title, entries, _headings()), below]


def _table2(entries: Sequence[Entry]) -> list[RenderableType]:
    title = "Table 2: bytes that one layer keeps on one rank; below each, the paper's formula"
    below = (
        "Extra is what the paper leaves out: layer-norm statistics, the causal mask, random-number states. "
        "labs/measure_table2.py lists it with the reasons."
    )
    return [exact_table(title, entries, _headings()), below]


def _table3(entries: Sequence[Entry]) -> list[RenderableType]:
    shape = PAPER_MODELS[entries[0].model].shape
    title = f"Table 3: sizes (s={shape.seq_length}, v={shape.vocab_size}), and the parameters of the GPT that they give"
    return [exact_table(title, entries, _headings())]


def _figure7(entries: Sequence[Entry]) -> list[RenderableType]:
    stages = [entry for entry in entries if entry.unit == "bytes"]
    title = "Figure 7: bytes on the first stage, all its layers, when it holds most"
    below = (
        "Below each line: the paper's equation, with its interleave factor. It counts p dropout masks of the embedding; "
        "where chunks are interleaved, the schedule holds 2p, and that is the whole difference."
    )
    percent_title = "\nFigure 7: the same in percent of the first line (paper: under 20, 10)"
    shares = [entry for entry in entries if entry.unit == "%"]
    return [exact_table(title, stages, _headings()), below, percent_table(percent_title, shares, {name: name for name in PAPER_MODELS})]


def _table4(entries: Sequence[Entry]) -> list[RenderableType]:
    return [percent_table("Table 4: time added to one 22B layer, from the printed milliseconds", entries)]


def _table5(entries: Sequence[Entry]) -> list[RenderableType]:
    headings = {
        name: f"{name}  {time.full_recompute_seconds:.2f} s with full recomputation, {time.seconds:.2f} s with both methods"
        for name, time in paper.TABLE5.items()
    }
    title = "Table 5: utilisation from the printed times; measured: FLOPs counted by torch"
    below = (
        "Table 5 leaves out the MFU with full recomputation; it follows from the time that it prints. "
        "For 2240 GPUs the paper gives both, but only one time."
    )
    return [percent_table(title, entries, headings), below]


def _flops(entries: Sequence[Entry]) -> list[RenderableType]:
    headings = {
        name: f"{name}  B={model.global_batch_size}, {num_microbatches(model)} × the counted microbatch"
        for name, model in PAPER_MODELS.items()
    }
    title = "FLOPs of one iteration, counted while the whole model runs; paper: eq. 7 and 8"
    counts = [entry for entry in entries if entry.unit == "FLOPs"]
    shares = [entry for entry in entries if entry.unit == "%"]
    below = (
        "Counted are matrix products, the logits' among them. Looking up embeddings, softmax, layer norm, "
        "GeLU, dropout, biases and the loss are none."
    )
    names = {name: name for name in PAPER_MODELS}
    return [
        flops_table(title, counts, headings),
        below,
        percent_table("\nThe utilisation that each gives, from table 5's times", shares, names),
    ]


def _figure9(entries: Sequence[Entry]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for name in dict.fromkeys(entry.model for entry in entries):
        of_ranks = {e.pipeline_rank: e for e in entries if e.model == name and e.quantity.startswith("rank")}
        outputs = {e.pipeline_rank: e.ours_formula for e in entries if e.model == name and e.quantity.startswith("outputs of")}
        last = len(of_ranks) - 1
        shown = sorted({0, 1, 2, last // 2, last - 1, last} & set(of_ranks))
        title = "Figure 9: bytes on pipeline ranks with both methods; outputs: more if not freed"
        parts.append(ranks_table(title, [of_ranks[rank] for rank in shown], outputs, _headings()))
        steps = {of_ranks[r].ours_formula - of_ranks[r + 1].ours_formula for r in range(1, last - 1)}
        if len(steps) == 1:
            parts.append(f"Between rank 1 and rank {last - 1} the bytes fall by {steps.pop():,} a rank.")
        (saved,) = [e for e in entries if e.model == name and e.unit == "GiB"]
        printed = "" if saved.paper is None else f'; the paper: {saved.paper:g} "GB"'
        parts.append(f"Freeing outputs saves {float(saved.ours_formula):.2f} GiB on rank 0{printed}.")
    return parts


def _disagreements(entries: Sequence[Entry]) -> list[RenderableType]:
    return [disagreements_list("Where the paper does not agree with itself, computed again", disagreements())]


_PARTS = {
    "figure1": _figure1,
    "table2": _table2,
    "table3": _table3,
    "figure7": _figure7,
    "table4": _table4,
    "table5": _table5,
    "flops": _flops,
    "figure9": _figure9,
    "disagreements": _disagreements,
}
