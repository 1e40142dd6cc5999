"""The model on a pipeline: our stages, run by torch.distributed.pipelining (2205.05198 section 4.2.3).

Ranks form a grid, pipeline × tensor.  Every pipeline rank holds ``num_model_chunks`` parts of the
model; part i of rank r is stage i·p + r.  One chunk runs as 1F1B, several as interleaved 1F1B.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.multiprocessing.reductions import StorageWeakRef

from actmem.config import ConfigError, ModelShape, check_divides, check_size
from actmem.model.gpt import GPT
from actmem.parallel.collectives import all_reduce
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import reduce_partial_gradients


def make_mesh(device_type: str, pipeline_parallel_size: int, tensor_parallel_size: int) -> DeviceMesh:
    """All ranks as a grid ``("pipeline", "tensor")``; neighbours share a tensor-parallel group."""
    wanted = pipeline_parallel_size * tensor_parallel_size
    if wanted != dist.get_world_size():
        raise ConfigError("pipeline_parallel_size", f"p · t = {wanted} ranks wanted, {dist.get_world_size()} started")
    sizes = (pipeline_parallel_size, tensor_parallel_size)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("pipeline", "tensor"))


class Watcher:
    """Told of everything a stage does; this one does not listen.  See measure.inflight."""

    def during(self, module: nn.Module, stage: int, microbatch: int) -> AbstractContextManager:
        """Entered around the forward pass of one microbatch, and around its loss."""
        return nullcontext()

    def after(self, kind: str, stage: Stage, microbatch: int) -> None:
        """Called after each forward (``"F"``, its loss included) and each backward (``"B"``)."""


class Stage(PipelineStage):
    """A PipelineStage that can be watched, and that can free its outputs.

    torch holds every output until its backward, 2sbh/t bytes a microbatch in flight, although
    the next stage has a copy.  ``free_outputs`` empties the output's storage once the copy has
    arrived and leaves its shape, which is all that backward asks of it (2205.05198 appendix B).
    """

    def __init__(self, part: GPT, *args, free_outputs: bool, watcher: Watcher, **kwargs):
        super().__init__(part, *args, **kwargs)
        self._free_outputs, self._watcher = free_outputs, watcher
        self._on_the_way: list[Tensor] = []
        self._outputs: dict[int, tuple[StorageWeakRef, int]] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args, **kwargs):
        with self._watcher.during(self.submod, self.stage_index, fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        storage = output.untyped_storage()
        self._outputs[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if not self.is_last:
            self._watcher.after("F", self, fwd_chunk_id)
        return output

    def loss(self, logits: Tensor, targets: Tensor, microbatch: int) -> Tensor:
        """The last stage's loss of one microbatch."""
        with self._watcher.during(self.submod.cross_entropy, self.stage_index, microbatch):
            loss = self.submod.loss(logits, targets)
        self._watcher.after("F", self, microbatch)
        return loss

    def get_fwd_send_ops(self, fwd_chunk_id: int):
        # 1F1B has waited for every earlier send when it asks for the next, and when it
        # begins a backward pass.
        self._free_sent()
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        if self._free_outputs and operations:
            self._on_the_way.extend(self.fwd_cache[fwd_chunk_id][0])
        return operations

    def backward_one_chunk(self, bwd_chunk_id: int, *args, **kwargs):
        self._free_sent()
        result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._watcher.after("B", self, bwd_chunk_id)
        return result

    def held_outputs(self) -> dict[int, int]:
        """Bytes of this stage's outputs that somebody still holds, by the storage's identity."""
        self._outputs = {key: entry for key, entry in self._outputs.items() if not entry[0].expired()}
        return {key: size for key, (_, size) in self._outputs.items()}

    def receive_buffers(self) -> dict[int, int]:
        """Bytes of torch's receive buffers: one for each microbatch, all made at the start."""
        infos = (info for of_microbatch in self.args_recv_info.values() for info in of_microbatch)
        buffers = (info.buffer for info in infos if isinstance(getattr(info, "buffer", None), Tensor))
        return {buffer.untyped_storage()._cdata: buffer.untyped_storage().nbytes() for buffer in buffers}

    def _free_sent(self) -> None:
        while self._on_the_way:
            storage = self._on_the_way.pop().untyped_storage()
            storage.resize_(0)
            del self._outputs[storage._cdata]


