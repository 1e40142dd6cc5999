"""The memory of Megatron-LM's last rank, tensor by tensor: what one of NVIDIA's CI runs logs, predicted from its code.

``Trace`` plays a run's setup and two iterations on torch's allocator (allocator.py): each tensor that
NVIDIA/Megatron-LM makes is taken with its bytes and given back where its code lets go of it, in the order of its
code at adc69dba2d (October 2025, which wrote most of the logged values) and of TransformerEngine 2.8.
Nothing is fitted: a line is a formula of the run's arguments and names the file and the function it was read
from.  Letters: s, b, h, a, t, v, f as in the paper, n = sb/cp tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from actmem.config import ConfigError, check_choice, check_divides, check_size
from actmem.formulas.schedule import interleaved
from actmem_course.others import table_rows
from actmem_course.others.allocator import KIB, MEBIBYTE, RECEIVED, RING, CachingAllocator, MemoryBlock

#: Each line of a bill: what it is, and the file (below megatron/core where no other is named) and function.
SOURCES = {row["line"]: row["read from"] for row in table_rows("megatron_lines.tsv")}
#: Arguments that stop a prediction, and why.
NOT_MODELLED = {
    "mtp-num-layers": "layers that predict further tokens",
    "fp16": "a loss scaler, and main gradients of 16 bits copied to 32 in the optimizer's step",
    "fp8-format": "8-bit copies of weights and inputs with their scales",
    "use-megatron-fsdp": "sharded weights, gathered layer by layer",
    "squared-relu": "an activation by torch.compile, on a number of GPUs that the table doesn't have",
    "moe-layer-freq": "layers of two kinds",
    "pipeline-model-parallel-layout": "layers of two kinds on a stage",
    "moe-shared-expert-intermediate-size": "a shared expert",
    "step-batch-size-schedule": "a batch that grows",
    "no-masked-softmax-fusion": "a softmax in several operations",
}
#: How many microbatches, or layers, are played one by one.
_MOST_PLAYED = 10_000
#: The one way to recompute that is modelled.
_RECOMPUTE = {"granularity": "full", "method": "uniform", "num-layers": "1"}
#: Arguments that change no byte of what is modelled, or that say what is taken for granted here.
_WITHOUT_BYTES = """adam-beta1 adam-beta2 apply-query-key-layer-scaling attention-backend attention-softmax-in-fp32 bf16
    calculate-per-token-loss ddp-average-in-collective decoder-first-pipeline-num-layers decoupled-lr
    distributed-timeout-minutes fim-rate fim-spm-rate finetune init-method-std manual-gc moe-aux-loss-coeff
    no-gradient-accumulation-fusion norm-epsilon num-workers overlap-param-gather recompute-method recompute-num-layers
    rotary-base train-samples use-tp-pp-dp-mapping"""


def whole_number(text: str) -> int:
    """The number above 0 that ``text`` is in digits; 0 if it is none, or longer than any size."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else 0


def parse(arguments: str) -> dict[str, str]:
    """``name=value`` words as golden rows have them; a word without "=", further numbers of a list, is left out."""
    words = (word.partition("=") for word in arguments.split())
    return {name: value.strip('"') for name, equals, value in words if equals}


