"""Lab 6's training as a job: killed and started again its losses are the same, bit for bit."""

import json
import os
import random
import re
import signal
import sys
from dataclasses import replace

import pytest
import torch
import train
from train import SHAPES, TEXT_BYTES, TrainingJob, check_folder

from actmem.config import ConfigError, ModelShape
from actmem.formulas.activations import TABLE2
from actmem_course import launch
from actmem_course.lab_tools import training_saves
from actmem_course.lab_tools.training_saves import check_save, newest_save
from actmem_course.standard_library import standard_library
from actmem_more.llama_shape import LlamaShape
from tests.labs.faults import Started
from tests.labs.in_process import lab_exit, ranks_of_pool
from tests.tiers import sampled

SCRIPT = "train.py"
MODES = {mode.name: mode for mode in TABLE2}
SHAPE = ModelShape(16, 2, 32, 8, num_layers=2, vocab_size=64)
JOB = TrainingJob(SHAPE, MODES["tensor+sequence+selective"], 6, 0.1)


def losses_of(job, folder=None, save_every=2):
    return train.train(job, ranks_of_pool(), standard_library(TEXT_BYTES) % job.shape.vocab_size, folder, save_every)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("mode", sampled(MODES, 2))
def test_what_goes_on_from_a_save_is_the_same_to_the_bit(mode, pools, tmp_path):
    job = replace(JOB, mode=MODES[mode])
    (uninterrupted, again) = pools[2].run(losses_of, job)
    pools[2].run(losses_of, replace(job, num_steps=3), tmp_path)
    assert newest_save(tmp_path) == 3
    assert pools[2].run(losses_of, job, tmp_path) == [uninterrupted] * 2 and uninterrupted == again
    assert len(set(uninterrupted)) == len(uninterrupted) == 6


@pytest.mark.parametrize(("ranks", "mode"), [(4, JOB.mode), (2, MODES["none"])])
def test_another_t_or_mode_goes_on_with_the_same_training(ranks, mode, pools, tmp_path):
    """In float64 without dropout, because other shards are other sums; from one save on, the same ranks agree to the bit."""
    job = replace(JOB, dropout=0.0, dtype="float64")
    uninterrupted = pools[2].run(losses_of, job)[0]
    for folder in ("a", "b"):
        pools[2].run(losses_of, replace(job, num_steps=3), tmp_path / folder)
    job = replace(job, mode=mode)
    first, second = (pools[ranks].run(losses_of, job, tmp_path / folder)[0] for folder in ("a", "b"))
    assert first == second and first[:3] == uninterrupted[:3]
    assert first == pytest.approx(uninterrupted, rel=1e-12)


LLAMA = LlamaShape(16, 2, 32, 8, 4, 48, num_layers=2, vocab_size=64)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("mode", sampled([name for name in MODES if MODES[name].tensor_parallel], 2))
def test_a_llama_trains_as_on_one_rank_and_goes_on(mode, pools, tmp_path):
    job = TrainingJob(LLAMA, MODES["none"], 6, dtype="float64")
    whole = pools[2].run(losses_of, job)[0]
    shared = replace(job, mode=MODES[mode])
    uninterrupted = pools[2].run(losses_of, shared)[0]
    assert uninterrupted == pytest.approx(whole, rel=1e-12) and whole[-1] < whole[0]
    pools[2].run(losses_of, replace(shared, num_steps=3), tmp_path)
    assert pools[2].run(losses_of, shared, tmp_path)[0] == uninterrupted


@pytest.mark.parametrize(("ranks", "dropout"), [(8, 0.0), (2, 0.1)])
def test_a_llama_that_cannot_train_so_is_refused(ranks, dropout):
    with pytest.raises(ConfigError, match="num_key_value_heads: 4 must be divisible|dropout: a Llama has none"):
        TrainingJob(LLAMA, MODES["tensor"], 6, dropout).check(ranks)


