"""GPU runs that others published, as printed: only to compare with, nothing here goes into a prediction; and their layouts."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from actmem.config import PAPER_MODELS, ZERO_STAGES, PaperModel, check_choice
from actmem_course.others import table_rows
from actmem_course.others.paper import A100_BYTES
from actmem_more.llama_shape import LlamaShape
from actmem_tools.plan.plan_report import plan_text
from actmem_tools.plan.planned_models import PlannedGPT, PlannedModel, planned_model_of
from actmem_tools.plan.search import Plan, find_plans
from actmem_tools.plan.step_time import DEVICES, GIBIBYTE, MODEL_ERROR, Cluster

_Run = TypeVar("_Run")


def _runs(kind: type[_Run], file: str) -> tuple[_Run, ...]:
    """A run a row; what is no number is text."""
    number = re.compile(r"\d+(\.\d+)?")
    return tuple(
        kind(**{name: json.loads(value) if number.fullmatch(value) else value for name, value in row.items()})
        for row in table_rows(file)
    )


@dataclass(frozen=True)
class NanotronRun:
    """One run of the 1.1B Llama on H100s: sizes, and the peak of ``torch.cuda.max_memory_allocated`` on rank 0, in MiB."""

    gpus: int
    dp: int
    tp: int
    pp: int
    mbz: int
    peak_allocated_mib: float


#: What huggingface/bench_cluster trained in July 2024 (bench_cluster/template/base_config.py).
NANOTRON_SEQ_LENGTH = 4096
NANOTRON_MODEL = LlamaShape(
    NANOTRON_SEQ_LENGTH, 1, 2048, 32, 32, 4096, num_layers=24, vocab_size=50257, tied_embeddings=True
)
#: Sequences of one step.
NANOTRON_GLOBAL_BATCH = 1024

#: Data sets nanotron/old_bench and nanotron/bench_cluster, llama-1B/…/log_metrics.csv: 18 rows drawn at random.
NANOTRON_RUNS = _runs(NanotronRun, "nanotron_runs.tsv")


@dataclass(frozen=True)
class TitanRun:
    """One line of torchtitan's tables.  reserved_gib: by the allocator, the most of all ranks.

    recompute: "selective", "full".  changed: "" for eager 16-bit training, else what else was on.
    """

    model: str
    gpus: int
    local_batch_size: int
    seq_length: int
    recompute: str
    changed: str
    reserved_gib: float
    tokens_per_second: float
    data_parallel_size: int
    context_parallel_size: int
    tensor_parallel_size: int
    pipeline_parallel_size: int


#: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: H100s with 96 GB; s is its default where none is given.
TITAN_RUNS = _runs(TitanRun, "titan_runs.tsv")


@dataclass(frozen=True)
class Llama3Run:
    """One line of the Llama 3 report's table 4, 405B on H100s: layout, and TFLOP/s of each GPU."""

    gpus: int
    context_parallel_size: int
    data_parallel_size: int
    seq_length: int
    batch_per_data_rank: int
    tflops: float


#: 2407.21783 table 4; TP 8 and PP 16 in all lines.
LLAMA3_RUNS = (
    Llama3Run(8192, 1, 64, 8192, 32, 430),
    Llama3Run(16384, 1, 128, 8192, 16, 400),
    Llama3Run(16384, 16, 8, 131072, 16, 380),
)


# Their layouts beside the planner's fastest, among those that their code could run.  A published layout stands if it is
# one of the first five or no further behind than times are right.  One that doesn't has a reason, with what it would be
# without it.

#: The recomputation modes that the paper's code could choose; it had no ZeRO.
PAPER_MODES = ("none", "selective", "full")


@dataclass(frozen=True)
class Choice:
    """A published layout: its place among the plans that fit, fastest first, and the first of them.

    reason: why it doesn't stand, where it doesn't.
    """

    source: str
    setting: str
    plan: Plan = field(repr=False)
    best: Plan = field(repr=False)
    place: int
    fitting: int
    reason: str = ""

    @property
    def published_plan(self) -> str:
        return plan_text(self.plan)

    @property
    def best_plan(self) -> str:
        return plan_text(self.best)

    @property
    def behind_percent(self) -> float:
        """How much longer it takes than the first, by predicted time."""
        return 100 * (self.plan.seconds.total / self.best.seconds.total - 1)

    @property
    def hidden_seconds(self) -> float:
        """Of the first: exchanges that must run beside computing."""
        return self.best.seconds.hidden

    @property
    def stands(self) -> bool:
        """Whether it is one of the first five, or as near to the first as times are right."""
        return self.place <= 5 or self.behind_percent <= 100 * MODEL_ERROR


