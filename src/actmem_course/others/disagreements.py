"""The places where the paper's text or formulas differ from our counts, each with our numbers.

None of this affects the paper's method; most of it strengthens the conclusion.
"""

from dataclasses import dataclass
from fractions import Fraction

from actmem.config import PAPER_MODELS, PaperModel
from actmem.formulas.activations import TABLE2, closed_form
from actmem.formulas.flops import layer_overhead, text_selective
from actmem.formulas.stages import embeddings_in_flight, eq5, in_flight, section43_extras
from actmem_course.others import paper, table_rows


@dataclass(frozen=True)
class Value:
    """One of our numbers.

    Attributes:
        label: The model or the case to which the number belongs, such as "22B".
        value: The number, in that unit.
        unit: Such as "%" or "GiB"; "" for a plain number.
    """

    label: str
    value: Fraction | float
    unit: str

    def __str__(self) -> str:
        number = f"{float(self.value):.2f}" if self.unit else str(self.value)
        return f"{self.label} {number}{self.unit if self.unit in ('', '%') else ' ' + self.unit}"


@dataclass(frozen=True)
class Disagreement:
    """One place where the paper and our count differ.

    Attributes:
        where: The place in the paper, such as a section.
        printed: What the paper says there.
        ours: Our numbers for the quantity that the paper gives there.
        why: The cause of the difference.
    """

    where: str
    printed: str
    ours: tuple[Value, ...]
    why: str

    def __str__(self) -> str:
        return f"{self.where}\n  paper: {self.printed}\n  ours: {', '.join(map(str, self.ours))}\n  {self.why}"


def disagreements() -> list[Disagreement]:
    """Return all disagreements: texts from disagreements.tsv, in the order of its lines, with our numbers computed."""
    lines = table_rows("disagreements.tsv")
    return [Disagreement(ours=tuple(ours), **line) for line, ours in zip(lines, _values(), strict=True)]


def _values() -> list[list[Value]]:
    """Return our numbers for each line of disagreements.tsv."""
    smallest, mt = PAPER_MODELS["22B"], PAPER_MODELS["530B"]
    t, p = smallest.parallel.tensor_parallel_size, smallest.parallel.pipeline_parallel_size
    extras = Fraction(section43_extras(smallest.shape, t, p), eq5(smallest.shape, t))
    interleaved = [model for model in PAPER_MODELS.values() if model.parallel.num_model_chunks > 1]
    ways = (("by the text", "paper-selective"), ("stopped early", "selective"))
    added = {
        f"{name} {how}": layer_overhead(PAPER_MODELS[name].shape, mode)
        for name in paper.SECTION5_ADDED_FLOPS_PERCENT
        for how, mode in ways
    }
    flops = {name: text_selective(model.shape, model.global_batch_size) for name, model in PAPER_MODELS.items()}
    _, b, h, s = mt.shape.letters()
    t, p, count = mt.parallel.tensor_parallel_size, mt.parallel.pipeline_parallel_size, in_flight(mt.parallel)
    saved, held = 2 * s * b * h * p, 2 * s * b * h * count
    before = {n: Fraction(str(row.mfu_percent)) - Fraction(str(row.gain_points)) for n, row in paper.APPENDIX_C.items()}
    return [
        _percents({"22B": extras}),
        [Value(model.name, Fraction(embeddings_in_flight(model.parallel)), "") for model in interleaved],
        _percents({name: baseline_share("tensor+sequence+selective", model) for name, model in PAPER_MODELS.items()}),
        _percents({name: baseline_share("full", model) for name, model in PAPER_MODELS.items()}),
        _percents(added),
        [Value(n, paper.percent_of_peak(n, each, paper.TABLE5[n].seconds), "%") for n, each in flops.items()],
        _percents({name: layer_overhead(model.shape, "full") for name, model in PAPER_MODELS.items()}),
        [
            Value("sbhp elements", Fraction(saved, 2**30), "GiB"),
            Value("the same", Fraction(saved, 10**9), "GB"),
            Value("divided by t", Fraction(saved // t, 2**30), "GiB"),
        ],
        [
            Value(f"outputs with m = {mt.parallel.num_model_chunks}", Fraction(count), ""),
            Value("sbh elements each", Fraction(held, 2**30), "GiB"),
        ],
        [
            Value(f"{name} before", percent, "%")
            for name, percent in before.items()
            if percent != Fraction(str(paper.TABLE5[name].mfu_percent))
        ],
    ]


def _percents(shares: dict[str, Fraction]) -> list[Value]:
    return [Value(name, 100 * share, "%") for name, share in shares.items()]


def baseline_share(row: str, model: PaperModel) -> Fraction:
    """Return the bytes that one layer saves in a configuration, divided by its bytes with tensor parallelism alone.

    Args:
        row: the configuration: a row of the paper's table 2 by its name, such as "tensor+sequence".
        model: one of the paper's models, from PAPER_MODELS.
    """
    rows = {configuration.name: configuration for configuration in TABLE2}
    place = model.shape, model.parallel.tensor_parallel_size
    return Fraction(closed_form(rows[row], *place), closed_form(rows["tensor"], *place))
