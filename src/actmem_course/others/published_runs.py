"""Peaks that others published of their training runs, each with the prediction of ``actmem plan``. Nothing is fitted.

published_predictions.tsv has the predictions: the bytes allocated, and the bytes that the allocator then reserves.
``python labs/measure_published.py`` makes them by running each run's command.

published_runs.tsv has the runs, with these columns:

- peak: the published peak; before: the memory that was in use before the model was made, if the source says so.
- kind: what was measured: "allocated", "reserved" or "nvidia-smi"; ``PublishedRun`` explains these.
- command: the ``actmem plan`` command for the run.
- recomputes: which of the command's plans the run was: "no" (no block is recomputed), "all" (every block is), or
  "part" (of every block the part that --again names).
- held: what the run held longer than that plan does: "logits" are float32 logits kept from one forward to the next.
- left_out: why the run can't be predicted: its source doesn't describe the run fully, or no option of plan does.
- why: the cause, if prediction and publication differ.
"""

from dataclasses import dataclass

from actmem_course.others import table_rows

_UNITS = {"B": 1, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class PublishedRun:
    """One published run.

    Attributes:
        name: the run's name: program, model, GPUs, microbatch.
        command: the ``actmem plan`` command for the run; "" if there is none.
        recomputes: which of the command's plans the run was: "no", "all" or "part" (of each block).
        held: "logits" if the run kept float32 logits from one forward to the next; else "".
        published_bytes: the published peak, without the memory in use before the model was made.
        kind: what was measured: "allocated" (bytes of tensors), "reserved" (bytes that torch's allocator took from the
            GPU), or "nvidia-smi" (the used memory that this program shows).
        source: the address of the publication.
        left_out: why the run can't be predicted; "" if it is predicted.
        why: the cause, if prediction and publication differ; else "".
        plan_bytes: the predicted peak of allocated bytes; None if the run is left out.
        reserved_bytes: the bytes that torch's allocator is predicted to reserve; None if the run is left out.
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
        """The prediction to compare with ``published_bytes``; None if the run is left out.

        For the kind "allocated" it is ``plan_bytes``. For "reserved" and "nvidia-smi" it is ``reserved_bytes``: what
        nvidia-smi shows, minus the memory in use before the model was made, is what the allocator reserved.
        """
        return self.plan_bytes if self.kind == "allocated" else self.reserved_bytes

    @property
    def difference_percent(self) -> float | None:
        """Predicted minus published, in percent of the published peak; None if the run is left out."""
        return None if self.predicted_bytes is None else 100 * (self.predicted_bytes / self.published_bytes - 1)


def published_runs() -> list[PublishedRun]:
    """Return all published runs, in the order of published_runs.tsv: runs that are left out come last."""
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
