"""A model that a factory or a Hugging Face ``config.json`` makes: whether it fits, and what makes it fit.

On one GPU or several.  Its blocks are solved from tiny runs (``actmem_tools.tape.extrapolate_blocks``).  What is
planned: how many of the first blocks recompute, the microbatch, and the weights on every rank or sharded as FSDP2 does
it.  The bill is of the code that is printed with it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from actmem.config import LARGEST_SIZE, Parallel
from actmem.rows import Row, total
from actmem_tools.command_line import empty_table
from actmem_tools.config_file import Order
from actmem_tools.plan.optimizers import OPTIMIZERS, Optimizer
from actmem_tools.plan.planned_models import RankWork
from actmem_tools.plan.step_time import GIBIBYTE, Cluster, Shards, StepSeconds, data_seconds, gib_or_mib, work_seconds
from actmem_tools.tape.evaluate import GRADIENTS
from actmem_tools.tape.extrapolate_blocks import (
    LOSS_CHUNKS,
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

#: Above these ``largest`` doesn't look.
LARGEST = {"b": 2**14, "s": 2**24}
_SHARD = """from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
policy = MixedPrecisionPolicy(param_dtype=torch.{dtype}, reduce_dtype=torch.float32)
for block in model.{path}.children():
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)"""


@dataclass(frozen=True)
class Way:
    """One way to run a step.  again: blocks of which ``part`` is recomputed, ``""`` all of it.

    sharded: by FSDP2, with float32 shards; else weights are whole on every rank.
    """

    micro_batch_size: int
    again: int
    sharded: bool
    part: str = ""


@dataclass(frozen=True)
class OwnModel:
    """A model of one's own, and the job that is to train it.

    Args:
        parts: tapes, by what of a block is recomputed.
        sizes: without b.
        global_batch_size: sequences of one step.
        lora: rank of the adapters, 0 for none.
    """

    parts: Mapping[str, BlockModel]
    sizes: Mapping[str, int]
    num_blocks: int
    cluster: Cluster
    global_batch_size: int
    optimizer: Optimizer = OPTIMIZERS["adamw"]
    loss: str = "whole"
    lora: int = 0

    @property
    def blocks(self) -> BlockModel:
        """What is the same whatever is recomputed."""
        return next(iter(self.parts.values()))

    def num_elements(self) -> tuple[int, int, int]:
        """Of all weights that are trained, of those of one block, and of those after the blocks."""
        ends, block, early, *_ = self.blocks.num_elements({**self.sizes, "b": 2})
        return ends + self.num_blocks * block, block, early

    def num_frozen(self) -> int:
        """Elements of all weights that aren't trained."""
        *_, ends, block = self.blocks.num_elements({**self.sizes, "b": 2})
        return ends + self.num_blocks * block

    def may_shard(self) -> bool:
        """Whether FSDP2 is planned.

        Not with frozen weights: their first block has no gradient of its input, and differs from the others.  Nor with
        blocks of several layers, each of which FSDP2 would gather alone.
        """
        return self.cluster.gpus > 1 and not self.num_frozen() and self.blocks.order == Order()

    @property
    def num_layers(self) -> int:
        """Of the whole model, in blocks and before them."""
        return self.blocks.order.num_layers(self.num_blocks)

    def notes(self) -> list[str]:
        """What else is to be known of the bill."""
        blocks, found = self.blocks, [*self.blocks.notes]
        if (blocks.shortest, blocks.longest) != (2, LARGEST_SIZE):
            longest = f" to {blocks.longest:,}" if blocks.longest < LARGEST_SIZE else " on"
            found.append(f"It holds for sequences from {blocks.shortest:,}{longest} tokens; others run otherwise.")
        if blocks.order != Order():
            first = f"the first {blocks.order.first} once, " if blocks.order.first else ""
            found.append(f"Its layers are of several kinds: {first}then {blocks.order.period} again and again.")
            if self.cluster.gpus > 1:
                found.append("Sharded weights (FSDP2) are planned for layers of one kind only.")
        return found

    def num_microbatches(self, way: Way) -> int:
        """Of one step, on each rank."""
        return max(1, self.global_batch_size // (self.cluster.gpus * way.micro_batch_size))

    def need(self, way: Way) -> Need:
        """Of a microbatch, on one rank, the last of the step if it has several."""
        sizes, whole = {**self.sizes, "b": way.micro_batch_size}, self.num_blocks - way.again
        is_first, sharded = self.num_microbatches(way) == 1, Sharded()
        if way.sharded:
            block = self.num_elements()[1]
            part = 4 * -(-block // self.cluster.gpus) if is_first else 0
            sharded = Sharded(self.blocks.element_size * block, 4 * block, part)
        return self.parts[way.part].need(sizes, way.again, whole, is_first and not way.sharded, sharded)

    def static_rows(self, way: Way) -> list[Row]:
        """Weights, gradients of earlier microbatches, the optimizer's states, and of DDP its buckets."""
        whole, each, ranks = self.num_elements()[0], self.blocks.element_size, self.cluster.gpus
        number, size = self._held_weights(way)
        if way.sharded:
            # Every weight is sharded by rows, the last rank's are padded: at most a row more than this.
            sources = (f"float32, 1/{ranks} of them",) * 3
        else:
            sources = ("as the factory makes them", "as weights; of an earlier microbatch", "as weights, each")
        rows = [Row("weights", size * (number + self.num_frozen()), source=sources[0])]
        if self.num_microbatches(way) > 1:
            rows.append(Row(GRADIENTS, size * number, source=sources[1]))
        rows += [replace(row, source=sources[2]) for row in self._moments(number, size)]
        buckets = Row("DDP's buckets", each * whole, source="a copy of all gradients")
        return [*rows, buckets] if ranks > 1 and not way.sharded else rows

    def _moments(self, elements: int, element_size: int) -> list[Row]:
        """The optimizer's states of so many weights, each as wide as a weight unless it has eight bits."""
        return [
            Row(state.term, elements * element_size if state.bytes_per_parameter == 4 else state.bytes_of(elements))
            for state in self.optimizer.states
        ]

    def _held_weights(self, way: Way) -> tuple[int, int]:
        """Trained weights that one rank holds, and bytes of an element of them."""
        whole = self.num_elements()[0]
        return (-(-whole // self.cluster.gpus), 4) if way.sharded else (whole, self.blocks.element_size)

    def _fsdp_rows(self, in_blocks: bool) -> list[Row]:
        """What FSDP2 holds beside shards, and beside what ``need`` has of other blocks.

        While embedding and loss run, a block is gathered already.
        In a block its gradients, and those of what ran before all blocks, wait for their division.
        """
        (whole, block, early), each = self.num_elements(), self.blocks.element_size
        ends = whole - self.num_blocks * block
        rows = [Row("gathered weights", each * (ends + block), source="FSDP2: the ends, a block")]
        if in_blocks:
            rows.append(Row("gathered gradients", each * (early + block), source="FSDP2: the head, a block"))
        return rows

    def _at_peak(self, way: Way) -> tuple[list[Row], Peak]:
        """The fullest moment of a microbatch's step, or of the optimizer's, which with ``foreach`` may copy.

        Returns: what is there beside weights and states, and of a microbatch what it has made besides.
        """
        need = self.need(way)
        number, size = self._held_weights(way)
        copied = size * number * self.optimizer.copies_in_step
        in_step = [Row("AdamW's copy", copied, source="foreach: the roots of the moments")]
        if self.num_microbatches(way) == 1:
            in_step.insert(0, Row(GRADIENTS, size * number))
        moments = [
            (self._fsdp_rows(in_blocks) if way.sharded else [], peak)
            for in_blocks, peak in ((False, need.ends), (True, need.blocks))
        ]
        return max([*moments, (in_step, Peak(0))], key=lambda moment: total(moment[0]) + moment[1].bytes)

    def bill(self, way: Way) -> list[Row]:
        """Everything at the peak."""
        beside, peak = self._at_peak(way)
        return [*self.static_rows(way), *beside, *peak.rows]

    def bytes(self, way: Way) -> int:
        """Of ``bill``."""
        beside, peak = self._at_peak(way)
        return total([*self.static_rows(way), *beside]) + peak.bytes

    def fits(self, way: Way) -> bool:
        """Whether it leaves the allowance free."""
        return self.bytes(way) <= self.cluster.usable_bytes

    def seconds(self, way: Way) -> StepSeconds:
        """Of one step; what is recomputed is in ``compute``."""
        need, ranks = self.need(way), self.cluster.gpus
        (whole, block, _), number = self.num_elements(), self.num_microbatches(way)
        compute = work_seconds(RankWork(need.matmul_flops, need.moved_bytes), self.cluster)
        each = self.blocks.element_size
        shards = Shards(block, whole - self.num_blocks * block, self.num_blocks, each, 4 if way.sharded else each)
        layout = Parallel(data_parallel_size=ranks, zero_stage=3 if way.sharded else 0)
        of_block = compute / (3 * self.num_blocks)
        data, hidden = data_seconds(shards, layout, number, (of_block, 2 * of_block), self.cluster)
        held, size = self._held_weights(way)
        # Gradients are read, weights and states read and written.
        moved = 3 * size * held + 2 * total(self._moments(held, size))
        step = moved / self.cluster.device.memory_bytes_per_second
        return StepSeconds(number * compute, 0, 0, 0, data, 0, step, hidden)

    def fewest_again(self, way: Way) -> Way | None:
        """The way with as few recomputed blocks as fit, or None."""
        if self.fits(way) or self.blocks.recompute:  # then no tape of blocks of both kinds has to be solved
            return way if self.fits(way) else None
        counts = range(way.again, self.num_blocks + 1)
        place = bisect_left(counts, True, key=lambda again: self.fits(replace(way, again=again)))
        return replace(way, again=counts[place]) if place < len(counts) else None

    def ways(self, asked: Way) -> list[Way]:
        """Those that fit, fastest first.

        Each microbatch that divides the batch, sharded or not, with as few recomputed blocks as fit.
        """
        rounds = self.global_batch_size // self.cluster.gpus
        found = {
            self.fewest_again(Way(size, 0, sharded, part))
            for part in self.parts
            for size in range(1, min(rounds, 64) + 1)
            if rounds % size == 0
            for sharded in ((False, True) if self.may_shard() else (False,))
        }
        different = {replace(way, part=way.part if way.again else asked.part) for way in found if way}
        return sorted(different, key=lambda way: (self.seconds(way).total, way.again, way.part))

    def largest(self, letter: str, way: Way) -> int:
        """The largest b or s that fits this way, 0 if none does."""

        def too_large(size: int) -> bool:
            if letter == "b":  # with as many microbatches a step
                batch = self.num_microbatches(way) * self.cluster.gpus * size
                return not replace(self, global_batch_size=batch).fits(replace(way, micro_batch_size=size))
            return not replace(self, sizes={**self.sizes, letter: size}).fits(way)

        # No tape has runs of one token, and one with chunks has whole ones.
        step = LOSS_CHUNKS if LOSS_CODE[self.loss] else 1
        shortest, longest = self.blocks.shortest, min(LARGEST["s"], self.blocks.longest)
        lengths = range(-(-shortest // step) * step, longest + 1, step)
        sizes = range(1, LARGEST["b"] + 1) if letter == "b" else lengths
        place = bisect_left(sizes, True, key=too_large)
        return sizes[place - 1] if place else 0

    def code(self, way: Way, dtype: str) -> list[str]:
        """What to paste."""
        changes = f"{LOSS_CODE[self.loss]}\n{adapter_code(self.blocks.path, self.lora)}"
        lines = [line for line in changes.split("\n") if line]
        again = self.blocks.order.num_layers(way.again)
        lines += recompute_code(self.blocks.path, again, way.part).split("\n") if again else []
        lines += _SHARD.format(path=self.blocks.path, dtype=dtype).split("\n") if way.sharded else []
        return lines + ([f"optimizer = {self.optimizer.code}"] if self.optimizer.code else [])


def way_text(way: Way, model: OwnModel) -> str:
    """A way in one line."""
    layers, gpus = model.num_layers, model.cluster.gpus
    again = f"{model.blocks.order.num_layers(way.again)} of {layers} blocks" if way.again else "no block"
    if way.again and way.part in SELECTIVE:
        again += f" but {SELECTIVE[way.part][0]}"
    of_it = way.part if way.again and way.part not in SELECTIVE else ""
    again = f"{of_it} of {again} runs again" if of_it else f"{again} run{'s' * (way.again < 2)} again"
    if model.blocks.recompute:
        again = f"{layers} of {layers} blocks recompute already"
    spread = f", {'FSDP2' if way.sharded else 'DDP'} on {gpus}" if gpus > 1 else ""
    return f"b {way.micro_batch_size}, {again}{spread}"


def outcome(model: OwnModel, asked: Way, dtype: str) -> dict:
    """The whole outcome: plain numbers and text."""

    def described(way: Way) -> dict:
        seconds = model.seconds(way)
        return {
            "text": way_text(way, model),
            "micro_batch_size": way.micro_batch_size,
            "blocks_again": model.blocks.order.num_layers(way.again),
            "sharded": way.sharded,
            "bytes": model.bytes(way),
            "seconds": seconds.total,
            "waiting_seconds": seconds.data,
            "hidden_seconds": seconds.hidden,
            "code": model.code(way, dtype),
        }

    every = replace(asked, again=model.num_blocks)
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
        "ways": [described(way) for way in model.ways(asked)[:3]],
        "all_blocks": [described(way) for way in (asked, *of_parts)],
        "largest": {name: {letter: model.largest(letter, way) for letter in letters} for name, way in alike.items()},
    }


def print_outcome(console: Console, found: Mapping, cluster: Cluster) -> None:
    """``outcome``, in tables of at most 80 columns."""

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    def ways(title: str, some: Sequence[Mapping]) -> Table:
        made = empty_table(title, "plan", "s a step", "waits", "hidden", "GiB")
        for way in some:
            seconds = (f"{way[name]:,.3f}" for name in ("seconds", "waiting_seconds", "hidden_seconds"))
            made.add_row(way["text"], *seconds, f"{way['bytes'] / GIBIBYTE:.2f}")
        return made

    asked, usable = found["asked"], found["usable_bytes"]
    say(
        f"{found['num_parameters'] / 1e9:.2f} billion parameters, "
        f"{found['blocks']['number']} blocks in {found['blocks']['path']}"
    )
    if found["num_trained"] < found["num_parameters"]:
        say(f"{found['num_trained']:,} parameters are trained, the others frozen: whole on each GPU")
    sizes = "".join(f", {letter}={size}" for letter, size in found["sizes"].items())
    say(f"{asked['text']}{sizes}: {asked['bytes'] / GIBIBYTE:.2f} GiB needed, {usable / GIBIBYTE:.2f} there")
    over = asked["bytes"] - usable
    verdict = f"It doesn't fit: {gib_or_mib(over)} too much" if over > 0 else f"It fits: {gib_or_mib(-over)} free"
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
