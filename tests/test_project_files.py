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


def workflow(name):
    found = yaml.safe_load(read(f".github/workflows/{name}.yml"))
    found["on"] = found.pop(True)  # YAML 1.1 reads the key as a truth value
    return found


def steps(job):
    return [step.get("run") or step["uses"] for step in job["steps"]]


def test_every_push_and_pull_request_runs_ci():
    ci = workflow("ci")
    assert ci["on"] == {"push": None, "pull_request": None}
    assert ci["permissions"] == {"contents": "read"}
    (job,) = ci["jobs"].values()
    assert steps(job)[-1] == ".ci/run" and (ROOT / ".ci" / "run").exists()
    assert job["timeout-minutes"] <= 120


def test_every_night_runs_what_a_push_does_not_wait_for():
    nightly = workflow("nightly")
    assert set(nightly["on"]) == {"schedule", "workflow_dispatch"} and nightly["permissions"] == {"contents": "read"}
    targets = [word for job in nightly["jobs"].values() for word in steps(job)[-1].split() if "=" not in word]
    assert targets == [".ci/run", "test-all", "mutants", "make", "matrix"]
    for target in ("test-all", "mutants", "matrix"):
        assert re.search(rf"^{target}:", read("Makefile"), re.MULTILINE)


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
    assert command == "make" and re.search(rf"^{target}:", read("Makefile"), re.MULTILINE)
    assert container["forwardPorts"] == [8888]


def test_hooks_use_the_ruff_of_the_constraints():
    pinned = re.search(r"^ruff==.*$", read("constraints.txt"), re.MULTILINE)[0]
    (hooks,) = (repo["hooks"] for repo in yaml.safe_load(read(".pre-commit-config.yaml"))["repos"])
    ruffs = [hook["additional_dependencies"] for hook in hooks if hook["entry"].startswith("ruff")]
    assert ruffs == [[pinned]] * 2


def test_the_citation_and_the_changes_name_todays_version():
    assert yaml.safe_load(read("CITATION.cff"))["version"] == actmem.__version__
    versions = re.findall(r"^## \[(.*?)\]", read("CHANGELOG.md"), re.MULTILINE)
    assert versions[:2] == ["Unreleased", actmem.__version__]


def test_contributing_names_files_and_modules_that_exist():
    text = read("CONTRIBUTING.md")
    named = re.findall(r"`((?:src|tests|labs|notebooks)/[\w/.]+)`", text)
    assert len(named) > 20
    assert [name for name in named if not any(ROOT.glob(name.rstrip("/").replace("NN_name", "[0-9][0-9]_*")))] == []
    modules = re.findall(r"python -m ([\w.]+)", text)
    assert modules and all(importlib.util.find_spec(module) for module in modules)


def test_what_the_readme_runs_is_there():
    """Modules behind ``python -m`` are programs, and paths of labs, tests and notebooks exist."""
    readme = read("README.md")
    modules = {
        name for name in re.findall(r"python -m ([\w.]+)", readme) if name.partition(".")[0] not in ("http", "pip")
    }
    assert {"actmem", "actmem_course.make_copies"} <= modules
    for name in modules:
        spec = importlib.util.find_spec(name)
        program = (
            Path(spec.submodule_search_locations[0]) / "__main__.py"
            if spec.submodule_search_locations
            else Path(spec.origin)
        )
        assert program.name == "__main__.py" or '__name__ == "__main__"' in program.read_text(encoding="utf-8"), name
    paths = set(re.findall(r"\b(?:labs|tests|notebooks)/[\w/]+\.(?:py|ipynb|sbatch)\b", readme))
    assert len(paths) > 20
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_an_installed_package_has_its_files_that_are_no_python():
    package = ROOT / "src" / "actmem_course"
    found = {path.relative_to(package).as_posix() for path in package.rglob("*.*") if "__pycache__" not in path.parts}
    (listed,) = re.findall(r"^actmem_course = (\[.*\])$", read("pyproject.toml"), re.MULTILINE)
    assert {name for name in found if not name.endswith(".py")} == set(json.loads(listed)) != set()