def test_a_save_that_was_cut_off_is_none(pools, tmp_path):
    pools[2].run(losses_of, JOB, tmp_path)
    assert newest_save(tmp_path) == 6
    (tmp_path / "step-00000006" / "checksums.json").unlink()
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-x" / "checksums.json").touch()
    assert newest_save(tmp_path) == 4
    assert pools[2].run(losses_of, JOB, tmp_path)[0] == pools[2].run(losses_of, JOB)[0]
    assert sorted(path.name for path in tmp_path.glob("step-0*")) == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize("text", ["{}", "[]", "[1]", "3", "{", "[" * 100_000])
def test_files_of_another_form_are_refused(text, tmp_path):
    tokens, place = torch.arange(10), tmp_path / "step-00000002"
    place.mkdir()
    (place / "checksums.json").write_text(text)
    with pytest.raises(ConfigError, match="checksums.json is damaged: remove"):
        check_folder(JOB, tokens, tmp_path, resume=True)
    (place / "checksums.json").write_text('{"other": 0}')
    with pytest.raises(ConfigError, match="other is damaged: remove"):
        check_folder(JOB, tokens, tmp_path, resume=True)
    (place / "other").touch()
    with pytest.raises(ConfigError, match="training.json is damaged: remove"):
        check_folder(JOB, tokens, tmp_path, resume=True)


def test_a_save_takes_the_place_of_one_that_was_cut_off(pools, tmp_path, capfd):
    job = replace(JOB, num_steps=2)
    pools[4].run(losses_of, job, tmp_path)
    place = tmp_path / "step-00000002"
    (place / "checksums.json").unlink()
    assert pools[2].run(losses_of, job, tmp_path) == pools[2].run(losses_of, job)
    assert sorted(path.name for path in place.iterdir()) == [
        ".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json", "training.json"
    ]  # fmt: skip
    assert "overwriting" not in capfd.readouterr().err


def test_one_training_at_a_time_is_at_work_in_a_folder(monkeypatch, tmp_path):
    tokens = torch.arange(10)
    with check_folder(JOB, tokens, tmp_path, resume=False):
        monkeypatch.setattr(training_saves, "LOCK_SECONDS", 0.2)
        with pytest.raises(
            ConfigError, match=f"^save: another training is at work in {tmp_path}: name another folder$"
        ):
            check_folder(JOB, tokens, tmp_path, resume=True)
        monkeypatch.setenv("RANK", "1")  # rank 0 has the lock for all
        check_folder(JOB, tokens, tmp_path, resume=False)
    monkeypatch.setenv("RANK", "0")
    check_folder(JOB, tokens, tmp_path, resume=False)


def test_each_save_has_the_settings_that_it_was_made_with(pools, tmp_path):
    pools[2].run(losses_of, replace(JOB, num_steps=2), tmp_path)
    other = replace(JOB, dropout=0.0, dtype="float64")
    pools[2].run(losses_of, other, tmp_path / "other")
    (tmp_path / "other" / "step-00000006").rename(tmp_path / "step-00000006")
    text = standard_library(TEXT_BYTES) % JOB.shape.vocab_size
    check_folder(other, text, tmp_path, resume=True)
    said = "another dropout: 0.0, not 0.1; another dtype: float64, not float32$"
    with pytest.raises(ConfigError, match=said):
        check_folder(JOB, text, tmp_path, resume=True)


