"""Every mistake that a table states is found, and named by its own sentence; so is what only the syntax of ours gives."""

import linecache

import pytest

from actmem_course.judge.judging import Judge
from actmem_course.judge.naming import made_edits, stated_edits
from actmem_course.judge.outline import ALL_LABS, load_lab
from tests.tiers import at_night

EXERCISES = {
    exercise.number: (lab.name, exercise) for lab in ALL_LABS for exercise in lab.exercises if exercise.is_case
}
ROWS = [(number, row) for number, (_, exercise) in EXERCISES.items() for row in range(len(stated_edits(exercise)))]


def verdict_of(number, edit, size):
    """The verdict on a file that is our solution after an edit."""
    lab, file = EXERCISES[number][0], f"/{EXERCISES[number][0]}_edited.py"
    linecache.cache[file] = (len(edit.source), None, edit.source.splitlines(True), file)
    names = edit.names("") | {"__file__": file}
    exec(compile(edit.source, file, "exec"), names)
    lab = load_lab(lab)
    judge = Judge(lab, [dict(names) for _ in range(1 if lab.one_process else max(size, lab.fewest_virtual))])
    judge.passed = {other.function for other in lab.exercises} - {EXERCISES[number][1].function}
    return judge.judge(EXERCISES[number][1])


# An edit of the whole training takes a second or two: one in three by day.
@pytest.mark.parametrize(("number", "row"), [at_night(r) if r[0] == "6.4" and r[1] % 3 else r for r in ROWS])
def test_named_by_its_sentence(number, row):
    edits = stated_edits(EXERCISES[number][1])
    verdict = verdict_of(number, edits[row], 4)
    assert (verdict.status, verdict.diagnosis) == ("wrong", edits[row].words)


@pytest.mark.nightly
@pytest.mark.parametrize(("number", "row"), ROWS)
def test_no_stated_mistake_passes_on_two_ranks(number, row):
    assert verdict_of(number, stated_edits(EXERCISES[number][1])[row], 2).status == "wrong"


@pytest.mark.parametrize("number", EXERCISES)
def test_no_two_rows_have_one_sentence_and_one_edit(number):
    edits = stated_edits(EXERCISES[number][1])
    assert len({edit.source for edit in edits}) == len(edits)


def test_syntax_names_what_nobody_states():
    words = {edit.words for edit in made_edits(EXERCISES["3.4"][1])}
    assert len(words) > 150
    for said in ("merge_heads comes before the product with qkv_weight", "qkv_weight and up_weight are swapped"):
        assert any(said in one for one in words), said
