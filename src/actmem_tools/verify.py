"""``plan --verify``: run the plan's fullest rank, and compare its predicted bill with what it holds, line by line.

The fullest rank is the pipeline rank with the highest peak memory.  The real model runs as this one rank, emulated, on
fake tensors.  It runs the schedule's actions until as many forward passes are in flight as the rank would have at its
peak, and one step of Adam.  Counted are the rank's weights, gradients and optimizer states, and all that autograd
saves.  States that data-parallel ranks would shard (ZeRO) are counted unsharded, and then divided by the rule that the
bill uses.
"""

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
from actmem_tools.plan.search import Bill, Counted, Plan, bill_of, chunk_layers, share

#: The line in which ``--verify`` lists the parts of a job that it doesn't run.
NOT_RUN = (
    "Not run: data-parallel ranks (states are counted whole, then divided by the bill's rule) and communication buffers"
)
#: Parts of a bill that are compared line by line.  Communication buffers don't exist on an emulated rank; the
#: transient is compared by ``count_peak``.
COUNTED_PARTS = ("weights", "gradients", "optimizer states", "activations", "logits and loss")

#: The tensor-parallel group, the context-parallel group, and the group that shares experts if that is a larger one.
_Ranks = tuple[TensorParallel, ContextParallel, TensorParallel | None]


def verify_plan(model: PlannedModel, plan: Plan) -> Comparison:
    """Run the plan's fullest rank, emulated, and compare its predicted bill with the bytes that it really holds.

    Args:
        model: the planned model that the plan trains.
        plan: the plan to check, from ``Request.search``.

    Returns: a Comparison of predicted and counted bytes, with each line of these parts of the bill: weights, gradients,
        optimizer states, activations, logits and loss.

    Raises: ConfigError if this library has no layer or no optimizer to run the plan with.
    """
    bill = _bill(model, plan)
    predicted = [*(row for part in COUNTED_PARTS for row in bill.parts[part])]
    with emulated(plan) as ranks:
        parts, saved = measure_fullest(model, plan, ranks)
        return compare(predicted, saved + _states(parts, plan))


def measure_fullest(model: PlannedModel, plan: Counted, ranks: _Ranks) -> tuple[list[GPT | LlamaStage], list[Row]]:
    """Make the model chunks of the plan's fullest rank, and run them up to the moment of its peak.

    Args:
        model: the planned model that the plan trains.
        plan: a plan, or a layout that doesn't fit; it says which pipeline rank is the fullest.
        ranks: the three groups of ranks that ``emulated`` yields.

    Returns: the chunks; and the bytes that they have saved for backward at that moment, one Row for each term.
    """
    chunks = chunks_of(model, plan)
    actions = fullest_actions(model, plan, chunks)
    parts = [_part(model, plan, ranks, layers) for layers in chunks]
    return parts, measure_parts(parts, [(action.kind, action.chunk, action.microbatch) for action in actions])


def _bill(model: PlannedModel, plan: Plan) -> Bill:
    """Return the plan's bill as a CPU's kernels save it.  Raises ConfigError if the plan can't be run here."""
    model.check_verifiable()
    return bill_of(model.on("cpu"), plan)


@contextmanager
def emulated(plan: Counted) -> Iterator[_Ranks]:
    """Make a context in which this process acts as one of the ranks that share a layer in the plan's layout.

    Args:
        plan: a plan, or a layout that doesn't fit; only its ``layout`` is read.

    Yields: three groups of ranks: the tensor-parallel group (with sequence parallelism only if t > 1); the
        context-parallel group; and the group that shares the experts, or None if that is the tensor-parallel group.
    """
    t, c, ranks = plan.layout.tensor_parallel_size, plan.layout.context_parallel_size, plan.layout.expert_ranks
    replicas = ranks // t
    with emulated_rank(t * c * replicas):
        groups = layer_groups(c, sequence_parallel=plan.layout.sequence_parallel and t > 1, replicas=replicas)
        yield *groups, expert_ranks(ranks) if replicas > 1 else None


def _part(model: PlannedModel, plan: Counted, ranks: _Ranks, layers: range) -> GPT | LlamaStage:
    (tp, context, experts), recompute = ranks, plan.recompute
    shape, dtype = model.shape.with_sizes(micro_batch_size=plan.layout.micro_batch_size), torch.bfloat16
    if isinstance(shape, ModelShape):
        return GPT(shape, tp, layers=layers, recompute=recompute, dtype=dtype)
    shape = shape.with_sizes(vocab_size=padded_vocab_size(shape.vocab_size, tp.size, multiple=1))
    routing: Routing = "one-sided" if model.routing == "one-sided" else "even"
    groups: dict = {"context": context, "experts": experts}
    return LlamaStage(shape, tp, layers=layers, recompute=recompute, routing=routing, dtype=dtype, **groups)


