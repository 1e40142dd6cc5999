"""Every table and figure of the paper: its entries, and how they are printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from rich.console import Group, RenderableType

from actmem.config import PAPER_MODELS
from actmem_course.bench import reproduce as paper_sections
from actmem_course.others import paper
from actmem_course.others.disagreements import disagreements
from actmem_course.results import PaperEntry
from actmem_course.show.tables import disagreements_list, exact_table, flops_table, percent_table, ranks_table

Models = Sequence[str]


def sizes(name: str) -> str:
    """One line of table 3, in the paper's letters."""
    model, (a, b, h, _) = PAPER_MODELS[name], PAPER_MODELS[name].shape.letters()
    t, p = model.parallel.tensor_parallel_size, model.parallel.pipeline_parallel_size
    m, layers, batch = model.parallel.num_model_chunks, model.shape.num_layers, model.global_batch_size
    return f"{name}  a={a} h={h} L={layers} t={t} p={p} m={m} B={batch} b={b}"


_NAMES = {name: name for name in PAPER_MODELS}
_SIZES = {name: sizes(name) for name in PAPER_MODELS}
_SECONDS = {
    name: f"{name}  {time.full_recompute_seconds:.2f} s with full recomputation, {time.seconds:.2f} s with both methods"
    for name, time in paper.TABLE5.items()
}
_BATCHES = {
    name: f"{name}  B={model.global_batch_size}, {paper_sections.num_microbatches(model)} × the counted microbatch"
    for name, model in PAPER_MODELS.items()
}


@dataclass(frozen=True)
class Shown:
    """A table of a section's entries.  unit: only entries of this unit.  below: a note under it."""

    title: str
    table: Callable[..., Group]
    headings: Mapping[str, str]
    below: str = ""
    unit: str = ""

    def __call__(self, entries: Sequence[PaperEntry]) -> list[RenderableType]:
        chosen = [entry for entry in entries if self.unit in ("", entry.unit)]
        return [self.table(self.title, chosen, self.headings), *([self.below] if self.below else [])]


@dataclass(frozen=True)
class Section:
    """entries: of one model.  models: which of those asked for.  empty: printed if none."""

    entries: Callable[[str], list[PaperEntry]]
    shown: tuple[Callable[[Sequence[PaperEntry]], list[RenderableType]], ...]
    models: Callable[[Models], Models] = lambda models: models
    empty: str = ""


def figure9_models(models: Models) -> Models:
    """Figure 9 is about pipeline ranks: of the 530B model, or of those asked for that have any."""
    piped = [name for name in models if PAPER_MODELS[name].parallel.pipeline_parallel_size > 1]
    return ["530B"] if "530B" in piped else piped


