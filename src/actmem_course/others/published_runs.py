"""Peaks that others published of their training runs, and what ``actmem plan`` predicts for them; no constant is
fitted.

published_predictions.tsv has the predictions, which ``python labs/measure_published.py`` gets from the commands:
what is allocated, and what the allocator then reserves.

published_runs.tsv has the runs. "peak" is the peak as it was published; "before" what the source says was taken before
the model was made; "kind" what was measured. "command" is what one types for the run. "recomputes" says which of the
command's plans the run was: the one that recomputes no block, the one that recomputes all, or the one for the ``part``
that --again names. "held" says what the run held longer than that plan does: "logits", in float32, from forward to the
next. "left_out" says why a run can't be predicted: its source doesn't state all of what it ran, or no
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
        plan_bytes: what the command predicts to be allocated; None if the run is left out.
        reserved_bytes: what torch's allocator would reserve for the same run; None if the run is left out.

    The other fields are columns of published_runs.tsv, explained at this module's top.
    """

    name: str
    command: str
    recomputes: str
    held: str
    published_bytes: int
    kind: str
    source: str
    left_out: str
    why: str
    plan_bytes: int | None
    reserved_bytes: int | None

    @property
    def predicted_bytes(self) -> int | None:
        """What is predicted of the kind that was published. What ``nvidia-smi`` shows is what is reserved, once the
        bytes are taken off that CUDA had taken before the model was made.
        """
        return self.plan_bytes if self.kind == "allocated" else self.reserved_bytes

    @property
    def difference_percent(self) -> float | None:
        """Predicted minus published, in percent of the published peak; None if the run is left out."""
        return None if self.predicted_bytes is None else 100 * (self.predicted_bytes / self.published_bytes - 1)


def published_runs() -> list[PublishedRun]:
    """Return all runs; those that are left out come last."""
    predicted = {row["name"]: row for row in table_rows("published_predictions.tsv")}
    runs = []
    for row in table_rows("published_runs.tsv"):
        peak, before, unit = float(row.pop("peak")), float(row.pop("before")), _UNITS[row.pop("unit")]
        found = predicted.get(row["name"])
        both = (int(found["allocated"]), int(found["reserved"])) if found else (None, None)
        runs.append(
            PublishedRun(
                **row, published_bytes=round((peak - before) * unit), plan_bytes=both[0], reserved_bytes=both[1]
            )
        )
    return runs
