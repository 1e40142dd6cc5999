"""The text that lab 6 trains on: the same every time, and refused where it is not there."""

import sysconfig
from pathlib import Path

import pytest
import torch

from actmem.config import ConfigError
from actmem_course.standard_library import standard_library


def test_bytes_of_the_modules_in_the_order_of_their_names_and_only_python_counts(tmp_path):
    first = min(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: path.name).read_bytes()
    text = standard_library(len(first))
    assert text.dtype == torch.int64 and bytes(text.tolist()) == first
    for name, content in {"b.py": "bb", "a.py": "a", "C.py": "C", "a.txt": "no"}.items():
        (tmp_path / name).write_text(content)
    assert bytes(standard_library(4, folder=tmp_path).tolist()) == b"Cabb"


@pytest.mark.parametrize("num_bytes", [5, 10**9])
def test_too_little_text(tmp_path, num_bytes):
    (tmp_path / "a.py").write_text("1234")
    with pytest.raises(
        ConfigError, match=rf"{num_bytes:,} bytes of text are asked for, .* has 4: is Python installed without"
    ):
        standard_library(num_bytes, folder=tmp_path)
