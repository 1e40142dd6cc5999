"""A pipeline that runs any list of actions in torch's runtime: what schedules promise is checked on real ranks."""

from __future__ import annotations

import re
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules

from actmem.config import ConfigError, ModelShape
from actmem.formulas.schedule import Schedule, split_backwards, stage_at
from actmem.main_grad import gradient_of
from actmem.parallel.groups import TensorParallel
from actmem.pipeline import Pipeline, Stage

#: Older pipelining refuses the node of an autograd.Function.
SPLITS_BACKWARDS = torch.__version__ >= "2.13"


def runtime_of_actions(ranks: list[list[str]], *arguments: Any, **named: Any) -> Any:
    """torch's pipeline runtime with these actions of each rank."""
    runtime = schedules._PipelineScheduleRuntime(*arguments, **named)
    with NamedTemporaryFile("w", suffix=".csv") as file:  # the methods that take lists were renamed
        print(*map(",".join, ranks), sep="\n", file=file, flush=True)
        runtime._load_csv(file.name)
    return runtime


def in_torchs_words(ranks: Schedule, v_shaped: bool = False) -> list[list[str]]:
    """Each rank's actions as torch writes them: "5F2" is a forward of stage 5 with microbatch 2.

    A whole backward is "B"; one that leaves the weights' gradients to a "W" is "I".  v_shaped: see ``stage_at``.
    """
    found = []
    for actions in ranks:
        split = split_backwards(actions)
        kinds = ["I" if a.kind == "B" and (a.chunk, a.microbatch) in split else a.kind for a in actions]
        stages = [stage_at(a.rank, a.chunk, len(ranks), v_shaped) for a in actions]
        found.append([f"{stage}{kind}{a.microbatch}" for stage, kind, a in zip(stages, kinds, actions)])
    return found


class ListedPipeline(Pipeline):
    """A Pipeline that runs a given list of actions on each rank.

    orders: the actions of each pipeline rank, for all microbatches, in torch's words: "5F2" is a forward of stage 5 with
    microbatch 2, "5B2" a whole backward, "5I2" one whose gradients of the weights are left to "5W2".  Rank r has the
    stages r, p + r, …, or on a V r, 2p − 1 − r, …, so that rank 0 has both ends of the model.  A watcher hears of "I" as
    of "B", and of every "W".  The other arguments, and what is refused, are Pipeline's.  Raises ConfigError if the list
    can't run.

    A split backward is torch's: from "I" to "W" it keeps nearly all that forward saved, and the gradients that "W" will
    read.  Before torch 2.13 it can't run here.
    """

    def __init__(self, shape: ModelShape, mesh: DeviceMesh, orders: list[list[str]], **options):
        p = mesh["pipeline"].size()
        if len(orders) != p or not all(orders):
            raise ConfigError("orders", f"must have a list of actions for each of the {p} pipeline ranks")
        passes = [[_read(word) for word in words] for words in orders]
        if any(len(set(words)) < len(words) for words in orders):
            raise ConfigError("orders", "must have no action twice")
        if not SPLITS_BACKWARDS and any(kind in word for words in orders for word in words for kind in "IW"):
            raise ConfigError("orders", f'"I" and "W" need torch 2.13 or newer, this is {torch.__version__}')
        n = 1 + max(microbatch for own in passes for _, microbatch in own)
        m = 1 + max(stage for own in passes for stage, _ in own) // p
        of_ranks = [{stage for stage, _ in own} for own in passes]
        looped = [{c * p + r for c in range(m)} for r in range(p)]
        self.v_shaped = of_ranks != looped
        if self.v_shaped and of_ranks != [{stage_at(r, c, p, True) for c in range(m)} for r in range(p)]:
            raise ConfigError("orders", f"ranks must have the stages {looped}, or lie on a V, got {of_ranks}")
        super().__init__(shape, mesh, num_microbatches=n, num_model_chunks=m, **options)
        arguments: dict[str, Any] = {"n_microbatches": n, "loss_fn": self._loss, "scale_grads": False}
        try:
            self.schedule = runtime_of_actions(orders, [*self.stages], **arguments)
        except AssertionError as error:  # torch's own checks: a missing action, an order that no rank can keep
            raise ConfigError("orders", str(error).splitlines()[0]) from None

    def _make_stage(self, index: int, watching: dict, model: dict) -> Stage:
        chunk, rank = divmod(index, p := self.mesh["pipeline"].size())
        stage = super()._make_stage(stage_at(rank, chunk, p, True) if self.v_shaped else index, watching, model)
        run = stage.backward_weight_one_chunk

        def run_and_notify(bwd_chunk_id: int, *args, **kwargs) -> None:
            run(bwd_chunk_id, *args, **kwargs)
            watching["watcher"].after("W", stage, bwd_chunk_id)

        stage.backward_weight_one_chunk = run_and_notify  # type: ignore[method-assign]
        return stage

    def _group_of_both_ends(self) -> TensorParallel | None:
        return None if self.v_shaped else super()._group_of_both_ends()

    def _reduce_shared_embedding(self) -> None:
        first, last = self.parts[0], self.parts[-1]
        if not (self.v_shaped and first.is_first and last.is_last):
            return super()._reduce_shared_embedding()
        one, other = (gradient_of(part.words.weight) for part in (first, last))
        if one is not None and other is not None:  # else the embedding is frozen
            other.copy_(one.add_(other))


def _read(word: str) -> tuple[int, int]:
    """Stage and microbatch."""
    found = re.fullmatch(r"(\d+)[FBIW](\d+)", word)
    if not found:
        raise ConfigError("orders", f"must have actions such as 5F2, 5B2, 5I2 and 5W2, got {word!r}")
    return int(found[1]), int(found[2])