def count_peak(model: PlannedModel, plan: Plan) -> Match:
    """Compare prediction and measurement of the transient: the bytes that backward allocates at its peak.

    An emulated rank runs the backward pass of one microbatch, with the plan's recomputation.  Bytes that forward passes
    have saved don't count.

    Args:
        model: the planned model that the plan trains.
        plan: the plan to check, from ``Request.search``.

    Returns: a Match: the transient's bytes in the bill of the plan's fullest rank, and the bytes counted in the run.

    Raises: ConfigError if this library has no layer or no optimizer to run the plan with.
    """
    bill = _bill(model, plan)
    predicted = total(bill.parts["transient"])
    # The rank holds most at the end of warm-up, when backward of its last chunk is next, or later, at a moment when the
    # model's last chunk has no microbatch in flight and backward of the chunk before it is next.
    *other_chunks, layers = chunks_of(model, plan)
    if other_chunks and layers.stop == model.num_layers and not bill.parts["logits and loss"]:
        layers = other_chunks[-1]
    with emulated(plan) as ranks:
        # What a backward pass makes doesn't depend on how many other microbatches are in flight.
        kept, peak = measure_part_peak(_part(model, plan, ranks, layers))
    return Match("transient", predicted, peak - kept)


def chunks_of(model: PlannedModel, plan: Counted) -> list[range]:
    """Return for each chunk of the plan's fullest rank the range of the model's layers that it holds, from 0.

    Chunk c of rank r is stage c·p + r of the model.
    """
    p, m = plan.layout.pipeline_parallel_size, plan.layout.num_model_chunks
    sizes = chunk_layers(model.num_layers, p, m)
    return [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(plan.pipeline_rank, m * p, p)]


def fullest_actions(model: PlannedModel, plan: Counted, chunks: Sequence[range]) -> list[Action]:
    """List the actions that the plan's fullest rank runs, from the start of the step until it first reaches its peak.

    A pipeline is full after 2p microbatches, so the first 4p of the step are enough to have its peak among them.

    Args:
        model: the planned model that the plan trains.
        plan: a plan, or a layout that doesn't fit; it has the number of the fullest rank and of the microbatches.
        chunks: the range of layers of each chunk of that rank, from ``chunks_of``.
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
    """Count weights, gradients and optimizer states, and divide them among data-parallel ranks by the bill's rule."""
    wider = plan.layout.expert_ranks > plan.layout.tensor_parallel_size
    mlps = [module for part in parts for module in part.modules() if isinstance(module, ExpertMLP) and wider]
    of_experts = sum(weight.numel() for mlp in mlps for weight in (mlp.gate, mlp.up, mlp.down))
    rows = []
    for row in measure_states(parts):
        element = 2 if row.term == "parameters" else 4
        divided = plan.layout.zero_stage >= {"parameters": 3, "gradients": 2}.get(row.term, 1)
        shared = share(row.bytes // element, plan.layout, divided, of_experts)
        rows.append(Row(row.term, element * shared, source=row.source))
    return rows


def report_verification(console: Console, model: PlannedModel, plan: Plan) -> bool:
    """Verify a plan, and print each line of its bill and its transient beside the bytes counted on an emulated rank.

    Args:
        console: the console to print on.
        model: the planned model that the plan trains.
        plan: the plan to check, from ``Request.search``.

    Returns: whether every line, and the transient, equals the counted bytes.
    """
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
    table = empty_table(title, "line", "bill", "counted", "diff.")
    for match in matches:
        cells = (f"{match.predicted or 0:,}", f"{match.measured or 0:,}", f"{match.difference:,}")
        table.add_row(match.term, *cells, style="bold red" if match.difference else "")
    return table


def measure_part_peak(part: GPT | LlamaStage) -> tuple[int, int]:
    """Run forward and backward of one microbatch through a model chunk on an emulated rank, and count live bytes.

    Weights, main gradients and buffers don't count.  The chunk's output is freed after forward, because a pipeline
    frees an output once it has been sent (2205.05198 appendix B); a loss is not freed.

    Args:
        part: the model chunk.

    Returns: the bytes alive after forward, and the most bytes alive at once during backward.
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
    """Run one step of Adam on float32 copies of the weights, and count the bytes that stay allocated after the step.

    The values of the gradients don't matter here, only their bytes.

    Args:
        parts: the model chunks of one rank.

    Returns: five rows: "parameters", "gradients", "float32 parameters", "Adam first moment", "Adam second moment".
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