class Pipeline:
    """One training step of a GPT on a grid of ranks.

    parts: this rank's chunks of the model, in the order of the stages.  ``step`` runs forward and
    backward of all microbatches; gradients are of the mean loss over the microbatches.
    Raises ConfigError if L is not divisible by p·m, if interleaving gets a number of microbatches
    that p does not divide, if there are fewer microbatches than stages on 1F1B, or if outputs are
    to be freed under interleaving, where torch holds every output until all sends are over.
    """

    def __init__(
        self,
        shape: ModelShape,
        mesh: DeviceMesh,
        *,
        num_microbatches: int,
        num_model_chunks: int = 1,
        sequence_parallel: bool = False,
        free_outputs: bool = False,
        watcher: Watcher | None = None,
        device: torch.device | str = "cpu",
        **model,
    ):
        self.shape, self.mesh = shape, mesh
        self.num_microbatches = check_size("num_microbatches", num_microbatches)
        self.group, p = mesh["pipeline"].get_group(), mesh["pipeline"].size()
        check_pipeline(shape, p, num_model_chunks, num_microbatches)
        self.tp: TensorParallel = tensor_parallel(mesh["tensor"].get_group(), sequence_parallel=sequence_parallel)
        self.num_stages = p * num_model_chunks
        if free_outputs and num_model_chunks > 1:
            raise ConfigError("free_outputs", "torch's interleaved schedule waits for its sends at the end of the step only")
        rank = mesh["pipeline"].get_local_rank()
        watching = {"watcher": watcher or Watcher(), "free_outputs": free_outputs}
        self.stages = [
            self._make_stage(chunk * p + rank, watching, {**model, "device": torch.device(device)})
            for chunk in range(num_model_chunks)
        ]
        self.parts: list[GPT] = [stage.submod for stage in self.stages]
        arguments = {"n_microbatches": num_microbatches, "loss_fn": self._loss}
        if num_model_chunks == 1:
            self.schedule = Schedule1F1B(self.stages[0], **arguments)
        else:
            self.schedule = ScheduleInterleaved1F1B(self.stages, **arguments)
        self._ends = self._group_of_both_ends()
        self._share_embedding()

    def step(self, tokens: Tensor, targets: Tensor) -> list[Tensor]:
        """Forward and backward of a batch ``[num_microbatches · b, s]`` of token ids and targets.

        Every rank gives the whole batch.  Returns the microbatches' losses on the last stage's
        ranks, an empty list elsewhere.  Gradients are complete afterwards on every rank.
        """
        self._losses_done = 0
        losses: list[Tensor] = []
        first, last = self.stages[0].is_first, self.stages[-1].is_last
        self.schedule.step(
            *((tokens,) if first else ()),
            **({"target": targets, "losses": losses} if last else {}),
            return_outputs=False,
        )
        for part in self.parts:
            reduce_partial_gradients(part, self.tp)
        self._reduce_shared_embedding()
        return [loss.detach() for loss in losses]

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        # The last stage meets the microbatches in order, in both schedules.
        microbatch, self._losses_done = self._losses_done, self._losses_done + 1
        return self.stages[-1].loss(logits, targets, microbatch)

    def _make_stage(self, index: int, watching: dict, model: dict) -> Stage:
        per_stage = self.shape.num_layers // self.num_stages
        layers = range(index * per_stage, (index + 1) * per_stage)
        part = GPT(self.shape, self.tp, layers=layers, **model)
        s, b, h = self.shape.seq_length, self.shape.micro_batch_size, self.shape.hidden_size
        dtype, t = next(part.parameters()).dtype, self.tp.size
        # Given the shapes, torch need not run the model once to find them.
        hidden = torch.empty(s // t if self.tp.sequence_parallel else s, b, h, dtype=dtype, device="meta", requires_grad=True)
        tokens = torch.empty(b, s, dtype=torch.int64, device="meta")
        logits = torch.empty(s, b, self.shape.vocab_size // t, dtype=dtype, device="meta", requires_grad=True)
        return Stage(
            part,
            index,
            self.num_stages,
            model["device"],
            input_args=(tokens if part.is_first else hidden,),
            output_args=(logits if part.is_last else hidden,),
            group=self.group,
            **watching,
        )

    def _group_of_both_ends(self) -> TensorParallel | None:
        """First and last pipeline rank with this rank's share of the embedding; None if they are one."""
        grid = self.mesh.mesh
        if grid.shape[0] == 1:
            return None
        mine = None
        for column in range(grid.shape[1]):  # making a group takes every rank, also those outside it
            members = [int(grid[0, column]), int(grid[-1, column])]
            group = dist.new_group(members)
            if dist.get_rank() in members:
                mine = tensor_parallel(group)
        return mine

    def _share_embedding(self) -> None:
        """Give the last stage the first one's word embedding: each has drawn its own."""
        if self._ends is not None:
            source = dist.get_global_rank(self._ends.group, 0)
            dist.broadcast(self._shared_embedding().data, source, group=self._ends.group)

    def _reduce_shared_embedding(self) -> None:
        """Add up the two copies' gradients, so that both ends take the same step."""
        if self._ends is not None:
            weight = self._shared_embedding()
            weight.grad = all_reduce(weight.grad, self._ends)

    def _shared_embedding(self) -> torch.nn.Parameter:
        """This end's copy of the word embedding."""
        return (self.parts[0] if self.parts[0].is_first else self.parts[-1]).words.weight


def check_pipeline(shape: ModelShape, pipeline_parallel_size: int, num_model_chunks: int, num_microbatches: int) -> None:
    """Raise ConfigError if the layers or the microbatches do not fit the pipeline."""
    p, m = pipeline_parallel_size, num_model_chunks
    check_divides("num_layers", shape.num_layers, "pipeline_parallel_size · num_model_chunks", p * m)
    if m > 1:
        check_divides("num_microbatches", num_microbatches, "pipeline_parallel_size", p)
    elif num_microbatches < p:
        raise ConfigError("num_microbatches", f"torch's 1F1B needs at least one a stage, {p}, got {num_microbatches}")
