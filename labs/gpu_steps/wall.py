"""The memory wall: train one rank of the 22B model for two steps with no more memory than the paper's GPU has.

Weights, gradients, Adam's states and every layer's activations are real, and the planner (``actmem plan``) predicts
their bytes.  If it predicts more than the GPU has, torch should run out of memory.  With each technique of the paper
less memory is needed.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actmem.config import ModelShape, Parallel
from actmem.layers.gpt import GPT
from actmem.ledger.storages import replaced
from actmem.main_grad import MainWeights
from actmem.parallel import weights as initial_weights
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem_tools.plan.planned_models import PlannedGPT
from actmem_tools.plan.search import rank_bill

#: What is tried, in this order: name, tensor parallelism, sequence parallelism, recomputation.
LADDER = (
    ("none", False, False, "none"),
    ("tensor", True, False, "none"),
    ("tensor+sequence", True, True, "none"),
    ("tensor+sequence+selective", True, True, "selective"),
    ("tensor+sequence+elementwise", True, True, "elementwise"),
    ("tensor+sequence+full", True, True, "full"),
)


def climb(
    shape: ModelShape, tensor: bool, sequence: bool, recompute: str, device: str, budget_bytes: int, curve: bool = False
) -> dict[str, Any]:
    """Train this rank's part of the model for two steps, with at most ``budget_bytes`` of the GPU.

    Args:
        shape: the model's sizes, unsharded.
        tensor: whether the ranks of the process group share the layers by tensor parallelism.
        sequence: whether they also use sequence parallelism.
        recompute: what backward recomputes: "none", "selective", "elementwise" or "full".
        device: "cpu" or "cuda".
        budget_bytes: the most bytes of the GPU's memory that torch may take.
        curve: whether to return also the allocated bytes over the second step's time.

    Returns: a dict with these keys; measured values are None or left out unless the device is a GPU and the steps fit:
        "budget_bytes": the argument.
        "predicted_bytes", "predicted_parts": the planner's prediction of the peak, and its parts by name.
        "out_of_memory": at which moment torch ran out of memory, and its message; "" if it didn't.
        "static_bytes": bytes allocated before the second step.
        "peak_bytes", "optimizer_peak_bytes": the most bytes allocated in the second step's forward and backward, and in
            the optimizer's step.
        "reserved_bytes", "forward_backward_seconds": bytes that the allocator had reserved by then, and the time.
        "made_last": of the blocks alive at the peak the 40 made last: bytes, forward or backward, and lines of code.
        "unbilled": the bytes, by name, of what is allocated between steps and is in no prediction.
        "curve": with ``curve``: pairs of the milliseconds since the step began and the bytes allocated then.
    """
    tp = tensor_parallel(sequence_parallel=sequence) if tensor else TensorParallel()
    layout = Parallel(tp.size, sequence, micro_batch_size=shape.micro_batch_size)
    bill = rank_bill(PlannedGPT("model", shape).on(device), layout, recompute, 1, 0)
    found: dict[str, Any] = {
        "budget_bytes": budget_bytes, "predicted_bytes": bill.bytes, "predicted_parts": bill.by_part(),
        "out_of_memory": "", "static_bytes": None, "peak_bytes": None, "optimizer_peak_bytes": None,
    }  # fmt: skip
    moment = "building the model"
    with _limited(device, budget_bytes):
        try:
            with replaced(initial_weights, "draw_normal", lambda original: _drawn_on_device):
                model = GPT(shape, tp, recompute=recompute, device=device, dtype=torch.bfloat16)
            main = MainWeights(model)
            optimizer = torch.optim.AdamW(main.parameters(), fused=device == "cuda")
            tokens = torch.randint(shape.vocab_size, (shape.micro_batch_size, shape.seq_length), device=device)
            moment = "the first step"
            _step(model, main, optimizer, tokens)
            moment = "the second step"
            found.update(_measured_step(model, main, optimizer, tokens, device, curve))
        except torch.OutOfMemoryError as error:
            found["out_of_memory"] = f"{moment}: {_first_sentences(str(error))}"
    return found


def _step(model: GPT, main: MainWeights, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    model.loss(model(tokens), tokens).backward()
    main.step(optimizer)


def _measured_step(
    model: GPT, main: MainWeights, optimizer: torch.optim.Optimizer, tokens: Tensor, device: str, curve: bool
) -> dict[str, Any]:
    """One more step, with the allocator's peak of forward and backward, and of the optimizer's step."""
    if device != "cuda":
        _step(model, main, optimizer, tokens)
        return {}
    torch.cuda.synchronize()
    static = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=400_000)
    try:  # memory may run out
        started.record()
        loss = model.loss(model(tokens), tokens)
        in_forward = len(torch.cuda.memory._snapshot()["device_traces"][0])
        loss.backward()
        ended.record()
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    found: dict[str, Any] = {"static_bytes": static, "peak_bytes": torch.cuda.max_memory_allocated()}
    found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    found["forward_backward_seconds"] = started.elapsed_time(ended) / 1000
    found["made_last"] = _made_last(events, in_forward)
    if curve:
        found["curve"] = _curve(static, events)
    torch.cuda.reset_peak_memory_stats()
    main.step(optimizer)
    torch.cuda.synchronize()
    found["optimizer_peak_bytes"] = torch.cuda.max_memory_allocated()
    found["unbilled"] = _unbilled(model, optimizer, tokens)
    return found


def _unbilled(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> dict[str, int]:
    """What is allocated between steps and in no bill, in blocks of 512 bytes."""

    def blocks(tensors: Iterator[Tensor]) -> int:
        return sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors)

    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return {
        "workspaces of cuBLAS": before - torch.cuda.memory_allocated(),
        "Adam's counts of steps": blocks(state["step"] for state in optimizer.state.values()),
        "causal mask": blocks(model.buffers()),
        "token ids": blocks(iter([tokens])),
    }


def _made_last(events: list[dict[str, Any]], in_forward: int) -> list[dict[str, Any]]:
    """The 40 blocks made last of those alive at the step's peak: the bill's transient as it was."""
    live: dict[int, dict[str, Any]] = {}
    size = most = 0
    at_peak: list[dict[str, Any]] = []
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            where = "forward" if number < in_forward else "backward"
            live[event["addr"]] = {"bytes": event["size"], "pass": where, "frames": _frames(event["frames"])}
            size += event["size"]
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
            size -= event["size"]
        if size > most:
            most, at_peak = size, list(live.values())[-40:]
    return at_peak


def _frames(frames: list[dict[str, Any]]) -> list[str]:
    """The innermost lines of Python that allocated a block."""
    return [f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}" for frame in frames[:4]]


def _curve(static: int, events: list[dict[str, Any]], points: int = 600) -> list[tuple[float, int]]:
    """Milliseconds since the first event, and the bytes allocated then: the highest of each of ``points`` stretches."""
    live, moments = static, []
    for event in events:
        if event["action"] in ("alloc", "free_completed"):
            live += event["size"] if event["action"] == "alloc" else -event["size"]
            moments.append(((event["time_us"] - events[0]["time_us"]) / 1000, live))
    stretch = max(1, len(moments) // points)
    return [max(moments[i : i + stretch], key=lambda moment: moment[1]) for i in range(0, len(moments), stretch)]


def _drawn_on_device(parameter: Tensor, tp: TensorParallel, seed: int | None) -> None:
    """Weights of the right spread in a second: the library draws them on the CPU, the same for every t."""
    with torch.no_grad():
        parameter.normal_(std=initial_weights.STANDARD_DEVIATION)


@contextmanager
def _limited(device: str, budget_bytes: int) -> Iterator[None]:
    """In the block, torch gets no more of the GPU than this: its own limit, and its own error."""
    if device != "cuda":
        yield
        return
    share = budget_bytes / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _first_sentences(text: str) -> str:
    """Of torch's error, what was asked for and how much of the allowed memory was in use."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
    used = re.search(r"([\d.]+ \w+) is allocated by PyTorch", text)
    allowed = re.search(r"([\d.]+ \w+) allowed", text)
    parts = (
        f"tried to allocate {asked[1]}" if asked else text.partition("\n")[0],
        f"{used[1]} in use" if used else "",
        f"{allowed[1]} allowed" if allowed else "",
    )
    return ", ".join(part for part in parts if part)
