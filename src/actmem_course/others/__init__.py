"""What others printed, published and logged: facts to compare with, and the arithmetic on them."""

import csv
from importlib import resources


def table_rows(file: str, package: str = __name__) -> list[dict[str, str]]:
    """Return the rows of a tab-separated file of this folder or another package's, by the names in its first line."""
    # Also from an archive: a page loads the package from a zip file.
    text = resources.files(package).joinpath(file).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
