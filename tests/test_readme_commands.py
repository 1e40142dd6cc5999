"""The commands that the READMEs and the findings tell a reader to type.

Those that take seconds run as they stand.  Of the other programs of ours ``--help`` runs, and has to name every option that
a command uses.  make's commands are dry runs.  NOT_RUN has the rest, with reasons.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = [ROOT / "README.md", ROOT / "FINDINGS.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("*/README.md"))]
FILES += sorted(ROOT.glob("src/*/README.md"))
#: Programs of others, by the word that a command begins with, and why none of their commands is run.
NOT_RUN = {
    "apt-get": "installs a package on the machine",
    "conda": "makes an environment of gigabytes",
    "docker": "needs GPUs and Docker",
    "git": "works on the reader's clone",
    "pip": "downloads packages",
    "pre-commit": "writes a hook into the reader's clone",
    "python3": "serves files until it is stopped",
}
#: What takes seconds, and runs as it stands, in a folder with the model below.
AS_IT_STANDS = (
    "python - <<'END'",
    "python labs/measure_table2.py --emulate 8 --model 1T",
    "actmem record my_model.py:factory --step --html page.html",
    "actmem tape my_model.py:factory --letters s,b,h,a,f,v --out tape.json",
)
MODEL = """
import torch
from torch import nn

def factory(s=16, b=2, h=32, a=4, f=64, v=50):
    block = nn.TransformerEncoderLayer(h, a, f, batch_first=True)
    return nn.Sequential(nn.Embedding(v, h), block, nn.Linear(h, v)), (torch.randint(0, v, (b, s)),)
"""
PROGRAM = re.compile(r"(?:my/)?(labs/\w+\.py)$")


def fenced_commands(text: str) -> list[str]:
    """The commands of blocks that have no language: continued lines as one, here-documents whole, without comments."""
    commands = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if "<<'END'" in block:
            commands.append(block.strip())
        elif not language:
            lines = block.replace("\\\n", " ").splitlines()
            commands += [" ".join(line.partition("  #")[0].split()) for line in lines if line.strip()]
    return commands


def inline_commands(text: str) -> list[str]:
    """What stands in backticks and begins with a program and a blank."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()).replace("\\|", "|") for span in re.findall(r"`([^`]+)`", prose)]
    begins = re.compile(rf"(python|torchrun|actmem|make|pytest|sbatch|[A-Z]+=\S+|{'|'.join(NOT_RUN)}) \S")
    found = [span for span in spans if begins.match(span) or re.match(r"(?:my/)?labs/\w+\.py\b", span)]
    return [command for span in found for command in span.split(" && ")]


COMMANDS = list(
    dict.fromkeys(
        command
        for file in FILES
        for text in [file.read_text(encoding="utf-8")]
        for command in fenced_commands(text) + inline_commands(text)
    )
)


def words_of(command: str) -> list[str]:
    """Without variables in front, and without what is left to the reader."""
    words = [word for word in shlex.split(command) if word != "…"]
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    return words


def program_and_options(words: list[str]) -> tuple[tuple[str, ...], set[str]] | None:
    """Our program that a command starts, as arguments of python, and its options; None if it starts none."""
    for place, word in enumerate(words):
        if match := PROGRAM.match(word):
            return (match[1],), options(words[place + 1 :])
    if words[0] == "actmem" and len(words) > 1 and re.match(r"[a-z]+$", words[1]):
        return ("-m", "actmem_tools", words[1]), options(words[2:])
    if words[:2] == ["python", "-m"]:
        return ("-m", words[2]), options(words[3:])
    return None


def options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def parts_of_tests(words: list[str]) -> list[str]:
    """Files and folders of tests that a command runs; of a module ``tests.name`` its file."""
    modules = [f"{word.replace('.', '/')}.py" for word in words if word.startswith("tests.")]
    return modules or [word for word in words if word.startswith("tests/")]


def run(command: list[str], folder: Path = ROOT) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
        environment.pop(name, None)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


USED: dict[tuple[str, ...], set[str]] = defaultdict(set)
for _command in COMMANDS:
    if "\n" not in _command and (_found := program_and_options(words_of(_command))):
        if not _found[0][-1].startswith("tests."):
            USED[_found[0]] |= _found[1]
DRY_RUNS = [command for command in COMMANDS if words_of(command)[0] == "make"]


def test_every_command_is_run_or_says_why_not():
    """A command that no rule here knows is a mistake in a README, or needs a line in NOT_RUN."""
    unknown = []
    for command in COMMANDS:
        words = words_of(command)
        is_ours = command.startswith("python - <<") or program_and_options(words) or words[0] in ("make", "jupyter")
        if not is_ours and not parts_of_tests(words) and words[0] not in (*NOT_RUN, "sbatch"):
            unknown.append(command)
    assert unknown == []
    assert set(AS_IT_STANDS[1:]) <= set(COMMANDS), "a command that is run here is in no README"


def test_tests_that_are_named_are_there():
    named = {path for command in COMMANDS for path in parts_of_tests(words_of(command))}
    assert named and [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("command", DRY_RUNS)
def test_make_knows_its_commands(command):
    done = run(["make", "--dry-run", "--no-print-directory", *words_of(command)[1:]])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("program", USED, ids=" ".join)
def test_a_program_knows_the_options_that_commands_use(program, monkeypatch, capsys):
    """Here, without a process for each: tests of labs start them."""
    monkeypatch.setattr(sys, "argv", [*(word for word in program if word != "-m"), "--help"])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        if program[0] == "-m":
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(ROOT / program[0]), run_name="__main__")
    shown = capsys.readouterr().out
    assert ended.value.code in (0, None)
    assert [option for option in USED[program] if not re.search(rf"{option}(?![\w-])", shown)] == []


@pytest.mark.slow
@pytest.mark.parametrize("start", AS_IT_STANDS)
def test_a_quick_command_runs(start, tmp_path):
    (command,) = [command for command in COMMANDS if command == start or command.startswith(f"{start}\n")]
    (tmp_path / "my_model.py").write_text(MODEL, encoding="utf-8")
    python = shlex.quote(sys.executable)
    text = re.sub(r"^python", python, re.sub(r"^actmem", f"{python} -m actmem_tools", command))
    done = run(["bash", "-c", text], tmp_path if "my_model" in command else ROOT)
    assert done.returncode == 0 and done.stdout, done.stdout + done.stderr
