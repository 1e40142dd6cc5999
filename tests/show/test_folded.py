"""One line, and what opens below it; a chapter's comparisons, of which none is forgotten."""

from fractions import Fraction

from actmem.rows import Row
from actmem_course.others.disagreements import disagreements
from actmem_course.show.folded import Agreement, Fold, in_the_paper, worked


def test_a_fold_is_stored_as_its_line_and_shows_the_rest_as_it_is_written():
    fold = Fold("two of three", "a < b\n  c & d")
    assert repr(fold) == "two of three"
    assert fold._repr_html_().count("two of three") == 1 and "a &lt; b\n  c &amp; d" in fold._repr_html_()


def test_a_worked_answer_wraps_and_is_stored_without_its_numbers():
    fold = worked("2 · 3 = 6", "so 6")
    assert repr(fold) == "Answer" and "pre-wrap" in fold._repr_html_() and "2 · 3 = 6\nso 6" in fold._repr_html_()
    assert "pre-wrap" not in Fold("a", "table")._repr_html_()


def test_an_agreement_counts_pairs_and_names_what_is_apart():
    agree = Agreement()
    agree.add("layers", [(1, 1), (2000, 2001)])
    agree.add("FLOPs of one step", [(Fraction(6, 2), 3)], "FLOPs")
    agree.add_rows("a stage", [Row("norm", 4), Row("GeLU", 0)], [Row("norm", 4), Row("mask", 7)])
    agree.add("under a thousandth", [(True, True)])
    assert repr(agree) == "predicted = measured: 3 of 5"
    assert agree.folded().details.splitlines() == [
        "layers: 1 of 2; 2,000 and 2,001 bytes",
        "FLOPs of one step: 3 FLOPs",
        "a stage, term by term: 1 of 2; 0 and 7 bytes",
        "under a thousandth: yes",
    ]


def test_every_disagreement_of_the_paper_is_a_paragraph():
    found = in_the_paper()
    assert found.details.split("\n\n") == list(map(str, disagreements()))
    assert f"{len(disagreements())} places" in found.line
