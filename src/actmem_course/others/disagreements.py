"""Where the paper's text, its formulas and our counts differ, each place recomputed.

None of this affects the paper's method; most of it strengthens the conclusion.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from actmem.config import PAPER_MODELS, PaperModel
from actmem.formulas.activations import TABLE2, closed_form
from actmem.formulas.first_stage import embeddings_in_flight, eq5, in_flight, section43_extras
from actmem.formulas.flops import layer_overhead, text_selective
from actmem_course.others import paper


@dataclass(frozen=True)
class Value:
    """One number of ours: for which model (or case), how much, and in which unit."""

    label: str
    value: Fraction | float
    unit: str

    def __str__(self) -> str:
        number = f"{float(self.value):.2f}" if self.unit else str(self.value)
        return f"{self.label} {number}{self.unit if self.unit in ('', '%') else ' ' + self.unit}"


@dataclass(frozen=True)
class Disagreement:
    """where: section of the paper.  printed: what it says.  ours: computed.  why: the difference."""

    where: str
    printed: str
    ours: tuple[Value, ...]
    why: str

    def __str__(self) -> str:
        return f"{self.where}\n  paper: {self.printed}\n  ours: {', '.join(map(str, self.ours))}\n  {self.why}"


def disagreements() -> list[Disagreement]:
    """The whole list, in the order of the paper."""
    smallest, mt = PAPER_MODELS["22B"], PAPER_MODELS["530B"]
    interleaved = [model for model in PAPER_MODELS.values() if model.parallel.num_model_chunks > 1]
    t, p = smallest.parallel.tensor_parallel_size, smallest.parallel.pipeline_parallel_size
    extras = Fraction(section43_extras(smallest.shape, t, p), eq5(smallest.shape, t))
    to_the_end = layer_overhead(smallest.shape, "paper-full")
    _, b, h, s = mt.shape.letters()
    t, p, count = mt.parallel.tensor_parallel_size, mt.parallel.pipeline_parallel_size, in_flight(mt.parallel)
    saved, held = 2 * s * b * h * p, 2 * s * b * h * count
    before = {n: Fraction(str(row.mfu_percent)) - Fraction(str(row.gain_points)) for n, row in paper.APPENDIX_C.items()}
    before = {n: mfu for n, mfu in before.items() if mfu != Fraction(str(paper.TABLE5[n].mfu_percent))}
    return [
        Disagreement(
            "§4.3",
            f"22B: the bytes beside its layers are under {paper.SECTION43_EXTRAS_PERCENT_BELOW['22B']}%",
            (Value("22B", 100 * extras, "%"),),
            "The section's own formula; still small enough to leave out.",
        ),
        Disagreement(
            "§4.3",
            "p embedding dropout masks on the first stage: "
            + ", ".join(f"{m.name} {m.parallel.pipeline_parallel_size}" for m in interleaved),
            tuple(Value(m.name, Fraction(embeddings_in_flight(m.parallel)), "") for m in interleaved),
            "p is the count without interleaving. With it, a second round of p forwards enters the first chunk "
            "before any backward reaches it: 2p masks.",
        ),
        Disagreement(
            "§6.1, figure 7",
            f"both methods together need under {paper.FIGURE7_BOTH_PERCENT_BELOW}% of the tensor-parallel baseline",
            tuple(
                Value(m.name, 100 * baseline_share("tensor+sequence+selective", m), "%") for m in PAPER_MODELS.values()
            ),
            "Table 2's own formulas; a rounding, the two largest models are just above.",
        ),
        Disagreement(
            "§6.1, figure 7",
            f"full recomputation needs {paper.FIGURE7_FULL_PERCENT}% of the tensor-parallel baseline",
            tuple(Value(m.name, 100 * baseline_share("full", m), "%") for m in PAPER_MODELS.values()),
            "Table 2's own formulas, 2sbh a layer; a rounding.",
        ),
        Disagreement(
            "§5 and eq. 8",
            ", ".join(f"{n} +{x}%" for n, x in paper.SECTION5_ADDED_FLOPS_PERCENT.items()) + " FLOPs for selective",
            tuple(
                Value(f"{name} {how}", 100 * layer_overhead(PAPER_MODELS[name].shape, mode), "%")
                for name in paper.SECTION5_ADDED_FLOPS_PERCENT
                for how, mode in (("by the text", "paper-selective"), ("stopped early", "selective"))
            ),
            "Eq. 8 adds 12Bs²h a layer, three forward passes of the core attention; the text runs it once more, "
            "4Bs²h. The output of its second product is not read in backward, so 2Bs²h is enough.",
        ),
        Disagreement(
            "Table 5, HFU",
            ", ".join(f"{name} {row.hfu_percent}%" for name, row in paper.TABLE5.items()),
            tuple(
                Value(
                    name,
                    paper.percent_of_peak(name, text_selective(model.shape, model.global_batch_size), row.seconds),
                    "%",
                )
                for (name, row), model in zip(paper.TABLE5.items(), PAPER_MODELS.values())
            ),
            "With the FLOPs that the text counts instead of eq. 8. MFU does not change.",
        ),
        Disagreement(
            "§5",
            f"full recomputation runs the whole forward pass again: +{float(100 * to_the_end):.1f}% FLOPs",
            tuple(Value(name, 100 * layer_overhead(model.shape, "full"), "%") for name, model in PAPER_MODELS.items()),
            "No mistake: the paper's code runs to the end. If the last dropout mask is drawn before the MLP's last "
            "product, backward reads nothing that comes after it, so that product need not run again.",
        ),
        Disagreement(
            "Appendix B, figure 9",
            f"freeing outputs saves {paper.FIGURE9_SAVED_GB} GB on rank 0 of 530B",
            (
                Value("sbhp elements", Fraction(saved, 2**30), "GiB"),
                Value("the same", Fraction(saved, 10**9), "GB"),
                Value("divided by t", Fraction(saved // t, 2**30), "GiB"),
            ),
            "The number is in GiB, and not divided by t, although sequence parallelism leaves each rank 1/t of an "
            "output.",
        ),
        Disagreement(
            "Appendix B, figure 9",
            f"r = p = {p} outputs on rank 0 of 530B",
            (
                Value(f"outputs with m = {mt.parallel.num_model_chunks}", Fraction(count), ""),
                Value("sbh elements each", Fraction(held, 2**30), "GiB"),
            ),
            "r = p holds without interleaving; table 3 interleaves this model, with pm + p − 1 outputs in flight.",
        ),
        Disagreement(
            "Appendix C and table 5",
            ", ".join(
                f"{n} MFU {paper.APPENDIX_C[n].mfu_percent}% (+{paper.APPENDIX_C[n].gain_points})" for n in before
            ),
            tuple(Value(f"{name} before", value, "%") for name, value in before.items()),
            "Table 5 has " + ", ".join(f"{name} {paper.TABLE5[name].mfu_percent}%" for name in before) + ".",
        ),
    ]


def baseline_share(row: str, model: PaperModel) -> Fraction:
    """A row of table 2 relative to tensor parallelism alone, for one layer of a model."""
    rows, place = {one.name: one for one in TABLE2}, (model.shape, model.parallel.tensor_parallel_size)
    return Fraction(closed_form(rows[row], *place), closed_form(rows["tensor"], *place))
