"""Where the paper contradicts itself, each place recomputed from its own formulas.

None of this affects the paper's method; most of it strengthens the conclusion.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from actmem.formulas.activations import TABLE2, closed_form
from actmem.formulas.first_stage import embeddings_in_flight, eq5, in_flight, section43_extras
from actmem.formulas.flops import layer_overhead
from actmem.models import PAPER_MODELS
from actmem_course.others import paper
from actmem_course.others.table5 import table5


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
        return f"{self.where}: printed {self.printed}; ours {', '.join(map(str, self.ours))}. {self.why}"


def disagreements() -> list[Disagreement]:
    """The whole list, in the order of the paper."""
    return [
        _extras_share(),
        _interleaved_embedding(),
        _both_share(),
        _full_share(),
        _eq8_overhead(),
        _table5_hfu(),
        _full_overhead(),
        _freed_outputs(),
        _freed_outputs_interleaved(),
        _appendix_c(),
    ]


def _extras_share() -> Disagreement:
    model = PAPER_MODELS["22B"]
    t, p = model.parallel.tensor_parallel_size, model.parallel.pipeline_parallel_size
    share = Fraction(section43_extras(model.shape, t, p), eq5(model.shape, t))
    return Disagreement(
        "§4.3",
        f"22B: the bytes beside its layers are under {paper.SECTION43_EXTRAS_PERCENT_BELOW['22B']}%",
        (Value("22B", 100 * share, "%"),),
        "The section's own formula; still small enough to leave out.",
    )


def _interleaved_embedding() -> Disagreement:
    models = [model for model in PAPER_MODELS.values() if model.parallel.num_model_chunks > 1]
    return Disagreement(
        "§4.3",
        "p embedding dropout masks on the first stage: "
        + ", ".join(f"{m.name} {m.parallel.pipeline_parallel_size}" for m in models),
        tuple(Value(m.name, Fraction(embeddings_in_flight(m.parallel)), "") for m in models),
        "p is the count without interleaving. With it, a second round of p forwards enters the first chunk "
        "before any backward reaches it: 2p masks.",
    )


def _closed_forms(model: str, name: str) -> Fraction:
    """A row of table 2, relative to the tensor-parallel baseline."""
    rows = {configuration.name: configuration for configuration in TABLE2}
    shape, t = PAPER_MODELS[model].shape, PAPER_MODELS[model].parallel.tensor_parallel_size
    return Fraction(closed_form(rows[name], shape, t), closed_form(rows["tensor"], shape, t))


def _both_share() -> Disagreement:
    return Disagreement(
        "§6.1, figure 7",
        f"both methods together need under {paper.FIGURE7_BOTH_PERCENT_BELOW}% of the tensor-parallel baseline",
        tuple(Value(name, 100 * _closed_forms(name, "tensor+sequence+selective"), "%") for name in PAPER_MODELS),
        "Table 2's own formulas; the two largest models are just above.",
    )


def _full_share() -> Disagreement:
    return Disagreement(
        "§6.1, figure 7",
        f"full recomputation needs {paper.FIGURE7_FULL_PERCENT}% of the tensor-parallel baseline",
        tuple(Value(name, 100 * _closed_forms(name, "full"), "%") for name in PAPER_MODELS),
        "Table 2's own formulas, 2sbh a layer.",
    )


def _eq8_overhead() -> Disagreement:
    values = []
    for name in paper.SECTION5_ADDED_FLOPS_PERCENT:
        shape = PAPER_MODELS[name].shape
        values += [
            Value(f"{name} by the text", 100 * layer_overhead(shape, "paper-selective"), "%"),
            Value(f"{name} stopped early", 100 * layer_overhead(shape, "selective"), "%"),
        ]
    return Disagreement(
        "§5 and eq. 8",
        ", ".join(f"{name} +{x}%" for name, x in paper.SECTION5_ADDED_FLOPS_PERCENT.items()) + " FLOPs for selective",
        tuple(values),
        "Eq. 8 adds 12Bs²h a layer, three forward passes of the core attention; the text runs it once more, "
        "4Bs²h. The output of its second product is not read in backward, so 2Bs²h is enough.",
    )


def _table5_hfu() -> Disagreement:
    return Disagreement(
        "Table 5, HFU",
        ", ".join(f"{name} {row.hfu_percent}%" for name, row in paper.TABLE5.items()),
        tuple(Value(row.model, row.hfu_text_percent, "%") for row in table5()),
        "With the FLOPs that the text counts instead of eq. 8. MFU does not change.",
    )


def _full_overhead() -> Disagreement:
    whole = layer_overhead(PAPER_MODELS["22B"].shape, "paper-full")
    return Disagreement(
        "§5",
        f"full recomputation runs the whole forward pass again: +{float(100 * whole):.1f}% FLOPs",
        tuple(Value(name, 100 * layer_overhead(model.shape, "full"), "%") for name, model in PAPER_MODELS.items()),
        "If the last dropout mask is drawn before the MLP's last product, backward reads nothing that comes after "
        "it, so that product need not run again.",
    )


def _freed_outputs() -> Disagreement:
    model = PAPER_MODELS["530B"]
    _, b, h, s = model.shape.letters()
    t, p = model.parallel.tensor_parallel_size, model.parallel.pipeline_parallel_size
    saved = 2 * s * b * h * p
    return Disagreement(
        "Appendix B, figure 9",
        f"freeing outputs saves {paper.FIGURE9_SAVED_GB} GB on rank 0 of 530B",
        (
            Value("sbhp elements", Fraction(saved, 2**30), "GiB"),
            Value("the same", Fraction(saved, 10**9), "GB"),
            Value("divided by t", Fraction(saved // t, 2**30), "GiB"),
        ),
        "The number is in GiB, and not divided by t, although sequence parallelism leaves each rank 1/t of an output.",
    )


def _freed_outputs_interleaved() -> Disagreement:
    model = PAPER_MODELS["530B"]
    _, b, h, s = model.shape.letters()
    count = in_flight(model.parallel)
    return Disagreement(
        "Appendix B, figure 9",
        f"r = p = {model.parallel.pipeline_parallel_size} outputs on rank 0 of 530B",
        (
            Value(f"outputs with m = {model.parallel.num_model_chunks}", Fraction(count), ""),
            Value("sbh elements each", Fraction(2 * s * b * h * count, 2**30), "GiB"),
        ),
        "r = p holds without interleaving; table 3 interleaves this model, with pm + p − 1 outputs in flight.",
    )


def _appendix_c() -> Disagreement:
    before = {n: Fraction(str(row.mfu_percent)) - Fraction(str(row.gain_points)) for n, row in paper.APPENDIX_C.items()}
    return Disagreement(
        "Appendix C and table 5",
        ", ".join(f"{name} MFU {row.mfu_percent}% (+{row.gain_points})" for name, row in paper.APPENDIX_C.items()),
        tuple(Value(f"{name} before", value, "%") for name, value in before.items()),
        "Table 5 has " + ", ".join(f"{name} {paper.TABLE5[name].mfu_percent}%" for name in before) + ".",
    )
