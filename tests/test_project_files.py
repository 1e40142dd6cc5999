"""Files that other tools read: hosted workflows, hooks, the dev container, the citation.

Nothing here can run them, so these tests hold them to what they call: commands, folders, versions.
"""

import importlib.util
import json
import re
from pathlib import Path

import yaml

import actmem
from notebooks.site.build import SITE

ROOT = Path(__file__).resolve().parents[1]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


TARGETS = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))


def workflow(name):
    found = yaml.safe_load(read(f".github/workflows/{name}.yml"))
    found["on"] = found.pop(True)  # YAML 1.1 reads the key as a truth value
    return found


def steps(job):
    return [step.get("run") or step["uses"] for step in job["steps"]]


def test_a_push_runs_ci_and_every_night_what_it_does_not_wait_for():
    ci, nightly = workflow("ci"), workflow("nightly")
    assert ci["on"] == {"push": None, "pull_request": None}
    assert set(nightly["on"]) == {"schedule", "workflow_dispatch"}
    assert ci["permissions"] == nightly["permissions"] == {"contents": "read"}
    (job,) = ci["jobs"].values()
    assert steps(job)[-1] == ".ci/run" and (ROOT / ".ci" / "run").exists()
    assert job["timeout-minutes"] <= 120
    targets = [word for job in nightly["jobs"].values() for word in steps(job)[-1].split() if "=" not in word]
    assert targets == [".ci/run", "test-all", "mutants", "make", "matrix"]
    assert {"test-all", "mutants", "matrix"} <= TARGETS


def test_main_publishes_what_make_site_builds():
    pages = workflow("pages")
    assert pages["on"]["push"] == {"branches": ["main"]}
    build, deploy = pages["jobs"]["build"], pages["jobs"]["deploy"]
    assert any(step.startswith("make site") for step in steps(build))
    assert build["steps"][-1]["with"]["path"] == SITE.relative_to(ROOT).as_posix()
    assert pages["permissions"] == {} and build["permissions"] == {"contents": "read"}
    assert deploy["permissions"] == {"pages": "write", "id-token": "write"} and deploy["needs"] == "build"


def test_the_dev_container_sets_up_with_make():
    container = json.loads(read(".devcontainer/devcontainer.json"))
    command, target, *_ = container["postCreateCommand"].split()
    assert command == "make" and target in TARGETS and container["forwardPorts"] == [8888]


def test_hooks_use_the_ruff_of_the_constraints():
    pinned = re.search(r"^ruff==.*$", read("constraints.txt"), re.MULTILINE)[0]
    (hooks,) = (repo["hooks"] for repo in yaml.safe_load(read(".pre-commit-config.yaml"))["repos"])
    ruffs = [hook["additional_dependencies"] for hook in hooks if hook["entry"].startswith("ruff")]
    assert ruffs == [[pinned]] * 2


def test_the_citation_and_the_changes_name_todays_version():
    assert yaml.safe_load(read("CITATION.cff"))["version"] == actmem.__version__
    versions = re.findall(r"^## \[(.*?)\]", read("CHANGELOG.md"), re.MULTILINE)
    assert versions[:2] == ["Unreleased", actmem.__version__]


def test_what_contributing_and_the_readme_name_is_there():
    """Modules behind ``python -m`` are programs; files exist."""
    contributing, readme = read("CONTRIBUTING.md"), read("README.md")
    named = re.findall(r"`((?:src|tests|labs|notebooks)/[\w/.]+)`", contributing)
    named += re.findall(r"\b(?:labs|tests|notebooks)/[\w/]+\.(?:py|ipynb|sbatch)\b", readme)
    assert len(named) > 40
    assert [name for name in named if not any(ROOT.glob(name.rstrip("/").replace("NN_name", "[0-9][0-9]_*")))] == []
    modules = set(re.findall(r"python -m ([\w.]+)", contributing + readme)) - {"http.server", "pip"}
    assert {"actmem", "actmem_course.make_copies"} <= modules
    for name in modules:
        spec = importlib.util.find_spec(name)
        folder = spec.submodule_search_locations
        program = Path(folder[0]) / "__main__.py" if folder else Path(spec.origin)
        assert program.name == "__main__.py" or '__name__ == "__main__"' in program.read_text(encoding="utf-8"), name


def test_an_installed_package_has_its_files_that_are_no_python():
    package = ROOT / "src" / "actmem_course"
    found = {path.relative_to(package).as_posix() for path in package.rglob("*.*") if "__pycache__" not in path.parts}
    (listed,) = re.findall(r"^actmem_course = (\[.*\])$", read("pyproject.toml"), re.MULTILINE)
    assert {name for name in found if not name.endswith(".py")} == set(json.loads(listed)) != set()
