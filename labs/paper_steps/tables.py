"""Tables that print the entries of each section of the paper."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from actmem.config import PAPER_MODELS
from actmem_course.lab_tools.paper_models import num_microbatches
from actmem_course.lab_tools.tables import numbers, red_if, table
from actmem_course.others import paper
from actmem_course.others.disagreements import Disagreement, disagreements
from paper_steps.sections import Number, PaperEntry

Entries = Sequence[PaperEntry]
#: Headings above a model's lines: its name; a line of table 3, in the paper's letters; its times; its microbatches.
NAMES = {name: name for name in PAPER_MODELS}
SIZES = {
    name: f"{name}  a={model.shape.num_attention_heads} h={model.shape.hidden_size} L={model.shape.num_layers} "
    f"t={model.parallel.tensor_parallel_size} p={model.parallel.pipeline_parallel_size} "
    f"m={model.parallel.num_model_chunks} B={model.global_batch_size} b={model.shape.micro_batch_size}"
    for name, model in PAPER_MODELS.items()
}
SECONDS = {
    name: f"{name}  {time.full_recompute_seconds:.2f} s with full recomputation, {time.seconds:.2f} s with both methods"
    for name, time in paper.TABLE5.items()
}
BATCHES = {
    name: f"{name}  B={model.global_batch_size}, {num_microbatches(model)} × the counted microbatch"
    for name, model in PAPER_MODELS.items()
}
SHAPE = PAPER_MODELS["22B"].shape  # all four have this s and v

FIGURE1 = "Figure 1: bytes on one GPU of the first stage, against its 80 GiB"
FIGURE1_NOTE = (
    "Baseline: tensor parallelism only; both methods: with sequence parallelism and selective recomputation. The "
    "figure prints no numbers and names no optimizer: taken here is Megatron's Adam, 18 bytes a parameter."
)
TABLE2 = "Table 2: bytes that one layer saves on one rank; below each, the paper's formula"
TABLE2_NOTE = (
    "Extra is what the paper leaves out: layer-norm statistics, the causal mask, random-number states. "
    "labs/measure_table2.py lists it with the reasons."
)
TABLE3 = f"Table 3: sizes (s={SHAPE.seq_length}, v={SHAPE.vocab_size}), and the parameters of the GPT that they give"
FIGURE7 = "Figure 7: bytes on the first stage, all its layers, when it holds most"
FIGURE7_NOTE = (
    "Below each line: the paper's equation, with its interleave factor. It counts p dropout masks of the embedding; "
    "where chunks are interleaved, the schedule holds 2p, and that is the whole difference."
)
TABLE5 = "Table 5: utilisation from the printed times; measured: FLOPs counted by torch"
TABLE5_NOTE = (
    "Table 5 leaves out the MFU with full recomputation; it follows from the time that it prints. "
    "For 2240 GPUs the paper gives both, but only one time."
)
FLOPS = "FLOPs of one iteration, counted while the whole model runs; paper: eq. 7 and 8"
FLOPS_NOTE = (
    "Counted are matmuls, the logits' among them. Looking up embeddings, softmax, layer norm, GeLU, dropout, biases "
    "and the loss are none."
)
FIGURE9 = "Figure 9: bytes on pipeline ranks with both methods; outputs: more if not freed"


def parts_of(section: str, entries: Entries) -> list[RenderableType]:
    """Return what to print for one section: tables, and the lines below them.

    Args:
        section: the part of the paper, a key of SECTIONS in measure_paper.py, such as "table2".
        entries: all entries of this section, of all models.
    """
    if not entries:
        about = {
            "table4": "Table 4 is about the 22B model only.",
            "figure9": "Figure 9 is about pipeline ranks, and the 22B model has one stage.",
        }
        return [about[section]]
    of_bytes = [entry for entry in entries if entry.unit == "bytes"]
    of_percent = [entry for entry in entries if entry.unit == "%"]
    if section == "figure1":
        return [bytes_table(FIGURE1, entries), FIGURE1_NOTE]
    if section == "table2":
        return [bytes_table(TABLE2, entries), TABLE2_NOTE]
    if section == "table3":
        return [bytes_table(TABLE3, entries)]
    if section == "figure7":
        shares = percent_table("\nFigure 7: the same in percent of the first line (paper: under 20, 10)", of_percent)
        return [bytes_table(FIGURE7, of_bytes), FIGURE7_NOTE, shares]
    if section == "table4":
        return [percent_table("Table 4: time added to one 22B layer, from the printed milliseconds", of_percent, {})]
    if section == "table5":
        return [percent_table(TABLE5, of_percent, SECONDS), TABLE5_NOTE]
    if section == "flops":
        counts = [entry for entry in entries if entry.unit == "FLOPs"]
        uses = percent_table("\nThe utilisation that each gives, from table 5's times", of_percent)
        return [flops_table(FLOPS, counts), FLOPS_NOTE, uses]
    if section == "figure9":
        return [part for name in dict.fromkeys(e.model for e in entries) for part in figure9_parts(name, entries)]
    return [disagreements_list("Where the paper does not agree with itself, computed again", disagreements())]


def figure9_parts(name: str, entries: Entries) -> list[RenderableType]:
    """Return what to print for one model in figure 9.

    These are a table of some pipeline ranks, a line that says by how many bytes one rank holds less than the rank
    before, and a line that says how many bytes freeing outputs saves on rank 0.

    Args:
        name: the model's name, such as "530B".
        entries: all entries of figure 9, of all models.
    """
    own = [entry for entry in entries if entry.model == name]
    by_rank = [entry for entry in own if entry.quantity.startswith("rank")]
    outputs = [int(entry.ours_formula or 0) for entry in own if entry.quantity.startswith("outputs of")]
    last = len(by_rank) - 1
    chosen = [by_rank[rank] for rank in sorted({0, 1, 2, last // 2, last - 1, last} & set(range(len(by_rank))))]
    parts: list[RenderableType] = [ranks_table(FIGURE9, chosen, dict(enumerate(outputs)))]
    steps = {
        (one.ours_formula or 0) - (other.ours_formula or 0) for one, other in zip(by_rank[1:last], by_rank[2:last])
    }
    if len(steps) == 1:
        parts.append(f"Between rank 1 and rank {last - 1} the bytes fall by {steps.pop():,} a rank.")
    (saved,) = [entry for entry in own if entry.unit == "GiB"]
    printed = "" if saved.paper is None else f'; the paper: {saved.paper:g} "GB"'
    parts.append(f"Freeing outputs saves {float(saved.ours_formula or 0):.2f} GiB on rank 0{printed}.")
    return parts


def bytes_table(title: str, entries: Entries) -> Group:
    """Make tables of bytes, one for each model, with a line for each entry.

    The columns are predicted, extra (predicted, but not counted by the paper), measured, and measured minus both
    predicted ones.  Below a line, in grey, is the entry's note (the paper's formula or claim) with the paper's number.

    Args:
        title: the line above all tables.
        entries: the entries to show, with bytes as their unit.
    """
    lines = [[entry.quantity, *counted(entry)] for entry in entries]
    return paper_table(title, ["", "predicted", "extra", "measured", "diff."], entries, lines, SIZES, notes=True)


def counted(entry: PaperEntry) -> list[str]:
    """Return an entry's cells for ``bytes_table``: predicted, extra, measured, difference; "" for a missing number."""
    extra = None if entry.measured is None else entry.extra
    return [whole(number) for number in (entry.ours_formula, extra, entry.measured, entry.difference)]


