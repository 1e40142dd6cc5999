"""18 public runs of nanotron, and what its code keeps for a Llama on rank 0, line by line, when that holds most.

Read from its code (models/llama.py, parallel/, optim/, nn/ of huggingface/nanotron at ee785d6c,
July 2024): sequence-parallel tensor parallelism without asynchronous communication, 1F1B, ZeRO-1,
gradients added up in float32 without a DDP wrapper, fused AdamW, flash attention, no recomputation,
16-bit weights.  Nothing here is fitted to a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from actmem.config import ConfigError, Parallel, check_divides, padded_vocab_size
from actmem.formulas.first_stage import in_flight
from actmem.rows import Row
from actmem_course.others import table_rows
from actmem_more.llama_shape import LlamaShape
from actmem_tools.plan.search import Bill

#: What huggingface/bench_cluster trained in July 2024 (bench_cluster/template/base_config.py).
NANOTRON_SEQ_LENGTH = 4096
NANOTRON_MODEL = LlamaShape(
    NANOTRON_SEQ_LENGTH, 1, 2048, 32, 32, 4096, num_layers=24, vocab_size=50257, tied_embeddings=True
)
#: Sequences of one step.
NANOTRON_GLOBAL_BATCH = 1024
#: CUBLAS_WORKSPACE_CONFIG=:4096:8 is eight buffers of 4,096 KiB for each thread that multiplies.
_WORKSPACE_BYTES = 8 * 4096 * 2**10
_THREADS = ("main thread", "autograd's thread")


def first_stage_layers(decoder: LlamaShape, pipeline_parallel_size: int) -> int:
    """Layers of rank 0, which has the embedding too.

    nanotron spreads blocks by elements of their matrices: 4h² + 3hf a layer, vh the head.  Blocks go to the rank
    until their sum exceeds its share; the block that crosses stays.
    """
    h, p = decoder.hidden_size, pipeline_parallel_size
    layer = 4 * h * h + 3 * h * decoder.ffn_hidden_size
    whole = decoder.num_layers * layer + decoder.vocab_size * h
    return min(decoder.num_layers, whole // (p * layer) + 1)


def nanotron_layer_rows(
    decoder: LlamaShape, seq_length: int, micro_batch_size: int, tensor_parallel_size: int
) -> list[Row]:
    """What one layer keeps for backward of one microbatch on one of t ranks.

    2s[2h + (9h + 4f)/t] + 4sa/t + 8s/t bytes a sequence, 8h in place of 9h for b = 1.  Raises ConfigError for
    grouped-query attention, which takes another path there, and on sizes that t does not divide.
    """
    a, h, f, t = decoder.num_attention_heads, decoder.hidden_size, decoder.ffn_hidden_size, tensor_parallel_size
    if decoder.num_key_value_heads != a:
        raise ConfigError("num_key_value_heads", f"nanotron packs Q, K and V in one buffer only for {a} of them")
    check_divides("num_attention_heads", a, "tensor_parallel_size", t)
    check_divides("ffn_hidden_size", f, "tensor_parallel_size", t)
    check_divides("seq_length", seq_length, "tensor_parallel_size", t)
    tokens = seq_length * micro_batch_size
    sbh, sbf, statistic = 2 * tokens * h, 2 * tokens * f, 4 * tokens
    rows = [
        Row("RMSNorm 1 input", sbh // t, t, "residual stream, cut along the sequence"),
        Row("RMSNorm 1 statistic", statistic // t, t, "1/rms of each token, float32"),
        Row(
            "QKV projection input, gathered", sbh, 1, "the all-gather is a node of its own: the linear saves the whole"
        ),
        Row("Q, K, V in one buffer", 3 * sbh // t, t, "Q is rotated in place, and its view keeps all three"),
        Row("K, V packed again", 2 * sbh // t, t, "copied to one buffer, rotated in place, saved by flash attention"),
        Row("attention output", sbh // t, t, "flash attention"),
        Row("log-sum-exp", a * statistic // t, t, "flash attention, float32"),
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


def _parameters(decoder: LlamaShape, num_layers: int, whole: bool, t: int, vocab_size: int) -> int:
    """Of rank 0; whole: it has the final norm and the head too."""
    h = decoder.hidden_size
    layers = num_layers * ((decoder.attention_weights + decoder.mlp_weights) // t + 2 * h)
    tables = 2 if whole and not decoder.tied_embeddings else 1
    return layers + tables * vocab_size * h // t + h * whole


def _static_parts(parameters: int, decoder: LlamaShape, layout: Parallel, layers: int, seq_length: int) -> dict:
    dp, t = layout.data_parallel_size, layout.tensor_parallel_size
    head_size = decoder.hidden_size // decoder.num_attention_heads
    table = seq_length * head_size
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


def _loss_rows(decoder: LlamaShape, seq_length: int, b: int, t: int, vocab_size: int) -> list[Row]:
    tokens = seq_length * b
    sbh, logits = 2 * tokens * decoder.hidden_size, 4 * tokens * vocab_size // t
    return [
        Row("final RMSNorm input", sbh // t, t, "residual stream"),
        Row("output layer input, gathered", sbh, 1, "as for Q, K, V"),
        Row("logits, float32", logits, t, "the cast, still held by the caller of the loss"),
        Row("logits − maximum, float32", logits, t, "turned in place into the softmax, saved"),
        Row("final RMSNorm statistic", 4 * tokens // t, t, "1/rms of each token, float32"),
        Row("indices of the loss", (3 * 8 + 1) * tokens, 1, "targets twice and their places, int64; a mask, bool"),
        Row("sums of the loss", 3 * 4 * tokens, 1, "maximum, sum and target logit of each token, float32"),
    ]


def _backward_rows(decoder: LlamaShape, seq_length: int, b: int, t: int) -> list[Row]:
    """The last MLP's backward at the fuller of its two moments."""
    h, f = decoder.hidden_size, decoder.ffn_hidden_size
    sbh, sbf = 2 * seq_length * b * h, 2 * seq_length * b * f
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
    return [*fuller, Row("weight gradient of the down projection", 2 * h * f // t, t, "16-bit, before it is added")]


def nanotron_bills(decoder: LlamaShape, layout: Parallel, seq_length: int, num_microbatches: int) -> list[Bill]:
    """Rank 0's bill at each moment that can be its fullest: in backward, in the loss, in the optimizer's step.

    Raises ConfigError on a layout that nanotron can't run, or a decoder that its path doesn't fit.
    """
    if layout.num_model_chunks > 1 or layout.context_parallel_size > 1 or layout.zero_stage != 1:
        raise ConfigError("layout", "these runs have one chunk a rank, no context parallelism and ZeRO stage 1")
    b, dp = layout.micro_batch_size, layout.data_parallel_size
    t, p = layout.tensor_parallel_size, layout.pipeline_parallel_size
    num_layers, whole = first_stage_layers(decoder, p), p == 1
    vocab_size = padded_vocab_size(decoder.vocab_size, t, multiple=1)
    parameters = _parameters(decoder, num_layers, whole, t, vocab_size)
    static = _static_parts(parameters, decoder, layout, num_layers, seq_length)

    flight = in_flight(layout, 0, num_microbatches)
    source = f"{flight} microbatches × {num_layers} layers: "
    activations = [
        Row(row.term, flight * num_layers * row.bytes, row.split_by, source + row.source)
        for row in nanotron_layer_rows(decoder, seq_length, b, t)
    ]
    activations.append(Row("token ids", flight * 8 * seq_length * b, 1, "int64, the embedding's"))
    running = {**static, "activations": activations}
    bills = [Bill("backward of the last MLP", {**running, "transient": _backward_rows(decoder, seq_length, b, t)})]
    if whole:
        bills.append(Bill("loss", {**running, "logits": _loss_rows(decoder, seq_length, b, t, vocab_size)}))
    gathering = [
        Row("gathered parameters, flat", 2 * parameters, t, "output of the coalesced all-gather"),
        Row("gathered parameters, copy", 2 * parameters, t, "the same, per parameter"),
        Row("own share, flat", 2 * parameters // dp, t * dp, "input of the coalesced all-gather"),
    ]
    bills.append(Bill("optimizer step", {**static, **({"communication": gathering} if dp > 1 else {})}))
    return bills


def nanotron_peak(decoder: LlamaShape, layout: Parallel, seq_length: int, num_microbatches: int) -> Bill:
    """The bill of the moment at which rank 0 holds most."""
    return max(nanotron_bills(decoder, layout, seq_length, num_microbatches), key=lambda bill: bill.bytes)


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
        return nanotron_peak(NANOTRON_MODEL, layout, NANOTRON_SEQ_LENGTH, count)

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
