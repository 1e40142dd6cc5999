"""Convert numbers to text (bytes in binary units, values in three digits), and choose the end of an axis."""

from actmem.rows import BINARY_UNITS, size_text
from actmem.rows import three_digits as three_digits

GIB = 2**30


def axis_unit(largest_bytes: int) -> tuple[int, str]:
    """Choose an axis's unit: the largest binary unit in which ``largest_bytes`` is at least 1.

    Args:
        largest_bytes: The largest value on the axis, in bytes.

    Returns: the unit in bytes, and its name, such as "GiB".
    """
    return next(((unit, name) for unit, name in BINARY_UNITS if largest_bytes >= unit), (1, "bytes"))


def exact_text(size_bytes: int) -> str:
    """Return a size as text, with all digits and in a binary unit: ``2,147,483,648 B = 2.00 GiB``."""
    return f"{size_bytes:,} B = {size_text(size_bytes)}"


def milliseconds(seconds: float) -> str:
    """Return seconds as a text in milliseconds, without the unit and with about three digits: ``0.12``, ``12.3``."""
    value = 1000 * seconds
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def axis_end(largest: float) -> float:
    """Choose the end of an axis: the smallest of 1, 1.5, 2, 3, 5, 7 × 10ⁿ that is at least ``largest``.

    With so few ends the axis stays in place while a slider makes a bar grow.

    Args:
        largest: The largest value on the axis, in the axis's unit.
    """
    if largest <= 0:
        return 1.0
    power = 10.0 ** int(f"{largest:e}".partition("e")[2])
    return next(step * power for step in (1, 1.5, 2, 3, 5, 7, 10) if step * power >= largest)
