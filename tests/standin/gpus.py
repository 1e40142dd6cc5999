"""GPUs where there are none: ``python -m tests.standin.gpus 2 python labs/measure_parity.py --ranks 2``.

STANDIN_SDPA=cudnn|flash|math chooses attention's kernel, STANDIN_BYTES the memory of a GPU, STANDIN_CAPABILITY=7.5 makes
it as old as a T4; STANDIN_NCCL_DESTROY=collective makes a group's end wait for all ranks; STANDIN_NCCL_FAILS=TEXT, and
STANDIN_NCCL_FAILS_ON=RANK, is an error at the start.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
HERE, BUILT = ROOT / "tests" / "standin", ROOT / "build" / "standin"


def why_not() -> str:
    """Why there can be no stand-in here; "" if there can."""
    if not torch.__version__.startswith("2.13."):
        return f"the stand-in GPU is written for torch 2.13, not {torch.__version__}"
    if torch.version.cuda or torch.version.hip:
        return "the stand-in GPU needs a CPU build of torch"
    return "" if sys.platform == "linux" and shutil.which(compiler()) else f"no C++ compiler ({compiler()}) on Linux"


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def build() -> None:
    """Compile it into build/ unless that has been done: minutes, once for each state of its source and of torch."""
    BUILT.mkdir(parents=True, exist_ok=True)
    source = HERE / "gpus.cpp"
    state = hashlib.sha256(torch.__version__.encode() + source.read_bytes()).hexdigest()
    with open(BUILT / "state", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another test process may have begun
        file.seek(0)
        if file.read() == state:
            return
        from torch.utils.cpp_extension import include_paths, library_paths

        command = [compiler(), *"-std=c++20 -O0 -fPIC -shared -w -DTORCH_EXTENSION_NAME=_standin".split()]
        command += ["-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", str(source)]
        for path in [*include_paths(), sysconfig.get_paths()["include"]]:
            command += ["-isystem", path]
        for path in library_paths():
            command += [f"-L{path}", f"-Wl,-rpath,{path}"]
        command += "-lc10 -ltorch_cpu -ltorch_python -ltorch -o".split()
        subprocess.run([*command, str(BUILT / "_standin.so")], check=True)
        file.truncate(0)
        file.write(state)


def environment(gpus: int, **settings: str) -> dict[str, str]:
    """The variables with which a command finds so many GPUs."""
    paths = [str(HERE / "site"), str(BUILT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = {"STANDIN_GPUS": str(gpus), "PYTHONPATH": os.pathsep.join(paths), "PATH": path, "OMP_NUM_THREADS": "1"}
    return {**os.environ, **found, **settings}


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(reason)
    build()
    os.execvpe(sys.argv[2], sys.argv[2:], environment(int(sys.argv[1])))
