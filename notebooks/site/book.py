"""The course as pages: the stored notebooks, the labs, the READMEs and FINDINGS.md, by jupyter-book.

Nothing is run.  Figures move (``live``), and links to labs lead to pages that show them.
"""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import yaml
from nbformat import NotebookNode

from actmem_course.strip_solutions import lab_names, lab_source
from actmem_course.others.logged_pairs import logged_pairs
from notebooks.site import cache, live
from notebooks.source.pictures import front_drawing, front_picture

ROOT = cache.ROOT
STYLE, ICON = (Path(__file__).with_name(name) for name in ("style.css", "favicon.svg"))
CONFIG = {
    "title": "Activation memory, predicted and counted",
    "author": "The actmem authors",
    "copyright": "",
    "only_build_toc_files": True,
    "execute": {"execute_notebooks": "off"},
    "parse": {"myst_enable_extensions": ["colon_fence", "dollarmath"]},
    "html": {"use_repository_button": False, "use_issues_button": False, "favicon": "favicon.svg"},
    "sphinx": {
        "config": {
            # Jupyter-book's own, less what asks other servers: thebe, intersphinx.
            "extensions": [
                "sphinx_togglebutton", "sphinx_copybutton", "myst_nb", "jupyter_book", "sphinx_comments", "sphinx_external_toc",
                "sphinx_design", "sphinx_book_theme",
            ],
            # Beside _static, because every script in there is loaded by every page.
            "html_extra_path": ["extra"],
            "mathjax_path": "../mathjax/tex-chtml.js",
            "html_context": {"default_mode": "auto"},
            "html_copy_source": False,
            "nb_code_prompt_show": "Show the code",
            "nb_code_prompt_hide": "Hide the code",
            "html_show_copyright": False,
            "html_theme_options": {"show_navbar_depth": 1, "use_download_button": False, "navbar_persistent": []},
            # Anchors of the READMEs' own headings.
            "myst_heading_anchors": 3,
        }
    },
}  # fmt: skip
#: What the course is about, on the first screen.
SENTENCE = (
    "The weights fit, and training still runs out of memory: most of it is activations, the tensors that the forward pass saves "
    "for the backward pass. "
    "Choose the methods of <i>Reducing Activation Recomputation in Large Transformer Models</i> and see which models fit. "
    "In this course you predict each of these bytes, then measure them."
)

#: Pages as they are, in folders as here, since they link to each other; and a file that README links to.
GUIDES = (
    "README.md", "FINDINGS.md", "labs/README.md", "src/actmem_tools/README.md", "src/README.md", "notebooks/README.md", "tests/README.md",
    "CONTRIBUTING.md",
)  # fmt: skip
CITATION = "CITATION.cff"

_ICON_SCRIPT = re.compile(r'<script[^>]*/fontawesome\.js[^>]*></script>')

def chapters() -> list[Path]:
    """The stored notebooks, in the order of the course."""
    return sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def labs() -> dict[str, str]:
    """The scripts that a reader runs, by file name: exercises as they are handed out, whatever is in labs/ now."""
    measuring = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "labs").glob("measure_*.py")}
    return {**{f"{name}.py": lab_source(name) for name in lab_names()}, **dict(sorted(measuring.items()))}


def title(notebook: NotebookNode) -> str:
    """The heading of a chapter."""
    return notebook.cells[0].source.partition("\n")[0].removeprefix("# ")


def write_sources(folder: Path) -> None:
    """Fill ``folder`` with what jupyter-book builds from.  Raises cache.SiteError if MathJax can't be had."""
    mathjax = folder / "extra" / "mathjax"
    es5 = cache.npm_package(cache.MATHJAX) / "es5"
    (mathjax / "output" / "chtml").mkdir(parents=True)
    shutil.copy(es5 / "tex-chtml.js", mathjax)
    shutil.copytree(es5 / "output" / "chtml" / "fonts", mathjax / "output" / "chtml" / "fonts")
    (folder / "_static").mkdir()
    styles = (live.FIGURES / "figures.css", STYLE)
    css = "\n".join(path.read_text(encoding="utf-8") for path in styles)
    (folder / "_static" / "actmem.css").write_text(css, encoding="utf-8")
    shutil.copy(ICON, folder)
    (folder / "notebooks").mkdir()
    shutil.copytree(ROOT / "notebooks" / "pictures", folder / "notebooks" / "pictures")
    moving = folder / "extra" / "live"
    live.write_assets(moving)
    live.write_cells(moving, "index", {"front": live.FRONT})
    shutil.copy(front_picture(), moving / "pictures" / "front.png")
    for path in chapters():
        notebook = nbformat.read(path, as_version=4)
        live.put_figures(notebook, path.stem, moving)
        nbformat.write(page(notebook), folder / "notebooks" / path.name)
    (folder / "labs").mkdir()
    for name, source in labs().items():
        (folder / "labs" / name).write_text(source, encoding="utf-8")
        (folder / "labs" / name).with_suffix(".md").write_text(lab_page(name, source), encoding="utf-8")
    (folder / "index.md").write_text(front_page(), encoding="utf-8")
    for name in (*GUIDES, CITATION):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    contents = {
        "format": "jb-book",
        "root": "index",
        "parts": [
            {"caption": "Chapters", "chapters": [{"file": f"notebooks/{path.stem}"} for path in chapters()]},
            {"caption": "Reference", "chapters": [{"file": name.removesuffix(".md")} for name in GUIDES]},
            {"caption": "Labs", "chapters": [{"file": f"labs/{name}"} for name in lab_names()]},
            {"caption": "Measurements", "chapters": [{"file": f"labs/{Path(name).stem}"} for name in labs() if Path(name).stem not in lab_names()]},
        ],
    }
    (folder / "_toc.yml").write_text(yaml.safe_dump(contents), encoding="utf-8")
    (folder / "_config.yml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")


