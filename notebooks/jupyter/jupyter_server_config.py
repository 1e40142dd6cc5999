# Read by the JupyterLab that `make course` starts.
from actmem_course.keep_pictures import keep_pictures


def _before_save(model, **kwargs):
    if model["type"] == "notebook" and model.get("content"):
        keep_pictures(model["content"])


c.ContentsManager.pre_save_hook = _before_save  # noqa: F821  # jupyter gives c
