"""How ``pytest --nbval`` checks the notebooks.

Printed text is compared strictly.  Pictures and HTML are not: they differ between machines,
and every number that matters is printed beside them.
"""

import nbval.kernel
import nbval.plugin

from notebooks.source.kernels import PrivateKernelManager

NOT_COMPARED = ("text/html", "image/svg+xml", "application/vnd.plotly.v1+json")

nbval.kernel.KernelManager = PrivateKernelManager


def pytest_collectstart(collector):
    if isinstance(collector, nbval.plugin.IPyNbFile):
        collector.skip_compare += NOT_COMPARED
