"""The labs on the site: exercises, never answers, under titles that say what they are about."""

import pytest

from actmem_course.cut import lab_names, lab_source
from notebooks.site import book


def test_labs_that_someone_solved_in_place_are_published_as_exercises(tmp_path, monkeypatch):
    labs = tmp_path / "labs"
    labs.mkdir()
    for name in lab_names():
        (labs / f"{name}.py").write_text("SOLVED = True\n")
    (labs / "measure_mine.py").write_text('"""python labs/measure_mine.py\n\nMine: all of it.\n"""\n')
    monkeypatch.setattr(book, "ROOT", tmp_path)
    found = book.labs()
    assert list(found) == [*(f"{name}.py" for name in lab_names()), "measure_mine.py"]
    assert not any("SOLVED" in source for source in found.values())
    assert all(found[f"{name}.py"] == lab_source(name) for name in lab_names())


@pytest.mark.parametrize("name", book.labs())
def test_a_lab_has_a_title_in_words(name):
    title = book.lab_title(book.labs()[name])
    assert ".py" not in title and 10 < len(title) < 90 and len(title.split()) >= 3
    assert book.lab_page(name, book.labs()[name]).startswith(f"# {title}\n")