class MegatronRun:
    """One run as a golden row's arguments give it, under the paper's letters where they have one.

    chunks: layers of each model chunk on the last pipeline rank; shards: ranks that share optimizer states, 0 if none.
    environment: what the arguments don't say.  "cublas": CUBLAS_WORKSPACE_CONFIG is set; "expandable": so are expandable
    segments; "small workspaces": a torch that knows no larger ones for Blackwell, from before May 2026; "batches kept":
    code from 5e4fc931ba (2026-05-21) to bf32f4415e (2026-07-06), where tensor-parallel rank 0 moved the very batch to
    the GPU that RerunDataIterator keeps until the step ends; "deterministic": unpermute adds by index_add, which keeps its
    source; "weight gradients kept": Transformer Engine from 2.3, which returns one empty tensor for all weights of a
    shape and never frees it; "weighted after": code of April 2025, which weights the experts' outputs, not what goes
    into their last product.
    ignored: arguments that nothing here reads though they may change bytes: the run is played as if they were off.
    Raises ConfigError that names the argument which this module doesn't model, which is no size, or which doesn't divide.
    """

    def __init__(self, arguments: str, gpu: str, gpus: int = 8, environment: Collection[str] = ("cublas",)):
        check_choice("gpu", gpu, ("a100", "h100", "gb200"))
        self.given = given = parse(arguments)
        self._asked: set[str] = set()
        for name, why in NOT_MODELLED.items():
            if name in given:
                raise ConfigError(name, f"not modelled: {why}")
        number, flag, word = self._number, self._flag, self._read
        self.h, self.a, self.s, self.b = map(
            number, ("hidden-size", "num-attention-heads", "seq-length", "micro-batch-size")
        )
        self.t, self.p = number("tensor-model-parallel-size", 1), number("pipeline-model-parallel-size", 1)
        self.cp = number("context-parallel-size", 1)
        self.ep, self.etp = number("expert-model-parallel-size", 1), number("expert-tensor-parallel-size", self.t)
        self.experts, self.top_k = number("num-experts", 0), number("moe-router-topk", 2)
        for what, ranks in (
            ("t · p · cp", self.t * self.p * self.cp),
            ("p · experts' t · ep", self.p * self.etp * self.ep if self.experts else 1),
        ):
            if gpus % ranks:
                raise ConfigError("gpus", f"{gpus} can't hold {what} = {ranks}; name the number in a column gpus")
        self.dp = gpus // (self.t * self.p * self.cp)
        self.swiglu, self.rms_norm = flag("swiglu"), word("normalization") == "RMSNorm"
        self.f = number("ffn-hidden-size", 64 * int(4 * self.h * 2 / 3 / 64) if self.swiglu else 4 * self.h)
        self.groups = number("num-query-groups", self.a) if flag("group-query-attention") else self.a
        check_divides("hidden-size", self.h if "kv-channels" not in given else 0, "num-attention-heads", self.a)
        check_divides("num-attention-heads", self.a, "num-query-groups", self.groups)
        for name, size in (("num-attention-heads", self.a), ("ffn-hidden-size", self.f)):
            check_divides(name, size, "tensor-model-parallel-size", self.t)
        self.d = number("kv-channels", self.h // self.a)
        self.latent = flag("multi-latent-attention")
        if self.latent:
            self.q_rank, self.kv_rank = number("q-lora-rank"), number("kv-lora-rank", 512)
            self.d, self.d_turned = number("qk-head-dim", 128), number("qk-pos-emb-head-dim", 64)
            self.d_value = number("v-head-dim", 128)
        unit = number("make-vocab-size-divisible-by", 128) * self.t
        self.v = -(-number("vocab-size", 50257) // unit) * unit
        batch, at_once = number("global-batch-size"), self.b * self.dp
        count = check_divides("global-batch-size", batch, "micro-batch-size · data-parallel ranks", at_once)
        self.microbatches = check_size("microbatches", count, _MOST_PLAYED)
        self.group = number("microbatch-group-size-per-virtual-pipeline-stage", self.p)
        # Of one microbatch on one rank.
        self.tokens = self.b * check_divides("seq-length", self.s, "context-parallel-size", self.cp)
        self.whole_bytes = 2 * self.tokens * self.h
        self.chunks = self._chunks()
        self.sequence_parallel = flag("sequence-parallel") and self.t > 1
        # One tensor of the residual stream, and its tokens on one rank.
        self.residual_bytes = self.whole_bytes // (self.t if self.sequence_parallel else 1)
        self.residual_tokens = self.residual_bytes // (2 * self.h)
        self.has_embedding = self.p == 1  # the last pipeline rank is the first too
        self.gated = 2 if self.swiglu else 1  # how wide the MLP's first output is, in units of its activation's
        self.local_experts = check_divides("num-experts", self.experts, "expert-model-parallel-size", self.ep)
        instances = number("num-distributed-optimizer-instances", 1)
        self.transformer_engine = word("transformer-impl") != "local"
        sharded = flag("use-distributed-optimizer")
        self.shards = self.dp * self.cp // instances if sharded else 0
        self.expert_f = number("moe-ffn-hidden-size", self.f)
        self.expert_shards = gpus // (self.etp * self.ep * self.p) // instances if sharded else 0
        self.grouped_gemm = flag("moe-grouped-gemm") and self.transformer_engine
        self.all_to_all = word("moe-token-dispatcher-type") == "alltoall"
        # Weights of the experts' outputs: in their MLP, before 2659630721 (2025-04-09) after it.
        self.weighted_after = "weighted after" in environment
        # unpermute adds by index_add, which keeps its source, if deterministic and after 56818f9e50 (2025-10-16).
        self.index_add = "deterministic" in environment
        self.overlap_grad_reduce = flag("overlap-grad-reduce")
        self.exchanged_heads = word("cp-comm-type") == "a2a"
        self.fused_rope = self.transformer_engine and not flag("no-rope-fusion")
        self.fused_gradients = "weight gradients kept" in environment and not flag("no-gradient-accumulation-fusion")
        self.fused_loss = flag("cross-entropy-loss-fusion") and word("cross-entropy-fusion-impl") == "te"
        deferred = flag("defer-embedding-wgrad-compute")
        self.deferred = number("wgrad-deferral-limit", self.microbatches) if deferred else 0
        self.flush_overlap = flag("overlap-p2p-communication-warmup-flush")
        by_gpu = "cudnn" if gpu == "h100" else "flash"  # DotProductAttention's own choice: get_attention_backend
        self.attention = word("attention-backend", by_gpu) if self.transformer_engine else "unfused"
        self.dropout, self.attention_dropout = (
            word(f"{where}-dropout", "0.1") not in ("0", "0.0") for where in ("hidden", "attention")
        )
        self.linear_bias, self.qk_layernorm = not flag("disable-bias-linear"), flag("qk-layernorm")
        self.rotary = word("position-embedding-type") == "rope"
        self.tied_embeddings = not flag("untie-embeddings-and-output-weights")
        self.full_recompute = word("recompute-granularity") is not None
        if self.full_recompute and [given.get(f"recompute-{what}") for what in _RECOMPUTE] != [*_RECOMPUTE.values()]:
            raise ConfigError("recompute-granularity", "not modelled: anything but each layer whole, by itself")
        self.mask_in_dataloader = not flag("no-create-attention-mask-in-dataloader")
        self.engine_workspace_bytes = (4 if gpu == "a100" else 32) * MEBIBYTE
        # Without CUBLAS_WORKSPACE_CONFIG torch chooses 32 MiB for Hopper and Blackwell, else :4096:2:16:8.
        large = gpu == "h100" or (gpu == "gb200" and "small workspaces" not in environment)
        self.workspace_bytes = 32 * MEBIBYTE if large or "cublas" in environment else 8 * MEBIBYTE + 128 * KIB
        self.expandable_segments = "expandable" in environment
        self.batches_kept = self.t == 1 and "batches kept" in environment
        self.positions = number("max-position-embeddings", self.s)
        self.ignored = sorted(given.keys() - self._asked - {*_WITHOUT_BYTES.split()})

    def _number(self, name: str, default: int | None = None) -> int:
        text = self._read(name)
        if text is None and default is not None:
            return default
        if not (size := whole_number(text or "")):
            raise ConfigError(name, "must be given as a whole number above 0")
        return size

    def _flag(self, name: str) -> bool:
        return (self._read(name) or "false").lower() != "false"

    def _read(self, name: str, default: str | None = None) -> str | None:
        self._asked.add(name)
        return self.given.get(name, default)

    def _chunks(self) -> list[int]:
        layers, last = (
            check_size("num-layers", self._number("num-layers"), _MOST_PLAYED),
            "decoder-last-pipeline-num-layers",
        )
        if last in self.given:
            return [check_size(last, self._number(last), layers)]
        if "num-layers-per-virtual-pipeline-stage" in self.given:
            chunks = layers // self.p // self._number("num-layers-per-virtual-pipeline-stage")
        else:
            chunks = self._number("num-virtual-stages-per-pipeline-rank", 1)
        if layers % (self.p * chunks):
            # --account-for-{embedding,loss}-in-pipeline-split: each counts as a layer, and the last chunk has the loss.
            whole = check_divides("num-layers with embedding and loss", layers + 2, "p · chunks", self.p * chunks)
            return [whole] * (chunks - 1) + [whole - 1]
        return [layers // (self.p * chunks)] * chunks

    def chunk_parameters(self, chunk: int) -> list[tuple[str, int]]:
        """The parameters of one chunk in the order of its modules: name, elements on one tensor-parallel rank."""
        h, t, d = self.h, self.t, self.d
        norm = [("norm", h)] if self.rms_norm else [("norm", h), ("norm", h)]

        def linear(name: str, out: int, into: int, bias: int) -> list[tuple[str, int]]:
            return [(name, out * into // t), *([("bias", bias)] if self.linear_bias else [])]

        if self.latent:
            layer = norm + linear("projection", h, self.a * self.d_value, h)
            for rank, turned, out in (
                (self.q_rank, 0, d + self.d_turned),
                (self.kv_rank, self.d_turned, d + self.d_value),
            ):
                layer.append(("down", h * (rank + turned)))
                layer += [("head norm", rank)] * (len(norm) * self.qk_layernorm)
                layer.append(("up", self.a * out * rank // t))
        else:
            qkv = (self.a + 2 * self.groups) * d
            layer = linear("projection", h, self.a * d, h) + norm + linear("QKV", qkv, h, qkv // t)
            if self.qk_layernorm:
                layer += 2 * len(norm) * [("head norm", d)]
        if self.experts:
            fc1, fc2 = (h * width // self.etp for width in (self.expert_f * self.gated, self.expert_f))
            number = self.local_experts
            sizes = [fc1] * number + [fc2] * number if self.grouped_gemm else [fc1, fc2] * number
            layer += [*norm, ("router", self.experts * h), *(("expert", size) for size in sizes)]
        else:
            fc1 = self.f * self.gated
            layer += norm + linear("fc1", fc1, h, fc1 // t) + linear("fc2", h, self.f, h)
        parameters = layer * self.chunks[chunk]
        if self.has_embedding and chunk == 0:
            position = [] if self.rotary else [("position", self.positions * h)]
            parameters = [("embedding", self.v * h // t), *position, *parameters]
        if chunk == len(self.chunks) - 1:
            parameters += norm
            if not (self.has_embedding and self.tied_embeddings):
                parameters.append(("output", self.v * h // t))
        return parameters


#: The cross entropy's tensors beside its logits in their order: bytes a token where made, the name alone where freed.
_CROSS_ENTROPY = """labels:8 softmax largest:4 where:8 where below:1 above:1 target_mask:1 below above copy:8 target:8 copy
    positions:8 picked:4 predicted:4 picked sums:4 positions log:4 loss:4 log largest predicted sums logits labels
    turned:4 loss"""
#: Parameters without weight decay.
_NOT_DECAYED = ("norm", "bias", "head norm")


@dataclass
class _Step:
    """Part of a branch: blocks its backward needs, bytes of its input's gradient and of scratch, and its weight's shape."""

    kept: list[MemoryBlock]
    gradient_bytes: int
    scratch: Collection[int] = ()
    weight: tuple[int, ...] = ()


@dataclass
class _Chunk:
    """One microbatch in one model chunk between forward and backward; of the last one the loss's blocks too."""

    received: MemoryBlock | None
    embedding: list[MemoryBlock]
    layers: list[tuple[MemoryBlock, list[list[_Step]]]] = field(default_factory=list)
    norm: list[MemoryBlock] = field(default_factory=list)
    loss: list[MemoryBlock] = field(default_factory=list)
    stub: MemoryBlock | None = None


class Trace:
    """One rank's run on the allocator.  peaks and held: bytes after each iteration; ``memory.peak_lines``: the bill.

    late: chooses when blocks that NCCL used can be taken again, instead of at once.
    """

    def __init__(self, run: MegatronRun, late: Callable[[Sequence[int]], int] | None = None):
        self.run = run
        self.memory = CachingAllocator(run.expandable_segments, late)
        self.take, self.free = self.memory.take, self.memory.free
        self.peaks: list[int] = []
        self.held: list[int] = []
        self._once: set[str] = set()
        self._parameters: list[int] = []
        self._inputs: dict[int, tuple[MemoryBlock, ...]] = {}
        self._late: list[MemoryBlock] = []
        self._steps: list[_Step] = []
        self._batches: list[MemoryBlock] = []
        self._deferred: list[MemoryBlock] = []
        self._buffer: MemoryBlock | None = None
        self._routed: dict[tuple[int, int], tuple[MemoryBlock]] = {}
        self._at = (0, 0)

    def play(self, iterations: int = 2) -> Trace:
        """Set up, then run iterations: Adam's moments appear at the end of the first."""
        self._set_up()
        for _ in range(iterations):
            self.free(*self._batches)
            self._batches = []
            self._iteration()
            self._optimizer_step()
            self.peaks.append(self.memory.peak)
            self.held.append(self.memory.allocated)
        return self

    # Setup: modules, gradient buffers, main parameters.

    def _set_up(self) -> None:
        run = self.run
        # As they first appear; experts have an optimizer of their own, whose states only ranks with the same ones share.
        groups: dict[tuple[bool, bool], list[int]] = {}
        chunks = [run.chunk_parameters(chunk) for chunk in range(len(run.chunks))]
        weights = [[self.take("weights", 2 * size) for _, size in parameters] for parameters in chunks]
        for chunk, parameters in enumerate(chunks):
            apart = [pair for pair in parameters if pair[0] == "expert" and run.ep > 1]
            dense = [pair for pair in parameters if pair not in apart]
            for pairs, ranks in ((dense, run.shards), (apart, run.expert_shards)):
                if not pairs:
                    continue
                shards = [size for _, size in pairs]
                total = sum(shards)
                if run.shards:
                    total, shards = self._buffer_shards(pairs, ranks)
                    self.take("weights", 2 * total)
                self.take("main gradients", 4 * total)
                for (name, _), size in zip(pairs, shards, strict=True):
                    groups.setdefault((pairs is apart, name in _NOT_DECAYED), []).extend([size] if size else [])
            if run.shards:
                self.free(*weights[chunk])
        self._parameters = [size for key in sorted(groups, key=lambda key: key[0]) for size in groups[key]]
        for size in self._parameters:
            copy = self.take("transient", 2 * size)
            self.take("main parameters", 4 * size)
            self.free(copy)

    def _buffer_shards(self, parameters: list[tuple[str, int]], shards: int) -> tuple[int, list[int]]:
        """Elements of the padded buffer, and of each parameter those that the last shard holds."""
        run = self.run
        bucket_end = math.lcm(shards, 128)
        cut = run.overlap_grad_reduce and run.has_embedding
        limit = max(40_000_000, 1_000_000 * run.dp * run.cp) if cut else math.inf
        shared = {"embedding", "output"} if run.tied_embeddings and not run.has_embedding else set()
        places: list[tuple[int, int]] = []
        buckets: list[tuple[int, int]] = []
        start = position = 0

        def close() -> None:
            nonlocal start, position
            buckets.append((start, -(-position // bucket_end) * bucket_end))
            start = position = buckets[-1][1]

        for name, size in reversed(parameters):
            position = -(-position // 64) * 64
            if name in shared and position > start:
                close()
            places.append((position, position + size))
            position += size
            if name in shared or position - start >= limit:
                close()
        if position > start:
            close()
        own = [(end - (end - begin) // shards, end) for begin, end in buckets]
        sizes = [sum(max(0, min(high, end) - max(low, begin)) for begin, end in own) for low, high in places]
        return buckets[-1][1], sizes[::-1]

    def _keep_once(self, line: str, num_bytes: int, which: str = "") -> None:
        if line + which not in self._once:
            self._once.add(line + which)
            self.take(line, num_bytes)

    def _shared_buffer(self, line: str, num_bytes: int) -> None:
        """GlobalMemoryBuffer has one buffer a dtype: a larger one takes its place."""
        if self._buffer is None or self._buffer.wanted < num_bytes:
            self._buffer = self._copies(line, [num_bytes], self._buffer)

    def _cublas(self, thread: str) -> None:
        self._keep_once("cuBLAS workspaces", self.run.workspace_bytes, thread)

    # One iteration: 1F1B on the last rank, interleaved where it has more chunks.

    def _iteration(self) -> None:
        run = self.run
        scalars = [self.take("transient", 4)]
        if len(run.chunks) > 1:
            self._interleaved(scalars)
        else:
            output: list[MemoryBlock] = []
            for microbatch in range(run.microbatches):
                # set_input_tensor replaces the last input; the last output's graph keeps it through this forward, and
                # the schedule's variable input_tensor_grad its gradient until this backward has given another.  So
                # by the code the gradient's block outlives the forward; if both come back at once, the sizes at rest
                # fit 28 rows with the input's in its place, else 23.  Bytes at the peak of one microbatch are the same.
                received, its_gradient = slice(1), slice(1, None)
                sooner, later = (received, its_gradient) if self.memory.late else (its_gradient, received)
                old = self._inputs.pop(0, ())
                stale, old = ((), old) if microbatch else (old, ())
                saved = self._forward(0, scalars, stale)
                self.free(*old[sooner], *output)
                output = [self.take("loss", 4) for _ in range(2)]  # the loss, and what it is divided by
                pair = self._backward(saved)
                self.free(*old[later])
                if pair:
                    self._inputs[0] = pair
                    if microbatch < run.deferred:  # what waits for its weight gradient holds the graph's leaf
                        self._deferred += map(self.memory.hold, pair)
            self.free(*output, *self._deferred)
            self._deferred = []
        self.free(*scalars)

    def _interleaved(self, scalars: list[MemoryBlock]) -> None:
        """schedules.py forward_backward_pipelining_with_interleaving: (chunks - 1) groups of forwards warm up."""
        run = self.run
        actions = interleaved(run.p, len(run.chunks), run.microbatches, run.group)[-1]
        backwards = [(one.chunk, one.microbatch) for one in actions if one.kind == "B"]
        # One received tensor lives to the end: the schedule's variable input_tensor holds what the last warm-up step
        # received; with the flush overlapped, recv_prev_wait_handle holds what that step waited for.
        steady = [one.kind for one in actions].index("B") - 1
        held_to_the_end = actions[steady - run.flush_overlap]
        stale, self._inputs = self._inputs, {}
        live: dict[tuple[int, int], _Chunk] = {}
        newest: dict[int, int] = {}
        kept: tuple[MemoryBlock, ...] = ()
        pending: tuple[MemoryBlock, ...] = ()
        arrived: dict[tuple[int, int], MemoryBlock] = {}
        for action in actions:
            chunk, microbatch = which = action.chunk, action.microbatch
            if action.kind == "F":
                old = self._inputs.pop(chunk, ())
                now, pending = ((), ()) if old is kept else (old[:1], old[1:])
                live[which] = self._forward(chunk, scalars, (*stale.pop(chunk, ()), *now))
                newest[chunk] = microbatch
                continue
            pair = self._backward(live.pop(which), arrived.pop(which, None)) or ()
            self.free(*pending)
            pending = ()
            sent = backwards.index(which) - run.p + 1
            if sent >= 0 and (ahead := backwards[sent])[0]:  # what the first rank has just sent
                arrived[ahead[0] - 1, ahead[1]] = self.take(RECEIVED, run.residual_bytes)
            if which == (held_to_the_end.chunk, held_to_the_end.microbatch):
                kept = pair
            if newest[chunk] == microbatch:
                self._inputs[chunk] = pair
            elif pair is not kept:
                self.free(*pair)
        if not any(kept is pair for pair in self._inputs.values()):
            self.free(*kept)

    def _forward(self, chunk: int, scalars: list[MemoryBlock], replaced: tuple[MemoryBlock, ...]) -> _Chunk:
        run, take, free = self.run, self.take, self.free
        last = chunk == len(run.chunks) - 1
        received = None if run.has_embedding else take(RECEIVED, run.residual_bytes)
        free(*replaced)
        batch = self._batch() if last or run.has_embedding else []
        hidden, embedding = (self.memory.hold(received), list[MemoryBlock]()) if received else self._embed()
        if run.rotary:
            self._keep_once("rotary table", 4 * run.s // run.cp * run.d)
        saved = _Chunk(received, embedding)
        for number in range(run.chunks[chunk]):
            self._at = chunk, number
            output, branches = self._layer(hidden)
            if run.full_recompute:
                free(*(block for branch in branches for step in branch for block in step.kept))
            else:
                free(hidden)
            saved.layers.append((hidden, branches))
            hidden = output
        if last:
            saved.norm, saved.loss = self._head_forward(hidden, scalars)
        free(hidden)
        if not last:  # sent on, and its data replaced by one number: schedules.py deallocate_output_tensor
            saved.stub = take("transient", 2)
        if not run.batches_kept:
            free(*batch)
        else:
            self._batches += batch
        return saved

    def _batch(self) -> list[MemoryBlock]:
        run, take = self.run, self.take
        whole = run.s * run.b
        rows = [8 * whole, 8 * whole, 4 * whole, *[whole * run.s] * run.mask_in_dataloader, 8 * whole]
        batch = [take("batch", size) for size in rows]
        if run.cp > 1:
            parts = [take("batch", size // run.cp) for size in rows]
            self.free(*batch)
            batch = parts
        if not run.has_embedding and (run.batches_kept or run.t > 1):
            self.free(batch.pop(0), batch.pop())  # the last stage drops ids and positions
        return batch

    def _embed(self) -> tuple[MemoryBlock, list[MemoryBlock]]:
        """Words; positions added; turned to [s, b] or scattered; dropout: each step's input goes after it."""
        run, take, free = self.run, self.take, self.free
        whole = run.whole_bytes
        saved = [take("batch", 8 * run.tokens)] if run.t > 1 else []
        output = take("embedding", whole)
        positions = [] if run.rotary else [take("embedding", whole)]
        output = self._copies("embedding", [run.residual_bytes], output)
        free(*positions)
        output = self._copies("embedding", [run.residual_bytes] * (not run.rotary), output)
        if run.dropout:
            before, output = output, take("norm inputs", run.residual_bytes)
            saved.append(take("dropout masks", run.residual_bytes // 2))
            free(before)
        return output, saved

    # A layer is two branches of steps: each takes its blocks forward and adds its backward.

    def _layer(self, hidden: MemoryBlock) -> tuple[MemoryBlock, list[list[_Step]]]:
        """Forward of one layer: its output, and the steps of its two branches."""
        middle, attention = self._branch(hidden, self._latent_attention if self.run.latent else self._attention)
        output, mlp = self._branch(middle, self._experts if self.run.experts else self._mlp)
        self.free(middle)
        return output, [attention, mlp]

    def _branch(self, x: MemoryBlock, body: Callable[[MemoryBlock], MemoryBlock]) -> tuple[MemoryBlock, list[_Step]]:
        """The body, then dropout and the sum with the residual stream."""
        run, take = self.run, self.take
        self._steps = []
        projected = body(x)
        mask = [take("dropout masks", run.residual_bytes // 2)] if run.dropout else []
        output = take("norm inputs", run.residual_bytes)
        self.free(projected)
        self._steps.append(_Step(mask, run.residual_bytes))
        return output, self._steps

    def _norm(self, x: MemoryBlock, line: str = "norm outputs") -> list[MemoryBlock]:
        """What a norm keeps: its output first, then statistics and the input."""
        run = self.run
        output = self.take(line, run.residual_bytes)
        return [output, *self._statistics(run.residual_tokens), self.memory.hold(x)]

    def _statistics(self, rows: int) -> list[MemoryBlock]:
        return [self.take("norm statistics", 4 * rows) for _ in range(1 if self.run.rms_norm else 2)]

    def _gathered(self) -> list[MemoryBlock]:
        """A linear layer's input from all ranks: Megatron's own layers gather it into the shared buffer."""
        run = self.run
        if run.sequence_parallel and not run.transformer_engine:
            self._shared_buffer("buffer for the gathered input", run.whole_bytes)
        return [self.take("transient", run.whole_bytes)] if run.sequence_parallel and run.transformer_engine else []

    def _engine(self, which: str = "") -> None:
        self._keep_once("Transformer Engine's workspace", self.run.engine_workspace_bytes, which)

    def _norm_linear(self, x: MemoryBlock, line: str, size: int) -> MemoryBlock:
        """A norm and the linear layer behind it, output of ``size`` bytes: one module in Transformer Engine."""
        run, take, free = self.run, self.take, self.free
        norm = self._norm(x)
        if run.transformer_engine:
            self._engine()
        gathered = self._gathered()
        output = take(line, size)
        if not run.transformer_engine:
            self._cublas("forward")
            if run.linear_bias and line == "Q, K, V":
                output = self._copies(line, [size], output)
        free(*gathered)
        scratch = [run.whole_bytes, *[run.residual_bytes] * run.sequence_parallel]
        self._steps.append(_Step(norm, run.residual_bytes, scratch, (size // run.tokens // 2, run.h)))
        return output

    def _row_linear(self, x: MemoryBlock) -> MemoryBlock:
        """A linear layer to the residual stream's width; with sequence parallelism its output is scattered."""
        run, take, free = self.run, self.take, self.free
        output = take("transient", run.whole_bytes)
        free(*self._late)  # the caller's value is a view of the packed tensor until here
        self._late = []
        if run.sequence_parallel:
            output = self._copies("transient", [run.residual_bytes], output)
        weight = run.h, x.wanted // run.tokens // 2
        self._steps.append(_Step([x], x.wanted, [run.whole_bytes] * run.sequence_parallel, weight))
        return output

    def _mlp(self, x: MemoryBlock) -> MemoryBlock:
        run = self.run
        fc1 = self._norm_linear(x, "MLP", 2 * run.tokens * run.f * run.gated // run.t)
        activated = self.take("MLP", fc1.wanted // run.gated)
        self._steps.append(_Step([fc1], fc1.wanted))
        return self._row_linear(activated)

    def _experts(self, x: MemoryBlock) -> MemoryBlock:
        """Router, the way to the experts, the experts, the way back.

        allgather: all ranks' tokens come into the shared buffer, this rank's are picked, the sums scattered back.
        alltoall: each token goes k times to its experts' ranks, is gathered there if experts are split, and sorted.
        """
        run, take, free = self.run, self.take, self.free
        norm = self._norm(x)
        self._engine()  # the router's product is Transformer Engine's, whoever makes the rest
        n, ranks, line = run.residual_tokens, run.etp * run.ep, "experts' inputs and outputs"
        arrived = n * run.top_k * run.etp
        routing = take("routing", 10 * arrived + 3 * n * (run.experts + ranks * run.local_experts))
        free(*self._routed.pop(self._at, ()))  # the dispatcher keeps the newest until the next microbatch
        self._routed[self._at] = (self.memory.hold(routing),)
        self._steps.append(_Step([*norm, routing], run.residual_bytes, [run.residual_bytes]))

        picked, sums_bytes, sent = 2 * arrived * run.h, 2 * n * ranks * run.h, 2 * n * run.top_k * run.h
        there, back = [picked], list[int]()
        if run.all_to_all:
            sums_bytes, sort = run.residual_bytes, [picked] * (run.local_experts > 1)
            there = [sent, *[sent] * (run.ep > 1), *[picked] * (run.etp > 1), *sort]
            back = [*sort, *[sent] * (run.etp > 1), *[sent] * (run.ep > 1)]
        elif ranks > 1:
            self._shared_buffer("buffer for the gathered input", sums_bytes)
        inputs = self._copies(line, there)
        moved = self._copies(line, back, self._expert_mlps(inputs, arrived, sums_bytes))
        output, *zeros = (take("transient", sums_bytes) for _ in range(1 + run.index_add))
        kept = [moved] if run.index_add or run.weighted_after else []
        free(*zeros, *([] if kept else [moved]))
        if ranks > 1 and not run.all_to_all:
            output = self._copies("transient", [run.residual_bytes], output)
        self._steps.append(_Step(kept, picked, [sums_bytes]))
        return output

    def _copies(self, line: str, sizes: list[int], block: MemoryBlock | None = None) -> MemoryBlock:
        """Tensors made one from the other: the last."""
        for size in sizes:
            before, block = block, self.take(line, size)
            self.free(*([before] if before else []))
        assert block
        return block

    def _expert_mlps(self, inputs: MemoryBlock, arrived: int, spread: int) -> MemoryBlock:
        """The experts of this rank, one after the other or in one grouped product; their outputs in one tensor."""
        run, take, free = self.run, self.take, self.free
        parts = 1 if run.grouped_gemm else run.local_experts
        for stream in range(4 * run.grouped_gemm):
            self._engine(f"stream {stream}")
        wide = 2 * arrived * run.expert_f // run.etp // parts
        kept, outputs = [inputs], list[MemoryBlock]()
        for _ in range(parts):
            weighted = [wide] * (not (run.swiglu or run.weighted_after))  # fused SwiGLU weighs by itself
            kept += [take("MLP", size) for size in (wide * run.gated, wide, *weighted)]
            outputs.append(take("experts' inputs and outputs", 2 * arrived * run.h // parts))
        output = outputs[0] if parts == 1 else take("experts' inputs and outputs", 2 * arrived * run.h)
        free(*(outputs if parts > 1 else []))
        self._steps.append(_Step(kept, spread, [block.wanted for block in kept[1:]]))
        return output

    def _attention(self, x: MemoryBlock) -> MemoryBlock:
        run, take = self.run, self.take
        d, line = run.d, "Q and K after norm or rotation"
        heads, groups = run.a // run.t, max(1, run.groups // run.t)
        q, k = 2 * run.tokens * heads * d, 2 * run.tokens * groups * d
        packed = [self._norm_linear(x, "Q, K, V", q + 2 * k)]
        new: list[MemoryBlock] = []
        if run.qk_layernorm:
            for size, rows in ((q, heads), (k, groups)):
                new += [take(line, size), *self._statistics(run.tokens * rows)]
        for size in (q, k) if run.rotary else ():
            tables = [take("rotary cos and sin", 2 * run.s * d) for _ in range(0 if run.fused_rope else 2)]
            new += [take(line, size), *tables]
        if new and run.transformer_engine:  # V is copied, so the packed tensor goes; the norm keeps contiguous copies
            new += [take(line, size) for size in (*((q, k) if run.qk_layernorm else ()), k)]
            self._late, packed = packed, []
        return self._row_linear(self._core_attention([*packed, *new], (q, k, k), q))

    def _latent_attention(self, x: MemoryBlock) -> MemoryBlock:
        """Two latents of each token instead of K and V; Q, K and V are made from them and kept."""
        run, take, free = self.run, self.take, self.free
        heads, m = run.a // run.t, run.residual_tokens
        norm = self._norm(x)
        self._engine()
        kept = [take("latents", 2 * m * rank) for rank in (run.q_rank, run.kv_rank + run.d_turned)]
        made = [take("transient", 2 * run.tokens * run.d_turned)]
        for rank, width in ((run.q_rank, run.d + run.d_turned), (run.kv_rank, run.d + run.d_value)):
            if run.qk_layernorm:
                kept += [take("latents", 2 * m * rank), *self._statistics(m)]
            made.append(take("transient", 2 * run.tokens * heads * width))
        if not run.qk_layernorm:  # a slice, which the linear layer makes contiguous
            kept.append(take("latents", 2 * m * run.kv_rank))
        kept += [take("rotary cos and sin", 2 * run.s * run.d_turned) for _ in range(4)]
        q, v = (2 * run.tokens * heads * width for width in (run.d + run.d_turned, run.d_value))
        packed = [take("Q, K, V", size) for size in (q, q, v)]
        free(*made)
        # Each layer has its own table and, from its start, cos and sin of 4,096 positions.
        self._keep_once("rotary table", 4 * (run.s + 3 * 4096) * run.d_turned, f"{self._at}")
        self._steps.append(_Step([*norm, *kept], run.residual_bytes))
        return self._row_linear(self._core_attention(packed, (q, q, v), v))

    def _core_attention(self, packed: list[MemoryBlock], sizes: tuple[int, int, int], out: int) -> MemoryBlock:
        """Softmax(QK)V, bytes of Q, K, V and the output; backward gives the gradient of the packed three."""
        run, take, free = self.run, self.take, self.free
        heads = run.a // run.t
        if run.attention != "unfused":
            return self._fused_attention(packed, sizes, out, heads)
        scores = 2 * run.tokens * (run.s // run.cp) * heads
        empty = [take("transient", scores)] if run.transformer_engine else []
        if not run.transformer_engine:
            self._shared_buffer("attention's buffer for scores", scores)
        product = take("transient", scores)
        self._cublas("forward")
        free(*empty)
        kept = [take("softmax outputs", scores)]
        if run.attention_dropout:
            kept += [take("attention dropout", scores), take("attention dropout", scores // 2)]
        by_head = take("transient", out)
        output = take("attention outputs", out)
        free(by_head, product)

        self._steps.append(_Step([*packed, *kept], sum(sizes), [scores, *sizes]))
        return output

    def _fused_attention(
        self, packed: list[MemoryBlock], sizes: tuple[int, int, int], out: int, heads: int
    ) -> MemoryBlock:
        """flash-attn wants Q, K, V contiguous; its output is [b, s].

        Context parallelism's ring passes K and V on as one tensor and keeps the one that comes last; each turn has an
        output of its own, added to the whole at the end: transformer_engine's context_parallel.py AttnFuncWithCPAndKVP2P.
        """
        run, take = self.run, self.take
        pair, gone = sum(sizes[1:]), list[MemoryBlock]()
        if run.attention == "flash" and len(packed) == 1:
            self._late = packed
            packed = [take("Q and K after norm or rotation", size) for size in sizes]
            if run.cp > 1:
                packed[1:], gone = [take(RING, pair)], packed[1:]
        statistics = [16, 4 * run.tokens * heads]  # the generator's state, the log-sum-exp
        if run.cp > 1 and not run.exchanged_heads:
            for _ in range(run.cp - 1):
                gone.append(packed.pop())
                packed.append(take(RING, pair))
            gone += [take("transient", size) for size in run.cp * (out, statistics[1])]
            statistics = [16] * (run.cp - 1) + statistics
        kept = [*packed, *(take("log-sum-exp", size) for size in statistics)]
        output = take("attention outputs", out)
        self.free(*gone)
        # The projection wants [s, b], and context parallelism by all-to-all its own tokens' heads.
        if (run.attention == "flash" and run.b > 1) or (run.cp > 1 and run.exchanged_heads):
            kept.append(output)
            output = take("attention outputs", out)
        self._steps.append(_Step(kept, sum(sizes), sizes))
        return output

    def _head_forward(
        self, hidden: MemoryBlock, scalars: list[MemoryBlock]
    ) -> tuple[list[MemoryBlock], list[MemoryBlock]]:
        run, take, free = self.run, self.take, self.free
        n = run.tokens
        norm = self._norm(hidden, "output layer input")
        if run.sequence_parallel:
            self._shared_buffer("buffer for the gathered input", 2 * n * run.h)
        self._cublas("forward")
        elements = n * run.v // run.t
        if run.fused_loss:
            kept = [take("logits, 16 bits", 2 * elements), take("loss", 8 * n), take("loss", 4 * n)]
            sums = [take("loss", 12 * n), *([take("loss", 12 * n * run.t)] if run.t > 1 else [])]
            free(*sums)
            scalars.append(take("loss", 8))
            return norm, kept
        blocks = {"logits": take("logits, 16 bits", 2 * elements)}
        for step in _CROSS_ENTROPY.split():
            name, _, size = step.partition(":")
            if size:
                blocks[name] = take("loss", int(size) * n)
            elif name == "softmax":
                blocks[name] = take("logits, float32", 4 * elements)
            else:
                free(blocks.pop(name))
        scalars.append(take("loss", 8))  # the sum that is reported, and its tokens
        return norm, [*blocks.values()]

    # Backward.

    def _backward(self, saved: _Chunk, arrived: MemoryBlock | None = None) -> tuple[MemoryBlock, MemoryBlock] | None:
        run, take, free = self.run, self.take, self.free
        if saved.norm:
            gradient = self._head_backward(saved.norm, saved.loss)
        else:
            gradient = arrived or take(RECEIVED, run.residual_bytes)
        for hidden, branches in reversed(saved.layers):
            if run.full_recompute:
                output, branches = self._layer(hidden)
                free(output)
            for branch in reversed(branches):
                inner = self.memory.hold(gradient)  # a branch's own gradient is added to the residual's in place
                for step in reversed(branch):
                    inner = self._undo(step, inner)
                free(inner)
            if run.full_recompute:
                free(hidden)
        if saved.stub:
            free(saved.stub)
        if saved.received:
            return saved.received, gradient
        scratch = [take("transient", run.residual_bytes) for _ in range(2)]
        free(*scratch, gradient, *saved.embedding)
        free(take("transient", 2 * run.v * run.h // run.t))
        return None

    def _undo(self, step: _Step, gradient: MemoryBlock) -> MemoryBlock:
        """Backward of a step, from its output's gradient to its input's: scratch, that gradient, then all else goes."""
        scratch = [self.take("transient", size) for size in step.scratch]
        before = self.take("transient", step.gradient_bytes)
        weight_bytes = 2 * math.prod(step.weight)
        if step.weight and self.run.fused_gradients:  # added to the main one; autograd gets an empty tensor a shape
            self._keep_once("Transformer Engine's empty weight gradients", weight_bytes, f"{step.weight}")
        elif step.weight:
            scratch.append(self.take("transient", weight_bytes))
        self.free(*scratch, *step.kept, gradient)
        return before

    def _head_backward(self, norm: list[MemoryBlock], loss: list[MemoryBlock]) -> MemoryBlock:
        run, take, free = self.run, self.take, self.free
        n, h, t = run.tokens, run.h, run.t
        scratch = [take("loss", size * n) for size in (4, 4, 8, 4)]  # gradients, positions, the update
        if run.fused_loss:  # its forward wrote the gradient over the logits
            logits, *loss = loss
        else:
            logits = take("logits, 16 bits", 2 * n * run.v // t)
        free(*scratch, *loss)
        whole = [take("transient", 2 * n * h)]
        self._cublas("backward")
        whole += [take("transient", run.residual_bytes) for _ in range(run.sequence_parallel)]
        if len(self._deferred) // 4 < run.deferred:
            self._deferred += map(self.memory.hold, (logits, norm[0]))
        else:
            free(take("transient", 2 * run.v * h // t))
        free(logits, norm[0])
        gradient = take(RECEIVED, run.residual_bytes)
        free(*whole, *norm[1:])
        return gradient

    def _optimizer_step(self) -> None:
        """Adam makes its moments at first use."""
        for number, size in enumerate(self._parameters):
            for moment in ("first", "second"):
                self._keep_once("Adam's moments", 4 * size, f"{moment} {number}")