def _figure9(entries: Sequence[PaperEntry]) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for name in dict.fromkeys(entry.model for entry in entries):
        own = [entry for entry in entries if entry.model == name]
        ranks = [entry for entry in own if entry.quantity.startswith("rank")]
        outputs = dict(
            enumerate(int(entry.ours_formula or 0) for entry in own if entry.quantity.startswith("outputs of"))
        )
        last = len(ranks) - 1
        shown = [ranks[rank] for rank in sorted({0, 1, 2, last // 2, last - 1, last} & set(range(len(ranks))))]
        title = "Figure 9: bytes on pipeline ranks with both methods; outputs: more if not freed"
        parts.append(ranks_table(title, shown, outputs, _SIZES))
        steps = {
            (one.ours_formula or 0) - (other.ours_formula or 0) for one, other in zip(ranks[1:last], ranks[2:last])
        }
        if len(steps) == 1:
            parts.append(f"Between rank 1 and rank {last - 1} the bytes fall by {steps.pop():,} a rank.")
        (saved,) = [entry for entry in own if entry.unit == "GiB"]
        printed = "" if saved.paper is None else f'; the paper: {saved.paper:g} "GB"'
        parts.append(f"Freeing outputs saves {float(saved.ours_formula or 0):.2f} GiB on rank 0{printed}.")
    return parts


def _disagreements(entries: Sequence[PaperEntry]) -> list[RenderableType]:
    return [disagreements_list("Where the paper does not agree with itself, computed again", disagreements())]


_SHAPE = PAPER_MODELS["22B"].shape  # all four have this s and v

#: In the order of the paper.
SECTIONS = {
    "figure1": Section(
        paper_sections.figure1,
        (
            Shown(
                "Figure 1: bytes on one GPU of the first stage, against its 80 GiB", exact_table, _SIZES,
                "Baseline: tensor parallelism only; both methods: with sequence parallelism and selective recomputation. "
                "The figure prints no numbers and names no optimizer: taken here is Megatron's Adam, 18 bytes a parameter.",
            ),
        ),
    ),
    "table2": Section(
        paper_sections.table2,
        (
            Shown(
                "Table 2: bytes that one layer keeps on one rank; below each, the paper's formula", exact_table, _SIZES,
                "Extra is what the paper leaves out: layer-norm statistics, the causal mask, random-number states. "
                "labs/measure_table2.py lists it with the reasons.",
            ),
        ),
    ),
    "table3": Section(
        paper_sections.table3,
        (
            Shown(
                f"Table 3: sizes (s={_SHAPE.seq_length}, v={_SHAPE.vocab_size}), and the parameters of the GPT that they give",
                exact_table, _SIZES,
            ),
        ),
    ),
    "figure7": Section(
        paper_sections.figure7,
        (
            Shown(
                "Figure 7: bytes on the first stage, all its layers, when it holds most", exact_table, _SIZES,
                "Below each line: the paper's equation, with its interleave factor. It counts p dropout masks of the embedding; "
                "where chunks are interleaved, the schedule holds 2p, and that is the whole difference.",
                unit="bytes",
            ),
            Shown("\nFigure 7: the same in percent of the first line (paper: under 20, 10)", percent_table, _NAMES, unit="%"),
        ),
    ),
    "table4": Section(
        paper_sections.table4,
        (Shown("Table 4: time added to one 22B layer, from the printed milliseconds", percent_table, {}),),
        models=lambda models: [name for name in models if name == "22B"],
        empty="Table 4 is about the 22B model only.",
    ),
    "table5": Section(
        paper_sections.table5_entries,
        (
            Shown(
                "Table 5: utilisation from the printed times; measured: FLOPs counted by torch", percent_table, _SECONDS,
                "Table 5 leaves out the MFU with full recomputation; it follows from the time that it prints. "
                "For 2240 GPUs the paper gives both, but only one time.",
            ),
        ),
    ),
    "flops": Section(
        paper_sections.flops_entries,
        (
            Shown(
                "FLOPs of one iteration, counted while the whole model runs; paper: eq. 7 and 8", flops_table, _BATCHES,
                "Counted are matrix products, the logits' among them. Looking up embeddings, softmax, layer norm, "
                "GeLU, dropout, biases and the loss are none.",
                unit="FLOPs",
            ),
            Shown("\nThe utilisation that each gives, from table 5's times", percent_table, _NAMES, unit="%"),
        ),
    ),
    "figure9": Section(
        paper_sections.figure9,
        (_figure9,),
        figure9_models,
        "Figure 9 is about pipeline ranks, and the 22B model has one stage.",
    ),
    "disagreements": Section(paper_sections.disagreement_entries, (_disagreements,), models=lambda models: [""]),
}  # fmt: skip


def parts_of(section: str, entries: Sequence[PaperEntry]) -> list[RenderableType]:
    """What to print for one section: tables, and the lines below them."""
    if not entries:
        return [SECTIONS[section].empty]
    return [part for shown in SECTIONS[section].shown for part in shown(entries)]


def measure_paper(
    sections: Sequence[str], models: Models, processes: int = 1, on_model: Callable[[str], None] = lambda name: None
) -> dict[str, list[PaperEntry]]:
    """The entries of each section.  Every rank is emulated: one process is enough, and no model needs more than one.

    on_model: called as the models are done, in their order, one without a name (``disagreements``) last.
    """
    chosen = {section: SECTIONS[section].models(models) for section in sections}
    wanted = {name: own for name in (*models, "") if (own := [s for s in sections if name in chosen[s]])}
    found: dict[str, list[PaperEntry]] = {section: [] for section in sections}
    for name, entries in zip(wanted, _in_processes(wanted, min(processes, len(models)))):
        for entry in entries:
            found[entry.section].append(entry)
        on_model(name)
    return found


def _in_processes(wanted: Mapping[str, Sequence[str]], processes: int) -> Iterator[list[PaperEntry]]:
    if processes < 2:
        yield from map(_entries_of, wanted, wanted.values())
        return
    # A forked process would inherit torch's threads in the middle of their work.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_entries_of, wanted, wanted.values())


def _entries_of(name: str, sections: Sequence[str]) -> list[PaperEntry]:
    """All of one model: its sections share what is measured for them."""
    return [entry for section in sections for entry in SECTIONS[section].entries(name)]
