"""Count the saved bytes, FLOPs and parameters of the paper's models, by running them without their GPUs.

Bytes are those of one emulated pipeline rank: its real model chunks run on torch's fake backend, through the actions of
the schedule, up to the moment at which the rank holds most.

FLOPs and parameters are those of the whole model on the meta device, where tensors have shapes and no values.
``torch.utils.flop_counter`` counts the matmuls, so logits and attention count; embedding look-ups, softmax, layer norm,
GeLU, dropout, biases and the loss don't.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from actmem.config import PAPER_MODELS, ModelShape, PaperModel, Parallel
from actmem.formulas.activations import TABLE2, Configuration
from actmem.formulas.stages import stage_rows
from actmem.layers.gpt import GPT
from actmem.ledger.emulate import emulated_rank
from actmem.parallel.groups import tensor_parallel
from actmem.rows import Row, extra_rows, paper_rows
from actmem_tools.plan.planned_models import planned_model_of
from actmem_tools.plan.search import Counted
from actmem_tools.verify import chunks_of, emulated, measure_fullest

_CONFIGURATIONS = {configuration.name: configuration for configuration in TABLE2 if configuration.tensor_parallel}

#: The rows of table 2 that t ranks share: what figure 7 compares.
STAGE_CONFIGURATIONS = tuple(_CONFIGURATIONS)


@dataclass(frozen=True)
class PaperStage:
    """One pipeline rank of one of the paper's models, in one configuration.

    Attributes:
        model_name: the model in table 3, such as "175B".
        configuration_name: the configuration in table 2, such as "tensor+sequence".
        pipeline_rank: which rank of the pipeline, from 0.
    """

    model_name: str
    configuration_name: str
    pipeline_rank: int = 0

    @property
    def model(self) -> PaperModel:
        """The sizes and the parallelism of the model, from table 3."""
        return PAPER_MODELS[self.model_name]

    @property
    def configuration(self) -> Configuration:
        """The row of table 2."""
        return _CONFIGURATIONS[self.configuration_name]

    @property
    def parallel(self) -> Parallel:
        """How the ranks share the model: table 3's layout, with sequence parallelism if the configuration has it."""
        return replace(self.model.parallel, sequence_parallel=self.configuration.sequence_parallel)

    @property
    def num_microbatches(self) -> int:
        """How many microbatches one iteration has, without data parallelism."""
        return num_microbatches(self.model)

    def _stage_rows(self) -> list[Row]:
        model, recompute = self.model, self.configuration.recompute
        return stage_rows(model.shape, self.parallel, self.pipeline_rank, recompute, self.num_microbatches)

    def rows(self) -> list[Row]:
        """Predict what the rank has saved for backward when it holds most: rows of the terms that the paper counts."""
        return paper_rows(self._stage_rows())

    def extra_rows(self) -> list[Row]:
        """Predict what the rank has saved for backward when it holds most: rows of terms that the paper leaves out."""
        return extra_rows(self._stage_rows())

    @property
    def plan(self) -> Counted:
        """This rank as a ``Counted``, the planner's record of a layout, because ``measure_fullest`` takes a Counted.

        Its field ``bytes``, which in the planner is the predicted peak, is 0: ``measure_fullest`` doesn't read it.
        """
        layout = replace(self.parallel, micro_batch_size=self.model.shape.micro_batch_size)
        return Counted(layout, self.configuration.recompute, self.num_microbatches, self.pipeline_rank, bytes=0)


def num_microbatches(model: PaperModel) -> int:
    """Return how many microbatches one iteration has without data parallelism.

    Args:
        model: one of the paper's models, from PAPER_MODELS.
    """
    return model.global_batch_size // model.shape.micro_batch_size


@cache
def measure_paper_stage(stage: PaperStage) -> list[Row]:
    """Measure with the ledger what an emulated rank has saved for backward when it holds most, in bfloat16.

    Args:
        stage: the model, the configuration and the pipeline rank to emulate.

    Returns: measured rows, one for each term.
    """
    with emulated(stage.plan) as ranks:
        return measure_fullest(planned_model_of(stage.model_name), stage.plan, ranks)[1]


def meta_model(shape: ModelShape, recompute: str = "none") -> GPT:
    """Make the whole model on the meta device, where tensors take no memory.

    Args:
        shape: the model's sizes.
        recompute: what backward recomputes: "none", "selective" or "full".
    """
    with torch.device("meta"):
        # Built without naming the device: its random-number generators need a real one.
        model = GPT(shape, recompute=recompute, dtype=torch.bfloat16)
    return model.to("meta")


def count_flops(shape: ModelShape, recompute: str = "none") -> dict[str, int]:
    """Count the FLOPs of forward and backward of one microbatch through the whole model.

    Args:
        shape: the model's sizes; the microbatch has ``shape.micro_batch_size`` sequences.
        recompute: what backward recomputes: "none", "selective" or "full".

    Returns: the FLOPs of each of torch's operators for matmuls, by its name, such as "aten.addmm".
    """
    model = meta_model(shape, recompute)
    tokens = torch.zeros(shape.micro_batch_size, shape.seq_length, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model.loss(model(tokens), tokens).backward()
    return {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}


@cache
def count_iteration(model_name: str, recompute: str) -> dict[str, int]:
    """Count the FLOPs of a whole iteration (all microbatches) of one of the paper's models.

    Args:
        model_name: a key of PAPER_MODELS, such as "175B".
        recompute: what backward recomputes: "none", "selective" or "full".

    Returns: the FLOPs of each of torch's operators for matmuls, by its name, such as "aten.addmm".
    """
    model = PAPER_MODELS[model_name]
    counts = count_flops(model.shape, recompute)
    return {operator: num_microbatches(model) * count for operator, count in counts.items()}


@cache
def count_parameters(model_name: str) -> tuple[int, int]:
    """Count the parameters of one of the paper's models by building its GPT.

    Args:
        model_name: a key of PAPER_MODELS, such as "175B".

    Returns: how many parameters the whole model has, and how many of them one rank of the first pipeline stage has.
    """
    model, stage = PAPER_MODELS[model_name], PaperStage(model_name, "tensor+sequence")
    chunks = chunks_of(planned_model_of(model_name), stage.plan)
    models = [meta_model(model.shape)]
    with emulated_rank(model.parallel.tensor_parallel_size):
        tp = tensor_parallel(sequence_parallel=True)
        models += [GPT(model.shape, tp, layers=layers, dtype=torch.bfloat16) for layers in chunks]
        of_model, *share = (sum(parameter.numel() for parameter in gpt.parameters()) for gpt in models)
    return of_model, sum(share)
