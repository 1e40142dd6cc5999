"""FLOPs of the paper's models, counted by torch while the whole model runs forward and backward.

Nothing is computed: on the meta device tensors have shapes and no numbers.  ``torch.utils.flop_counter``
counts matrix products from the shapes that reach them, so logits and attention count, and
looking up embeddings, softmax, layer norm, GeLU, dropout, biases and the loss do not.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from actmem.config import ModelShape, check_divides
from actmem.layers.gpt import GPT
from actmem.measure.emulate import emulated_rank
from actmem.models import PAPER_MODELS, PaperModel
from actmem.parallel.groups import tensor_parallel
from actmem_course.bench.reproduce.paper_stage import PaperStage


def meta_model(shape: ModelShape, recompute: str = "none") -> GPT:
    """The whole model on one device, without storage."""
    with torch.device("meta"):
        # Built without naming the device: its random-number generators need a real one.
        model = GPT(shape, recompute=recompute, dtype=torch.bfloat16)
    return model.to("meta")


def count_flops(shape: ModelShape, recompute: str = "none") -> dict[str, int]:
    """FLOPs of one microbatch through all layers, forward and backward, by torch operator."""
    model = meta_model(shape, recompute)
    tokens = torch.zeros(shape.micro_batch_size, shape.seq_length, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model.loss(model(tokens), tokens).backward()
    return {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}


def count_iteration(model_name: str, recompute: str) -> dict[str, int]:
    """The same for a whole iteration of a paper model: all of its equal microbatches."""
    model = PAPER_MODELS[model_name]
    b = model.shape.micro_batch_size
    times = check_divides("global_batch_size", model.global_batch_size, "micro_batch_size", b)
    return {operator: times * count for operator, count in count_flops(model.shape, recompute).items()}


def count_parameters(model_name: str) -> tuple[int, int]:
    """Parameters of the whole model, and of its first pipeline rank's share, both by building the GPT."""
    model = PAPER_MODELS[model_name]
    whole = sum(parameter.numel() for parameter in meta_model(model.shape).parameters())
    return whole, _first_rank(model)


def _first_rank(model: PaperModel) -> int:
    chunks = PaperStage(model.name, "tensor+sequence").chunks()
    with emulated_rank(model.parallel.tensor_parallel_size):
        tp = tensor_parallel(sequence_parallel=True)
        parts = [GPT(model.shape, tp, layers=layers, dtype=torch.bfloat16) for layers in chunks]
        return sum(parameter.numel() for part in parts for parameter in part.parameters())