def test_one_flipped_byte_is_found(pools, tmp_path):
    pools[2].run(losses_of, replace(JOB, num_steps=2), tmp_path)
    place = tmp_path / "step-00000002"
    check_save(tmp_path, 2)
    for path in [path for path in place.iterdir() if path.name != "checksums.json"]:
        contents = bytearray(path.read_bytes())
        contents[len(contents) // 2] ^= 1
        path.write_bytes(contents)
        with pytest.raises(ConfigError, match=f"{path.name} is damaged: remove"):
            check_save(tmp_path, 2)
        contents[len(contents) // 2] ^= 1
        path.write_bytes(contents)
    check_save(tmp_path, 2)


@pytest.mark.nightly
@pytest.mark.skipif(os.name == "nt", reason="limits the size of a file by ulimit")
def test_a_save_that_does_not_fit_is_one_line(tmp_path):
    saving = [sys.executable, str(launch.LABS / SCRIPT), "--ranks", "2", "--steps", "2", "--save", f"{tmp_path}/run"]
    code, output, errors = Started(["sh", "-c", 'ulimit -f 64; exec "$@"', "sh", *saving], tmp_path).end()
    assert code == 1 and "step 2" in output and newest_save(tmp_path / "run") == 0
    assert len(errors) == 1
    assert re.fullmatch(r"train.py: rank \d: cannot write .*step-00000002: File too large", errors[0])


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads processes from /proc")
def test_killed_at_a_random_step_and_started_again(pools, tmp_path):
    whole = pools[2].run(losses_of, TrainingJob(SHAPES["gpt"], JOB.mode, 12, 0.1))[0]
    saves = ["--save", str(tmp_path / "run"), "--save-every", "2"]
    saving = [sys.executable, str(launch.LABS / SCRIPT), "--ranks", "2", "--steps", "12", *saves, "--resume"]
    step = random.randrange(1, 12)
    print(f"killed after step {step}")
    run = Started(saving, tmp_path)
    for line in run.process.stdout:
        if line.startswith(f"step {step}:"):
            break
    os.killpg(run.process.pid, signal.SIGKILL)
    assert run.end()[0] == -signal.SIGKILL and run.nothing_is_left()
    path = tmp_path / "resumed.json"
    code, output, errors = Started([*saving, "--json", str(path)], tmp_path).end()
    assert (code, errors) == (0, [])
    assert int(output.split()[1].strip(":")) > step - step % 2 - 2  # it did not begin anew
    assert json.loads(path.read_text()) == whole and len(whole) == 12


ALONE = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--resume"], "--resume: needs --save FOLDER"),
        (["--save-every", 3], "--save-every: needs --save FOLDER"),
        (["--save", "{folder}", "--save-every", 0], "--save-every: must be at least 1, got 0"),
        (["--dropout", 1], "--dropout: must be at least 0 and less than 1, got 1.0"),
        (["--save", "/proc/actmem"], "--save: cannot write and lock /proc/actmem: No such file or directory"),
        (["--save", "{folder}/file"], "--save: cannot write and lock {folder}/file: File exists"),
        (["--save", "n" * 300], f"--save: cannot write and lock {'n' * 300}: File name too long"),
        (["--save", "{saved}"], "--save: {saved} holds a training of 4 steps: add --resume, or name another folder"),
        (["--save", "{saved}", "--resume"], "--resume: the training in {saved} has another dropout: 0.5, not 0.1"),
        (["--save", "{saved}", "--resume", "--dropout", 0.5, "--steps", 3], "--steps: {saved} holds 4 already"),
        (["--save", ""], "argument --save: must name a folder"),
    ],
)
def test_bad_input_is_one_line(arguments, expected, monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    whole = tmp_path / "saved" / "step-00000004"
    whole.mkdir(parents=True)
    (whole / "empty").touch()
    settings = TrainingJob(SHAPES["gpt"], JOB.mode, 4, 0.5).settings(standard_library(TEXT_BYTES))
    (whole / "training.json").write_text(json.dumps(settings))
    (whole / "checksums.json").write_text(json.dumps(training_saves._checksums(whole)))
    names = {"folder": str(tmp_path), "saved": str(tmp_path / "saved")}
    arguments = [str(argument).format(**names) for argument in arguments]
    if "n" * 300 in arguments:  # the other ranks find it too, and leave that to rank 0
        assert lab_exit(SCRIPT, arguments, monkeypatch, capsys, **ALONE | {"RANK": 1}) == (0, "", [])
    code, out, (line,) = lab_exit(SCRIPT, arguments, monkeypatch, capsys, **ALONE)
    assert (code, out) == (2, "") and line.startswith("train.py: " + expected.format(**names))


@pytest.mark.parametrize("num_bytes", [5, 10**9])
def test_too_little_text(tmp_path, num_bytes):
    (tmp_path / "a.py").write_text("1234")
    said = rf"{num_bytes:,} bytes of text are asked for, .* has 4: is Python installed without"
    with pytest.raises(ConfigError, match=said):
        standard_library(num_bytes, folder=tmp_path)
