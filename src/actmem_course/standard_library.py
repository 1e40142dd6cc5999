"""A training text that every learner's machine has: the source code of Python's standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from actmem.config import ConfigError, check_size


def standard_library(num_bytes: int, device: torch.device | str = "cpu", folder: Path | None = None) -> Tensor:
    """Return the beginning of the standard library's source text as token ids, one for each byte.

    The text is that of the top-level modules in the order of their names. The same version of Python gives the same
    text on every machine.

    Args:
        num_bytes: how many bytes of text.
        device: the device of the tensor.
        folder: where the modules are; None for this Python's own folder.

    Returns: int64 ``[num_bytes]``, values from 0 to 255.

    Raises: ConfigError if the modules have fewer bytes than ``num_bytes`` (some systems install compiled modules only).
    """
    check_size("num_bytes", num_bytes)
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    parts, size = [], 0
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= num_bytes:
            break
    if size < num_bytes:
        raise ConfigError(
            "num_bytes",
            f"{num_bytes:,} bytes of text are asked for, and the standard library's source in {folder} has {size:,}: "
            "is Python installed without its source?",
        )
    return torch.frombuffer(bytearray(b"".join(parts)[:num_bytes]), dtype=torch.uint8).to(device, torch.int64)