def page(notebook: NotebookNode) -> NotebookNode:
    """A chapter for its page."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"(\]\(\.\./labs/\w+)\.py\)", r"\1.md)", cell.source)
            # Browsers break lines between a formula and the comma after it.
            cell.source = re.sub(r"\$([^$\n]+)\$([,.;])", r"$\1\2$", cell.source)
            continue
        if cell.metadata.get("jupyter", {}).get("source_hidden"):
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), fold(cell, is_first=cell is code[0])]
            if cell is code[0]:
                cell.metadata["mystnb"] = {"code_prompt_show": "Setup: what this chapter imports"}
        if any("──" in output.get("text", output.get("data", {}).get("text/plain", "")) for output in cell.outputs):
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), "actmem-table"]  # text_table rules off its header
        for output in cell.outputs:
            if "text/html" in output.get("data", {}):
                # A wide table scrolls, so the keyboard must reach it.
                output.data["text/html"] = output.data["text/html"].replace("<table", '<table tabindex="0"')
    return notebook


def fold(cell: NotebookNode, is_first: bool) -> str:
    """How a page has a cell whose code is folded in notebooks.

    A reader came for the figure, and not for the code that draws it; nothing is left of code that shows nothing.
    """
    if not cell.outputs and not is_first:
        return "remove-cell"
    shows_figure = any("actmem-shown" in output.get("data", {}).get("text/html", "") for output in cell.outputs)
    return "remove-input" if shows_figure else "hide-input"


def lab_title(source: str) -> str:
    """A lab's heading: what its text begins with, after the command and up to the first aside."""
    _, _, text = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")
    found = re.match(r"(Lab \d+: )?.*?(?= \(|:|\.( |$)|, (?!\d))", " ".join(text.split()))
    return found[0] if found else text


def lab_page(name: str, source: str) -> str:
    """A lab as a page: its code, which begins with the command that runs it, and the file to download."""
    return (
        f"# {lab_title(source)}\n\nIt runs in a checkout of the course, by the command in its first line. {{download}}`Download {name} <{name}>`.\n\n"
        f"```{{literalinclude}} {name}\n:language: python\n```\n"
    )


def evidence() -> str:
    """What A100s logged for a layer, beside the paper's equation."""
    layer = logged_pairs()[0]
    return (
        f"On NVIDIA's A100s one more layer of a test model took <b>{layer.logged_bytes:,} B</b> (Megatron-LM's own CI); "
        f"by formula it takes {layer.formula_bytes:,} B."
    )


#: A line of the map in the first chapter: a chapter's file, what it is about, its minutes.
_ON_MAP = re.compile(r"^\| \[[^]]*\]\(([^)]*\.ipynb)\) \| ([^|]*) \| (\d+) \|", re.MULTILINE)


def about_chapters() -> dict[str, str]:
    """What the first chapter's map says of each chapter, by file name."""
    prose = "\n".join(cell.source for cell in nbformat.read(chapters()[0], as_version=4).cells if cell.cell_type == "markdown")
    return {name: f"<br>{what} {minutes} minutes" for name, what, minutes in _ON_MAP.findall(prose)}


def front_page() -> str:
    """One sentence, where to begin and the memory wall, live; then the chapters, the labs, and how the README begins."""
    head = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    heading, *about = (part for part in head.split("\n\n") if not part.startswith(("![", "| ")))  # no picture, no table
    lines = [
        heading,
        "",
        f'<p class="actmem-lead">{SENTENCE}</p>',
        "",
        f'<p class="actmem-live"><a href="notebooks/{chapters()[0].stem}.html">Read the course</a></p>',
        "",
        f'<p>{evidence()}</p>',
        "",
        live.place("index", "front", "front", front_drawing().alt),
        "",
        "## The chapters",
        "",
    ]
    said = about_chapters()
    lines += [f"- [{title(nbformat.read(path, as_version=4))}](notebooks/{path.name}){said.get(path.name, '')}" for path in chapters()]
    for heading, are_exercises in (("The labs", True), ("Measurements", False)):
        lines += ["", f"## {heading}", ""]
        lines += [
            f"- [{lab_title(source)}](labs/{Path(name).stem}.md)"
            for name, source in labs().items()
            if (Path(name).stem in lab_names()) == are_exercises
        ]
    lines += ["", "## About", "", "\n\n".join(about), "", "[The README](README.md) has commands; [the findings](FINDINGS.md) say how everything is checked."]
    return "\n".join(lines) + "\n"


def build_pages(sources: Path, target: Path) -> None:
    """Run jupyter-book over ``sources``; its pages become the folder ``target``.  Raises cache.SiteError at its first warning."""
    command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", "-W", "--keep-going", "-q", str(sources)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        (cache.CACHE / "jupyter-book.log").write_text(done.stdout + done.stderr, encoding="utf-8")
        said = [line for line in (done.stdout + done.stderr).splitlines() if "WARNING" in line or "ERROR" in line]
        raise cache.SiteError(f"jupyter-book failed, see {cache.CACHE / 'jupyter-book.log'}: {' | '.join(said[:3])}")
    shutil.copytree(sources / "_build" / "html", target)
    for path in target.rglob("*.html"):
        # The theme's icons are there twice, as a font and as a script of 1.5 MB: the font is enough.
        path.write_text(_ICON_SCRIPT.sub("", path.read_text(encoding="utf-8")), encoding="utf-8")
