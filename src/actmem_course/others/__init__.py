"""Numbers that others printed, published or logged, to compare our predictions with."""

import csv
from importlib import resources


def table_rows(file: str, package: str = __name__) -> list[dict[str, str]]:
    """Read a tab-separated file of a package: one dict for each line, with the names of the first line as keys.

    Args:
        file: the file's name, such as "published_runs.tsv".
        package: the name of the package that has the file; by default ``actmem_course.others``.
    """
    # Also from an archive: a page loads the package from a zip file.
    text = resources.files(package).joinpath(file).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
