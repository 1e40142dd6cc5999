"""Kernels on private sockets: two started at once over TCP can be given the same port."""

import shutil
import tempfile
from pathlib import Path

from jupyter_client.manager import AsyncKernelManager, KernelManager


class PrivateKernelManager(KernelManager):
    """Sockets in a new folder that goes with the kernel.  Its path is short: a socket's may have 107 characters."""

    def __init__(self, **kwargs: object):
        self._folder = tempfile.mkdtemp(prefix="nb-")
        super().__init__(transport="ipc", ip=str(Path(self._folder) / "k"), **kwargs)

    def cleanup_ipc_files(self) -> None:
        super().cleanup_ipc_files()
        shutil.rmtree(self._folder, ignore_errors=True)


class AsyncPrivateKernelManager(PrivateKernelManager, AsyncKernelManager):
    """For nbclient."""
