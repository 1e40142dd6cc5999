"""Plan a model in the user's own code or in Hugging Face's: does it fit on the GPUs, and what makes it fit?

A plan chooses how many of the model's first blocks are recomputed, how large a microbatch is, and whether every rank
holds all weights (DDP) or a shard of them (FSDP2).  The bytes come from formulas found in tiny runs of the model
(``actmem_tools.tape.extrapolate_blocks``).  The predicted bill is that of the code printed with the plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from actmem.config import LARGEST_SIZE, Parallel
from actmem.rows import Row, size_text, total
from actmem_tools.command_line import empty_table
from actmem_tools.config_file import Order
from actmem_tools.plan.optimizers import OPTIMIZERS, Optimizer
from actmem_tools.plan.planned_models import RankWork
from actmem_tools.plan.step_time import GIBIBYTE, Cluster, Shards, StepSeconds, data_seconds, work_seconds
from actmem_tools.tape.evaluate import GRADIENTS
from actmem_tools.tape.extrapolate_blocks import (
    LOSS_CODE,
    SELECTIVE,
    BlockModel,
    Need,
    Peak,
    Sharded,
    adapter_code,
    recompute_code,
)

if TYPE_CHECKING:  # only the screen needs it
    from rich.console import Console
    from rich.table import Table

#: The largest microbatch, in sequences, and the longest sequence, in tokens, that ``OwnModel.largest`` tries.
LARGEST = {"b": 2**14, "s": 2**24}
#: The values of ``--precision``, each with two dtypes: that of FSDP2's shards, with their gradients and optimizer
#: states; and that of gradients while they are reduced.
FSDP_DTYPES = {
    "mixed": ("float32", "float32"),
    "bf16-gradients": ("float32", "bfloat16"),
    "bf16": ("bfloat16", "bfloat16"),
}
#: See ``actmem_more.gpu_kernels``.
_OF_A_GPU = "The bill is of a GPU's kernels; of dropout, nn.RMSNorm and attention with dropout a CPU keeps more."
_SHARD = """from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
model.to(torch.{shard})
policy = MixedPrecisionPolicy(param_dtype=torch.{dtype}, reduce_dtype=torch.{reduce})
for block in model.{path}.children():
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)"""


@dataclass(frozen=True)
class StepOptions:
    """The choices of a plan: how a training step is run.

    Attributes:
        micro_batch_size: b, sequences in a microbatch.
        recomputed: how many of the model's first blocks are recomputed in backward.
        sharded: whether FSDP2 shards the weights; if not, every rank holds all of them (DDP).
        part: which part of each of these blocks is recomputed: "" for the whole block; the name of a module in it, such
            as "mlp"; "operations" for all but matmuls and attention; "every-second-matmul" for all but attention and
            every second matmul.
    """

    micro_batch_size: int
    recomputed: int
    sharded: bool
    part: str = ""


@dataclass(frozen=True)
class OwnModel:
    """A model in the user's own code, and the job that is to train it; its methods predict bytes and seconds.

    Args:
        parts: the formulas for memory and FLOPs.  A key names the part of a block that is recomputed, as
            ``StepOptions.part`` does; its value has the formulas of the model that recomputes this part.
        sizes: the model's sizes by letter, without b, such as ``{"s": 4096, "h": 2048}``.
        num_blocks: how many blocks the model has.
        cluster: the GPUs of the job.
        global_batch_size: sequences in one step, on all GPUs together.
        optimizer: the optimizer, one of ``OPTIMIZERS``.
        loss: how the loss is computed: "whole", all logits at once; or "chunked", in eight chunks of tokens.
        lora: rank of the LoRA adapters; 0 for none.
        precision: with FSDP2, the dtypes of shards and reduced gradients: "mixed", "bf16-gradients" or "bf16"
            (``FSDP_DTYPES``).  Without FSDP2 weights, gradients and states all have the dtype of the weights.
    """

    parts: Mapping[str, BlockModel]
    sizes: Mapping[str, int]
    num_blocks: int
    cluster: Cluster
    global_batch_size: int
    optimizer: Optimizer = OPTIMIZERS["adamw"]
    loss: str = "whole"
    lora: int = 0
    precision: str = "mixed"

    @property
    def blocks(self) -> BlockModel:
        """One of the values of ``parts``, to read what is the same in all of them, such as the weights' elements."""
        return next(iter(self.parts.values()))

    def num_elements(self) -> tuple[int, int, int]:
        """Count the elements of trained weights.

        Returns: three counts: all trained weights; those of one block; and those outside the blocks whose gradients
            backward computes before it reaches the blocks, such as the output layer's.
        """
        ends, block, early, *_ = self.blocks.num_elements({**self.sizes, "b": 2})
        return ends + self.num_blocks * block, block, early

    def num_frozen(self) -> int:
        """Count the elements of all weights that aren't trained."""
        *_, ends, block = self.blocks.num_elements({**self.sizes, "b": 2})
        return ends + self.num_blocks * block

    def may_shard(self) -> bool:
        """Return whether there are several GPUs and this library can plan FSDP2 for the model.

        FSDP2 can't be planned if some weights are frozen: the first block then computes no gradient of its input, and
        differs from the other blocks.  It can't be planned either if a block has several layers, because FSDP2 would
        gather each layer by itself.
        """
        return self.cluster.gpus > 1 and not self.num_frozen() and self.blocks.order == Order()

    @property
    def num_layers(self) -> int:
        """How many layers the model has: those in its blocks, and those before the first block."""
        return self.blocks.order.num_layers(self.num_blocks)

    def notes(self) -> list[str]:
        """Return sentences to print beside predicted bytes.

        They say for which sequences the bytes hold, and what is unusual in the model.
        """
        blocks, found = self.blocks, [_OF_A_GPU, *self.blocks.notes]
        if (blocks.shortest, blocks.longest, blocks.multiple) != (2, LARGEST_SIZE, 1):
            longest = f" to {blocks.longest:,}" if blocks.longest < LARGEST_SIZE else " on"
            longest += f", multiples of {blocks.multiple}" if blocks.multiple > 1 else ""
            found.append(f"It holds for sequences from {blocks.shortest:,} tokens{longest}; others run otherwise.")
        if blocks.order.after_encoder:
            found.append("The encoder runs as configured and saves all, on s tokens or speech of its own length.")
        elif blocks.order != Order():
            first = f"the first {blocks.order.first} once, " if blocks.order.first else ""
            found.append(f"Its layers are of several kinds: {first}then {blocks.order.period} again and again.")
            if self.cluster.gpus > 1:
                found.append("Sharded weights (FSDP2) are planned for layers of one kind only.")
        return found

    @property
    def _fsdp_sizes(self) -> list[int]:
        """Bytes of an element of FSDP2's shards, and of gradients while they are reduced."""
        return [4 if dtype == "float32" else 2 for dtype in FSDP_DTYPES[self.precision]]

    def num_microbatches(self, opts: StepOptions) -> int:
        """Return how many microbatches each rank runs in one step with these options."""
        return max(1, self.global_batch_size // (self.cluster.gpus * opts.micro_batch_size))

    def need(self, opts: StepOptions) -> Need:
        """Predict memory and FLOPs of the last microbatch of a step, on one rank.

        Args:
            opts: how the step is run.

        Returns: the bytes that forward saves, the peaks and the FLOPs.  Add the bytes of ``static_rows`` (weights,
            earlier gradients, optimizer states) to get all bytes.
        """
        sizes, whole = {**self.sizes, "b": opts.micro_batch_size}, self.num_blocks - opts.recomputed
        is_first, sharded = self.num_microbatches(opts) == 1, Sharded()
        if opts.sharded:
            block = self.num_elements()[1]
            shard, reduced = self._fsdp_sizes
            part = shard * -(-block // self.cluster.gpus) if is_first else 0
            sharded = Sharded(self.blocks.element_size * block, reduced * block, part)
        return self.parts[opts.part].need(sizes, opts.recomputed, whole, is_first and not opts.sharded, sharded)

    def static_rows(self, opts: StepOptions) -> list[Row]:
        """List the bytes that one rank holds during the whole step.

        Args:
            opts: how the step is run.

        Returns: a row each for the weights, the gradients that earlier microbatches have accumulated, the optimizer's
            states, and the buckets in which DDP reduces gradients.
        """
        whole, each, ranks = self.num_elements()[0], self.blocks.element_size, self.cluster.gpus
        number, size = self._held_weights(opts)
        if opts.sharded:
            # Each weight is sharded by rows, and padded for the last rank: that is at most a row more than counted.
            sources = (f"{FSDP_DTYPES[self.precision][0]}, 1/{ranks} of them",) * 3
        else:
            sources = ("as the factory makes them", "as weights; of an earlier microbatch", "as weights, each")
        rows = [Row("weights", size * (number + self.num_frozen()), source=sources[0])]
        if self.num_microbatches(opts) > 1:
            rows.append(Row(GRADIENTS, size * number, source=sources[1]))
        rows += [replace(row, source=sources[2]) for row in self._moments(number, size)]
        buckets = Row("DDP's buckets", each * whole, source="a copy of all gradients")
        return [*rows, buckets] if ranks > 1 and not opts.sharded else rows

    def _moments(self, elements: int, element_size: int) -> list[Row]:
        """List the optimizer's states for ``elements`` weights of ``element_size`` bytes.

        A state has the weights' element size, unless it is kept in 8 bits.
        """
        return [
            Row(state.term, elements * element_size if state.bytes_per_parameter == 4 else state.bytes_of(elements))
            for state in self.optimizer.states
        ]

    def _held_weights(self, opts: StepOptions) -> tuple[int, int]:
        """Return how many elements of trained weights one rank holds, and the bytes of one."""
        whole = self.num_elements()[0]
        if opts.sharded:
            return -(-whole // self.cluster.gpus), self._fsdp_sizes[0]
        return whole, self.blocks.element_size

    def _fsdp_rows(self, in_blocks: bool) -> list[Row]:
        """List the bytes that FSDP2 holds beside the shards, without those of other blocks, which ``need`` counts.

        While embedding or loss run, the next block's weights are gathered already.  While a block runs in backward, two
        kinds of gradients wait to be reduced: the block's, and those of the weights that backward reaches before the
        blocks, such as the output layer's.

        Args:
            in_blocks: True for a moment at which a block runs in backward; False for one in embedding or loss.
        """
        (whole, block, early), each = self.num_elements(), self.blocks.element_size
        ends = whole - self.num_blocks * block
        rows = [Row("gathered weights", each * (ends + block), source="FSDP2: the ends, a block")]
        if in_blocks:
            rows.append(Row("gathered gradients", each * (early + block), source="FSDP2: the head, a block"))
        return rows

    def _at_peak(self, opts: StepOptions) -> tuple[list[Row], Peak]:
        """Find the moment with the most bytes alive: in a microbatch, or in the optimizer's step.

        Returns: the rows that are alive at that moment beside ``static_rows``; and the peak of the tensors that the
            microbatch saves and makes, which is 0 in the optimizer's step.
        """
        need = self.need(opts)
        number, size = self._held_weights(opts)
        copied = size * number * self.optimizer.copies_in_step
        in_step = [Row("AdamW's copy", copied, source="foreach: the roots of the moments")]
        if self.num_microbatches(opts) == 1:
            in_step.insert(0, Row(GRADIENTS, size * number if opts.sharded else need.left_bytes))
        moments = [
            (self._fsdp_rows(in_blocks) if opts.sharded else [], peak)
            for in_blocks, peak in ((False, need.ends), (True, need.blocks))
        ]
        return max([*moments, (in_step, Peak(0))], key=lambda moment: total(moment[0]) + moment[1].bytes)

    def bill(self, opts: StepOptions) -> list[Row]:
        """List all bytes that one rank holds at the step's peak with these options, one row for each kind of tensor."""
        beside, peak = self._at_peak(opts)
        return [*self.static_rows(opts), *beside, *peak.rows]

    def bytes(self, opts: StepOptions) -> int:
        """Return the sum of ``bill`` in bytes; this is faster than to add up its rows."""
        beside, peak = self._at_peak(opts)
        return total([*self.static_rows(opts), *beside]) + peak.bytes

    def fits(self, opts: StepOptions) -> bool:
        """Return whether a step with these options fits into a GPU's memory with ``Cluster.allowance_bytes`` free."""
        return self.bytes(opts) <= self.cluster.usable_bytes

    def seconds(self, opts: StepOptions) -> StepSeconds:
        """Predict the seconds of one step with these options, split into computing, waiting and the optimizer's step.

        ``compute`` of the result includes recomputation, so ``recompute`` is 0.  ``tensor``, ``pipeline`` and
        ``bubble`` are 0 too, because all ranks are data-parallel.
        """
        need, ranks = self.need(opts), self.cluster.gpus
        (whole, block, _), number = self.num_elements(), self.num_microbatches(opts)
        compute = work_seconds(RankWork(need.matmul_flops, need.moved_bytes), self.cluster)
        each = self.blocks.element_size
        reduced = self._fsdp_sizes[1] if opts.sharded else each
        shards = Shards(block, whole - self.num_blocks * block, self.num_blocks, each, reduced)
        layout = Parallel(data_parallel_size=ranks, zero_stage=3 if opts.sharded else 0)
        of_block = compute / (3 * self.num_blocks)
        data, hidden = data_seconds(shards, layout, number, (of_block, 2 * of_block), self.cluster)
        held, size = self._held_weights(opts)
        # The step reads gradients, and reads and writes weights and states.
        moved = 3 * size * held + 2 * total(self._moments(held, size))
        step = moved / self.cluster.device.memory_bytes_per_second
        return StepSeconds(number * compute, 0, 0, 0, data, 0, step, hidden)

    def fewest_recomputed(self, opts: StepOptions) -> StepOptions | None:
        """Return ``opts`` with the fewest recomputed blocks with which the step fits; None if it fits with no number.

        The result has at least as many recomputed blocks as ``opts``.
        """
        if self.fits(opts):
            return opts
        # If nothing fits, no tape with both kinds of blocks is solved, which takes longest.
        if self.blocks.recompute or not self.fits(replace(opts, recomputed=self.num_blocks)):
            return None
        counts = range(opts.recomputed, self.num_blocks + 1)
        place = bisect_left(counts, True, key=lambda number: self.fits(replace(opts, recomputed=number)))
        return replace(opts, recomputed=counts[place])

    def fitting(self, asked: StepOptions) -> list[StepOptions]:
        """List the options with which the step fits, the fastest first.

        Every combination is tried of three choices: a microbatch of at most 64 sequences that divides the batch, a part
        of a block to recompute, and FSDP2 or not.  Each combination is listed with the fewest recomputed blocks with
        which it fits.

        Args:
            asked: the options that the user asked for; only their ``part`` is used.  Options that recompute no block
                are equal whatever their ``part`` is, so they are listed once, with the ``part`` of ``asked``.
        """
        rounds = self.global_batch_size // self.cluster.gpus
        found = {
            self.fewest_recomputed(StepOptions(size, 0, sharded, part))
            for part in self.parts
            for size in range(1, min(rounds, 64) + 1)
            if rounds % size == 0
            for sharded in ((False, True) if self.may_shard() else (False,))
        }
        different = {replace(opts, part=opts.part if opts.recomputed else asked.part) for opts in found if opts}
        return sorted(different, key=lambda opts: (self.seconds(opts).total, opts.recomputed, opts.part))

    def largest(self, letter: str, opts: StepOptions) -> int:
        """Return the largest microbatch or the longest sequence that fits; 0 if none does.

        Args:
            letter: "b" for the microbatch, in sequences (the number of microbatches in a step doesn't change); or "s"
                for the sequence, in tokens.
            opts: all other choices for the step.
        """

        def too_large(size: int) -> bool:
            if letter == "b":
                batch = self.num_microbatches(opts) * self.cluster.gpus * size
                return not replace(self, global_batch_size=batch).fits(replace(opts, micro_batch_size=size))
            return not replace(self, sizes={**self.sizes, letter: size}).fits(opts)

        # Tapes don't hold for one token, and where something runs in chunks only for whole ones.
        step, shortest, longest = self.blocks.multiple, self.blocks.shortest, min(LARGEST["s"], self.blocks.longest)
        lengths = range(-(-shortest // step) * step, longest + 1, step)
        sizes = range(1, LARGEST["b"] + 1) if letter == "b" else lengths
        place = bisect_left(sizes, True, key=too_large)
        return sizes[place - 1] if place else 0

    def code(self, opts: StepOptions, dtype: str) -> list[str]:
        """Return lines of Python that set these options on ``model``: loss, LoRA, recomputation, FSDP2 and optimizer.

        Args:
            opts: how the step is run.
            dtype: the dtype in which FSDP2 gathers weights, such as "bfloat16".
        """
        changes = f"{LOSS_CODE[self.loss]}\n{adapter_code(self.blocks.path, self.lora)}"
        lines = [line for line in changes.split("\n") if line]
        again = self.blocks.order.num_layers(opts.recomputed)
        lines += recompute_code(self.blocks.path, again, opts.part).split("\n") if again else []
        shard, reduce = FSDP_DTYPES[self.precision]
        code = _SHARD.format(path=self.blocks.path, dtype=dtype, shard=shard, reduce=reduce)
        lines += code.split("\n") if opts.sharded else []
        return lines + ([f"optimizer = {self.optimizer.code}"] if self.optimizer.code else [])


def options_text(opts: StepOptions, model: OwnModel) -> str:
    """Return one line of text with the microbatch, the recomputed blocks, and DDP or FSDP2.

    Args:
        opts: how the step is run.
        model: the model that is trained with these options.
    """
    layers, gpus = model.num_layers, model.cluster.gpus
    again = f"{model.blocks.order.num_layers(opts.recomputed)} of {layers} blocks" if opts.recomputed else "no block"
    if opts.recomputed and opts.part in SELECTIVE:
        again += f" but {SELECTIVE[opts.part][0]}"
    of_it = opts.part if opts.recomputed and opts.part not in SELECTIVE else ""
    again = f"{of_it} of {again} runs again" if of_it else f"{again} run{'s' * (opts.recomputed < 2)} again"
    if model.blocks.recompute:
        again = f"{layers} of {layers} blocks recompute already"
    spread = f", {'FSDP2' if opts.sharded else 'DDP'} on {gpus}" if gpus > 1 else ""
    return f"b {opts.micro_batch_size}, {again}{spread}"


def outcome(model: OwnModel, asked: StepOptions, dtype: str) -> dict:
    """Make the dict that ``actmem plan --json`` writes for a model in the user's own code.

    Args:
        model: the model and its job.
        asked: the options that the user asked for.
        dtype: the dtype in which FSDP2 gathers weights, such as "bfloat16".

    Returns: a dict with these keys.
        num_parameters: elements of all weights.
        num_trained: elements of the trained weights.
        blocks: a dict with the "path" of the blocks in the model, such as "model.layers", and the "number" of layers.
        sizes: the model's sizes by letter, without b.
        asked: the options asked for, as a dict with "text", "micro_batch_size", "blocks_again" (layers that are
            recomputed), "sharded" (by FSDP2, else DDP), "bytes" (needed on a GPU), "seconds" of a step, of which
            "waiting_seconds" wait for data-parallel collectives, "hidden_seconds" (collectives that run beside
            computation and are not in "seconds"), and "code" to paste.
        usable_bytes: memory of a GPU that a plan may fill.
        fits: whether the options asked for fit.
        bill: everything that one GPU holds at the peak with these options, a list of dicts with "term", "bytes" and
            "source".
        kept_bytes: bytes that forward saves for backward with these options.
        notes: sentences for the user (``OwnModel.notes``).
        ways: the three fastest options that fit, a list of dicts like "asked".
        all_blocks: a list of dicts like "asked": first the options asked for; then, for each part of a block that can
            be recomputed, the options with that part recomputed in all blocks. If the model itself recomputes, only the
            options asked for.
        largest: two dicts, "no block runs again" (left out if the model itself recomputes) and "all blocks run again".
            Each has the largest "b" that fits, and the largest "s" if the model has sequences.
    """

    def described(opts: StepOptions) -> dict:
        seconds = model.seconds(opts)
        return {
            "text": options_text(opts, model),
            "micro_batch_size": opts.micro_batch_size,
            "blocks_again": model.blocks.order.num_layers(opts.recomputed),
            "sharded": opts.sharded,
            "bytes": model.bytes(opts),
            "seconds": seconds.total,
            "waiting_seconds": seconds.data,
            "hidden_seconds": seconds.hidden,
            "code": model.code(opts, dtype),
        }

    every = replace(asked, recomputed=model.num_blocks)
    alike = {"no block runs again": asked, "all blocks run again": every}
    of_parts = [replace(every, part=part) for part in model.parts]
    if model.blocks.recompute:
        alike, of_parts = {"all blocks run again": asked}, []
    trained, frozen = model.num_elements()[0], model.num_frozen()
    letters = "bs" if "s" in model.sizes else "b"
    return {
        "num_parameters": trained + frozen,
        "num_trained": trained,
        "blocks": {"path": model.blocks.path, "number": model.num_layers},
        "sizes": dict(model.sizes),
        "asked": described(asked),
        "usable_bytes": model.cluster.usable_bytes,
        "fits": model.fits(asked),
        "bill": [{"term": row.term, "bytes": row.bytes, "source": row.source} for row in model.bill(asked)],
        "kept_bytes": model.need(asked).kept_bytes,
        "notes": model.notes(),
        "ways": [described(opts) for opts in model.fitting(asked)[:3]],
        "all_blocks": [described(opts) for opts in (asked, *of_parts)],
        "largest": {name: {letter: model.largest(letter, opts) for letter in letters} for name, opts in alike.items()},
    }


def print_outcome(console: Console, found: Mapping, cluster: Cluster) -> None:
    """Print a plan for a model in the user's own code in tables of at most 80 columns.

    Args:
        console: the console to print on.
        found: the plan as a dict (verdict, bill, fastest options), from ``outcome``.
        cluster: the GPUs of the job.
    """

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    def ways(title: str, some: Sequence[Mapping]) -> Table:
        made = empty_table(title, "plan", "s a step", "waits", "hidden", "GiB")
        for opts in some:
            seconds = (f"{opts[name]:,.3f}" for name in ("seconds", "waiting_seconds", "hidden_seconds"))
            made.add_row(opts["text"], *seconds, f"{opts['bytes'] / GIBIBYTE:.2f}")
        return made

    asked, usable = found["asked"], found["usable_bytes"]
    say(
        f"{found['num_parameters'] / 1e9:.2f} billion parameters, "
        f"{found['blocks']['number']} blocks in {found['blocks']['path']}"
    )
    if found["num_trained"] < found["num_parameters"]:
        say(f"{found['num_trained']:,} parameters are trained, the others get no gradient: whole on each GPU")
    sizes = "".join(f", {letter}={size}" for letter, size in found["sizes"].items())
    say(f"{asked['text']}{sizes}: {asked['bytes'] / GIBIBYTE:.2f} GiB needed, {usable / GIBIBYTE:.2f} there")
    over = asked["bytes"] - usable
    verdict = f"It doesn't fit: {size_text(over)} too much" if over > 0 else f"It fits: {size_text(-over)} free"
    largest = max(found["bill"], key=lambda line: line["bytes"])
    say(f"{verdict}; the largest line is {largest['term']}, {largest['bytes'] / GIBIBYTE:.2f} GiB")
    bill, rest = empty_table("The bill", "line", "GiB", "source"), found["bill"][16:]
    smaller = {"term": f"{len(rest)} smaller lines", "bytes": sum(line["bytes"] for line in rest), "source": ""}
    for line in [*found["bill"][:16], *([smaller] if rest else [])]:
        bill.add_row(line["term"][:42], f"{line['bytes'] / GIBIBYTE:.2f}", line["source"])
    bill.add_row("together", f"{asked['bytes'] / GIBIBYTE:.2f}", "", style="bold")
    console.print(bill)
    for note in found["notes"]:
        say(note)
    if found["ways"]:
        console.print(ways(f"Fits, fastest first, by {cluster.device.name}'s data sheet", found["ways"]))
    else:
        say("Nothing fits: neither with every block again nor, on several GPUs, sharded.")
    console.print(ways("With all blocks alike", found["all_blocks"]))
    for name, most in found["largest"].items():
        each = [f"{x} = {size:,}{' or more' if size == LARGEST[x] else ''}" for x, size in most.items()]
        say(f"The largest that fits if {name}: " + f"; at b = {asked['micro_batch_size']}, ".join(each))
    if found["ways"] and found["ways"][0]["code"]:
        say(f"\nFor {found['ways'][0]['text']}:")
        say("\n".join(found["ways"][0]["code"]))
