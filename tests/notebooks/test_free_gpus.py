"""The notebook for borrowed GPUs, on a machine that has torch and not the course."""

import os
import subprocess
import sysconfig
import venv

import pytest

from notebooks.source.build import NOTEBOOKS, SOURCES, read


@pytest.mark.nightly
def test_the_notebook_for_free_gpus_installs_the_course_from_the_repository(tmp_path):
    venv.create(tmp_path / "venv")
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    packages = sysconfig.get_paths()["purelib"]
    (site / "packages.pth").write_text(f"{packages}\n")  # torch and pip, and not what the .pth files there add
    first = next(cell.source for cell in read(SOURCES / "free_gpus.py").cells if cell.cell_type == "code")
    program = first.replace('REPOSITORY = ""', f"REPOSITORY = {str(NOTEBOOKS.parent)!r}")
    program += "\nimport actmem_course.launch as launch; print(launch.LABS); print(launch.run('measure_runs.py', '--help').returncode)"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(tmp_path / "venv" / "bin" / "python"), "-c", program]
    environment = {**clean, "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "false", "PIP_NO_INDEX": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == [str(tmp_path / "actmem" / "labs"), "0"], done.stderr
