"""NVIDIA's logged memory beside ours: 132 rows of Megatron-LM's functional tests, and pairs that differ in one thing.

golden.tsv: what NVIDIA/Megatron-LM's tests/functional_tests/test_cases/*/golden_values_dev_dgx_*.json of the snapshot
d98e8a64 say of cases that don't resume.  peak_bytes: the largest mem-max-allocated-bytes;
held_bytes: mem-allocated-bytes.  What a test sets beside its arguments is stated once, in ``GoldenRow.environment``.
golden_logs.tsv: by how many bytes the logs of one test on one kind of GPU differ, in those files' commits from October 2025
on and those of the long-term container on A100s, without logs of another environment and without experts.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from itertools import combinations
from random import Random
from typing import TYPE_CHECKING

from actmem.config import ConfigError, ModelShape, Parallel
from actmem.formulas.activations import eq1
from actmem.formulas.first_stage import in_flight
from actmem_course.others import table_rows
from actmem_course.others.allocator import UNSPLIT
from actmem_course.others.megatron_memory import MegatronRun, Trace, parse, whole_number

if TYPE_CHECKING:
    from importlib.abc import Traversable

GOLDEN = resources.files("actmem_course.others") / "golden.tsv"
_VP1 = "gpt/gpt3_mcore_te_tp1_pp4_vp1"
#: Values written while tensor-parallel rank 0 moved to the GPU the batch that is kept until the step ends.
_JUNE_2026 = {(_VP1, "gb200"), (_VP1, "h100"), ("gpt/gpt3_mcore_te_tp1_pp1_dist_optimizer_fim_dataset", "gb200")}
#: Why a row may be off: the first that it has, an argument or a word of its environment; "" if it has none.
REASONS = {
    "overlap-moe-expert-parallel-comm": "what overlapping the experts' exchanges keeps is not modelled",
    "num-experts": "the router decides how many tokens reach a rank's experts; here it is an even share",
    "multi-latent-attention": "small tensors of the latents, and unsplit blocks",
    "context-parallel-size": "blocks that the ring sent come back when the GPU is done with them (one log's peak grows by 9 MiB in the middle of its run)",
    "": "unsplit blocks, up to 1 MiB each: which free block a tensor gets differs from one log to the next",
    "nothing sent": "no other rank's tensors, or segments that expand: no block depends on chance",
}
#: How near the bytes at rest should be, percent.
NEAR = 0.05
#: How often a run is played with delays drawn at random.
LATE_PLAYS = 32
_NEEDED = ("case", "gpu", "arguments")
#: How far a run's peak may be from the logged one, percent.  Of kernels no source shows what they save; how many tokens
#: the fullest rank's experts get is the router's doing: here it is an even share.
LIMITS = {"dense, unfused attention": 0.3, "dense, flash or cuDNN attention": 1.2, "experts or latent attention": 2.5}


@dataclass(frozen=True)
class GoldenRow:
    """One test on one kind of GPU.  peak_bytes, held_bytes: as logged, None where a file gives none."""

    case: str
    gpu: str
    arguments: str
    peak_bytes: int | None = None
    held_bytes: int | None = None
    gpus_given: int | None = None

    @property
    def gpus(self) -> int:
        """How many the test runs on: what the table says, else 4 on one node of GB200s, 8 elsewhere."""
        return self.gpus_given or (4 if "1node" in self.case else 8)

    @property
    def environment(self) -> frozenset[str]:
        """What the bytes depend on and the arguments don't say, as MegatronRun has it.

        Tests that compare bit by bit set CUBLAS_WORKSPACE_CONFIG, those with flash attention don't.  Two tests
        set expandable segments, but not on A100s.  Values are as old as the commit that last wrote them.
        """
        words = set()
        april_2025 = self.gpu == "a100" and "te_8experts2parallel" in self.case
        if april_2025 and "groupedGEMM" not in self.case:
            words.add("weighted after")
        elif not april_2025 and not any(
            word in self.case for word in ("nondeterministic", "release", "tp2_pp2_ep4_etp1")
        ):
            words.add("deterministic")
        if parse(self.arguments).get("attention-backend") != "flash" or self.case.startswith("moe/"):
            words.add("cublas")
        elif self.gpu == "gb200" and "nondeterministic_" in self.case:  # written before May 2026
            words.add("small workspaces")
        if self.gpu != "a100" and self.case.removesuffix("_1node") in (_VP1, _VP1 + "_tunable_overlap"):
            words.add("expandable")
        if (self.case, self.gpu) in _JUNE_2026:
            words.add("batches kept")
        return frozenset(words)

    @property
    def logs_apart(self) -> tuple[int, int]:
        """By how many bytes this test's logs on this kind of GPU differ: at rest, and in peak less held; 0 of a single log."""
        return _logs().get((self.case, self.gpu), (0, 0))

    @property
    def kind(self) -> str:
        """Which of LIMITS it is."""
        given, (dense, fused, other) = parse(self.arguments), LIMITS
        if given.keys() & {"num-experts", "multi-latent-attention"}:
            return other
        unfused = given.get("attention-backend") == "unfused" or given.get("transformer-impl") == "local"
        return dense if unfused else fused

    @property
    def active_bytes(self) -> int:
        """Peak less held, as NVIDIA's CI logged both."""
        assert self.peak_bytes and self.held_bytes
        return self.peak_bytes - self.held_bytes


