"""What torch's caching allocator reserves when batches grow, and what this course's model of the allocator says."""

from typing import Any

import torch

from actmem.config import ModelShape
from actmem.parallel.groups import tensor_parallel
from actmem_course.lab_tools.held_bytes import layer_runner
from actmem_course.others.allocator import CachingAllocator


def measure_reserved(shape: ModelShape, batches: tuple[int, ...], device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Run a layer with each microbatch size in turn, and replay the GPU's allocations in the model of the allocator.

    Args:
        shape: the layer's sizes; the microbatch size is replaced.
        batches: the microbatch sizes, in the order in which the layer runs with them.
        device: "cpu" or "cuda".
        dtype: of the weights and the input.

    Returns: a dict with "reserved_before_bytes", the bytes reserved before the first run; and "rows", one for each
        size, with the most bytes allocated so far and the bytes reserved after the run, on the GPU and in the model.
        On a CPU there are no rows.
    """
    if device != "cuda":
        return {"rows": []}
    # What is modelled are segments of fixed sizes.
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_reserved()
    rows: list[dict[str, Any]] = []
    torch.cuda.memory._record_memory_history(context=None, max_entries=100_000)
    try:
        for size in batches:
            layer_runner(
                shape.with_sizes(micro_batch_size=size), tensor_parallel(sequence_parallel=True), device, dtype
            ).run()
            torch.cuda.synchronize()
            rows.append({
                "micro_batch_size": size,
                "reserved_bytes": torch.cuda.memory_reserved() - start,
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
                "events": len(torch.cuda.memory._snapshot()["device_traces"][0]),
            })  # fmt: skip
        events = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    model, blocks, done = CachingAllocator(), {}, 0
    for row in rows:
        for event in events[done : row["events"]]:
            if event["action"] == "alloc":
                blocks[event["addr"]] = model.take("", event["size"])
            elif event["action"] == "free_completed" and event["addr"] in blocks:
                model.free(blocks.pop(event["addr"]))
        done = row["events"]
        row["model_reserved_bytes"], row["model_peak_allocated_bytes"] = model.reserved, model.peak
    return {"reserved_before_bytes": start, "rows": rows}