def percent_table(title: str, entries: Entries, headings: Mapping[str, str] = NAMES) -> Group:
    """Make tables of percentages, one for each model, with a line for each entry.

    The columns are the number that the paper prints, ours by formula, measured, and by formula minus printed, in
    percentage points.

    Args:
        title: the line above all tables.
        entries: the entries to show, with "%" as their unit.
        headings: the line above a model's table, by the model's name.
    """
    lines = []
    for entry in entries:
        ours = ("" if number is None else f"{float(number):.2f}" for number in (entry.ours_formula, entry.measured))
        off = "" if entry.difference_from_paper is None else f"{float(entry.difference_from_paper):+.2f}"
        lines.append([entry.quantity, "" if entry.paper is None else str(entry.paper), *ours, off])
    return paper_table(title, ["percent", "paper", "ours", "measured", "ours − paper"], entries, lines, headings)


def flops_table(title: str, entries: Entries) -> Group:
    """Make tables of FLOPs in units of 10¹⁵, one for each model; their column of differences is in single FLOPs.

    Args:
        title: the line above all tables.
        entries: the entries to show, with "FLOPs" as their unit.
    """
    lines = []
    for entry in entries:
        found = (entry.printed, entry.ours_formula, entry.measured)
        cells = ("" if number is None else f"{float(number / 10**15):,.4f}" for number in found)
        lines.append([entry.quantity, *cells, whole(entry.difference)])
    return paper_table(title, ["10¹⁵ FLOPs", "paper", "ours", "counted", "diff."], entries, lines, BATCHES)


