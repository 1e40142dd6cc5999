"""On PYTHONPATH with STANDIN_GPUS=N, every Python finds N CUDA devices when it imports torch."""

import ctypes
import importlib.util
import os
import sys

ROOT = os.path.abspath(__file__).rsplit(os.sep, 4)[0]


class BesideTorch:
    """Loads the stand-in with torch: what torch looks up once must be there before, the rest comes after."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        execute = spec.loader.exec_module

        def exec_module(module):
            ctypes.CDLL(os.path.join(ROOT, "build", "standin", "_standin.so"))
            execute(module)
            importlib.import_module("standin_cuda")

        spec.loader.exec_module = exec_module
        return spec


if int(os.environ.get("STANDIN_GPUS", "0")):
    sys.meta_path.insert(0, BesideTorch())
    exists = os.path.exists
    os.path.exists = lambda path: path == "/dev/nvidiactl" or exists(path)
