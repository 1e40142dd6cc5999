"""18 public runs of nanotron, each with a prediction of the peak of rank 0, tensor by tensor.

The prediction is derived from nanotron's code (models/llama.py, parallel/, optim/, nn/ of huggingface/nanotron at
ee785d6c, July 2024): sequence-parallel tensor parallelism without asynchronous communication, 1F1B, ZeRO-1, gradients
accumulated in float32 without a DDP wrapper, fused AdamW, flash attention, no recomputation, 16-bit weights. Nothing is
fitted to a run.
"""

from dataclasses import dataclass
from functools import cached_property

from actmem.config import Parallel, padded_vocab_size
from actmem.formulas.stages import in_flight
from actmem_course.others import table_rows
from actmem_more.llama_shape import LlamaShape

#: The model that huggingface/bench_cluster trained in July 2024 (bench_cluster/template/base_config.py).
NANOTRON_MODEL = LlamaShape(4096, 1, 2048, 32, 32, 4096, num_layers=24, vocab_size=50257, tied_embeddings=True)
_S, _H = NANOTRON_MODEL.seq_length, NANOTRON_MODEL.hidden_size
_A, _F = NANOTRON_MODEL.num_attention_heads, NANOTRON_MODEL.ffn_hidden_size
#: Sequences of one step.
NANOTRON_GLOBAL_BATCH = 1024
#: CUBLAS_WORKSPACE_CONFIG=:4096:8 is eight buffers of 4,096 KiB for each thread that multiplies.
_WORKSPACE_BYTES = 8 * 4096 * 2**10


