"""What is counted of a model of the paper: bytes of one emulated pipeline rank, FLOPs and parameters of the whole
model.

Bytes are counted on one emulated pipeline rank, with everything in flight: it runs the real GPT part on torch's fake
backend, through the schedule's own actions, up to the moment at which it holds most.

FLOPs and parameters are those of the whole model, on the meta device, where tensors have shapes and no numbers.
``torch.utils.flop_counter`` counts matmuls from the shapes that reach them, so logits and attention count; embedding
look-ups, softmax, layer norm, GeLU, dropout, biases and the loss do not.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from actmem.config import PAPER_MODELS, ModelShape, PaperModel, Parallel
from actmem.formulas.activations import TABLE2, Configuration
from actmem.formulas.first_stage import stage_rows
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
    """One pipeline rank of a model of table 3, in one configuration of table 2."""

    model_name: str
    configuration_name: str
    pipeline_rank: int = 0

    @property
    def model(self) -> PaperModel:
        """The model of table 3."""
        return PAPER_MODELS[self.model_name]

    @property
    def configuration(self) -> Configuration:
        """The row of table 2."""
        return _CONFIGURATIONS[self.configuration_name]

    @property
    def parallel(self) -> Parallel:
        """How table 3's ranks share the model, with or without sequence parallelism."""
        return replace(self.model.parallel, sequence_parallel=self.configuration.sequence_parallel)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one iteration."""
        return num_microbatches(self.model)

    def _stage_rows(self) -> list[Row]:
        model, recompute = self.model, self.configuration.recompute
        return stage_rows(model.shape, self.parallel, self.pipeline_rank, recompute, self.num_microbatches)

    def rows(self) -> list[Row]:
        """Predict the rank's rows of terms that the paper counts."""
        return paper_rows(self._stage_rows())

    def extra_rows(self) -> list[Row]:
        """Predict the rank's rows that the paper leaves out."""
        return extra_rows(self._stage_rows())

    @property
    def plan(self) -> Counted:
        """The rank as the planner has it, without its bytes."""
        layout = replace(self.parallel, micro_batch_size=self.model.shape.micro_batch_size)
        return Counted(layout, self.configuration.recompute, self.num_microbatches, self.pipeline_rank, bytes=0)


def num_microbatches(model: PaperModel) -> int:
    """Return the microbatches of one iteration, without data parallelism."""
    return model.global_batch_size // model.shape.micro_batch_size


@cache
def measure_paper_stage(stage: PaperStage) -> list[Row]:
    """Measure what the rank keeps at its fullest, by the ledger, in bfloat16 on an emulated rank of t."""
    with emulated(stage.plan) as ranks:
        return measure_fullest(planned_model_of(stage.model_name), stage.plan, ranks)[1]


def meta_model(shape: ModelShape, recompute: str = "none") -> GPT:
    """Make the whole model on the meta device, without storage."""
    with torch.device("meta"):
        # Built without naming the device: its random-number generators need a real one.
        model = GPT(shape, recompute=recompute, dtype=torch.bfloat16)
    return model.to("meta")


def count_flops(shape: ModelShape, recompute: str = "none") -> dict[str, int]:
    """Count the FLOPs of one microbatch through all layers, forward and backward.

    Returns: the FLOPs of each torch operator that multiplies, by its name, such as "aten.addmm".
    """
    model = meta_model(shape, recompute)
    tokens = torch.zeros(shape.micro_batch_size, shape.seq_length, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model.loss(model(tokens), tokens).backward()
    return {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}


@cache
def count_iteration(model_name: str, recompute: str) -> dict[str, int]:
    """Count the FLOPs of a whole iteration of one of the paper's models: of all its equal microbatches.

    Args:
        model_name: a key of PAPER_MODELS, such as "175B".
        recompute: a mode's name.

    Returns: the FLOPs by torch operator, as from ``count_flops``.
    """
    model = PAPER_MODELS[model_name]
    counts = count_flops(model.shape, recompute)
    return {operator: num_microbatches(model) * count for operator, count in counts.items()}


@cache
def count_parameters(model_name: str) -> tuple[int, int]:
    """Count the parameters of the whole model, and those of its first pipeline rank, by building the GPT.

    Returns: the two numbers.
    """
    model, stage = PAPER_MODELS[model_name], PaperStage(model_name, "tensor+sequence")
    chunks = chunks_of(planned_model_of(model_name), stage.plan)
    models = [meta_model(model.shape)]
    with emulated_rank(model.parallel.tensor_parallel_size):
        tp = tensor_parallel(sequence_parallel=True)
        models += [GPT(model.shape, tp, layers=layers, dtype=torch.bfloat16) for layers in chunks]
        of_model, *share = (sum(parameter.numel() for parameter in gpt.parameters()) for gpt in models)
    return of_model, sum(share)
