"""The stored chapters, and the few that browsers open as notebooks: a notebook takes most of a minute in JupyterLab."""

import functools

import nbformat

from notebooks.site.book import chapters

NAMES = [path.name for path in chapters()]
#: The chapters that are used in JupyterLab.
IN_JUPYTERLAB = ["01_memory_wall.ipynb", "05_recomputation.ipynb", "07_time.ipynb"]


@functools.cache
def stored(name):
    """A chapter as it is when it is first asked for."""
    path = next(path for path in chapters() if path.name == name)
    return nbformat.read(path, as_version=4)
