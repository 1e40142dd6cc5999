"""18 public runs of nanotron, and what its code keeps for a Llama on rank 0, line by line, when that holds most.

Read from its code (models/llama.py, parallel/, optim/, nn/ of huggingface/nanotron at ee785d6c,
July 2024): sequence-parallel tensor parallelism without asynchronous communication, 1F1B, ZeRO-1,
gradients added up in float32 without a DDP wrapper, fused AdamW, flash attention, no recomputation,
16-bit weights.  Nothing here is fitted to a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from actmem.config import Parallel, padded_vocab_size
from actmem.formulas.first_stage import in_flight
from actmem.rows import Row
from actmem_course.others import table_rows
from actmem_more.llama_shape import LlamaShape
from actmem_tools.plan.search import Bill

#: What huggingface/bench_cluster trained in July 2024 (bench_cluster/template/base_config.py): its sizes as letters.
NANOTRON_MODEL = LlamaShape(4096, 1, 2048, 32, 32, 4096, num_layers=24, vocab_size=50257, tied_embeddings=True)
_S, _H = NANOTRON_MODEL.seq_length, NANOTRON_MODEL.hidden_size
_A, _F = NANOTRON_MODEL.num_attention_heads, NANOTRON_MODEL.ffn_hidden_size
#: Sequences of one step.
NANOTRON_GLOBAL_BATCH = 1024
#: CUBLAS_WORKSPACE_CONFIG=:4096:8 is eight buffers of 4,096 KiB for each thread that multiplies.
_WORKSPACE_BYTES = 8 * 4096 * 2**10
_THREADS = ("main thread", "autograd's thread")


def first_stage_layers(pipeline_parallel_size: int) -> int:
    """Layers of rank 0, which has the embedding too.

    nanotron spreads blocks by elements of their matrices: 4h² + 3hf a layer, vh the head.  Blocks go to the rank
    until their sum exceeds its share; the block that crosses stays.
    """
    layer = 4 * _H * _H + 3 * _H * _F
    whole = NANOTRON_MODEL.num_layers * layer + NANOTRON_MODEL.vocab_size * _H
    return min(NANOTRON_MODEL.num_layers, whole // (pipeline_parallel_size * layer) + 1)


def nanotron_layer_rows(micro_batch_size: int, tensor_parallel_size: int) -> list[Row]:
    """What one layer keeps for backward of one microbatch on one of t ranks.

    2s[2h + (9h + 4f)/t] + 4sa/t + 8s/t bytes a sequence, 8h in place of 9h for b = 1.
    """
    t, tokens = tensor_parallel_size, _S * micro_batch_size
    sbh, sbf, statistic = 2 * tokens * _H, 2 * tokens * _F, 4 * tokens
    rows = [
        Row("RMSNorm 1 input", sbh // t, t, "residual stream, cut along the sequence"),
        Row("RMSNorm 1 statistic", statistic // t, t, "1/rms of each token, float32"),
        Row(
            "QKV projection input, gathered", sbh, 1, "the all-gather is a node of its own: the linear saves the whole"
        ),
        Row("Q, K, V in one buffer", 3 * sbh // t, t, "Q is rotated in place, and its view keeps all three"),
        Row("K, V packed again", 2 * sbh // t, t, "copied to one buffer, rotated in place, saved by flash attention"),
        Row("attention output", sbh // t, t, "flash attention"),
        Row("log-sum-exp", _A * statistic // t, t, "flash attention, float32"),
        Row("RMSNorm 2 input", sbh // t, t, "residual stream, cut along the sequence"),
        Row("RMSNorm 2 statistic", statistic // t, t, "1/rms of each token, float32"),
        Row("gate and up input, gathered", sbh, 1, "as for Q, K, V"),
        Row("gate and up", 2 * sbf // t, t, "one product for both"),
        Row("SiLU of gate", sbf // t, t, "gradient of up"),
        Row("down projection input", sbf // t, t, "weight gradient"),
    ]
    if micro_batch_size > 1:
        source = "[b, s] to [s, b] is no view for b > 1, so the product saves a copy"
        rows.insert(7, Row("attention projection input, transposed", sbh // t, t, source))
    return rows


def _static_parts(layout: Parallel, layers: int, vocab_size: int) -> dict:
    dp, t = layout.data_parallel_size, layout.tensor_parallel_size
    matrices = NANOTRON_MODEL.attention_weights + NANOTRON_MODEL.mlp_weights
    norms = 2 * layers + (layout.pipeline_parallel_size == 1)  # the last of them on the last stage
    parameters = layers * matrices // t + norms * _H + vocab_size * _H // t
    table = _S * _H // _A
    return {
        "weights": [Row("parameters", 2 * parameters, t, "16-bit")],
        "gradients": [Row("gradients", 4 * parameters, t, "float32, whole on every rank under ZeRO-1 too")],
        "optimizer states": [
            Row(name, 4 * parameters // dp, t * dp, "float32, a share of each data-parallel rank")
            for name in ("float32 parameters", "Adam first moment", "Adam second moment")
        ],
        "buffers": [
            Row("rotary table, not used", layers * 4 * table, 1, "float32, for inference"),
            Row("rotary cos and sin", layers * 2 * table, 1, "16-bit"),
            *(Row(f"cuBLAS workspace, {thread}", _WORKSPACE_BYTES, 1, ":4096:8") for thread in _THREADS),
        ],
    }


def _loss_rows(b: int, t: int, vocab_size: int) -> list[Row]:
    tokens = _S * b
    sbh, logits = 2 * tokens * _H, 4 * tokens * vocab_size // t
    return [
        Row("final RMSNorm input", sbh // t, t, "residual stream"),
        Row("output layer input, gathered", sbh, 1, "as for Q, K, V"),
        Row("logits, float32", logits, t, "the cast, still held by the caller of the loss"),
        Row("logits − maximum, float32", logits, t, "turned in place into the softmax, saved"),
        Row("final RMSNorm statistic", 4 * tokens // t, t, "1/rms of each token, float32"),
        Row("indices of the loss", (3 * 8 + 1) * tokens, 1, "targets twice and their places, int64; a mask, bool"),
        Row("sums of the loss", 3 * 4 * tokens, 1, "maximum, sum and target logit of each token, float32"),
    ]


def _backward_rows(b: int, t: int) -> list[Row]:
    """The last MLP's backward at the fuller of its two moments."""
    sbh, sbf = 2 * _S * b * _H, 2 * _S * b * _F
    shard = Row("output gradient, shard", sbh // t, t, "residual stream")
    matmul = [
        Row("output gradient, gathered", sbh, 1, "backward of the reduce-scatter"),
        shard,
        Row("gradient of the product", sbf // t, t, "down projection"),
    ]
    gate = [
        shard,
        Row("gradients of product, SiLU and up", 3 * sbf // t, t, "gated unit"),
        Row("down projection input, freed by then", -sbf // t, t, "gated unit"),
    ]
    fuller = max(matmul, gate, key=lambda rows: sum(row.bytes for row in rows))
    return [*fuller, Row("weight gradient of the down projection", 2 * _H * _F // t, t, "16-bit, before it is added")]


def nanotron_bills(layout: Parallel, num_microbatches: int) -> list[Bill]:
    """Rank 0's bill at each moment that is the fullest of one of these runs: in backward, and in the loss."""
    b, t, p = layout.micro_batch_size, layout.tensor_parallel_size, layout.pipeline_parallel_size
    num_layers = first_stage_layers(p)
    vocab_size = padded_vocab_size(NANOTRON_MODEL.vocab_size, t, multiple=1)
    flight = in_flight(layout, 0, num_microbatches)
    source = f"{flight} microbatches × {num_layers} layers: "
    activations = [
        Row(row.term, flight * num_layers * row.bytes, row.split_by, source + row.source)
        for row in nanotron_layer_rows(b, t)
    ]
    activations.append(Row("token ids", flight * 8 * _S * b, 1, "int64, the embedding's"))
    running = {**_static_parts(layout, num_layers, vocab_size), "activations": activations}
    bills = [Bill("backward of the last MLP", {**running, "transient": _backward_rows(b, t)})]
    if p == 1:
        bills.append(Bill("loss", {**running, "logits": _loss_rows(b, t, vocab_size)}))
    return bills


@dataclass(frozen=True)
class NanotronRun:
    """One run of the 1.1B Llama on H100s: its sizes, and ``torch.cuda.max_memory_allocated`` of rank 0, in MiB."""

    gpus: int
    dp: int
    tp: int
    pp: int
    mbz: int
    logged_mib: float

    @property
    def setting(self) -> str:
        """The sizes in words."""
        return f"{self.gpus} GPUs dp {self.dp} tp {self.tp} pp {self.pp} mbz {self.mbz}"

    @cached_property
    def bill(self) -> Bill:
        """What rank 0 holds when it holds most, by its code."""
        layout = Parallel(self.tp, True, self.pp, micro_batch_size=self.mbz, data_parallel_size=self.dp)
        count = layout.num_microbatches(NANOTRON_GLOBAL_BATCH)
        return max(nanotron_bills(layout, count), key=lambda bill: bill.bytes)

    @property
    def predicted_mib(self) -> float:
        """The bill's sum in MiB."""
        return self.bill.bytes / 2**20

    @property
    def difference_percent(self) -> float:
        """Predicted minus logged, in percent of the logged peak."""
        return 100 * (self.predicted_mib / self.logged_mib - 1)


def nanotron_runs() -> list[NanotronRun]:
    """18 rows drawn at random from nanotron/old_bench and nanotron/bench_cluster, llama-1B/…/log_metrics.csv."""
    sizes = ("gpus", "dp", "tp", "pp", "mbz")
    return [
        NanotronRun(**{name: int(row[name]) for name in sizes}, logged_mib=float(row["peak_allocated_mib"]))
        for row in table_rows("nanotron_runs.tsv")
    ]
