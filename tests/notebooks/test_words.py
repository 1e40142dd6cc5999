"""The script that holds chapters' lengths: it says which chapter is over, of what, and ends with 1."""

import pytest

from notebooks.source import words

#: Five words and 20 minutes, one import, and a second cell whose imports don't count.
CHAPTER = """# %% [markdown]
# *20 minutes.* Two more words

# %%
import sys

# %%
import os
"""


@pytest.fixture
def counted(tmp_path, monkeypatch, capsys):
    """Counts chapters, given by name with their text, against limits of five words and 20 minutes."""

    def count(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        return words.main(), capsys.readouterr().out

    monkeypatch.setattr(words, "SOURCES", tmp_path)
    monkeypatch.setattr(words, "LIMITS", {"01_one": (5, 20)})
    return count


def test_a_chapter_within_its_limits_passes(counted):
    code, said = counted(**{"01_one": CHAPTER})
    assert code == 0 and "words 5 of 5, minutes 20 of 20, imports 1 of 6\n" in said


@pytest.mark.parametrize(
    ("old", "new", "over"),
    [
        ("more", "or more", "words 6 of 5 OVER"),
        ("20", "21", "minutes 21 of 20 OVER"),
        ("20 minutes.", "One hour.", "minutes inf of 20 OVER"),
        ("import sys", "import sys\n" + "from math import pi\n" * 6, "imports 7 of 6 OVER"),
    ],
)
def test_what_is_over_is_named(counted, old, new, over):
    code, said = counted(**{"01_one": CHAPTER.replace(old, new)})
    assert code == 1 and over in said
