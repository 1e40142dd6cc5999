"""What a GPU allocated at the 22B model's peak beyond the planner's bill: each byte has a name."""

from dataclasses import replace

import pytest
import torch
from torch.profiler import profile

from actmem.config import PAPER_MODELS, Parallel
from actmem_course.figures.gpu_results import newest
from actmem_tools.plan.planned_models import PlannedGPT
from actmem_tools.plan.search import rank_bill
from actmem_tools.tape.evaluate import BACKWARD, Free, Make, Mark, moments, sizes_of
from actmem_tools.tape.stage_tapes import stage_part_of, stored_tape, transient

SHAPE, WALL = PAPER_MODELS["22B"].shape, newest("wall")
#: Threads that a multiprocessor runs at once: of an A100, H100 or H200.
THREADS = 2048


def in_blocks(size):
    """As torch's allocator hands out memory."""
    return -(-size // 512) * 512


def partial_sums(rows, columns):
    """Sizes of what CUDA's sum over the rows of a 16-bit matrix takes while it runs.

    A block of 128 threads adds up 128 columns: 32 threads side by side have four columns each, and 4 share the rows.
    Where each would add up 256 numbers or more, several blocks share the rows: as many as the GPU runs at once, but
    each thread keeps 16. They leave their float32 sums in memory, for which torch takes 128 times what they need, and
    a counter for each 128 columns.
    Source: torch's aten/src/ATen/native/cuda/Reduce.cuh, setReduceConfig, global_memory_size and semaphore_size.
    """
    across, numbers, at_once = columns // 128, rows // 4, WALL["machine"]["multiprocessors"] * THREADS // 128
    if numbers < 256 or across > at_once:
        return []
    blocks = max(min(-(-at_once // across), -(-numbers // 16)), -(-numbers // 256))
    return [4 * columns * blocks * 128, 4 * across]


def kernels_memory(made, tokens, rows):
    """Sizes of what the kernel that made a tensor takes besides it, on a GPU.

    tokens: of the microbatch.  rows: of the matrices whose columns a node of backward adds up.
    """
    node, _, op = made.name.rpartition(": ")
    if op == "_softmax_backward_data":  # multiplies gradient and output
        return [made.bytes]
    if op == "sum" and made.bytes == 8:  # counts in whole numbers, of which it makes a copy
        return [8 * tokens]
    return partial_sums(rows[node], made.bytes // 2) if op == "sum" and node in rows else []


def on_gpu(name, at):
    """The events of a stored tape, in the allocator's blocks, with what kernels take while they run."""
    tokens = at["s"] * at["b"]
    rows = {"_ColumnParallelBackward": tokens, "AddBackward0": tokens // at["t"] if "sequence" in name else tokens}
    for event in stored_tape("gpt", f"{name} cuda").events(at):
        if isinstance(event, Make):
            # The batch is measured by itself.
            yield replace(event, bytes=0 if event.name == "randint" else in_blocks(event.bytes))
            yield Make(-1, sum(map(in_blocks, kernels_memory(event, tokens, rows))), "a kernel's memory")
            yield Free(-1)
        else:
            yield event


def part_on_gpu(name, at):
    """A stage's part, and how much more is alive in its forward pass, at most, than when that ends."""
    events = list(on_gpu(name, at))
    values = {size: size for event in events for size in sizes_of(event)}
    part = stage_part_of(events, values)
    forward = (live for _, live, _ in moments(events[: events.index(Mark(BACKWARD))], values))
    return part, max(forward) - part.kept_bytes


@pytest.mark.parametrize("row", [row for row in WALL["wall"] if row["peak_bytes"]], ids=lambda row: row["name"])
def test_every_byte_of_a_gpus_peak_has_a_name(row):
    recompute = next((mode for mode in ("selective", "elementwise", "full") if mode in row["name"]), "none")
    layout = Parallel(8, "sequence" in row["name"], micro_batch_size=SHAPE.micro_batch_size)
    model = PlannedGPT("22B", SHAPE).on("cuda")
    bill = rank_bill(model, layout, recompute, 1, 0)
    assert row["predicted_bytes"] == bill.bytes
    a, b, h, s = SHAPE.letters()
    at = {"s": s, "b": b, "a": a // 8, "d": h // a, "v": model.own_vocabulary(layout), "t": 8}
    axes = "sequence" if layout.sequence_parallel else "tensor"
    layer, _ = part_on_gpu(f"layer {recompute} {axes}", at)
    ends, forward = part_on_gpu(f"whole {axes}", at)
    backward = transient(layer, ends, True, True, SHAPE.num_layers)
    on_host = sum(each.bytes for each in bill.parts["activations"] if each.term == "random-number state")
    kept = bill.bytes - bill.by_part()["transient"] - on_host + in_blocks(4)  # and the loss
    assert row["peak_bytes"] == kept + max(forward, backward.bytes) + sum(row["unbilled"].values())
    if "made_by_backward" in row:  # as torch's own record of the step has it
        made = sum(in_blocks(block["bytes"]) for block in row["made_by_backward"])
        # The gradient that the layers get is a row of both parts.
        assert made == sum(each.bytes for each in backward.rows if each.bytes > 0) - layer.gradient_bytes


def test_a_count_copies_its_mask_in_whole_numbers():
    with profile(profile_memory=True) as seen:
        torch.ones(2048, 4, dtype=torch.bool).sum()
    [copied] = (event.cpu_memory_usage for event in seen.key_averages() if event.key == "aten::to")
    assert kernels_memory(Make(0, 8, "cross_entropy: sum"), 2048 * 4, {}) == [copied]
