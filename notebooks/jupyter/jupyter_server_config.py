"""Read by the JupyterLab that `make course` starts, which gives it ``c``."""

from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager

from actmem_course.keep_pictures import add_pictures, drop_widgets


class NotebooksWithPictures(AsyncLargeFileManager):
    """Files as always, but a notebook whose kernel has ended opens with pictures in place of widgets."""

    async def get(self, path, content=True, **options):
        model = await super().get(path, content=content, **options)
        if content and model["type"] == "notebook":
            sessions = await self.parent.session_manager.list_sessions()
            if not any(session["path"].strip("/") == path.strip("/") for session in sessions):
                drop_widgets(model["content"])
        return model


def _before_save(model, **more):
    if model["type"] == "notebook" and model.get("content"):
        add_pictures(model["content"])


c.ServerApp.contents_manager_class = NotebooksWithPictures  # noqa: F821
c.ContentsManager.pre_save_hook = _before_save  # noqa: F821
