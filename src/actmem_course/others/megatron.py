"""The memory of Megatron-LM's last rank, tensor by tensor: what one of NVIDIA's CI runs logs, predicted from its code.

``trace`` plays a run's setup and three iterations on torch's allocator (allocator.py): each tensor that
NVIDIA/Megatron-LM makes is taken with its bytes and given back where its code lets go of it, in the order of its
code at adc69dba2d (October 2025, which wrote most of the logged values) and of TransformerEngine 2.8.
Nothing is fitted: a line is a formula of the run's arguments and names the file and the function it was read
from.  Letters: s, b, h, a, t, v, f as in the paper, n = sb/cp tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from actmem.checks import ConfigError
from actmem_course.others.allocator import KIB, MIB, UNSPLIT, Block, CachingAllocator

#: Each line of a bill: what it is, and the file (below megatron/core where no other is named) and function.
SOURCES = {
    "weights": "2N, 16 bits; with the distributed optimizer one buffer: distributed/param_and_grad_buffer.py",
    "main gradients": "4N, one float32 buffer a model chunk: distributed/param_and_grad_buffer.py",
    "main parameters": "4N, or this rank's shard: optimizer/{optimizer,distrib_optimizer}.py",
    "Adam's moments": "8N, or this rank's shard: transformer_engine/pytorch/optimizers/fused_adam.py",
    "cuBLAS workspaces": "CUBLAS_WORKSPACE_CONFIG=:4096:8 is 32 MiB for each thread: aten/src/ATen/cuda/CublasHandlePool.cpp",
    "Transformer Engine's workspace": "32 MiB from Hopper on, else 4: transformer_engine/pytorch/module/base.py",
    "attention's buffer for scores": "2as²b/t, kept: utils.py GlobalMemoryBuffer, transformer/dot_product_attention.py",
    "rotary table": "4s·d, cached: models/common/embeddings/rotary_pos_embedding.py forward",
    "received input and its gradient": "2sbh + 2sbh: transformer/transformer_block.py set_input_tensor keeps the last",
    "batch": "ids, labels, positions, loss mask, causal mask sb·s: pretrain_gpt.py get_batch",
    "embedding": "positions and words before dropout: models/common/embeddings/language_model_embedding.py",
    "dropout masks": "1 byte: fusions/fused_bias_dropout.py, language_model_embedding.py",
    "norm inputs": "the residual stream, 2sbh each: transformer/transformer_layer.py",
    "norm statistics": "float32 mean and 1/deviation: transformer_engine/pytorch/module/layernorm_linear.py",
    "norm outputs": "inputs of Q, K, V and of the MLP, 2sbh each: module/layernorm_linear.py",
    "Q, K, V": "6sbh/t in one tensor: transformer/attention.py get_query_key_value_tensors",
    "Q and K after norm or rotation": "new tensors, and V a copy: attention/dot_product_attention/utils.py get_qkv_layout",
    "rotary cos and sin": "16 bits, for Q and K each: rotary_pos_embedding's apply_rotary_pos_emb",
    "softmax outputs": "2as²b/t: attention/dot_product_attention/softmax.py",
    "attention dropout": "2as²b/t outputs and as²b/t masks: attention/dot_product_attention/backends.py",
    "log-sum-exp": "4as·b/t: flash attention; where the kernel is cuDNN's no source shows more",
    "attention outputs": "2sbh/t: attention/dot_product_attention/backends.py",
    "MLP": "input and output of the activation: transformer/mlp.py, fusions/fused_bias_{gelu,swiglu}.py",
    "output layer input": "2sbh: tensor_parallel/layers.py",
    "logits, 16 bits": "2sbv/t: models/gpt/gpt_model.py _postprocess holds them during the loss",
    "logits, float32": "4sbv/t: tensor_parallel/cross_entropy.py, turned in place into the softmax",
    "loss": "labels, masks, sums of each token: tensor_parallel/cross_entropy.py",
    "transient": "live inside one operation only: products, gradients, optimizer scratch",
    UNSPLIT: "c10/cuda/CUDACachingAllocator.cpp should_split",
}

ATTENTION = ("unfused", "flash")


@dataclass(frozen=True)
class MegatronRun:
    """One run as its arguments give it.  chunk_layers: layers of each model chunk on the last pipeline rank."""

    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_size: int
    vocab_size: int
    seq_length: int
    micro_batch_size: int
    num_microbatches: int
    microbatch_group: int
    chunk_layers: tuple[int, ...]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    context_parallel_size: int
    data_parallel_size: int
    sequence_parallel: bool
    optimizer_shards: int
    overlap_grad_reduce: bool
    flush_overlap: bool
    transformer_engine: bool
    attention: str
    dropout: bool
    linear_bias: bool
    swiglu: bool
    rms_norm: bool
    qk_layernorm: bool
    rotary: bool
    tied_embeddings: bool
    full_recompute: bool
    mask_in_dataloader: bool
    hopper: bool
    workspace_bytes: int
    expandable_segments: bool
    batches_kept: bool

    @property
    def has_embedding(self) -> bool:
        """Whether the last pipeline rank is the first too."""
        return self.pipeline_parallel_size == 1

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one rank."""
        return self.seq_length * self.micro_batch_size // self.context_parallel_size

    @property
    def residual_bytes(self) -> int:
        """One tensor of the residual stream: 2sbh, divided by t with sequence parallelism."""
        return 2 * self.tokens * self.hidden_size // (self.tensor_parallel_size if self.sequence_parallel else 1)

    def chunk_parameters(self, chunk: int) -> list[tuple[str, int]]:
        """The parameters of one chunk in the order of its modules: name, elements on one tensor-parallel rank."""
        h, t, d = self.hidden_size, self.tensor_parallel_size, self.head_size
        norm = [("norm", h)] if self.rms_norm else [("norm", h), ("norm", h)]

        def linear(name: str, out: int, into: int, bias: int) -> list[tuple[str, int]]:
            return [(name, out * into // t), *([("bias", bias)] if self.linear_bias else [])]

        qkv = (self.num_attention_heads + 2 * self.num_query_groups) * d
        fc1 = self.ffn_hidden_size * (2 if self.swiglu else 1)
        layer = linear("projection", h, self.num_attention_heads * d, h) + norm + linear("QKV", qkv, h, qkv // t)
        if self.qk_layernorm:
            layer += 2 * len(norm) * [("head norm", d)]
        layer += norm + linear("fc1", fc1, h, fc1 // t) + linear("fc2", h, self.ffn_hidden_size, h)
        parameters = layer * self.chunk_layers[chunk]
        if self.has_embedding and chunk == 0:
            position = [] if self.rotary else [("position", self.seq_length * h)]
            parameters = [("embedding", self.vocab_size * h // t), *position, *parameters]
        if chunk == len(self.chunk_layers) - 1:
            parameters += norm
            if not (self.has_embedding and self.tied_embeddings):
                parameters.append(("output", self.vocab_size * h // t))
        return parameters


class _Held:
    """What backward of one layer, or of one chunk and microbatch, still needs, by name."""

    def __init__(self, **blocks: Block | list[Block]):
        self.__dict__.update(blocks)


class Trace:
    """One rank's run on the allocator.  peaks and held: bytes after each iteration; ``memory.peak_lines``: the bill."""

    def __init__(self, run: MegatronRun):
        self.run = run
        self.memory = CachingAllocator(expandable=run.expandable_segments)
        self.take, self.free = self.memory.take, self.memory.free
        self.peaks: list[int] = []
        self.held: list[int] = []
        self._once: set[str] = set()
        self._groups: list[list[int]] = []
        self._inputs: dict[int, tuple[Block, ...]] = {}
        self._pending: list[Block] = []
        self._late: list[Block] = []
        self._batches: list[Block] = []

    def play(self, iterations: int = 3) -> Trace:
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
        decayed: list[int] = []
        others: list[int] = []
        chunks = [run.chunk_parameters(chunk) for chunk in range(len(run.chunk_layers))]
        weights = [[self.take("weights", 2 * size) for _, size in parameters] for parameters in chunks]
        for chunk, parameters in enumerate(chunks):
            if not run.optimizer_shards:
                self.take("main gradients", 4 * sum(size for _, size in parameters))
                shards = [size for _, size in parameters]
            else:
                total, shards = self._buffer_shards(parameters)
                self.take("weights", 2 * total)
                self.take("main gradients", 4 * total)
                self.free(*weights[chunk])
            for (name, _), size in zip(parameters, shards, strict=True):
                if size:
                    (others if name in ("norm", "bias", "head norm") else decayed).append(size)
        first_decays = not chunks[0] or chunks[0][0][0] not in ("norm", "bias", "head norm")
        self._groups = [decayed, others] if first_decays else [others, decayed]
        for size in self._each_parameter():
            copy = self.take("transient", 2 * size)
            self.take("main parameters", 4 * size)
            self.free(copy)

    def _each_parameter(self) -> Iterator[int]:
        for group in self._groups:
            yield from group

    def _buffer_shards(self, parameters: list[tuple[str, int]]) -> tuple[int, list[int]]:
        """Elements of the padded buffer, and of each parameter those that the last shard holds."""
        run = self.run
        shards = run.optimizer_shards
        bucket_end = math.lcm(shards, 128)
        limit = None
        if run.overlap_grad_reduce and run.has_embedding:
            limit = max(40_000_000, 1_000_000 * run.data_parallel_size * run.context_parallel_size)
        shared = {"embedding", "output"} if run.tied_embeddings and not run.has_embedding else set()
        places: list[tuple[int, int]] = []
        buckets: list[tuple[int, int]] = []
        start = position = 0

        def pad(number: int, unit: int) -> int:
            return -(-number // unit) * unit

        for name, size in reversed(parameters):
            position = pad(position, 64)
            if name in shared and position > start:
                buckets.append((start, pad(position, bucket_end)))
                start = position = buckets[-1][1]
            places.append((position, position + size))
            position += size
            if name in shared or (limit and position - start >= limit):
                buckets.append((start, pad(position, bucket_end)))
                start = position = buckets[-1][1]
        if position > start:
            buckets.append((start, pad(position, bucket_end)))
        own = [(end - (end - begin) // shards, end) for begin, end in buckets]
        sizes = [sum(max(0, min(high, end) - max(low, begin)) for begin, end in own) for low, high in places]
        return (buckets[-1][1] if buckets else 0), sizes[::-1]

    def _keep_once(self, line: str, num_bytes: int, which: str = "") -> None:
        if line + which not in self._once:
            self._once.add(line + which)
            self.take(line, num_bytes)

    def _cublas(self, thread: str) -> None:
        self._keep_once("cuBLAS workspaces", self.run.workspace_bytes, thread)

    def _linear_workspace(self, thread: str) -> None:
        if self.run.transformer_engine:
            self._keep_once("Transformer Engine's workspace", (32 if self.run.hopper else 4) * MIB)
        else:
            self._cublas(thread)

    # One iteration: 1F1B on the last rank, interleaved where it has more chunks.

    def _iteration(self) -> None:
        run = self.run
        scalars = [self.take("transient", 4)]
        if len(run.chunk_layers) > 1:
            self._interleaved(scalars)
        else:
            for microbatch in range(run.num_microbatches):
                # set_input_tensor replaces the last input; the last output's graph keeps it through this forward.
                old = self._inputs.pop(0, ())
                saved = self._forward(0, scalars, () if microbatch else old)
                if microbatch:
                    self.free(*old)
                if pair := self._backward(saved):
                    self._inputs[0] = pair
        self.free(*scalars)

    def _interleaved(self, scalars: list[Block]) -> None:
        """schedules.py forward_backward_pipelining_with_interleaving: (chunks - 1) groups of forwards warm up."""
        run = self.run
        chunks, m, group = len(run.chunk_layers), run.num_microbatches, run.microbatch_group
        ends = [(first, min(first + group, m)) for first in range(0, m, group)]
        forwards = [(chunk, i) for low, high in ends for chunk in range(chunks) for i in range(low, high)]
        backwards = [(chunk, i) for low, high in ends for chunk in reversed(range(chunks)) for i in range(low, high)]
        warm_up = min((chunks - 1) * group, len(forwards) - 1)
        # One received tensor lives to the end: the schedule's variable input_tensor holds what the last warm-up step
        # received; with the flush overlapped, recv_prev_wait_handle holds what that step waited for.
        held_to_the_end = forwards[warm_up - run.flush_overlap]
        stale, self._inputs = self._inputs, {}
        live: dict[tuple[int, int], _Held] = {}
        newest: dict[int, int] = {}
        kept: tuple[Block, ...] = ()
        arrived: dict[tuple[int, int], Block] = {}

        def forward(chunk: int, microbatch: int) -> None:
            old = self._inputs.pop(chunk, ())
            self._pending = [] if old is kept else [*old[1:]]
            free_now = () if old is kept else old[:1]
            live[chunk, microbatch] = self._forward(chunk, scalars, (*stale.pop(chunk, ()), *free_now))
            newest[chunk] = microbatch

        for which in forwards[:warm_up]:
            forward(*which)
        for step, (chunk, microbatch) in enumerate(backwards):
            self._pending = []
            if warm_up + step < len(forwards):
                forward(*forwards[warm_up + step])
            pair = self._backward(live.pop((chunk, microbatch)), arrived.pop((chunk, microbatch), None)) or ()
            self.free(*self._pending)
            ahead, which = backwards[step - run.pipeline_parallel_size + 1] if step >= run.pipeline_parallel_size - 1 else (0, 0)
            if ahead:  # recv_tensor_from_previous_stage: the gradient that the first rank has just sent
                arrived[ahead - 1, which] = self.take("received input and its gradient", run.residual_bytes)
            if (chunk, microbatch) == held_to_the_end:
                kept = pair
            if newest[chunk] == microbatch:
                self._inputs[chunk] = pair
            elif pair is not kept:
                self.free(*pair)
        if not any(kept is pair for pair in self._inputs.values()):
            self.free(*kept)

    def _forward(self, chunk: int, scalars: list[Block], replaced: tuple[Block, ...]) -> _Held:
        run, take, free = self.run, self.take, self.free
        last = chunk == len(run.chunk_layers) - 1
        received = None if run.has_embedding else take("received input and its gradient", run.residual_bytes)
        free(*replaced)
        batch = self._batch() if last or run.has_embedding else []
        if received:
            hidden, embedding = received, []
        else:
            hidden, embedding = self._embed()
        layers: list[tuple[Block, _Held]] = []
        for _ in range(run.chunk_layers[chunk]):
            output, held = self._layer(hidden)
            if run.full_recompute:
                self._free_all(held)
            layers.append((hidden, held))
            hidden = output
        saved = _Held(received=received, embedding=embedding, layers=layers, hidden=hidden, head=None)
        if last:
            saved.head = self._head_forward(batch, scalars)
        elif hidden is not received:
            free(hidden)  # sent on, and its data replaced: schedules.py deallocate_output_tensor
        if not run.batches_kept:
            free(*batch)
        else:
            self._batches += batch
        return saved

    def _batch(self) -> list[Block]:
        run, take = self.run, self.take
        whole = run.seq_length * run.micro_batch_size
        rows = [8 * whole, 8 * whole, 4 * whole]
        rows += [whole * run.seq_length] if run.mask_in_dataloader else []
        rows.append(8 * whole)
        batch = [take("batch", size) for size in rows]
        if run.context_parallel_size > 1:
            parts = [take("batch", size // run.context_parallel_size) for size in rows]
            self.free(*batch)
            batch = parts
        if not run.has_embedding and run.batches_kept:
            self.free(batch.pop(0), batch.pop())
        return batch

    def _embed(self) -> tuple[Block, list[Block]]:
        run, take, free = self.run, self.take, self.free
        whole = 2 * run.tokens * run.hidden_size
        saved = [take("batch", 8 * run.tokens)] if run.tensor_parallel_size > 1 else []
        words = take("embedding", whole)
        if run.sequence_parallel:
            part = take("embedding", run.residual_bytes)
            free(words)
            words = part
        if not run.rotary:
            positions = take("embedding", whole)
            added = take("embedding", run.residual_bytes)
            free(words, positions)
            words = added
        if not run.sequence_parallel:
            turned = take("embedding", whole)
            free(words)
            words = turned
        if not run.dropout:
            return words, saved
        output, mask = take("norm inputs", run.residual_bytes), take("dropout masks", run.residual_bytes // 2)
        free(words)
        if run.rotary:
            self._keep_once("rotary table", 4 * run.seq_length * run.head_size)
        return output, [*saved, mask]

    def _norm(self, line: str = "norm outputs") -> list[Block]:
        run, take = self.run, self.take
        tokens = run.residual_bytes // (2 * run.hidden_size)
        output = take(line, run.residual_bytes)
        return [output, *(take("norm statistics", 4 * tokens) for _ in range(1 if run.rms_norm else 2))]

    def _layer(self, hidden: Block) -> tuple[Block, _Held]:
        """Forward of one layer: the blocks that backward needs, and the output."""
        run, take, free = self.run, self.take, self.free
        norm1 = self._norm()
        self._linear_workspace("forward")
        gathered = self._gathered()
        attention = self._attention_forward(gathered)
        projected = take("transient", 2 * run.tokens * run.hidden_size)
        free(*self._late)  # the caller's value is a view of the packed tensor until here
        self._late = []
        middle, mask1 = self._bias_dropout_add(projected)
        norm2 = self._norm()
        gathered = self._gathered()
        fc1 = take("MLP", self._fc1_bytes)
        free(*gathered)
        activated = take("MLP", self._fc1_bytes // (2 if run.swiglu else 1))
        projected = take("transient", 2 * run.tokens * run.hidden_size)
        output, mask2 = self._bias_dropout_add(projected)
        return output, _Held(
            norm1=norm1,
            attention=attention,
            mask1=mask1,
            middle=middle,
            norm2=norm2,
            fc1=fc1,
            activated=activated,
            mask2=mask2,
        )

    @property
    def _fc1_bytes(self) -> int:
        run = self.run
        return 2 * run.tokens * run.ffn_hidden_size * (2 if run.swiglu else 1) // run.tensor_parallel_size

    def _gathered(self) -> list[Block]:
        run = self.run
        return [self.take("transient", 2 * run.tokens * run.hidden_size)] if run.sequence_parallel else []

    def _bias_dropout_add(self, projected: Block) -> tuple[Block, list[Block]]:
        run, take = self.run, self.take
        if run.sequence_parallel:
            part = take("transient", run.residual_bytes)
            self.free(projected)
            projected = part
        mask = [take("dropout masks", run.residual_bytes // 2)] if run.dropout else []
        output = take("norm inputs", run.residual_bytes)
        self.free(projected)
        return output, mask

    def _attention_forward(self, gathered: list[Block]) -> list[Block]:
        """The blocks kept: those of Q, K, V first, then scores, then the output."""
        run, take, free = self.run, self.take, self.free
        t, d = run.tensor_parallel_size, run.head_size
        heads, groups = run.num_attention_heads // t, max(1, run.num_query_groups // t)
        q, k = 2 * run.tokens * heads * d, 2 * run.tokens * groups * d
        packed = [take("Q, K, V", q + 2 * k)]
        if not run.transformer_engine and run.linear_bias:
            packed.append(take("Q, K, V", q + 2 * k))
            free(packed.pop(0))
        free(*gathered)
        if run.qk_layernorm or run.rotary:
            new: list[Block] = []
            if run.qk_layernorm:
                for size, rows in ((q, heads), (k, groups)):
                    new += [take("Q and K after norm or rotation", size)]
                    new += [take("norm statistics", 4 * run.tokens * rows) for _ in range(1 if run.rms_norm else 2)]
            if run.rotary:
                for size in (q, k):
                    tables = [take("rotary cos and sin", 2 * run.seq_length * d) for _ in range(2)]
                    turned = [take("transient", size) for _ in range(2)]
                    new += [take("Q and K after norm or rotation", size), *tables]
                    free(*turned)
            if run.transformer_engine:  # V is copied, so the packed tensor goes; the norm keeps contiguous copies
                new += [take("Q and K after norm or rotation", size) for size in (q, k)] if run.qk_layernorm else []
                new.append(take("Q and K after norm or rotation", k))
                self._late, packed = packed, []
            packed += new
        if run.attention == "flash":  # it wants each contiguous; the ring of context parallelism sends K and V as one
            if not self._late:
                self._late, packed = packed, []
                packed.append(take("Q and K after norm or rotation", q))
                copies = [take("transient", k), take("transient", k)]
                packed.append(take("Q and K after norm or rotation", 2 * k))
                free(*copies)
            output = take("attention outputs", q)
            return [*packed, take("log-sum-exp", 4 * run.tokens * heads), output]
        scores = 2 * run.tokens * (run.seq_length // run.context_parallel_size) * heads
        if run.transformer_engine:
            empty = [take("transient", scores)]
        else:
            self._keep_once("attention's buffer for scores", scores)
            empty = []
        self._cublas("forward")
        product = take("transient", scores)
        free(*empty)
        kept = [take("softmax outputs", scores)]
        if run.dropout:
            kept += [take("attention dropout", scores), take("attention dropout", scores // 2)]
        by_head = take("transient", q)
        output = take("attention outputs", q)
        free(by_head, product)
        return [*packed, *kept, output]

    def _head_forward(self, batch: list[Block], scalars: list[Block]) -> _Held:
        run, take, free = self.run, self.take, self.free
        n = run.tokens
        norm = self._norm("output layer input")
        gathered = self._gathered()
        self._cublas("forward")
        elements = n * run.vocab_size // run.tensor_parallel_size
        logits = take("logits, 16 bits", 2 * elements)
        labels = take("loss", 8 * n)
        softmax = take("logits, float32", 4 * elements)
        largest, where = take("loss", 4 * n), take("loss", 8 * n)
        free(where)
        either = [take("loss", n), take("loss", n)]
        target_mask = take("loss", n)
        free(*either)
        copy = take("loss", 8 * n)
        target = take("loss", 8 * n)
        free(copy)
        positions = take("loss", 8 * n)
        picked = take("loss", 4 * n)
        predicted = take("loss", 4 * n)
        free(picked)
        sums = take("loss", 4 * n)
        free(positions)
        log = take("loss", 4 * n)
        loss = take("loss", 4 * n)
        free(log, largest, predicted, sums, logits, labels, *gathered)
        turned = take("loss", 4 * n)
        free(loss)
        scalars.append(take("loss", 8))  # the sum that is reported, and its tokens
        return _Held(norm=norm, softmax=softmax, target_mask=target_mask, target=target, loss=turned)

    # Backward.

    def _backward(self, saved: _Held, arrived: Block | None = None) -> tuple[Block, Block] | None:
        run, take, free = self.run, self.take, self.free
        if saved.head:
            gradient = self._head_backward(saved.head)
        else:
            gradient = arrived or take("received input and its gradient", run.residual_bytes)
        if saved.head and saved.hidden is not saved.received:
            free(saved.hidden)
        for hidden, held in reversed(saved.layers):
            if run.full_recompute:
                output, held = self._layer(hidden)
                free(output)
            self._layer_backward(held)
            if hidden is not saved.received:
                free(hidden)
        if saved.received:
            return saved.received, gradient
        scratch = [take("transient", run.residual_bytes) for _ in range(2)]
        free(*scratch, gradient, *saved.embedding)
        free(take("transient", 2 * run.vocab_size * run.hidden_size // run.tensor_parallel_size))
        return None

    def _head_backward(self, head: _Held) -> Block:
        run, take, free = self.run, self.take, self.free
        n, h, t = run.tokens, run.hidden_size, run.tensor_parallel_size
        gradients = [take("loss", 4 * n), take("loss", 4 * n)]
        positions, update = take("loss", 8 * n), take("loss", 4 * n)
        logits = take("logits, 16 bits", 2 * n * run.vocab_size // t)
        free(positions, update, head.softmax, head.target_mask, head.target, head.loss, *gradients)
        self._cublas("backward")
        gathered = self._gathered()
        whole = take("transient", 2 * n * h)
        own = [take("transient", run.residual_bytes)] if run.sequence_parallel else []
        weight = take("transient", 2 * run.vocab_size * h // t)
        free(logits, weight, *gathered)
        if own:
            free(whole)
            whole = own[0]
        gradient = take("received input and its gradient", run.residual_bytes)
        free(whole, *head.norm)
        return gradient

    def _layer_backward(self, held: _Held) -> None:
        """Backward of one layer, MLP first; its input gradient is added to the residual's in place."""
        run, take, free = self.run, self.take, self.free
        h, t, n = run.hidden_size, run.tensor_parallel_size, run.tokens
        residual = run.residual_bytes
        fc1 = self._fc1_bytes
        activated = fc1 // (2 if run.swiglu else 1)

        dropped = take("transient", residual)
        free(*held.mask2)
        gathered = self._gathered()
        gradient, weight = take("transient", activated), take("transient", 2 * run.ffn_hidden_size * h // t)
        free(held.activated, dropped, *gathered, weight)
        before = take("transient", fc1)
        free(gradient, held.fc1)
        self._norm_linear_backward(before, fc1 // (2 * n) * h * 2, held.norm2)
        free(held.middle)

        dropped = take("transient", residual)
        free(*held.mask1)
        gathered = self._gathered()
        width = run.num_attention_heads * run.head_size // t
        gradient, weight = take("transient", 2 * n * width), take("transient", 2 * h * width)
        free(held.attention[-1], dropped, *gathered, weight)
        packed = self._attention_backward(gradient, held.attention[:-1])
        self._norm_linear_backward(packed, packed.wanted // (2 * n) * h * 2, held.norm1)

    def _norm_linear_backward(self, gradient: Block, weight_bytes: int, norm: list[Block]) -> None:
        run, take, free = self.run, self.take, self.free
        gathered = self._gathered()
        whole = take("transient", 2 * run.tokens * run.hidden_size)
        own = [take("transient", run.residual_bytes)] if run.sequence_parallel else []
        weight = take("transient", weight_bytes)
        free(norm[0], *gathered)
        before = take("transient", run.residual_bytes)
        free(whole, *own, *norm[1:], gradient, weight, before)

    def _attention_backward(self, gradient: Block, kept: list[Block]) -> Block:
        run, take, free = self.run, self.take, self.free
        t, d = run.tensor_parallel_size, run.head_size
        heads, groups = run.num_attention_heads // t, max(1, run.num_query_groups // t)
        q, k = 2 * run.tokens * heads * d, 2 * run.tokens * groups * d
        if run.attention == "flash":
            parts = [take("transient", size) for size in (q, k, k)]
            packed = take("transient", q + 2 * k)
            free(gradient, *parts, *kept)
            return packed
        self._cublas("backward")
        scores = 2 * run.tokens * (run.seq_length // run.context_parallel_size) * heads
        count = 3 if run.dropout else 1
        packed_kept, kept = kept[:-count], kept[-count:]
        probabilities, value = take("transient", scores), take("transient", k)
        free(gradient)
        if run.dropout:
            before = take("transient", scores)
            free(probabilities, *kept[1:])
            probabilities = before
        parts = []
        for size in (q, k):
            product = take("transient", size)
            parts.append(take("transient", size))
            free(product)
        free(probabilities, kept[0])
        packed = take("transient", q + 2 * k)
        free(*parts, value, *packed_kept)
        return packed

    def _free_all(self, held: _Held) -> None:
        for value in held.__dict__.values():
            self.free(*(value if isinstance(value, list) else [value]))

    def _optimizer_step(self) -> None:
        """count_zeros_fp32 compares each gradient with 0 (1 byte an element); then Adam, its moments at first use."""
        for size in self._each_parameter():
            self.free(self.take("transient", size))
        for number, size in enumerate(self._each_parameter()):
            for moment in ("first", "second"):
                self._keep_once("Adam's moments", 4 * size, f"{moment} {number}")


def trace(run: MegatronRun) -> Trace:
    """The run played to its steady state."""
    return Trace(run).play()


def parse(arguments: str) -> dict[str, str]:
    """``name=value`` words as golden rows have them.  Raises ConfigError on a word without a value."""
    parsed: dict[str, str] = {}
    for word in arguments.split():
        name, equals, value = word.partition("=")
        if equals:
            parsed[name] = value.strip('"')
    return parsed


def _flag(given: Mapping[str, str], name: str) -> bool:
    return given.get(name, "false") not in ("false", "False")


def megatron_run(arguments: str, gpu: str, num_gpus: int = 8, environment: str = "cublas", written: str = "") -> MegatronRun:
    """The run that arguments of a golden row describe.  Raises ConfigError that names what this module doesn't model.

    environment: ``cublas`` if the test sets CUBLAS_WORKSPACE_CONFIG, ``expandable`` if it sets expandable segments;
    written: the date at which the values were last written, 2026-07-01 for instance, where the code's age matters.
    """
    given = parse(arguments)

    def number(name: str, default: int | None = None) -> int:
        text = given.get(name)
        if text is None and default is not None:
            return default
        if text is None or not text.isdecimal() or not int(text):
            raise ConfigError(name, "must be given as a whole number above 0")
        return int(text)

    for name in ("num-experts", "multi-latent-attention", "fp8-format", "use-megatron-fsdp", "mtp-num-layers"):
        if name in given:
            raise ConfigError(name, "not modelled: only dense layers in 16 bits are")
    h, a, layers = number("hidden-size"), number("num-attention-heads"), number("num-layers")
    t, p = number("tensor-model-parallel-size", 1), number("pipeline-model-parallel-size", 1)
    cp = number("context-parallel-size", 1)
    if num_gpus % (t * p * cp):
        raise ConfigError("num_gpus", f"{num_gpus} can't hold t · p · cp = {t * p * cp}")
    dp = num_gpus // (t * p * cp)
    swiglu = _flag(given, "swiglu")
    ffn = number("ffn-hidden-size", 64 * int(4 * h * 2 / 3 / 64) if swiglu else 4 * h)
    if "num-layers-per-virtual-pipeline-stage" in given:
        chunks = layers // p // number("num-layers-per-virtual-pipeline-stage")
    else:
        chunks = number("num-virtual-stages-per-pipeline-rank", 1)
    per_chunk = [layers // (p * chunks)] * chunks
    if layers % (p * chunks):
        # --account-for-{embedding,loss}-in-pipeline-split: both count as a layer, the last chunk has the loss.
        per_chunk = [(layers + 2) // (p * chunks)] * chunks
        per_chunk[-1] -= 1
    if "decoder-last-pipeline-num-layers" in given:
        per_chunk = [number("decoder-last-pipeline-num-layers")]
    b = number("micro-batch-size")
    microbatches = number("global-batch-size", b * dp) // (b * dp)
    unit = number("make-vocab-size-divisible-by", 128) * t
    attention = given.get("attention-backend", "unfused" if given.get("transformer-impl") == "local" else "flash")
    instances = number("num-distributed-optimizer-instances", 1)
    sharded = _flag(given, "use-distributed-optimizer")
    newer_blackwell = gpu == "gb200" and (not written or written >= "2026-05")
    default_workspace = 32 * MIB if gpu == "h100" or newer_blackwell else 8 * MIB + 128 * KIB
    return MegatronRun(
        hidden_size=h,
        ffn_hidden_size=ffn,
        num_attention_heads=a,
        num_query_groups=number("num-query-groups", a) if _flag(given, "group-query-attention") else a,
        head_size=number("kv-channels", h // a),
        vocab_size=-(-number("vocab-size", 50257) // unit) * unit,
        seq_length=number("seq-length"),
        micro_batch_size=b,
        num_microbatches=microbatches,
        microbatch_group=number("microbatch-group-size-per-virtual-pipeline-stage", p),
        chunk_layers=tuple(per_chunk),
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        context_parallel_size=cp,
        data_parallel_size=dp,
        sequence_parallel=_flag(given, "sequence-parallel") and t > 1,
        optimizer_shards=dp * cp // instances if sharded else 0,
        overlap_grad_reduce=_flag(given, "overlap-grad-reduce"),
        flush_overlap=_flag(given, "overlap-p2p-communication-warmup-flush"),
        transformer_engine=given.get("transformer-impl", "transformer_engine") == "transformer_engine",
        attention=attention,
        dropout=float(given.get("hidden-dropout", "0.1")) > 0,
        linear_bias=not _flag(given, "disable-bias-linear"),
        swiglu=swiglu,
        rms_norm=given.get("normalization") == "RMSNorm",
        qk_layernorm=_flag(given, "qk-layernorm"),
        rotary=given.get("position-embedding-type") == "rope",
        tied_embeddings=not _flag(given, "untie-embeddings-and-output-weights"),
        full_recompute=given.get("recompute-granularity") == "full",
        mask_in_dataloader=not _flag(given, "no-create-attention-mask-in-dataloader"),
        hopper=gpu != "a100",
        workspace_bytes=32 * MIB if "cublas" in environment else default_workspace,
        expandable_segments="expandable" in environment,
        batches_kept=t == 1 and "2026-05-21" <= written <= "2026-07-06",
    )
