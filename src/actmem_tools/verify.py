"""``plan --verify``: run the fullest rank of a plan, and compare its bill line by line with what is counted.

The real model runs as one emulated rank on fake tensors: every forward that the rank would have in
flight, through the schedule's own actions, and one step of Adam.  Counted are weights, gradients
and optimizer states of the whole rank, and all that autograd keeps.  What ZeRO divides is counted
whole and divided as the bill divides it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from actmem.config import ModelShape, padded_vocab_size
from actmem.formulas.schedule import Action, held, interleaved, one_forward_one_backward
from actmem.layers.gpt import GPT
from actmem.ledger.census import LiveStorages
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.storages import storages_of
from actmem.main_grad import MainWeights, gradient_of, use_main_gradients
from actmem.parallel.groups import TensorParallel
from actmem.rows import Comparison, Match, Row, compare, total
from actmem_more.context import ContextParallel, layer_groups
from actmem_more.experts import ExpertMLP, Routing, expert_ranks
from actmem_more.llama import LlamaStage
from actmem_tools.command_line import empty_table
from actmem_tools.measured_parts import measure_parts, run_part
from actmem_tools.plan.plan_report import plan_text
from actmem_tools.plan.planned_models import PlannedModel
from actmem_tools.plan.search import Bill, Plan, bill_of, chunk_layers, share

#: What ``--verify`` says it leaves out.
NOT_RUN = (
    "Not run: data-parallel ranks (states are counted whole, then divided by the bill's rule) and communication buffers"
)
#: Parts of a bill that an emulated rank holds; buffers and the transient are not among them.
COUNTED_PARTS = ("weights", "gradients", "optimizer states", "activations", "logits and loss")


_Ranks = tuple[TensorParallel, ContextParallel, TensorParallel | None]


def verify_plan(model: PlannedModel, plan: Plan) -> Comparison:
    """The counted lines of the plan's bill beside those of an emulated rank.

    Raises ConfigError on a model that this library can't run.
    """
    bill = _bill(model, plan)
    predicted = [*(row for part in COUNTED_PARTS for row in bill.parts[part])]
    chunks = chunks_of(model, plan)
    actions = fullest_actions(model, plan, chunks)
    steps = [(action.kind, action.chunk, action.microbatch) for action in actions]
    with _emulated(plan) as ranks:
        parts = [_part(model, plan, ranks, layers) for layers in chunks]
        return compare(predicted, measure_parts(parts, steps) + _states(parts, plan))


def _bill(model: PlannedModel, plan: Plan) -> Bill:
    """What is to be verified.  Raises ConfigError on what this library has no layer or optimizer for."""
    model.check_verifiable()
    return bill_of(model.on("cpu"), plan)


@contextmanager
def _emulated(plan: Plan) -> Iterator[_Ranks]:
    """The emulated rank's groups: t, c, and who shares experts if these are more than t.

    A single tensor-parallel rank has no sequence to share.
    """
    t, c, ranks = plan.layout.tensor_parallel_size, plan.layout.context_parallel_size, plan.layout.expert_ranks
    replicas = ranks // t
    with emulated_rank(t * c * replicas):
        groups = layer_groups(c, sequence_parallel=plan.layout.sequence_parallel and t > 1, replicas=replicas)
        yield *groups, expert_ranks(ranks) if replicas > 1 else None


def _part(model: PlannedModel, plan: Plan, ranks: _Ranks, layers: range) -> GPT | LlamaStage:
    (tp, context, experts), recompute = ranks, plan.recompute
    shape, dtype = model.shape.with_sizes(micro_batch_size=plan.layout.micro_batch_size), torch.bfloat16
    if isinstance(shape, ModelShape):
        return GPT(shape, tp, layers=layers, recompute=recompute, dtype=dtype)
    shape = shape.with_sizes(vocab_size=padded_vocab_size(shape.vocab_size, tp.size, multiple=1))
    routing: Routing = "one-sided" if model.routing == "one-sided" else "even"
    groups: dict = {"context": context, "experts": experts}
    return LlamaStage(shape, tp, layers=layers, recompute=recompute, routing=routing, dtype=dtype, **groups)


def count_peak(model: PlannedModel, plan: Plan) -> Match:
    """The transient of the plan's fullest rank: the bill's, and counted in the next backward pass of an emulated rank.

    Of a microbatch that recomputes as the plan says.  Raises ConfigError on a plan that this library can't run.
    """
    bill = _bill(model, plan)
    predicted = total(bill.parts["transient"])
    # The fullest moment ends warm-up, so backward begins with the last chunk, or comes when that has no microbatch.
    *others, layers = chunks_of(model, plan)
    if others and layers.stop == model.num_layers and not bill.parts["logits and loss"]:
        layers = others[-1]
    with _emulated(plan) as ranks:
        # What a backward pass makes doesn't depend on the microbatches that wait.
        kept, peak = measure_part_peak(_part(model, plan, ranks, layers))
    return Match("transient", predicted, peak - kept)


def chunks_of(model: PlannedModel, plan: Plan) -> list[range]:
    """The layers of each chunk of the plan's fullest rank: chunk c is stage c·p + r of the model."""
    p, m = plan.layout.pipeline_parallel_size, plan.layout.num_model_chunks
    sizes = chunk_layers(model.num_layers, p, m)
    return [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(plan.pipeline_rank, m * p, p)]


