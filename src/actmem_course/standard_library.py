"""A training text that every learner's machine has: the source code of Python's standard library."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from actmem.config import ConfigError, check_size


def standard_library(num_bytes: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the beginning of the standard library's source text as token ids, one for each byte.

    The text is that of the top-level modules in the order of their names. The same version of Python gives the same
    text on every machine.

    Args:
        num_bytes: how many bytes of text.
        device: the device of the tensor.

    Returns: int64 ``[num_bytes]``, values from 0 to 255.

    Raises: ConfigError if the modules have fewer bytes than ``num_bytes`` (some systems install compiled modules only).
    """
    check_size("num_bytes", num_bytes)
    folder, text = Path(sysconfig.get_paths()["stdlib"]), b""
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        text += path.read_bytes()
        if len(text) >= num_bytes:
            return torch.frombuffer(bytearray(text[:num_bytes]), dtype=torch.uint8).to(device, torch.int64)
    raise ConfigError(
        "num_bytes",
        f"{num_bytes:,} bytes of text are asked for, and the standard library's source in {folder} has {len(text):,}: "
        "is Python installed without its source?",
    )
