"""One course: what has passed over all labs, where to read, what a hint needs."""

from actmem_course.judge import learner_progress
from actmem_course.judge.learner_progress import LearnerProgress
from actmem_course.judge.outline import ALL_LABS
from actmem_course.judge.verdict import PASSED, SKIPPED, WRONG, Verdict
from actmem_course.launch import LABS
from tests.labs.learners import learner_file, start


def test_progress_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(learner_progress, "MINE", tmp_path / "my")
    file = tmp_path / "my" / "labs" / "lab2_tensor_parallel.py"
    progress = LearnerProgress(file)
    first, second, *_ = ALL_LABS
    assert progress.next(first)[1].number == "1.1" and progress.next(second)[1].number == "2.1"
    progress.note([Verdict("1.1", "layer_bytes", PASSED), Verdict("2.1", "f", PASSED), Verdict("2.2", "f_bar", WRONG)])
    again = LearnerProgress(file)
    assert again.passed == {"1.1", "2.1"} and again.next(first)[1].number == "1.2"
    number = sum(len(lab.exercises) for lab in ALL_LABS)
    assert f"2 of {number} exercises passed (1: 1/4, 2: 1/8" in again.summary()
    again.note(
        [Verdict("1.1", "layer_bytes", SKIPPED), Verdict("2.1", "f", WRONG)]
    )  # what is not judged keeps its mark
    assert LearnerProgress(file).passed == {"1.1"} and (tmp_path / "my" / ".progress.json").exists()


def test_a_hint_needs_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('a hint loads torch')")
    file = learner_file(tmp_path, "lab2_tensor_parallel")
    done = start(file, "--hint", "2.1", PYTHONPATH=f"{tmp_path}:{LABS.parent / 'src'}", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0 and "• " in done.stdout, done.stderr