def fullest_actions(model: PlannedModel, plan: Plan, chunks: Sequence[range]) -> list[Action]:
    """The rank's actions up to the first moment at which it holds most.

    A pipeline is full after 2p microbatches, so a longer step needs no more than four rounds.
    """
    layout, on_cpu = plan.layout, model.on("cpu")
    p, m = layout.pipeline_parallel_size, layout.num_model_chunks
    n = min(plan.num_microbatches, 4 * p)
    ranks = one_forward_one_backward(p, n) if m == 1 else interleaved(p, m, n)
    layer, first, last = (total(on_cpu.rows(layout, what)) for what in (plan.recompute, "first", "last"))
    sizes = [
        len(layers) * layer + (first if layers.start == 0 else 0) + (last if layers.stop == model.num_layers else 0)
        for layers in chunks
    ]
    actions = ranks[plan.pipeline_rank]
    curve = held(actions, lambda action: sizes[action.chunk])
    return actions[: curve.index(max(curve)) + 1]


def _states(parts: Sequence[nn.Module], plan: Plan) -> list[Row]:
    """What is counted of weights, gradients and optimizer states, divided among data-parallel ranks as in the bill."""
    beside = plan.layout.expert_ranks > plan.layout.tensor_parallel_size
    mlps = [module for part in parts for module in part.modules() if isinstance(module, ExpertMLP) and beside]
    of_experts = sum(weight.numel() for mlp in mlps for weight in (mlp.gate, mlp.up, mlp.down))
    rows = []
    for row in measure_states(parts):
        element = 2 if row.term == "parameters" else 4
        divided = plan.layout.zero_stage >= {"parameters": 3, "gradients": 2}.get(row.term, 1)
        shared = share(row.bytes // element, plan.layout, divided, of_experts)
        rows.append(Row(row.term, element * shared, source=row.source))
    return rows


def report_verification(console: Console, model: PlannedModel, plan: Plan) -> bool:
    """Verify the plan, print each line of its bill beside the counted one, and the peak; True if all are equal."""
    comparison = verify_plan(model, plan)
    console.print(f"\n[bold]Verified:[/] {plan_text(plan)}", highlight=False)
    console.print(_table(comparison.matches, plan))
    lines, unequal = len(comparison.matches), len(comparison.unequal)
    verdict = f"{lines - unequal} of {lines} lines equal what is counted, to the byte"
    console.print(verdict if comparison.exact else f"[bold red]{verdict}", highlight=False)
    peak = count_peak(model, plan)
    text = (
        f"Beyond that, at the peak of the next backward pass: bill {peak.predicted:,} B, "
        f"counted {peak.measured:,} B, difference {peak.difference:,}"
    )
    console.print(f"[bold red]{text}" if peak.difference else text, highlight=False)
    console.print(NOT_RUN, highlight=False)
    return comparison.exact and not peak.difference


def _table(matches: tuple[Match, ...], plan: Plan) -> Table:
    title = f"Pipeline rank {plan.pipeline_rank}, emulated on CPU: the bill and what is counted"
    found = empty_table(title, "line", "bill", "counted", "diff.")
    for match in matches:
        cells = (f"{match.predicted or 0:,}", f"{match.measured or 0:,}", f"{match.difference:,}")
        found.add_row(match.term, *cells, style="bold red" if match.difference else "")
    return found


def measure_part_peak(part: GPT | LlamaStage) -> tuple[int, int]:
    """Bytes held after the forward pass of one microbatch, and the most during its backward pass.

    Without weights, main gradients and buffers.  A stage's output is freed once it is sent
    (2205.05198 appendix B).  For one chunk on an emulated rank.
    """
    use_main_gradients(part)
    alive = LiveStorages([*part.parameters(), *map(gradient_of, part.parameters()), *part.buffers()])
    with alive:
        y = run_part(part)
        if not part.is_last:
            y.untyped_storage().resize_(0)
        kept = alive.bytes
        gradient = None if part.is_last else torch.empty_like(y)
        alive.peak_bytes = 0
        y.backward(gradient)
    return kept, alive.peak_bytes


def measure_states(parts: Sequence[nn.Module]) -> list[Row]:
    """What a stage holds besides activations, one row a kind: what stays after one step of Adam on float32 copies.

    Gradients are those that the step started from, whatever they hold: only their bytes count.
    """
    held: list[dict[str, list]] = []
    for part in parts:
        weights = MainWeights(part)
        optimizer = torch.optim.AdamW(weights.parameters())
        weights.step(optimizer)
        states = {
            "parameters": part.parameters(),
            "gradients": map(gradient_of, part.parameters()),
            "float32 parameters": weights.parameters(),
            "Adam first moment": (state["exp_avg"] for state in optimizer.state.values()),
            "Adam second moment": (state["exp_avg_sq"] for state in optimizer.state.values()),
        }
        held.append({name: list(tensors) for name, tensors in states.items()})
    rows = []
    for name in held[0]:
        storages = storages_of(*(tensor for part in held for tensor in part[name]))
        rows.append(Row(name, sum(s.nbytes() for s in storages), source="storages alive after a step"))
    return rows