@dataclass(frozen=True)
class GoldenResult:
    """A row with its run played; ``why_not`` in place of both where the run isn't modelled."""

    row: GoldenRow = field(repr=False)
    played: Trace | None = field(repr=False)
    why_not: str = ""

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The largest sum of blocks in use over the iterations that are played."""
        return self.played.peaks[-1] if self.played else None

    @property
    def predicted_held_bytes(self) -> int | None:
        """What is in use between iterations, from the second on."""
        return self.played.held[-1] if self.played else None

    @property
    def peak_percent(self) -> float | None:
        """Predicted minus logged, percent of the logged peak."""
        return _percent(self.predicted_peak_bytes, self.row.peak_bytes)

    @property
    def held_percent(self) -> float | None:
        """Predicted minus logged, percent of the logged held bytes."""
        return _percent(self.predicted_held_bytes, self.row.held_bytes)

    @property
    def ignored(self) -> list[str]:
        """Arguments that may change bytes and are taken as if they were off."""
        return self.played.run.ignored if self.played else []

    @property
    def reason(self) -> str:
        """Which of REASONS."""
        if not self.played:
            return ""
        run = self.played.run
        words = {*run.given, *self.row.environment}
        if run.expandable_segments or run.t * run.p * run.cp == 1:
            words.add("nothing sent")
        return next((name for name in REASONS if name in words), "")

    @property
    def surplus_percent(self) -> float | None:
        """How many more tokens than an even share the experts would have to get for the logged peak; None without experts."""
        if not self.played or not self.played.run.experts or not self.row.held_bytes:
            return None
        shared = sum(self.active_lines.get(line, 0) for line in ("MLP", "experts' inputs and outputs"))
        return 100 * (self.row.active_bytes - sum(self.active_lines.values())) / shared

    @cached_property
    def fits_if_late(self) -> bool:
        """Whether one of LATE_PLAYS in which blocks that NCCL used come back late holds the logged bytes, but for scalars."""
        assert self.played and self.row.held_bytes
        run = self.played.run
        plays = (Trace(run, Random(seed).choice).play() for seed in range(LATE_PLAYS if run.p * run.cp > 1 else 0))
        return any(abs(play.held[-1] - self.row.held_bytes) <= _SCALARS_BYTES for play in plays)

    @property
    def within_limit(self) -> bool:
        """Whether the peak is as near as LIMITS says; True where nothing was logged or predicted."""
        return abs(self.peak_percent or 0) <= LIMITS[self.row.kind]

    @cached_property
    def tensor_bytes(self) -> int:
        """The sum of that bill without what blocks have beyond their tensors."""
        return sum(size for line, size in self.active_lines.items() if line != UNSPLIT)

    @cached_property
    def active_lines(self) -> dict[str, int]:
        """The bill of what exists at the peak and not between iterations, line by line."""
        assert self.played
        lines = self.played.memory.peak_lines.copy()
        lines.subtract(self.played.memory.lines)
        return {line: size for line, size in lines.items() if size}


def _percent(ours: int | None, logged: int | None) -> float | None:
    return None if ours is None or not logged else 100 * (ours / logged - 1)


@cache
def _logs() -> dict[tuple[str, str], tuple[int, int]]:
    return {
        (row["case"], row["gpu"]): (int(row["at_rest_apart_bytes"]), int(row["active_apart_bytes"]))
        for row in table_rows("golden_logs.tsv")
    }


def read_golden(path: Traversable = GOLDEN) -> list[GoldenRow]:
    """Rows of a tab-separated file with golden.tsv's columns; only case, gpu and arguments are needed.

    Raises ConfigError on a file that can't be read, has no rows, lacks a column or has bytes that are no number.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        reader = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
        names, lines = reader.fieldnames or (), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError("rows", f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    for name in _NEEDED:
        if name not in names:
            raise ConfigError("rows", f"{path} has no column {name}")
    if not lines:
        raise ConfigError("rows", f"{path} has no rows")
    return [_row(number, raw) for number, raw in enumerate(lines, start=2)]


def _row(line: int, raw: dict) -> GoldenRow:
    if not all(raw[name] for name in _NEEDED):
        raise ConfigError("rows", f"line {line}: case, gpu and arguments can't be empty")
    numbers = {name: raw.get(name) or None for name in ("peak_bytes", "held_bytes", "gpus")}
    for name, text in numbers.items():
        if text and not whole_number(text):
            raise ConfigError("rows", f"line {line}: {name} must be a whole number above 0")
    case, gpu, arguments = (raw[name] for name in _NEEDED)
    if "no_create_attention_mask" in case:  # the shared table leaves this argument out
        arguments += " no-create-attention-mask-in-dataloader=true"
    return GoldenRow(case, gpu, arguments, *(int(text) if text else None for text in numbers.values()))


def predict(row: GoldenRow) -> GoldenResult:
    """The row with its run played, or why it can't be."""
    try:
        return GoldenResult(row, _play(row.arguments, row.gpu, row.gpus, row.environment))
    except ConfigError as error:
        return GoldenResult(row, None, str(error))


def equal_by_code(results: Sequence[GoldenResult]) -> list[tuple[int, float]]:
    """Rows of one kind of GPU with the same predicted bytes: how many, and how far apart they logged those at rest, percent."""
    groups = defaultdict(list)
    for r in results:
        if r.row.held_bytes:
            groups[r.row.gpu, r.predicted_peak_bytes, r.predicted_held_bytes].append(r.row.held_bytes)
    apart = [(len(held), 100 * (max(held) / min(held) - 1)) for held in groups.values()]
    return [one for one in apart if one[1] > NEAR]


@cache
def _play(*what) -> Trace:
    """Cases that differ in name only are played once."""
    return Trace(MegatronRun(*what)).play()


def equalities() -> list[tuple[str, int, int]]:
    """What of the paper A100s logged: in words, the bytes by formula, and the logged ones.

    Logged: peak less held of one run, minus that of another, which differs in one thing.  The first two are equal;
    the third is six numbers apart, each in a block of 512 B.
    """
    rows = {row.case.removeprefix("gpt/gpt3_mcore_te_tp1_"): row for row in read_golden() if row.gpu == "a100"}
    run = MegatronRun(rows["pp1_uniform_full_recompute"].arguments, "a100")
    layer = eq1(ModelShape(run.s, run.b, run.h, run.a)) + 16 * run.s * run.b
    thin = MegatronRun(rows["pp4_vp1"].arguments, "a100")
    parallel = Parallel(pipeline_parallel_size=thin.p, num_model_chunks=len(thin.chunks))
    more = in_flight(parallel, thin.p - 1, thin.microbatches) - sum(thin.chunks)
    pairs = (
        ("one layer, 34sbh + 5as²b + 16sb", layer, "pp4_untie_embeddings_and_outputs", "pp4_vp1_uneven_pipeline"),
        (
            f"nothing recomputed instead of everything, {run.chunks[0]} layers", run.chunks[0] * (layer - run.whole_bytes),
            "pp1_dist_optimizer_no_mmap_bin_files", "pp1_uniform_full_recompute",
        ),
        (
            f"{more} more layers in flight; {len(thin.chunks)} of their inputs are held between iterations too, and cancel",
            more * layer - len(thin.chunks) * run.whole_bytes, "pp4_vp1", "pp4_untie_embeddings_and_outputs",
        ),
    )  # fmt: skip
    return [(what, formula, rows[one].active_bytes - rows[other].active_bytes) for what, formula, one, other in pairs]


# The same models run on this machine (bench/golden_here.py).

LAYERS_AND_HEAD = "what layers and head keep, the received input and its gradient"
#: Lines of HereResult in which the two sides may differ, and why they do.
WHY_APART = {
    LAYERS_AND_HEAD: "the paper's terms",
    "logits, 16 bits": "the loss reads them",
    "logits, float32": "the softmax",
    "norm statistics": "float32 there, 16 bits in torch's CPU kernel",
    "batch": "their causal mask s²b, positions 8sb and loss mask 4sb, less 4sb of 32-bit ids that ours looks up",
    "loss": "other small tensors within the cross entropy",
    "generator states": "recomputation keeps them; CUDA's are on the host",
    "transient": "a gradient or a copy inside one operation",
    UNSPLIT: "blocks larger than their tensors",
}


@dataclass(frozen=True)
class HereResult:
    """A row beside a count.  counted, on_gpu: bytes of each line at the peak, ours and the played run's.

    megatron_core: counted bytes with its layers in place of ours; None where it isn't installed, or runs layers again.
    """

    golden: GoldenResult = field(repr=False)
    run: MegatronRun = field(repr=False)
    counted: dict[str, int]
    on_gpu: dict[str, int]
    megatron_core: int | None = None

    @property
    def logged_bytes(self) -> int:
        return self.golden.row.active_bytes

    @property
    def counted_bytes(self) -> int:
        """What the emulated rank has at its peak beyond weights, gradients and buffers."""
        return sum(self.counted.values())

    @property
    def apart(self) -> dict[str, int]:
        """On the GPU minus here, line by line, where they differ."""
        differences = {line: self.on_gpu.get(line, 0) - self.counted.get(line, 0) for line in WHY_APART}
        return {line: size for line, size in differences.items() if size}

    @property
    def open_bytes(self) -> int:
        """What no line explains: logged less counted less ``apart``."""
        return self.logged_bytes - self.counted_bytes - sum(self.apart.values())


# Natural experiments: what cancels in the difference of two rows leaves the formula of the one thing that differs.

#: A thing: its arguments, and the formula of what it changes in "active" bytes, the peak less what is held.
THINGS = {
    "layers": (
        "pipeline-model-parallel-size decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers num-layers",
        "34sbh + 5as²b + 16sb of statistics a layer",
    ),
    "recomputation": (
        "recompute-granularity recompute-method recompute-num-layers",
        "32sbh + 5as²b + 16sb a layer: only inputs stay",
    ),
    "interleaving": (
        "num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank",
        "layers of the chunks in flight, and 2sbh held or not",
    ),
    "tensor parallelism": ("tensor-model-parallel-size", "24sbh + 5as²b divided by t, and the logits"),
    "SwiGLU": ("swiglu", "16sbh against 6sbf, f = 1,344"),
    "causal mask": ("no-create-attention-mask-in-dataloader", "a mask of s²b bytes in each batch"),
    "rotary positions": (
        "position-embedding-type no-rope-fusion rotary-interleaved rotary-percent",
        "cos and sin of Q and K",
    ),
    "norms of Q and K": ("qk-layernorm", "4sbh/t and statistics"),
    "loss per token": ("calculate-per-token-loss", "nothing"),
    "order of ranks": ("use-tp-pp-dp-mapping expert-tensor-parallel-size", "nothing"),
    "GPU": ("gpu", "flash-attn's copy of its output, 2sbh/t a layer, not where H100 runs cuDNN's kernel"),
}
#: What changes held bytes only: it cancels in "active".
_HELD_ONLY = """use-distributed-optimizer overlap-grad-reduce overlap-param-gather num-distributed-optimizer-instances
    untie-embeddings-and-output-weights decoupled-lr disable-bias-linear ddp-average-in-collective vocab-size"""
#: A tensor of a few numbers is a block of 512 B: so many of them no line counts.
_SCALARS_BYTES = 16 * 512


#: The verdict on a pair that no formula explains, and that another log of the same tests could.
AS_LOGS = "no further than each test's own logs"


@dataclass(frozen=True)
class Experiment:
    """Two rows that differ in one of THINGS: what each logged beyond what it holds, the first minus the second."""

    thing: str
    more: GoldenResult = field(repr=False)
    less: GoldenResult = field(repr=False)

    @property
    def beside(self) -> str:
        """The second row."""
        return f"{self.less.row.case}, {self.less.row.gpu}"

    @property
    def logged_bytes(self) -> int:
        return self.more.row.active_bytes - self.less.row.active_bytes

    @property
    def formula_bytes(self) -> int:
        """The difference of the two bills' tensors."""
        return self.more.tensor_bytes - self.less.tensor_bytes

    @property
    def apart_bytes(self) -> int:
        """Logged minus formula."""
        return self.logged_bytes - self.formula_bytes

    @property
    def reason(self) -> str:
        """Which of REASONS the two rows have, the first of them."""
        return min((self.more.reason, self.less.reason), key=[*REASONS].index)

    @property
    def verdict(self) -> str:
        """ "0 B"; a few scalars; explained by what blocks have beyond their tensors, as our allocator has it; no further apart than
        each test's own logs; else open."""
        if not self.apart_bytes:
            return "0 B"
        if abs(self.apart_bytes) <= _SCALARS_BYTES:
            return f"{abs(self.apart_bytes) // 512} scalars of 512 B"
        unsplit = self.more.active_lines.get(UNSPLIT, 0) - self.less.active_lines.get(UNSPLIT, 0)
        if abs(self.apart_bytes - unsplit) <= _SCALARS_BYTES:
            return "explained: unsplit blocks"
        logs = sum(one.row.logs_apart[1] for one in (self.more, self.less))
        return AS_LOGS if abs(self.apart_bytes) <= logs else "open"


def experiments(results: Sequence[GoldenResult]) -> list[Experiment]:
    """All pairs of results that differ in one of THINGS, the larger formula first; pairs of equal bytes are listed once."""
    owner = {name: thing for thing, (names, _) in THINGS.items() for name in names.split()}
    usable = [r for r in results if r.played and r.row.peak_bytes and r.row.held_bytes]
    found: dict[tuple, Experiment] = {}
    for one, other in combinations(usable, 2):
        a, b = ({**parse(r.row.arguments), "gpu": r.row.gpu} for r in (one, other))
        differ = {owner.get(name, name) for name in {*a, *b} if a.get(name) != b.get(name)} - {*_HELD_ONLY.split()}
        if len(differ) != 1 or not differ <= THINGS.keys() or one.row.gpus != other.row.gpus:
            continue
        (thing,) = differ
        if thing == "GPU" and one.row.case != other.row.case:
            continue
        more, less = sorted((one, other), key=lambda r: r.tensor_bytes, reverse=True)
        pair = Experiment(thing, more, less)
        if thing != "GPU" or pair.logged_bytes or pair.formula_bytes:
            found.setdefault((thing, more.row.gpu, less.row.gpu, pair.logged_bytes, pair.formula_bytes), pair)
    order = list(THINGS)
    key = lambda e: (order.index(e.thing), e.more.row.gpu, e.more.row.case, e.less.row.case)  # noqa: E731
    return sorted(found.values(), key=key)
