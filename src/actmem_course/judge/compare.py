"""Compare what a learner's function returned with the right value: is it equal up to rounding, and if not, how does
it differ?
"""

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from actmem_course.judge.verdict import Fault, Wrong

#: Tolerance in float64, beside the largest value: the order of summation changes only later digits.
ROUNDING = 1e-9
#: Tolerance for what is computed in float32.  It is above the 1e-6 that many add to a norm before they divide by it.
SINGLE_PRECISION = 1e-5
#: A sentence lists the wrong rows if they form at most so many ranges.
_MOST_RANGES = 4


def close(found: Tensor, expected: Tensor, tolerance: float = ROUNDING) -> bool:
    """Return whether two tensors have the same shape, and values that are equal up to rounding.

    Args:
        found: the learner's tensor, of any shape and dtype.
        expected: the right tensor.
        tolerance: the largest allowed difference of two values, relative to the largest expected value or to 1,
            whichever is larger.
    """
    if found.shape != expected.shape:
        return False
    scale = max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
    return bool(((found.to(expected.dtype) - expected).abs() <= tolerance * scale).all())


def summed(tensors: Iterable[Tensor]) -> Tensor:
    """Return the elementwise sum of tensors of one shape, such as those of all ranks."""
    return reduce(torch.add, tensors)


def grad_of(tensor: Tensor) -> Tensor:
    """Return ``tensor.grad``, which a backward pass of our own code has just set (so it isn't None)."""
    assert tensor.grad is not None
    return tensor.grad


def dtype_name(x: Tensor | torch.dtype) -> str:
    """Return the name of a dtype, or of a tensor's dtype, without ``torch.``: "float32"."""
    return str(x.dtype if isinstance(x, Tensor) else x).removeprefix("torch.")


def check_plain_tensor(what: str, found: Any) -> Tensor:
    """Check that a learner's function returned a plain tensor, and return it detached.

    Args:
        what: the tensor's name, with which the error's message begins: "the result".
        found: what the function returned.

    Raises: Wrong if ``found`` is None, a DTensor or anything else but a plain tensor.
    """
    if found is None:
        raise Wrong(f"{what} is None", "is a return missing?")
    if type(found).__name__ == "DTensor":
        raise Wrong(f"{what} is a DTensor; expected a plain tensor", "call full_tensor() or to_local()")
    if not isinstance(found, Tensor):
        call = "call its apply" if isinstance(found, torch.autograd.Function) else ""
        raise Wrong(f"{what} is a {type(found).__name__}, not a tensor", call)
    if type(found).__name__ == "AsyncCollectiveTensor":
        found = found.trigger_wait()  # type: ignore[attr-defined]
    return found.detach()


def check_tensors(found: Any, names: str, count: int = 2) -> Sequence[Tensor]:
    """Check that a learner's function returned several tensors, and return them.

    Args:
        found: what the function returned.
        names: the tensors' names, for the error's message: "this rank's qkv_weight and projection_weight".
        count: how many tensors the function should have returned.

    Raises: Wrong unless ``found`` is a tuple or a list of ``count`` tensors.
    """
    if isinstance(found, (tuple, list)) and [isinstance(part, Tensor) for part in found] == [True] * count:
        return found
    raise Wrong(f"expected {count} tensors: {names}", "is a return missing?" if found is None else "")


def another_kind(expected: str, found: object) -> Wrong:
    """Make the Wrong exception for a result of the wrong type, for the caller to raise.

    Args:
        expected: the right type, for the message: "a list".
        found: what the learner's function returned.
    """
    advice = "is a return missing?" if found is None else ""
    if isinstance(found, Iterator):
        advice = "put list(…) around it"
    return Wrong(f"expected {expected}, got {type(found).__name__}", advice)


def check_whole_number(what: str, value: Any) -> int:
    """Check that a learner's function returned a whole number, of Python, numpy or torch, and return it as an int.

    Args:
        what: the number's name, with which the error's message begins: "the result".
        value: what the function returned.

    Raises: Wrong unless ``value`` is a whole number of at most 128 bits.
    """
    if value is None:
        raise Wrong(f"{what} is None", "is a return missing?")
    try:
        # numpy's booleans have no index; Python's and torch's have one.
        if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool":
            raise TypeError
        number = operator.index(value)
    except TypeError:
        advice = "divide with //, which rounds down, or up by -(-a // b)" if isinstance(value, float) else ""
        raise Wrong(f"{what} must be a whole number, not {value!r}", advice) from None
    if number.bit_length() > 128:  # Python writes no number of more than 4,300 digits
        raise Wrong(f"{what} is a whole number of {number.bit_length():,} bits: nothing here is so large")
    return number


