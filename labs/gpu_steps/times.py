"""Times of one layer in every mode of recomputation (Table 4), and of its matmuls alone, the largest part of them."""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from actmem.config import ModelShape
from actmem.formulas.flops import layer_overhead
from actmem.parallel.groups import tensor_parallel
from actmem_course.lab_tools.held_bytes import layer_runner
from actmem_course.lab_tools.timing import Stopwatch, Work, time_in_turns
from actmem_course.ranks import Ranks


def measure_modes(shape: ModelShape, ranks: Ranks, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Time one layer under sequence parallelism in every mode of recomputation, and its matmuls alone, in turns.

    Args:
        shape: the layer's sizes, unsharded.
        ranks: this rank, with the number of ranks and the device.
        dtype: of the weights and the input.
        rounds: how many rounds are timed.

    Returns: a dict with these keys:
        "rows": one for each mode and one for the matmuls alone: median seconds, the overhead over no recomputation,
            and the FLOPs that the mode adds, as a share.
        "matmul_share": the seconds of the matmuls alone, divided by those of the layer without recomputation.
        "matmul_flops": the FLOPs of the matmuls alone, forward and backward, on this rank.
    """
    modes = ("none", "selective", "elementwise", "full")
    work: dict[str, Work] = {
        mode: layer_runner(shape, tensor_parallel(sequence_parallel=True), ranks.device, dtype, mode).work()
        for mode in modes
    }
    work["matmuls alone"] = matmuls_alone(shape, ranks, dtype)
    timed = time_in_turns(work, ranks, rounds=rounds)
    whole = timed.medians("none")["combined_seconds"]
    rows = []
    for name in work:
        row: dict[str, Any] = {"mode": name, **timed.medians(name)}
        row["over_none"] = None if name == "none" else timed.over(name, "none")
        row["flops_overhead"] = float(layer_overhead(shape, name)) if name in modes else None
        rows.append(row)
    return {
        "matmul_share": timed.medians("matmuls alone")["combined_seconds"] / whole,
        "matmul_flops": 3 * _forward_flops(shape, ranks.size),
        "rows": rows,
    }


def matmuls_alone(shape: ModelShape, ranks: Ranks, dtype: torch.dtype) -> Work:
    """Return ``Work``, code to be timed, that runs only the matmuls of a layer on one rank.

    There are six matmuls in forward and twelve in backward.  Their operands are random tensors of the layer's shapes.

    Args:
        shape: the layer's sizes, unsharded.
        ranks: this rank, with the number of ranks, t, and the device.
        dtype: of the operands.
    """
    a, b, h, s = shape.letters()
    t = ranks.size
    place: dict[str, Any] = {"device": ranks.device, "dtype": dtype}

    def pairs() -> list[tuple[Tensor, Tensor]]:
        linears = ((h, 3 * h // t), (h // t, h), (h, 4 * h // t), (4 * h // t, h))
        found = [(torch.randn(s * b, rows, **place), torch.randn(rows, columns, **place)) for rows, columns in linears]
        heads, width = a * b // t, h // a
        query, key = torch.randn(heads, s, width, **place), torch.randn(heads, width, s, **place)
        return [*found, (query, key), (torch.randn(heads, s, s, **place), torch.randn(heads, s, width, **place))]

    operands = pairs()
    gradients = [torch.randn(*left.shape[:-1], right.shape[-1], **place) for left, right in operands]

    def forward() -> None:
        for left, right in operands:
            torch.matmul(left, right)

    def backward(_: object) -> None:
        for (left, right), gradient in zip(operands, gradients):
            torch.matmul(gradient, right.mT)
            torch.matmul(left.mT, gradient)

    return Work(forward, backward)


def _forward_flops(shape: ModelShape, t: int) -> int:
    """Of one rank's matmuls in forward: 24sbh² + 4s²bh, divided by t."""
    _, b, h, s = shape.letters()
    return (24 * s * b * h * h + 4 * s * s * b * h) // t


def matmul_rate(device: str, size: int, rounds: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Measure a GPU's peak rates: the FLOPs per second of a square matmul, and the bytes per second of a copy.

    Args:
        device: "cpu" or "cuda".
        size: rows and columns of the matrices.
        rounds: how often the matmul and the copy are run; the result is the median.
        dtype: of the matrices; the copied tensor has float32.

    Returns: "size", "flops_per_second", and "copy_bytes_per_second", which counts bytes read and bytes written.
    """
    x, y = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    big = torch.randn(size * size // 2, device=device, dtype=torch.float32)
    target = torch.empty_like(big)
    return {
        "size": size,
        "flops_per_second": 2 * size**3 / _seconds(lambda: torch.matmul(x, y), device, rounds),
        "copy_bytes_per_second": 2 * big.nbytes / _seconds(lambda: target.copy_(big), device, rounds),
    }


def _seconds(run: Callable[[], object], device: str, rounds: int) -> float:
    """The median of so many calls, each between two events."""
    watch, found = Stopwatch(device), []
    for _ in range(rounds + 3):
        start = watch.mark()
        run()
        end = watch.mark()
        watch.wait()
        found.append(watch.seconds(start, end))
    return median(found[3:])