def _choice(
    source: str,
    setting: str,
    model: PlannedModel,
    cluster: Cluster,
    batch: int,
    modes: Collection[str],
    stages: Collection[int],
    sizes: dict[str, int | bool],
    windows: bool = True,
) -> Choice:
    """The layout with these sizes among plans for the model, its GPUs and batch.  modes, stages: what its code may choose."""
    plans = find_plans(model.with_modes(list(modes)), cluster, batch, 10**6, windows=windows).plans
    able = [plan for plan in plans if plan.layout.zero_stage in stages]
    place, plan = next(
        (i, plan)
        for i, plan in enumerate(able, 1)
        if all(getattr(plan.layout, name) == size for name, size in sizes.items())
    )
    return Choice(source, setting, plan, able[0], place, len(able))


def paper_sizes(model: PaperModel, sequence_parallel: bool = True) -> dict[str, int | bool]:
    """Table 3's layout, as the planner names it."""
    own = model.parallel
    return {
        "tensor_parallel_size": own.tensor_parallel_size,
        "pipeline_parallel_size": own.pipeline_parallel_size,
        "num_model_chunks": own.num_model_chunks,
        "micro_batch_size": model.shape.micro_batch_size,
        "sequence_parallel": sequence_parallel,
    }


def llama3_sizes(run: Llama3Run) -> dict[str, int | bool]:
    """A layout of the Llama 3 report's table 4, in all of which TP is 8 and PP 16."""
    sizes = {"tensor_parallel_size": 8, "pipeline_parallel_size": 16}
    return sizes | {"context_parallel_size": run.context_parallel_size, "data_parallel_size": run.data_parallel_size}


def paper_choice(model: str) -> Choice:
    """One of the paper's models on its own GPUs.  Raises ConfigError on another name."""
    check_choice("model", model, PAPER_MODELS)
    paper = PAPER_MODELS[model]
    cluster, gpt = Cluster(paper.num_devices, A100_BYTES, device=DEVICES["a100"]), PlannedGPT(model, paper.shape)
    place = gpt, cluster, paper.global_batch_size, PAPER_MODES, (0,)
    return _choice("2205.05198 table 3", model, *place, paper_sizes(paper))


def llama3_choice(run: Llama3Run, num_layers: int | None = None) -> Choice:
    """A line of the Llama 3 report's table 4.  num_layers: of another model than its own, whose 126 no chunks divide."""
    model = planned_model_of("llama3-405b").with_sizes(seq_length=run.seq_length)
    if num_layers:
        model = model.with_sizes(num_layers=num_layers)
    batch = run.data_parallel_size * run.batch_per_data_rank
    setting, cluster = f"405B, {run.gpus} GPUs, s {run.seq_length}", Cluster(run.gpus, 80 * GIBIBYTE)
    place = model, cluster, batch, model.recompute_modes, ZERO_STAGES
    return _choice("2407.21783 table 4", setting, *place, llama3_sizes(run))


def titan_choice(run: TitanRun) -> Choice:
    """A line of torchtitan's tables, among layouts that recompute as it does, of all microbatches."""
    pipeline = run.pipeline_parallel_size > 1
    sizes = {name: size for name, size in vars(run).items() if name.endswith("_parallel_size")}
    # A pipeline's microbatches aren't in the table, and its gradients are reduced once a step, as in stage 1.
    sizes |= {} if pipeline else {"micro_batch_size": run.local_batch_size}
    modes = ["full"] if run.recompute == "full" else ["elementwise"]
    batch = run.data_parallel_size * run.local_batch_size
    model = planned_model_of(run.model).with_sizes(seq_length=run.seq_length)
    setting = f"{run.model[7:].upper()}, {run.gpus} GPUs, s {run.seq_length}"
    stages = (1,) if pipeline else (3,)
    cluster = Cluster(run.gpus, 96 * GIBIBYTE)  # its H100s have 96 GiB
    return _choice("torchtitan", setting, model, cluster, batch, modes, stages, sizes, windows=False)


def published_choices() -> Iterator[Choice]:
    """All of them."""
    yield from map(paper_choice, PAPER_MODELS)
    for run in LLAMA3_RUNS:
        choice, even = llama3_choice(run), llama3_choice(run, 128)
        text = "chunks of 126 layers, the end ones a layer short, aren't planned: with 128 layers"
        yield _with_reason(choice, f"{text} place {even.place}, {even.behind_percent:.1f}% behind")
    layouts = {(run.model, run.gpus, run.seq_length): run for run in reversed(TITAN_RUNS)}
    for titan in reversed(layouts.values()):
        choice = titan_choice(titan)
        waits = choice.plan.seconds.tensor
        rest = (choice.plan.seconds.total - waits) / choice.best.seconds.total - 1
        text = f"waits {waits:.1f} s for exchanges that its asynchronous tensor parallelism hides"
        yield _with_reason(choice, f"{text}: without them {rest:.1%} behind")


def _with_reason(choice: Choice, reason: str) -> Choice:
    return choice if choice.stands else replace(choice, reason=reason)