def first_stage_layers(pipeline_parallel_size: int) -> int:
    """Return how many transformer layers of ``NANOTRON_MODEL`` rank 0 has; it also has the embedding.

    nanotron gives each rank blocks, in order, until the rank's blocks have more than 1/p of all weight elements. The
    block that passes this limit stays on the rank. A layer counts 4h² + 3hf elements, the output layer vh, and the
    embedding none.

    Args:
        pipeline_parallel_size: p, the number of pipeline ranks.
    """
    layer = 4 * _H * _H + 3 * _H * _F
    all_blocks = NANOTRON_MODEL.num_layers * layer + NANOTRON_MODEL.vocab_size * _H
    return min(NANOTRON_MODEL.num_layers, all_blocks // (pipeline_parallel_size * layer) + 1)


def layer_bytes(b: int, t: int) -> dict[str, int]:
    """Return the bytes that one layer saves for backward of one microbatch, by the tensor's name.

    For each sequence the sum is 2s[2h + (9h + 4f)/t] + 4sa/t + 8s/t bytes, with 8h in place of 9h if b = 1.

    Args:
        b: sequences of the microbatch.
        t: tensor-parallel ranks.
    """
    tokens = _S * b
    sbh, sbf, statistic = 2 * tokens * _H, 2 * tokens * _F, 4 * tokens
    kept = {
        "RMSNorm 1 input": sbh // t,  # the residual stream, cut along the sequence
        "RMSNorm 1 statistic": statistic // t,  # 1/rms of each token, float32
        "QKV projection input": sbh,  # gathered: the all-gather is a node of its own, and the linear saves the whole
        "Q, K, V in one buffer": 3 * sbh // t,  # Q is rotated in place, and its view keeps all three
        "K, V packed again": 2 * sbh // t,  # copied to one buffer, rotated in place, saved by flash attention
        "attention output": sbh // t,  # flash attention
        "log-sum-exp": _A * statistic // t,  # flash attention, float32
        "RMSNorm 2 input": sbh // t,
        "RMSNorm 2 statistic": statistic // t,
        "gate and up input": sbh,  # gathered, as for Q, K, V
        "gate and up": 2 * sbf // t,  # one product for both
        "SiLU of gate": sbf // t,  # for the gradient of up
        "down projection input": sbf // t,  # for the weight's gradient
    }
    if b > 1:  # [b, s] to [s, b] is no view then, so the product saves a copy
        kept["attention projection input, transposed"] = sbh // t
    return kept


def static_bytes(layout: Parallel, layers: int, vocab_size: int) -> dict[str, int]:
    """Return the bytes that rank 0 holds between two steps.

    Args:
        layout: the run's sizes of data, tensor and pipeline parallelism.
        layers: how many layers rank 0 has, from ``first_stage_layers``.
        vocab_size: v, padded to a multiple of t.

    Returns: the bytes of "weights", "gradients", "optimizer states" and "buffers".
    """
    dp, t = layout.data_parallel_size, layout.tensor_parallel_size
    matrices = NANOTRON_MODEL.attention_weights + NANOTRON_MODEL.mlp_weights
    norms = 2 * layers + (layout.pipeline_parallel_size == 1)  # the last of them on the last stage
    parameters = layers * matrices // t + norms * _H + vocab_size * _H // t
    # A rotary table in float32, for inference, and cos and sin in 16 bits.
    rotary = layers * (4 + 2) * _S * _H // _A
    return {
        "weights": 2 * parameters,
        "gradients": 4 * parameters,  # float32, whole on every rank under ZeRO-1 too
        "optimizer states": 3 * (4 * parameters // dp),  # float32 weights and Adam's two moments, a share each
        "buffers": rotary + 2 * _WORKSPACE_BYTES,  # of the main thread, and of autograd's
    }


def loss_bytes(b: int, t: int, vocab_size: int) -> dict[str, int]:
    """Return the bytes that the last stage's norm, output layer and loss save for one microbatch, by the tensor's name.

    Args:
        b: sequences of the microbatch.
        t: tensor-parallel ranks.
        vocab_size: v, padded to a multiple of t.
    """
    tokens = _S * b
    sbh, logits = 2 * tokens * _H, 4 * tokens * vocab_size // t
    return {
        "final RMSNorm input": sbh // t,
        "final RMSNorm statistic": 4 * tokens // t,
        "output layer input": sbh,  # gathered
        "logits, float32": logits,  # the cast, still held by the caller of the loss
        "logits − maximum, float32": logits,  # turned in place into the softmax, saved
        "indices of the loss": (3 * 8 + 1) * tokens,  # targets twice and their places, int64; a mask, bool
        "sums of the loss": 3 * 4 * tokens,  # maximum, sum and target logit of each token, float32
    }


def backward_bytes(b: int, t: int) -> int:
    """Return the peak of the bytes that the backward of the last layer's MLP allocates.

    It is the larger of two moments: the backward of the down projection, and that of the gated unit.

    Args:
        b: sequences of the microbatch.
        t: tensor-parallel ranks.
    """
    sbh, sbf = 2 * _S * b * _H, 2 * _S * b * _F
    # The down projection: the output's gradient gathered, as the reduce-scatter's backward has it; the product's.
    matmul = sbh + sbf // t
    # The gated unit: gradients of product, SiLU and up; the down projection's input is freed by then.
    gate = (3 - 1) * sbf // t
    weight_gradient = 2 * _H * _F // t  # of the down projection, in 16 bits, before it is added
    return sbh // t + max(matmul, gate) + weight_gradient


def nanotron_moments(layout: Parallel, num_microbatches: int) -> dict[str, dict[str, int]]:
    """Return the bytes that rank 0 holds at each moment that can be its peak.

    Args:
        layout: the run's sizes of data, tensor and pipeline parallelism, and of the microbatch.
        num_microbatches: how many microbatches each data-parallel rank runs in a step.

    Returns: one or two moments: "backward of the last MLP"; and "loss", if p = 1. Each is a dict of bytes, with the
        keys of ``static_bytes``, "activations", and "transient" (what the MLP's backward allocates) or "logits" (what
        the loss saves).
    """
    b, t, p = layout.micro_batch_size, layout.tensor_parallel_size, layout.pipeline_parallel_size
    layers, flight = first_stage_layers(p), in_flight(layout, 0, num_microbatches)
    vocab_size = padded_vocab_size(NANOTRON_MODEL.vocab_size, t, multiple=1)
    token_ids = 8 * _S * b  # int64, the embedding's
    activations = flight * (layers * sum(layer_bytes(b, t).values()) + token_ids)
    running = {**static_bytes(layout, layers, vocab_size), "activations": activations}
    moments = {"backward of the last MLP": {**running, "transient": backward_bytes(b, t)}}
    if p == 1:
        moments["loss"] = {**running, "logits": sum(loss_bytes(b, t, vocab_size).values())}
    return moments


@dataclass(frozen=True)
class NanotronRun:
    """One run of the 1.1B Llama on H100s.

    Attributes:
        gpus: How many GPUs the run had, dp · tp · pp.
        dp: Size of data parallelism.
        tp: Size of tensor parallelism.
        pp: Size of pipeline parallelism.
        mbz: Sequences in a microbatch.
        logged_mib: ``torch.cuda.max_memory_allocated`` of rank 0, in MiB.
    """

    gpus: int
    dp: int
    tp: int
    pp: int
    mbz: int
    logged_mib: float

    @property
    def setting(self) -> str:
        """The run's sizes as a line of text: "8 GPUs dp 2 tp 2 pp 2 mbz 4"."""
        return f"{self.gpus} GPUs dp {self.dp} tp {self.tp} pp {self.pp} mbz {self.mbz}"

    @cached_property
    def fullest(self) -> tuple[str, dict[str, int]]:
        """The name of the moment at which rank 0 is predicted to hold most, and its bytes by part.

        Both are an item of what ``nanotron_moments`` returns.
        """
        layout = Parallel(self.tp, True, self.pp, micro_batch_size=self.mbz, data_parallel_size=self.dp)
        moments = nanotron_moments(layout, layout.num_microbatches(NANOTRON_GLOBAL_BATCH))
        return max(moments.items(), key=lambda moment: sum(moment[1].values()))

    @property
    def predicted_mib(self) -> float:
        """The predicted peak of rank 0, in MiB."""
        return sum(self.fullest[1].values()) / 2**20

    @property
    def difference_percent(self) -> float:
        """Predicted minus logged, in percent of the logged peak."""
        return 100 * (self.predicted_mib / self.logged_mib - 1)


def nanotron_runs() -> list[NanotronRun]:
    """Read the 18 logged runs from nanotron_runs.tsv, in the order of its lines.

    These runs were drawn once, at random, from those whose logs are published as llama-1B/…/log_metrics.csv in
    nanotron/old_bench and nanotron/bench_cluster.
    """
    sizes = ("gpus", "dp", "tp", "pp", "mbz")
    return [
        NanotronRun(**{name: int(row[name]) for name in sizes}, logged_mib=float(row["peak_allocated_mib"]))
        for row in table_rows("nanotron_runs.tsv")
    ]
