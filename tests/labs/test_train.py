"""Lab 6's training as a job: the same losses for any number of ranks, in any mode."""

from dataclasses import replace

import pytest
import train
from train import TEXT_BYTES, TrainingJob

from actmem.config import ConfigError, ModelShape
from actmem.formulas.activations import TABLE2
from actmem_course.standard_library import standard_library
from tests.labs.in_process import lab_exit
from tests.tiers import sampled

MODES = {mode.name: mode for mode in TABLE2}
SHAPE = ModelShape(16, 2, 32, 8, num_layers=2, vocab_size=64)
JOB = TrainingJob(SHAPE, MODES["tensor+sequence+selective"], 6, 0.1)


def losses_of(job):
    return train.train(job, "cpu", standard_library(TEXT_BYTES) % job.shape.vocab_size)


def test_the_same_ranks_give_the_same_losses_to_the_bit(pools):
    (first, of_rank_1), (second, _) = pools[2].run(losses_of, JOB), pools[2].run(losses_of, JOB)
    assert first == of_rank_1 == second and len(set(first)) == 6


@pytest.mark.by_day(1)
@pytest.mark.parametrize("mode", sampled([name for name in MODES if MODES[name].tensor_parallel], 2))
def test_ranks_train_as_one_does(mode, pools):
    """In float64 without dropout, because other shards are other sums."""
    job = TrainingJob(SHAPE, MODES["none"], 6, dtype="float64")
    whole = pools[2].run(losses_of, job)[0]
    assert pools[2].run(losses_of, replace(job, mode=MODES[mode]))[0] == pytest.approx(whole, rel=1e-12)
    assert whole[-1] < whole[0]


def test_bad_input_is_one_line(monkeypatch, capsys):
    alone = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
    code, out, (line,) = lab_exit("train.py", ["--dropout", "1"], monkeypatch, capsys, **alone)
    assert (code, out) == (2, "")
    assert line.startswith("train.py: --dropout: must be at least 0 and less than 1, got 1.0")


@pytest.mark.parametrize("num_bytes", [5, 10**9])
def test_too_little_text(tmp_path, num_bytes, monkeypatch):
    (tmp_path / "a.py").write_text("1234")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    said = rf"{num_bytes:,} bytes of text are asked for, .* has 4: is Python installed without"
    with pytest.raises(ConfigError, match=said):
        standard_library(num_bytes)
