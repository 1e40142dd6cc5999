"""Real text that is on every learner's machine: the source of Python's standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from actmem.config import ConfigError, check_size


def standard_library(num_bytes: int, device: torch.device | str = "cpu", folder: Path | None = None) -> Tensor:
    """Return the first bytes of the standard library's top modules, in the order of their names: int64 ``[num_bytes]``.

    Each byte is a token, 0 to 255. The same Python gives the same text on every machine.

    Args:
        folder: where the modules are; None: where this Python has them.

    Raises: ConfigError if there is less text than asked for, as where only compiled modules are installed.
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
