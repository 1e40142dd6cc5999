"""Who predicts memory how well: public calculators beside counted bytes, a leaderboard, the slopes of two kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actmem.config import PAPER_MODELS, padded_vocab_size
from actmem.formulas.activations import TABLE2
from actmem.ledger.whole_step import watch_step
from actmem.torch_private import fake_tensors
from actmem_course.bench.measure_runs import MIB, measure_runs, predict_nanotron
from actmem_course.bench.reproduce import measure_layer_of
from actmem_course.others import table_rows
from actmem_course.others.calculators import CALCULATORS, calculator_bytes, calculator_sequence_bytes
from actmem_course.others.golden import LIMITS, predict, read_golden
from actmem_course.others.megatron_memory import MegatronRun, Trace
from actmem_course.others.published import NANOTRON_MODEL, NANOTRON_RUNS, NANOTRON_SEQ_LENGTH, NanotronRun
from actmem_course.results import CalculatorResult, KernelSlope, PredictorLine

#: Llama 3 70B and 405B, cut to 12 and 4 layers, under Megatron-LM on 8 B200s: rank 7's logged peak and what its allocator
#: reserved, and by how much SimuMax's own prediction misses the fullest rank: MooreThreads/SimuMax docs/b200/b200_release_v1.2_summary.json.
_B200 = "b200.tsv"
#: What its launcher gives all of them: simu_tools/megatron_scripts/scripts/run_pretrain_llama3.sh; the tokenizer adds a word.
_B200_ARGUMENTS = """ffn-hidden-size={f} hidden-size={h} num-attention-heads={a} num-layers={layers} seq-length={s}
    tensor-model-parallel-size={t} pipeline-model-parallel-size={p} context-parallel-size={cp} cp-comm-type=a2a
    group-query-attention=true num-query-groups={groups} micro-batch-size=1 global-batch-size={batch} vocab-size=128257
    swiglu=true normalization=RMSNorm disable-bias-linear=true position-embedding-type=rope attention-dropout=0.0
    hidden-dropout=0.0 untie-embeddings-and-output-weights=true no-create-attention-mask-in-dataloader=true
    attention-backend=flash use-distributed-optimizer=true sequence-parallel=true cross-entropy-loss-fusion=true
    cross-entropy-fusion-impl=te"""
#: Its torch and TransformerEngine 2.11.
_B200_ENVIRONMENT = ("small workspaces", "weight gradients kept")
#: SimuMax's own errors for its layouts of DeepSeek V2 and V3 there, which aren't modelled here.
_DEEPSEEK = (0.5, 0.74, 0.75, 0.81)
#: Linear and cross entropy, SwiGLU MLP as Hugging Face has them: h, the other width, and MiB at the peak by tokens, as
#: linkedin/Liger-Kernel benchmark/data/all_benchmark_data.csv logged them on an A100 (operation "full").
_ON_A100 = {
    "linear and cross entropy": (4096, 128256, {16384: 15302.3759765625, 32768: 27582.5}),
    "SwiGLU MLP": (4096, 11008, {16384: 3452.25, 32768: 6372.25}),
}


def measure_calculators() -> list[CalculatorResult]:
    """Each calculator's print for each row of table 2, one layer of the 22B model on one of its t ranks.

    Counted on an emulated rank, without what the paper leaves out: no calculator counts those bytes.
    """
    paper = PAPER_MODELS["22B"]
    return [
        CalculatorResult(
            calculator.name,
            calculator.source,
            row.name,
            calculator_bytes(calculator, row, paper.shape, paper.parallel.tensor_parallel_size),
            result.measured_bytes - result.extra_bytes,
            calculator.why,
        )
        for calculator in CALCULATORS
        for row, result in zip(TABLE2, measure_layer_of(paper.name))
    ]


def runs_of_two_sizes() -> tuple[NanotronRun, NanotronRun]:
    """Two published runs without a pipeline that differ only in their microbatch: what one more sequence takes on a GPU."""
    pairs = [
        (small, large)
        for small in NANOTRON_RUNS
        for large in NANOTRON_RUNS
        if small.pp == 1 and small.mbz < large.mbz
        and (small.gpus, small.dp, small.tp, small.pp) == (large.gpus, large.dp, large.tp, large.pp)
    ]  # fmt: skip
    return pairs[0]


def sequence_results() -> list[CalculatorResult]:
    """The same for one more sequence in the microbatch of a Llama, as GPUs measured it; the last line is ours."""
    small, large = runs_of_two_sizes()
    more = large.mbz - small.mbz
    counted = round((large.peak_allocated_mib - small.peak_allocated_mib) * MIB / more)
    what = f"1.1B Llama, tp {small.tp}, {small.gpus} GPUs"
    llama = replace(NANOTRON_MODEL, vocab_size=padded_vocab_size(NANOTRON_MODEL.vocab_size, small.tp, multiple=1))
    ours = [predict_nanotron(run).bytes for run in (small, large)]
    lines = [
        CalculatorResult(
            calculator.name,
            calculator.source,
            what,
            calculator_sequence_bytes(calculator, llama, NANOTRON_SEQ_LENGTH, small.tp),
            counted,
            calculator.why_llama,
        )
        for calculator in CALCULATORS
    ]
    why = "counted row by row from that code"
    difference = (ours[1] - ours[0]) // more
    return [*lines, CalculatorResult("ours", "src/actmem_course/others/nanotron.py", what, difference, counted, why)]


def kernel_slopes() -> list[KernelSlope]:
    """Bytes that one more token takes at the peak: by formula, counted on fake tensors, and from two logged peaks."""
    slopes = []
    for kernel, (h, width, peaks) in _ON_A100.items():
        formula, size = (
            ("6v + 4h + 8", 6 * width + 4 * h + 8) if "entropy" in kernel else ("14f + 8h", 14 * width + 8 * h)
        )
        few, many = peaks
        logged = (peaks[many] - peaks[few]) * MIB / (many - few)
        counted = (_peak(kernel, h, width, many) - _peak(kernel, h, width, few)) / (many - few)
        slopes.append(KernelSlope(kernel, formula, size, counted, logged))
    return slopes


def _peak(kernel: str, h: int, width: int, tokens: int) -> int:
    """The peak of a forward and backward as that benchmark runs it: gradients exist, and the graph is retained."""
    with fake_tensors():
        x = torch.zeros(tokens, h, dtype=torch.bfloat16, requires_grad=True)
        run: Callable[[Tensor], Tensor]
        if "entropy" in kernel:
            model: nn.Module = _linear(h, width)
            given = torch.zeros(tokens, dtype=torch.long)
            run, gradient = lambda x: F.cross_entropy(model(x), given), None
        else:
            gate, up, down = layers = _linear(h, width), _linear(h, width), _linear(width, h)
            model = nn.ModuleList(layers)
            given = gradient = torch.zeros(tokens, h, dtype=torch.bfloat16)
            run = lambda x: down(F.silu(gate(x)) * up(x))  # noqa: E731
        for _ in range(2):
            with watch_step(model, batch=(x, x.grad, given)) as bill:
                run(x).backward(gradient, retain_graph=True)
    return bill.peak_bytes


def _linear(into: int, out: int) -> nn.Linear:
    return nn.Linear(into, out, bias=False, dtype=torch.bfloat16)


def _b200_runs() -> Iterator[tuple[dict[str, str], Trace]]:
    """Each layout in ``b200.tsv``, and its fullest rank's run played on the allocator."""
    for row in table_rows(_B200):
        h, t, p, cp = (int(row[name]) for name in ("h", "t", "p", "cp"))
        arguments = _B200_ARGUMENTS.format(**row, groups=h // 1024, batch=4 * (8 // (t * p * cp)))
        yield row, Trace(MegatronRun(arguments, "gb200", environment=_B200_ENVIRONMENT)).play()


def b200_errors() -> tuple[list[float], list[float]]:
    """Ours and SimuMax's, of each layout in ``b200.tsv``: predicted minus logged, percent of the logged peak."""
    runs = list(_b200_runs())
    ours = [100 * (trace.peaks[-1] / MIB / float(row["peak_mib"]) - 1) for row, trace in runs]
    return ours, [float(row["simumax_percent"]) for row, _ in runs]


def b200_reserved() -> list[tuple[float, int, int]]:
    """Of each layout in ``b200.tsv``, in MiB: the logged peak, what was reserved for it, and what our allocator reserves."""
    return [
        (float(row["peak_mib"]), int(row["reserved_mib"]), trace.memory.reserved // MIB) for row, trace in _b200_runs()
    ]


def leaderboard() -> list[PredictorLine]:
    """Predictors on rows that GPUs logged, the least mean error first."""
    nanotron = [r.difference_percent for r in measure_runs()]
    golden = [predict(row) for row in read_golden()]
    kinds = {kind: [r.peak_percent for r in golden if r.row.kind == kind] for kind in LIMITS}
    ours, theirs = b200_errors()
    lines = [
        _line("ours", "1.1B Llama under nanotron", nanotron, "Hugging Face's logs"),
        *(_line("ours", f"Megatron-LM, {kind}", off, "NVIDIA's CI") for kind, off in kinds.items()),
        _line("ours", "Llama 3 on B200s", ours, "SimuMax's logs"),
        _line("SimuMax", "Llama 3 on B200s", theirs, "SimuMax, its own rows"),
        _line("SimuMax", "DeepSeek on B200s", _DEEPSEEK, "SimuMax, its own rows"),
        *(
            _line(r.calculator, "one more sequence, nanotron", [r.difference_percent], "Hugging Face's logs")
            for r in sequence_results()
        ),
    ]
    return sorted(lines, key=lambda line: line.mean_percent)


def _line(predictor: str, what: str, percents: Iterable[float | None], by: str) -> PredictorLine:
    off = [abs(percent) for percent in percents if percent is not None]
    return PredictorLine(predictor, what, len(off), mean(off), max(off), by)