def difference(found: Tensor, expected: Tensor, t: int = 1, sizes: Collection[int] = ()) -> Fault:
    """Return a fault that says how a learner's tensor differs from the right tensor.

    Args:
        found: the learner's tensor, which isn't close to ``expected``.
        expected: the right tensor.
        t: how many ranks there are: a wrong factor may be a power of t.
        sizes: numbers of elements: for a number n in it a wrong factor of 1/n is explained as a mean over n elements.

    Returns: the fault.  Its symptom continues a sentence that begins with the tensor's name: "has shape …", "is twice
        what …".
    """
    if found.shape != expected.shape:
        transposed = found.dim() == 2 and close(found.t(), expected)
        shapes = f"has shape {list(found.shape)}; expected {list(expected.shape)}"
        return Fault(shapes, cause="it is transposed" if transposed else "")
    if not found.isfinite().all():
        return Fault("has infinite or undefined values")
    if not found.any():
        return Fault("is zero everywhere")
    ratio = factor(found, expected)
    if ratio is not None:
        if ratio < 0 and close(found, -expected):
            return Fault("has the wrong sign")
        of_mean = t == 1 and is_mean(ratio, sizes)
        cause = "is a mean taken where a sum belongs?" if of_mean else ""
        return Fault(f"is {times(ratio, t)} what it should be", cause=cause)
    wrong_rows = [i for i in range(found.shape[0]) if not close(found[i], expected[i])] if found.dim() else []
    if found.dim() and 0 < len(wrong_rows) < found.shape[0]:
        if wrong_rows == [len(found) - 1]:
            last = f"is wrong in its last row, {wrong_rows[0]}, alone"
            return Fault(last, cause="is a shorter piece at the end left out?")
        rows = "row" if len(wrong_rows) == 1 else "rows"
        ranges = _ranges(wrong_rows)
        which = f"{rows} {ranges}" if ranges.count(",") < _MOST_RANGES else f"{len(wrong_rows)} rows"
        return Fault(f"is wrong in {which} of dimension 0 and right in the others")
    error = ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-300)).item()
    return Fault(f"has the right shape but wrong values: off by up to {error:.2g} times the largest right value")


def is_mean(ratio: float, sizes: Collection[int]) -> bool:
    """Return whether a wrong factor may come from a mean over n elements where a sum belongs.

    Args:
        ratio: the factor by which a tensor differs from the right tensor.
        sizes: the numbers n for which the factor may be 1/n.
    """
    return any(math.isclose(ratio * n, 1) for n in sizes if n > 1)


def factor(found: Tensor, expected: Tensor) -> float | None:
    """Return the number c for which found = c · expected, up to rounding; None if there is no such number.

    Args:
        found: the learner's tensor.
        expected: the right tensor.
    """
    norm = (expected * expected).sum().item()
    if not norm or found.shape != expected.shape:
        return None
    ratio = (found * expected).sum().item() / norm
    return ratio if close(found, ratio * expected) else None


def times(ratio: float, t: int = 1) -> str:
    """Return the text for a factor: "twice", "1/3 of", "1/t (here 1/4) of".  "what it should be" can follow it.

    Args:
        ratio: the factor, such as 2.0.
        t: how many ranks there are; if more than one, the factors t, 1/t and t² are written with the letter t.
    """
    named = {-1.0: "the negative of", 0.5: "half", 2.0: "twice"}
    if t > 1:
        named |= {
            float(t): f"t (here {t}) times",
            1 / t: f"1/t (here 1/{t}) of",
            float(t * t): f"t² (here {t * t}) times",
        }
    for value, words in reversed(named.items()):
        if abs(ratio - value) < 1e-6 * abs(value):
            return words
    part = round(1 / ratio)
    return f"1/{part} of" if 1 < part < 1000 and abs(part * ratio - 1) < 1e-6 else f"{ratio:.6g} times"


def _ranges(numbers: list[int]) -> str:
    """Write ascending whole numbers as ranges: "0 to 3, 6"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]} to {p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