def ranks_table(title: str, entries: Entries, outputs: Mapping[int, int]) -> Group:
    """Make figure 9's table: for each pipeline rank the bytes that it saves, and the bytes of its stage's outputs.

    The rank would hold the outputs in addition if it did not free them after sending them (appendix B).

    Args:
        title: the line above the table.
        entries: for each line of the table, the entry with the bytes that the rank saves.
        outputs: bytes of the stage's outputs, by the number of the pipeline rank.
    """
    lines = [[entry.quantity, *counted(entry), whole(outputs[entry.pipeline_rank or 0])] for entry in entries]
    header = ["", "predicted", "extra", "measured", "diff.", "outputs"]
    return paper_table(title, header, entries, lines, SIZES)


def paper_table(
    title: str,
    header: Sequence[str],
    entries: Entries,
    lines: Sequence[Sequence[str]],
    headings: Mapping[str, str],
    notes: bool = False,
) -> Group:
    """Make a table for each of the paper's models, all below one title; columns without any entry are left out.

    Args:
        title: the line above all tables.
        header: the columns' headings.
        entries: one for each line; the line is red if measured and predicted number differ.
        lines: the cells of each entry's line, in the order of ``header``.
        headings: the line above a model's table, by the model's name.
        notes: whether a line below each entry's shows the entry's note, with the number that the paper prints.
    """
    used = [i for i in range(1, len(header)) if any(line[i] for line in lines)]
    parts: list[Text | Table] = [Text(title, style="bold")]
    for model in dict.fromkeys(entry.model for entry in entries):
        made = table(headings.get(model, ""), header[0], *(numbers(header[i]) for i in used), tight=True)
        for entry, line in zip(entries, lines):
            if entry.model != model:
                continue
            made.add_row(line[0], *(line[i] for i in used), style=red_if(entry.exact is False))
            if notes and entry.note:
                made.add_row(f"  {entry.note}", whole(entry.printed), style="dim")
        parts.append(made)
    return Group(*parts)


def whole(number: Number | None) -> str:
    """Return a number with all its digits as text; "" for None."""
    return "" if number is None else f"{number:,}"


def disagreements_list(title: str, found: Iterable[Disagreement]) -> Group:
    """Return a list, to be printed, of the places where the paper doesn't agree with itself, a few lines for each.

    Args:
        title: the line above the list.
        found: the places, from ``disagreements()``.
    """
    parts: list[Text | Table] = [Text(title, style="bold")]
    for place in found:
        parts.append(Text(f"\n{place.where}", style="bold"))
        lines = Table.grid(padding=(0, 1))
        lines.add_column(width=6, justify="right", style="dim")
        lines.add_column()
        lines.add_row("paper", place.printed)
        lines.add_row("ours", ", ".join(map(str, place.ours)))
        lines.add_row("", place.why)
        parts.append(lines)
    return Group(*parts)
