"""Pipeline parallelism: our stages, run by torch.distributed.pipelining (2205.05198 section 4.2.3).

Ranks form a grid, pipeline × tensor.  Every pipeline rank holds ``num_model_chunks`` parts of the
model; part i of rank r is stage i·p + r.  One chunk runs as 1F1B, several as interleaved 1F1B.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from actmem.config import ConfigError, ModelShape, Parallel, check_divides, check_size
from actmem.layers.gpt import GPT
from actmem.main_grad import gradient_of
from actmem.parallel.collectives import all_reduce
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import reduce_partial_gradients
from actmem.torch_private import (
    first_messages,
    outputs_of,
    receive_buffers_of,
    without_outputs,
)


def make_mesh(device_type: str, pipeline_parallel_size: int, tensor_parallel_size: int) -> DeviceMesh:
    """Return all ranks as a grid ``("pipeline", "tensor")``, in which neighbouring ranks form a tensor-parallel group.

    Args:
        device_type: "cpu" or "cuda".
        pipeline_parallel_size: p, rows of the grid.
        tensor_parallel_size: t, columns of the grid.

    Raises: ConfigError unless p · t is the number of ranks.
    """
    wanted = pipeline_parallel_size * tensor_parallel_size
    if wanted != dist.get_world_size():
        raise ConfigError("pipeline_parallel_size", f"p · t = {wanted} ranks wanted, {dist.get_world_size()} started")
    sizes = (pipeline_parallel_size, tensor_parallel_size)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("pipeline", "tensor"))


class Watcher:
    """Callbacks around each forward and backward pass of a pipeline stage. Here they do nothing; a subclass measures.

    A stage's number is its place in the model, from 0; a microbatch's number is its place in the step, from 0.
    """

    def during(self, module: nn.Module, stage: int, microbatch: int) -> AbstractContextManager:
        """Return a context in which the stage runs the forward pass, or the loss, of one microbatch.

        Args:
            module: the stage's part of the model, or its loss.
            stage: the stage's number.
            microbatch: the microbatch's number.
        """
        return nullcontext()

    def after(self, kind: str, stage: Stage, microbatch: int) -> None:
        """Take note that a pass of one microbatch has ended. On the last stage the loss is a part of the forward pass.

        Args:
            kind: "F" for a forward pass, "B" for a backward pass.
            stage: the Stage that ran the pass.
            microbatch: the microbatch's number.
        """


class Stage(PipelineStage):
    """torch's PipelineStage with callbacks for a Watcher, and the option to free its outputs.

    Before 2.15 torch holds every output until its backward, although the next stage has a copy. In 16 bits these are
    2sbh bytes for each microbatch in flight, or 2sbh/t under sequence parallelism. ``free_outputs`` empties an output's
    storage once it has been sent. The output's shape stays, and backward needs nothing else of the output (2205.05198
    appendix B).

    Args:
        part: the stage's part of the model.
        args: further positional arguments of torch's ``PipelineStage``, such as the stage's number.
        free_outputs: True frees each output once it has been sent.
        watcher: the Watcher that is called around every forward and backward pass.
        kwargs: further keyword arguments of torch's ``PipelineStage``.
    """

    submod: GPT

    def __init__(self, part: GPT, *args, free_outputs: bool, watcher: Watcher, **kwargs):
        super().__init__(part, *args, **kwargs)
        self._free_outputs, self._watcher = free_outputs, watcher
        self._being_sent: list[Tensor] = []
        self._outputs: WeakSet[torch.UntypedStorage] = WeakSet()

    def forward_one_chunk(self, fwd_chunk_id: int, *args, **kwargs):
        with self._watcher.during(self.submod, self.stage_index, fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._outputs.add(output.untyped_storage())
        if not self.is_last:
            self._watcher.after("F", self, fwd_chunk_id)
        return output

    def loss(self, logits: Tensor, targets: Tensor, microbatch: int) -> Tensor:
        """Return one microbatch's mean loss, computed on the last stage in the watcher's context.

        Args:
            logits: ``[s, b, v/t]``.
            targets: ids ``[b, s]`` of the tokens to predict.
            microbatch: the microbatch's number, from 0.
        """
        with self._watcher.during(self.submod.cross_entropy, self.stage_index, microbatch):
            loss = self.submod.loss(logits, targets)
        self._watcher.after("F", self, microbatch)
        return loss

    def get_fwd_send_ops(self, fwd_chunk_id: int):
        # Before it asks for the next send, and before a backward pass, 1F1B waits for all earlier sends.
        self._free_sent()
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        if self._free_outputs and operations:
            self._being_sent.extend(outputs_of(self, fwd_chunk_id))
        return operations

    def backward_one_chunk(self, bwd_chunk_id: int, *args, **kwargs):
        self._free_sent()
        result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._watcher.after("B", self, bwd_chunk_id)
        return result

    def _get_init_p2p_neighbors_ops(self):
        return first_messages(super()._get_init_p2p_neighbors_ops())

    def held_outputs(self) -> dict[int, int]:
        """Return the bytes of this stage's outputs that are still alive: a dict from a storage's id to its bytes."""
        return {id(storage): storage.nbytes() for storage in self._outputs}

    def receive_buffers(self) -> dict[int, int]:
        """Return the bytes of torch's receive buffers: a dict from a storage's id to its bytes.

        There is one buffer for each microbatch, and all are allocated at the start.
        """
        storages = (buffer.untyped_storage() for buffer in receive_buffers_of(self))
        return {id(storage): storage.nbytes() for storage in storages}

    def _free_sent(self) -> None:
        while self._being_sent:
            self._being_sent.pop().untyped_storage().resize_(0)


class Pipeline:
    """This rank's part of a GPT that trains on a grid of pipeline × tensor-parallel ranks.

    ``step`` runs forward and backward of all microbatches; gradients are of the mean loss over the microbatches.

    Args:
        shape: the sizes of the whole model.
        mesh: the grid of ranks, from ``make_mesh``.
        num_microbatches: microbatches of one step.
        num_model_chunks: m, model chunks on each pipeline rank. 1 runs as 1F1B, more as interleaved 1F1B.
        sequence_parallel: whether layer norms, dropouts and residuals are split along the sequence.
        free_outputs: True frees each stage's output once it has been sent (see ``Stage``).
        watcher: the Watcher that is called around every forward and backward pass; None: nothing is called.
        device: the device of the model's parts.
        model: further keyword arguments of ``GPT``, such as ``recompute``, ``seed`` or ``dtype``.

    Attributes:
        parts: this rank's chunks of the model, in the order of the stages.

    Raises: ConfigError if p = 1 and m > 1, if p·m does not divide L, if p does not divide the number of microbatches
        under interleaving, if 1F1B has fewer microbatches than stages, or if ``free_outputs`` is set under
        interleaving, where torch (2.11 to 2.14) holds every output until all sends are done.
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
        check_pipeline(shape, p, num_model_chunks, num_microbatches, free_outputs)
        self.tp: TensorParallel = tensor_parallel(mesh["tensor"].get_group(), sequence_parallel=sequence_parallel)
        self.num_stages = p * num_model_chunks
        rank = mesh["pipeline"].get_local_rank()
        watching = {"watcher": watcher or Watcher(), "free_outputs": free_outputs}
        self.stages = [
            self._make_stage(chunk * p + rank, watching, {**model, "device": torch.device(device)})
            for chunk in range(num_model_chunks)
        ]
        self.parts = [stage.submod for stage in self.stages]
        arguments: dict[str, Any] = {"n_microbatches": num_microbatches, "loss_fn": self._loss, "scale_grads": False}
        if num_model_chunks == 1:
            self.schedule: Any = Schedule1F1B(self.stages[0], **arguments)
        else:
            self.schedule = ScheduleInterleaved1F1B([*self.stages], **arguments)
        self._ends = self._group_of_both_ends()

    def step(self, tokens: Tensor, targets: Tensor) -> list[Tensor]:
        """Run forward and backward of one batch.

        Call this on every rank with the whole batch. Afterwards gradients are complete on every rank, in ``main_grad``
        if ``use_main_gradients(part)`` was called, else in ``grad``. Before the call gradients must be zero or None:
        older values would be scaled and reduced a second time.

        Args:
            tokens: token ids ``[num_microbatches · b, s]``.
            targets: ids of the tokens to predict, of the same shape.

        Returns: on the last stage's ranks the mean loss of each microbatch, elsewhere an empty list.
        Raises: ConfigError on a batch of another size.
        """
        wanted = [self.num_microbatches * self.shape.micro_batch_size, self.shape.seq_length]
        for name, given in (("tokens", tokens), ("targets", targets)):
            if list(given.shape) != wanted:
                raise ConfigError(name, f"must be [num_microbatches · b, s] = {wanted}, got {list(given.shape)}")
        self._losses_done = 0
        losses: list[Tensor] = []
        inputs = (tokens,) if self.stages[0].is_first else ()
        last: dict[str, Any] = {"target": targets, "losses": losses} if self.stages[-1].is_last else {}
        self.schedule.step(*inputs, **last, **without_outputs(self.schedule))
        for part in self.parts:
            for parameter in part.parameters():
                if (grad := gradient_of(parameter)) is not None:
                    grad.div_(self.num_microbatches)  # torch's schedule would scale .grad and nothing else
            reduce_partial_gradients(part, self.tp)
        self._reduce_shared_embedding()
        return [loss.detach() for loss in losses]

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        # Both schedules run the microbatches in order on the last stage.
        microbatch, self._losses_done = self._losses_done, self._losses_done + 1
        return self.stages[-1].loss(logits, targets, microbatch)

    def _make_stage(self, index: int, watching: dict, model: dict) -> Stage:
        per_stage = self.shape.num_layers // self.num_stages
        layers = range(index * per_stage, (index + 1) * per_stage)
        part = GPT(self.shape, self.tp, layers=layers, **model)
        s, b, h = self.shape.seq_length, self.shape.micro_batch_size, self.shape.hidden_size
        dtype, t = next(part.parameters()).dtype, self.tp.size
        # With these shapes given, torch doesn't have to run the model once to find them.
        hidden = torch.empty(s // self.tp.sequence_parts, b, h, dtype=dtype, device="meta", requires_grad=True)
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
        """Return the group of the first and the last pipeline rank that hold this rank's part of the embedding.

        Returns: None if p = 1, and on ranks that are neither first nor last.
        """
        grid = self.mesh.mesh
        if grid.shape[0] == 1:
            return None
        # Every rank must take part in making each group.
        groups = [dist.new_group([int(first), int(last)]) for first, last in zip(grid[0], grid[-1])]
        at_an_end = self.parts[0].is_first or self.parts[-1].is_last
        return tensor_parallel(groups[self.mesh["tensor"].get_local_rank()]) if at_an_end else None

    def _reduce_shared_embedding(self) -> None:
        """Add up the two copies' gradients, so that both take the same step."""
        if self._ends is not None:
            grad = gradient_of((self.parts[0] if self.parts[0].is_first else self.parts[-1]).words.weight)
            if grad is not None:  # else the embedding is frozen
                all_reduce(grad, self._ends, in_place=True)


def check_pipeline(
    shape: ModelShape, pipeline_parallel_size: int, num_model_chunks: int, num_microbatches: int, free_outputs: bool
) -> None:
    """Raise ConfigError if the layers, the microbatches or ``free_outputs`` do not fit the pipeline.

    Args:
        shape: the sizes of the whole model; p·m must divide its layers.
        pipeline_parallel_size: p.
        num_model_chunks: m; more than 1 means interleaved 1F1B, which needs p > 1.
        num_microbatches: microbatches of one step: at least p with 1F1B, a multiple of p when interleaved.
        free_outputs: whether outputs are freed once they have been sent; not possible when interleaved.
    """
    p, m = pipeline_parallel_size, num_model_chunks
    # This raises if p = 1 with several chunks: both ends of the model would train an embedding of their own.
    Parallel(pipeline_parallel_size=p, num_model_chunks=m)
    check_divides("num_layers", shape.num_layers, "pipeline_parallel_size · num_model_chunks", p * m)
    if m > 1:
        check_divides("num_microbatches", num_microbatches, "pipeline_parallel_size", p)
    elif num_microbatches < p:
        raise ConfigError("num_microbatches", f"torch's 1F1B needs at least one a stage, {p}, got {num_microbatches}")
    if free_outputs and m > 1:
        raise ConfigError("free_outputs", "torch's interleaved schedule waits for its sends at the step's end only")
