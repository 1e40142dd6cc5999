"""Peaks that others published of their training runs, and what ``actmem plan`` predicts for them; no constant is
fitted.

published_predictions.tsv has the predictions, which ``python labs/measure_published.py`` gets from the commands.

published_runs.tsv has the runs. "peak" is the peak as it was published; "before" what the source says was taken before
the model was made; "kind" what was measured. "command" is what one types for the run. "recomputes" says which of the
command's plans the run was: the one that recomputes no block, the one that recomputes all, or the one for the ``part``
that --again names. "left_out" says why a run can't be predicted: its source doesn't state all of what it ran, or no
option describes it. "why" is the cause of a difference.
"""

from dataclasses import dataclass

from actmem_course.others import table_rows

_UNITS = {"B": 1, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class PublishedRun:
    """One published run.

    Attributes:
        published_bytes: its peak, without what was taken before the model was made.
        kind: "allocated" tensors, memory "reserved" for them, or what "nvidia-smi" shows.
        predicted_bytes: what the command predicts; None if the run is left out.

    The other fields are columns of published_runs.tsv.
    """

    name: str
    command: str
    recomputes: str
    published_bytes: int
    kind: str
    source: str
    left_out: str
    why: str
    predicted_bytes: int | None

    @property
    def difference_percent(self) -> float | None:
        """Predicted minus published, in percent of the published peak; None if the run is left out."""
        return None if self.predicted_bytes is None else 100 * (self.predicted_bytes / self.published_bytes - 1)


def published_runs() -> list[PublishedRun]:
    """Return all runs; those that are left out come last."""
    predicted = {row["name"]: int(row["bytes"]) for row in table_rows("published_predictions.tsv")}
    runs = []
    for row in table_rows("published_runs.tsv"):
        peak, before, unit = float(row.pop("peak")), float(row.pop("before")), _UNITS[row.pop("unit")]
        published_bytes = round((peak - before) * unit)
        runs.append(PublishedRun(**row, published_bytes=published_bytes, predicted_bytes=predicted.get(row["name"])))
    return runs
