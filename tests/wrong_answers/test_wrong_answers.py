"""Every mistake that a table states is named by its own sentence, and what breaks a rule of the judge's by the rule's."""

import inspect
import linecache
import re
from functools import cache

import pytest

from actmem.formulas import schedule
from actmem_course.judge.exercise import names_of
from actmem_course.judge.judging import Judge
from actmem_course.judge.outline import ALL_LABS, lab_of, load_lab, mistakes_of, solution_module
from actmem_course.judge.solutions import lab5_pipeline as lab5
from tests.labs.learners import judged, judged_names
from tests.tiers import at_night
from tests.wrong_answers.edits import EDITS

EXERCISES = {exercise.number: exercise for lab in ALL_LABS for exercise in lab.exercises}


@cache
def source(number):
    return inspect.getsource(solution_module(lab_of(EXERCISES[number]).name))


def verdict_of(number, text, size=4):
    """The verdict on a file with this text, all of whose other functions are right."""
    lab = lab_of(EXERCISES[number])
    file = f"/{lab.name}_edited.py"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    names = {"__file__": file, "__name__": "learner"}
    exec(compile(text, file, "exec"), names)
    return judged_names(lab.name, number, names, size, {other.function for other in lab.exercises})


def explained(verdict):
    """All that is known, in one line."""
    why = ": ".join(filter(None, (verdict.cause, verdict.repair)))
    return "; ".join(filter(None, (verdict.diagnosis, why)))


#: Every way to make every stated mistake, with what is said of it.
EDITED = [
    (number, mistake, text)
    for number, exercise in EXERCISES.items()
    for mistake in mistakes_of(exercise)
    for text in mistake.sources(source(number))
]
OF_EXERCISE = {number: [k for k, (of, *_) in enumerate(EDITED) if of == number] for number in EXERCISES}
#: By day three of each exercise, from all over its list.  What the judge's rules say has all its cases by day, below.
BY_DAY = {k for of in OF_EXERCISE.values() for k in of[:: -(-len(of) // 3) or 1]}


@pytest.mark.parametrize("which", [k if k in BY_DAY else at_night(k) for k in range(len(EDITED))])
def test_named_by_its_cause_and_repair(which):
    number, mistake, text = EDITED[which]
    verdict = verdict_of(number, text)
    assert (verdict.status, verdict.cause, verdict.repair) == ("wrong", mistake.cause, mistake.repair)
    assert verdict.diagnosis and mistake.cause not in verdict.diagnosis


@pytest.mark.nightly
@pytest.mark.parametrize("which", range(len(EDITED)))
def test_no_stated_mistake_passes_on_two_ranks(which):
    number, _, text = EDITED[which]
    assert verdict_of(number, text, 2).status == "wrong"


@pytest.mark.parametrize("size", [4, at_night(2)])
@pytest.mark.parametrize("which", range(len(EDITS)))
def test_what_breaks_a_rule_is_named(which, size):
    number, words, *pieces = EDITS[which]
    text = source(number)
    for before, after in zip(pieces[::2], pieces[1::2]):
        assert before in text, f"{number}: our solution no longer has {before!r}"
        text = text.replace(before, after)
    verdict = verdict_of(number, text, size)
    assert verdict.status == "wrong" and re.search(words, explained(verdict)), verdict


IN_GROUPS = [
    number
    for number, exercise in EXERCISES.items()
    if exercise.takes_group and re.search(rf"def {exercise.function}\([^)]*\bgroup\b", source(number))
]


@pytest.mark.parametrize("number", IN_GROUPS)
def test_whoever_takes_all_ranks_for_the_group_is_told(number):
    exercise = EXERCISES[number]
    of_all = r"\1    group = dist.group.WORLD\n"
    text, count = re.subn(
        rf'(def {exercise.function}\(.*?\n    """.*?"""\n)', of_all, source(number), count=1, flags=re.DOTALL
    )
    verdict = verdict_of(number, text)
    assert count == 1 and verdict.status == "wrong"
    assert re.search(
        "outside group; pass group=group|right with group=WORLD, but not on a group of", explained(verdict)
    )


def test_a_shorter_warm_up_passes_with_a_remark():
    def interleaved(p, rank, m, n):
        return [(a.kind, a.chunk, a.microbatch) for a in schedule.interleaved(p, m, n, short_warmup=True)[rank]]

    verdict = judged("5.2", interleaved)
    assert (verdict.status, judged("5.2").diagnosis) == (
        "passed",
        "",
    ) and "where sends take no time" in verdict.diagnosis


def test_one_number_that_is_the_same_by_chance_names_nothing():
    def how_many_fit(budget, flight, full, recomputed):
        right = lab5.how_many_fit(budget, flight, full, recomputed)
        return flight if (budget, full) == (100, 30) else right  # as if recomputed_bytes were full_bytes

    verdict = judged("5.4", how_many_fit)
    assert verdict.diagnosis.endswith("30 B or 10 B each: the result is 4; expected 3")


def test_what_uses_a_function_that_is_wrong_in_one_of_its_exercises_is_blocked_by_that_one():
    lab = load_lab("lab4_recompute")
    (second,) = lab.choose(["4.2"], "number")
    functions = names_of(next(mistakes_of(second)[0].sources(source("4.2"))), "")
    judge = Judge(lab, [functions])
    verdicts = [judge.judge(exercise) for exercise in lab.choose(["4.1", "4.2", "4.4"], "number")]
    assert [verdict.status for verdict in verdicts] == ["passed", "wrong", "blocked"]
    assert "by 4.2 (checkpoint)" in verdicts[2].diagnosis
