"""How ``pytest --nbval`` checks the notebooks.

Printed text is compared strictly.  Pictures and HTML are not: they differ between machines,
and every number that matters is printed beside them.
By day kernels, and the labs that cells start, are forked from a Python that has loaded torch; ALL=1 starts each anew.
"""

import os
import sys

import nbval.kernel
import nbval.plugin

from notebooks.source.kernels import PrivateKernelManager
from tests import forked_python

NOT_COMPARED = ("text/html", "image/svg+xml", "application/vnd.plotly.v1+json")

KERNEL = "from ipykernel.kernelapp import launch_new_instance; launch_new_instance()"


class ForkedKernelManager(PrivateKernelManager):
    def format_kernel_cmd(self, extra_arguments=None):
        return [forked_python.shared(), "-c", KERNEL, "-f", self.connection_file]

    def start_kernel(self, **options):
        return super().start_kernel(env={**os.environ, "OMP_NUM_THREADS": "1"}, **options)


is_forked = sys.platform == "linux" and os.environ.get("ALL") != "1"
nbval.kernel.KernelManager = ForkedKernelManager if is_forked else PrivateKernelManager


def pytest_collectstart(collector):
    if isinstance(collector, nbval.plugin.IPyNbFile):
        collector.skip_compare += NOT_COMPARED
