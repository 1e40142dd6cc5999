"""Predict memory and FLOPs of a step of a model with any number of equal blocks, from tapes with one to three blocks.

Some of the first blocks may be recomputed in backward; the others save everything.  A tape (``tape.evaluate``) has a
fixed number of blocks of each kind.  The bytes that one more block adds are found by comparing two tapes, of which one
has a block more:

1. Align the two tapes at the moment where forward ends and backward begins.  After it both run the same operations, and
   the longer tape holds the saved bytes of exactly one more block.  That is so until the shorter tape's only block
   frees tensors that all blocks share, such as tables of rotary positions.
2. From that moment on only the longer tape is read.  Its second block in backward adds to gradients that the first one
   has made.
3. Every later block of backward does the same as the second, while fewer blocks still hold saved tensors.

While the last of the shorter tape's blocks runs, both tapes are compared at the same operation.  What the longer one
has more is what each further block holds after it has run: its gradients, and its part of a gradient that all blocks
add to.  In forward, the block that runs last is read on the longer tape, as it may find more alive than the only block
of the shorter one.

One exception: if the first block makes a tensor that all others read, as T5's makes its table of positions, the second
block saves it too when it is recomputed, and no later block does.  Then the two tapes have one recomputed block more
(``BlockModel.fewest``).

``model_tape.solved_blocks`` makes the tapes, and checks this rule on a run with more blocks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import accumulate, pairwise, product

from actmem.config import LARGEST_SIZE, ConfigError
from actmem.rows import Row, by_term
from actmem_tools.config_file import Order
from actmem_tools.tape.evaluate import (
    BACKWARD,
    GRADIENTS,
    NOTHING,
    Event,
    Formula,
    Free,
    Make,
    Mark,
    Resize,
    Run,
    Tape,
    alive_after,
    first_microbatch,
    used_in,
    value,
)

#: Pairs of tapes that differ by one block: how many blocks each recomputes, and how many save everything.
_PAIRS = ((0, 1), (0, 2)), ((1, 0), (2, 0))

#: Parts of a block that are the whole block without some operations.  Each has a phrase for the operations whose
#: results are saved, and a Python condition for the saved matmuls.  "every-second-matmul" is torchtitan's.
SELECTIVE = {
    "operations": ("matmuls and attention", "True"),
    "every-second-matmul": ("attention and every second matmul", "matmuls[ctx.is_recompute] % 2"),
}
_RECOMPUTE = """from functools import partial
from torch.utils.checkpoint import checkpoint
for block in list(model.{path}.children())[:{again}]:
    {part}.forward = partial(checkpoint, {part}.forward, use_reentrant=False)"""
_RECOMPUTE_SELECTIVE = """from collections import Counter
from functools import partial
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
def contexts():
    matmuls = Counter()
    def policy(ctx, op, *args, **kwargs):
        is_matmul = op.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
        matmuls[ctx.is_recompute] += is_matmul
        save = "dot_product" in op.name() or is_matmul and {saved}
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE
    return create_selective_checkpoint_contexts(policy)
for block in list(model.{path}.children())[:{again}]:
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)"""

_ADAPTERS = """from torch import nn
class Adapted(nn.Module):
    def __init__(self, linear, rank):
        super().__init__()
        like = {{"device": linear.weight.device, "dtype": linear.weight.dtype}}
        self.linear, self.down = linear, nn.Linear(linear.in_features, rank, bias=False, **like)
        self.up = nn.Linear(rank, linear.out_features, bias=False, **like)
        nn.init.zeros_(self.up.weight)
    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))
model.requires_grad_(False)
for parent in [*model.{path}.modules()]:
    for name, linear in [*parent.named_children()]:
        if isinstance(linear, nn.Linear):
            setattr(parent, name, Adapted(linear, {rank}))"""
#: How many chunks a chunked loss has.
LOSS_CHUNKS = 8
#: The values of ``--loss``, each with Python code that makes a Hugging Face model compute that loss; "": no change.
LOSS_CODE = {
    "whole": "",
    "chunked": f"""from torch.nn.functional import pad
from actmem_more.chunked_loss import LinearCrossEntropy
from actmem.parallel.groups import TensorParallel
def forward(input_ids, labels, attention_mask=None):
    x = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    targets = pad(labels[:, 1:], (0, 1), value=-100)
    in_chunks = LinearCrossEntropy(TensorParallel(), chunk=-(-targets.numel() // {LOSS_CHUNKS}))
    losses = in_chunks(x, model.get_output_embeddings().weight, targets)
    return {{"loss": losses.sum() / (targets != -100).sum()}}
model.forward = forward""",
}


def place_of(path: str) -> str:
    """Return the Python expression that follows ``model.`` to get the submodule at a path.

    Args:
        path: the submodule's name, as in ``named_modules()``.

    Returns: the path itself, such as ``layers``; if a name in the path is a number, as in a Sequential, a call such as
        ``get_submodule("1.0")``.
    """
    return path if all(map(str.isidentifier, path.split("."))) else f'get_submodule("{path}")'


def adapter_code(path: str, rank: int) -> str:
    """Return Python code that freezes ``model`` and adds a LoRA adapter to each linear layer in its blocks.

    Args:
        path: where the blocks are: the expression after ``model.``, from ``place_of``.
        rank: the adapters' rank; 0 for none.

    Returns: the code; "" for rank 0.
    """
    return _ADAPTERS.format(path=path, rank=rank) if rank else ""


def recompute_code(path: str, again: int, part: str) -> str:
    """Return Python code that makes ``model`` recompute its first blocks in backward, or a part of each.

    Args:
        path: where the blocks are: the expression after ``model.``, from ``place_of``.
        again: how many of the blocks are recomputed.
        part: which part of a block is recomputed: "" for the whole block; "operations" for all but matmuls and
            attention; "every-second-matmul" for all but attention and every second matmul; or the name of a module in
            the block, such as "mlp".
    """
    if part in SELECTIVE:
        return _RECOMPUTE_SELECTIVE.format(path=path, again=again, saved=SELECTIVE[part][1])
    return _RECOMPUTE.format(path=path, again=again, part=f"block.{place_of(part)}" if part else "block")


@dataclass(frozen=True)
class Peak:
    """The most bytes that are alive after any operation.

    Attributes:
        bytes: the number of these bytes.
        named_rows: a function that returns ``rows``, because finding the names takes longer than finding the bytes.
    """

    bytes: int
    named_rows: Callable[[], tuple[Row, ...]] = field(default=tuple, repr=False, compare=False)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """A row for each name of the storages that are alive at this moment, the largest first."""
        return self.named_rows()


@dataclass(frozen=True)
class Sharded:
    """Bytes of one block's weights and gradients under FSDP2, which shards them among the ranks.

    Attributes:
        weights: bytes of all weights of the block, gathered; they are gathered while the block before it runs.
        gradients: bytes of all gradients of the block in the dtype in which they are reduced; they are alive until the
            next block has run.
        part: bytes of this rank's shard of the gradients, which stays alive after that.
    """

    weights: int = 0
    gradients: int = 0
    part: int = 0


@dataclass(frozen=True)
class Need:
    """Memory and FLOPs of one microbatch on one rank, without weights, their gradients, buffers and inputs.

    Attributes:
        kept_bytes: bytes alive when forward ends.
        left_bytes: bytes alive when backward ends: in a step's first microbatch the weights' gradients, of which one
            can be a view of a larger tensor.
        ends: the peak from the start of forward, through the loss, until backward reaches the blocks.
        blocks: the peak of backward from the blocks on.
        matmul_flops: FLOPs of all matmuls and attention, in forward, backward and recomputation.
        moved_bytes: bytes that operations read and write, in forward, backward and recomputation.
    """

    kept_bytes: int
    left_bytes: int
    ends: Peak
    blocks: Peak
    matmul_flops: int
    moved_bytes: int

    @property
    def peak(self) -> Peak:
        """The peak of the whole microbatch."""
        return max(self.ends, self.blocks, key=lambda peak: peak.bytes)


@dataclass(frozen=True)
class BlockModel:
    """A model made of equal blocks; ``need`` predicts memory and FLOPs for any number of them.

    A block is one layer, or a group of layers of different kinds that repeats.  The prediction compares tapes with few
    blocks, to find the bytes that one more block adds.  If the batch size b or another size is 1, torch may run other
    operations, so such sizes have tapes of their own.

    Attributes:
        tapes: a function that returns the tape of a model with few blocks.  Its arguments are the number of blocks that
            are recomputed, the number of blocks that save everything, and whether b is 1.
        path: where the blocks are: the Python expression after ``model.``, such as "layers".
        elements: five formulas, for how many elements the weights in and outside the blocks have (``num_elements``).
        element_size: bytes of a weight's element.
        order: how many layers a block has, and how many layers come before the first block.
        notes: sentences for the user on what is unusual in the model.
        recompute: whether the model's own code recomputes every block in backward.
        shortest: the shortest sequence for which the tapes are valid.
        longest: the longest sequence for which the tapes are valid and which the model can read.
        multiple: the number that must divide a sequence's length.
        names: a function that returns names for the storages of one of ``tapes``, by the storage's number.  Its
            arguments are the number of recomputed blocks, the number of saving blocks, and the letters of the sizes
            that are 1.
            Storages that the result leaves out keep the name of their operation.
        fewest: a function without arguments.  It returns how many recomputed blocks a tape must have so that every
            further recomputed block adds the same bytes: 1; or 2 if the first block makes a tensor that all blocks
            share, as T5's does.
    """

    tapes: Callable[[int, int, bool], Tape]
    path: str
    elements: tuple[Formula, ...]
    element_size: int
    order: Order = Order()
    notes: tuple[str, ...] = ()
    recompute: bool = False
    shortest: int = 2
    longest: int = LARGEST_SIZE
    multiple: int = 1
    names: Callable[[int, int, tuple[str, ...]], Mapping[int, str]] = lambda again, whole, ones: {}
    fewest: Callable[[], int] = lambda: 1

    @property
    def letters(self) -> tuple[str, ...]:
        """The letters of the sizes that ``need`` takes."""
        return self.tapes(0, 1, False).letters

    def num_elements(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the numbers of elements of the model's weights at these sizes.

        Returns: five counts.  Of trained weights: those outside the blocks; those of one block; and those outside the
            blocks whose gradients backward computes before it reaches the blocks, such as the output layer's.  Of
            frozen weights: those outside the blocks, and those of one block.
        """
        in_order = [sizes[letter] for letter in self.letters]
        return tuple(value(formula, in_order) for formula in self.elements)

    def need(
        self,
        sizes: Mapping[str, int],
        recomputed: int,
        saving: int,
        is_first: bool = False,
        sharded: Sharded = Sharded(),
    ) -> Need:
        """Predict memory and FLOPs of one microbatch.

        Args:
            sizes: the model's sizes by letter.
            recomputed: how many of the first blocks are recomputed.
            saving: how many blocks, after the recomputed ones, save everything.
            is_first: whether this is the step's first microbatch, whose gradients stay as the weights' ``.grad``.
            sharded: bytes of a block's weights and gradients under FSDP2; by default there is no FSDP2.
        """
        again, whole = min(recomputed, self.fewest() if recomputed > 1 else 1), min(saving, 1)
        at = tuple(sizes.items())
        fewest = self._moments(again, whole, at, is_first)  # solved first: its runs are the shortest
        more = [(recomputed - again, self._moments(again + 1, whole, at, is_first))] if recomputed else []
        more += [(saving - whole, self._moments(again, whole + 1, at, is_first))] if saving else []
        return fewest.with_more(more, [number for number in (again, whole) if number], self._head(at), sharded)

    def _head(self, at: tuple) -> int:
        """Count the operations of backward before its first block.

        The number is the same at all sizes above 1.  The operations that follow a tape's only block can begin as a
        block does, which makes the count too large; so the smaller of two counts is taken, one with recomputed blocks
        and one with saving blocks.
        """
        sizes = dict(at)
        is_one = sizes.get("b") == 1
        pairs = [
            [self._structure(*each, self.tapes(*each, is_one).ones(sizes), False) for each in pair] for pair in _PAIRS
        ]
        return min(shorter.num_same(longer) - shorter.num_more(longer) for shorter, longer in pairs)

    @cached_property
    def _structure(self) -> Callable[[int, int, tuple[str, ...], bool], _Structure]:
        return cache(
            lambda recomputed, saving, ones, is_first: _Structure(
                self.tapes(recomputed, saving, "b" in ones).variants[ones],
                is_first,
                partial(self.names, recomputed, saving, ones),
            )
        )

    @cached_property
    def _moments(self) -> Callable[[int, int, tuple, bool], _Moments]:
        """Make ``_Moments``, and remember the latest: a search varies only the number of blocks."""

        def made(recomputed: int, saving: int, at: tuple, is_first: bool) -> _Moments:
            sizes = dict(at)
            tape = self.tapes(recomputed, saving, sizes.get("b") == 1)
            tape.check(sizes)
            structure = self._structure(recomputed, saving, tape.ones(sizes), is_first)
            return _Moments(structure, tape.values(structure.used, sizes))

        return lru_cache(32)(made)


def fewest_alike(model: BlockModel, check: Callable[[BlockModel, int, int], object]) -> int:
    """Return how many recomputed blocks a tape must have so that every further one adds the same bytes: 1 or 2.

    The result is 1 if a prediction made with 1 is right.  The caller makes ``BlockModel.fewest`` return the result.

    Args:
        model: the model whose prediction is checked.
        check: called with a model, a number of recomputed blocks and a number of saving blocks.  It runs the real model
            with these blocks, and raises ConfigError if the prediction of the given model is wrong.

    Raises: ConfigError if the prediction is wrong with both 1 and 2.
    """
    try:
        check(replace(model, fewest=lambda: 1), 3, 0)
        return 1
    except ConfigError:
        check(replace(model, fewest=lambda: 2), 4, 0)
        return 2


@dataclass(frozen=True)
class _Moment:
    """A moment of a model with more blocks than a tape has.

    Attributes:
        bytes: bytes alive at this moment, of all blocks together.
        tape: the tape that is read.
        place: the moment is right after the tape's event with this index.
        waiting: for each kind of block, how many blocks beyond the tape's own still hold the tensors that they saved.
        others: a dict from names to further bytes: gradients of blocks that have run, and tensors that FSDP2 holds.
    """

    bytes: int
    tape: _Moments
    place: int
    waiting: list[int]
    others: dict[str, int]


class _Structure:
    """The operations and changes of memory of a tape, with indices of formulas in place of sizes.

    Args:
        events: the tape's events.
        is_first: whether to read the events as those of a step's first microbatch.
        names: a function that returns the names of storages by their numbers.

    Attributes:
        used: the indices of all formulas that the events have.
        changes: for each event a pair: the size that is made and the size that is freed; ``NOTHING`` for none.
        forward: the operations of forward, the last first: pairs of the name and the index of the event.
        backward: the operations of backward in order: pairs of the name and the index of the event.
        end: the index of the event at which backward begins.
        flops: for each index of a formula, how often its value is added to the FLOPs.
        moved: for each index of a formula, how often its value is added to the bytes that are read and written.
    """

    def __init__(self, events: Sequence[Event], is_first: bool, names: Callable[[], Mapping[int, str]]):
        self.events, self.names = first_microbatch(events) if is_first else events, names
        self.used = used_in(self.events)
        self.changes: list[tuple[int, int]] = []
        self.forward: list[tuple[str, int]] = []
        self.backward: list[tuple[str, int]] = []
        self.flops: Counter[int] = Counter()
        self.moved: Counter[int] = Counter()
        phase, alive = self.forward, dict[int, int]()
        for place, event in enumerate(self.events):
            gone = alive.pop(event.number, NOTHING) if isinstance(event, (Free, Resize)) else NOTHING
            if isinstance(event, Make) or (isinstance(event, Resize) and gone != NOTHING):
                alive[event.number] = event.bytes
            come = alive.get(event.number, NOTHING) if isinstance(event, (Make, Resize)) else NOTHING
            self.changes.append((come, gone))
            if isinstance(event, Mark) and event.name == BACKWARD:
                self.end, phase = place, self.backward
            elif isinstance(event, Run):
                phase.append((event.op, place))
                self.flops[event.flops] += 1
                self.moved.update([*event.read, *event.written])
        self.forward.reverse()

    def num_same(self, other: _Structure) -> int:
        """Count the operations at the beginning of backward that are the same in the other tape."""
        pairs = zip(self.backward, other.backward)
        return next((i for i, (mine, theirs) in enumerate(pairs) if mine[0] != theirs[0]), len(self.backward))

    def num_more(self, other: _Structure) -> int:
        """Count how many more operations of backward the other tape has, which has one more block."""
        return len(other.backward) - len(self.backward)


class _Moments:
    """The bytes that are alive after each operation of a tape, at some sizes.

    Args:
        structure: the tape's operations, with indices of formulas.
        values: the value of each formula by its index.

    Attributes:
        forward: bytes alive after each operation of forward, the last first.
        backward: bytes alive after each operation of backward.
        kept: bytes alive when forward ends.
        left: bytes alive at the end: in a step's first microbatch the weights' gradients.
    """

    def __init__(self, structure: _Structure, values: Mapping[int, int]):
        self.structure, self.values = structure, values
        live = [*accumulate(values[come] - values[gone] for come, gone in structure.changes)]
        self.forward = [live[place] for _, place in structure.forward]
        self.backward = [live[place] for _, place in structure.backward]
        self.kept = live[structure.end]
        self.left = live[-1]

    def with_more(self, more: Sequence[tuple[int, _Moments]], own: Sequence[int], head: int, sharded: Sharded) -> Need:
        """Predict memory and FLOPs of a microbatch for a model with more blocks than this tape has.

        Args:
            more: for each kind of block, first the kind that backward reaches last: how many blocks there are beyond
                this tape's, and the _Moments of a tape with one block more of this kind.
            own: how many blocks of each kind this tape has, 1 or 2.
            head: how many operations backward has before its first block.
            sharded: bytes of a block's weights and gradients under FSDP2; all 0 without FSDP2.
        """
        # Of each kind: what one more block saves for backward, and what it leaves at the end.
        saved = [other.kept - self.kept for _, other in more]
        left = [other.left - self.left + sharded.part for _, other in more]
        fullest_of: dict[bool, _Moment] = {}

        def consider(in_blocks: bool, tape: _Moments, fullest: tuple[int, int], waiting: list[int], ran: list[int],
                     own_ran: int, of_ran: int | None = None) -> None:  # fmt: skip
            """Compare a moment with the fullest one so far, before the blocks of backward or among them.

            fullest: its bytes on the tape, and its place.  waiting, ran: of each kind, how many of the further blocks
            wait for backward, and how many have run it.  own_ran: how many of the tape's own blocks have run it.
            of_ran: bytes of the further blocks that have run; by default what they leave at the end.
            """
            if of_ran is None:
                of_ran = sum(number * size for number, size in zip(ran, left))
            others = {GRADIENTS: own_ran * sharded.part + of_ran}
            if own_ran or any(ran):
                others["float32 gradients"] = sharded.gradients
            if in_blocks and own_ran + sum(ran) + 1 < sum(further) + num_own:
                others["gathered weights"] = sharded.weights
            live, place = fullest
            live += sum(number * size for number, size in zip(waiting, saved)) + sum(others.values())
            if in_blocks not in fullest_of or live > fullest_of[in_blocks].bytes:
                fullest_of[in_blocks] = _Moment(live, tape, place, waiting, others)

        def ends_of_blocks(numbers: Iterable[int]) -> list[int]:
            """Return at which operation of backward each block ends on a tape with these numbers of blocks."""
            in_order = [length for length, number in zip(lengths, numbers) for _ in range(number)]
            return [*accumulate(reversed(in_order), initial=head)][1:]

        further, zeros, num_own = [number for number, _ in more], [0 for _ in more], sum(own)
        # Of forward only the operations that end all tapes are known to run after all blocks have saved.
        num_last = min(self._num_aligned(other, "forward", size) for (_, other), size in zip(more, saved))
        if num_last:
            consider(False, self, self._fullest("forward", 0, num_last), further, zeros, 0)
        # The block that runs last is the second of its kind, or a later one: it may find more alive than a first did.
        if more and more[-1][0]:
            number, other = more[-1]
            in_block = num_last + len(other.forward) - len(self.forward)
            consider(False, other, other._fullest("forward", 0, in_block), [*further[:-1], number - 1], zeros, 0)
        # Rules 1 and 2 at the top of this file: while a tape is aligned with its longer one, the further blocks wait.
        aligned = [self._num_aligned(other, "backward", size) for (_, other), size in zip(more, saved)]
        lengths = [self.structure.num_more(other.structure) for _, other in more]
        block_ends = ends_of_blocks(own)
        for start, end in _between(0, len(self.backward), [head, *aligned, *block_ends]):
            waiting = [number if start < length else 0 for number, length in zip(further, aligned)]
            ran = [number - waits for number, waits in zip(further, waiting)]

            def of_ran(i: int, ran: Sequence[int] = tuple(ran)) -> int:
                """Return the bytes of further blocks that have run: what their tape has more at the same operation."""
                of_each = zip(ran, more, lengths)
                return sum(number and number * (o.backward[i + n] - self.backward[i]) for number, (_, o), n in of_each)

            place = max(range(start, end), key=lambda i: self.backward[i] + of_ran(i))
            fullest = self.backward[place], self.structure.backward[place][1]
            own_ran = sum(block_end <= start for block_end in block_ends)
            consider(start >= head, self, fullest, waiting, ran, own_ran, of_ran(place) + sum(ran) * sharded.part)
        for k, ((number, other), first) in enumerate(zip(more, aligned)):
            # Of two blocks of its own the first of the model runs as no other; this tape has been read for it.
            last = self.structure.num_same(other.structure) + (2 - own[k]) * lengths[k]
            block_ends = ends_of_blocks([*own[:k], own[k] + 1, *own[k + 1 :]])
            # Rule 3: from the second of these blocks to the last, each changes the bytes by as much as the one before.
            counts = {count for count in (number - 1, number - 2, 0) if count >= 0}
            for (start, end), waits in product(_between(first, last, block_ends), counts if number else ()):
                ran = [*zeros[:k], number - 1 - waits, *further[k + 1 :]]
                waiting = [*further[:k], waits, *zeros[k + 1 :]]
                fullest = other._fullest("backward", start, end)
                consider(True, other, fullest, waiting, ran, sum(place <= start for place in block_ends))

        def of_all_blocks(name: str) -> int:
            on_tape = self._total(name)
            return on_tape + sum(number * (other._total(name) - on_tape) for number, other in more)

        kept = self.kept + sum(number * size for number, size in zip(further, saved))
        at_end = self.left + sum(number * size for number, size in zip(further, left))
        ends_peak, blocks_peak = (
            Peak(fullest_of[in_blocks].bytes, partial(self._with_rows, more, fullest_of[in_blocks]))
            if in_blocks in fullest_of
            else Peak(0)
            for in_blocks in (False, True)
        )
        return Need(kept, at_end, ends_peak, blocks_peak, of_all_blocks("flops"), of_all_blocks("moved"))

    def _fullest(self, side: str, start: int, end: int) -> tuple[int, int]:
        """Find the operation, from ``start`` to before ``end``, after which the most bytes are alive.

        Returns: these bytes, and the index of the operation's event.
        """
        live = getattr(self, side)
        i = max(range(start, end), key=live.__getitem__)
        return live[i], getattr(self.structure, side)[i][1]

    def _total(self, name: str) -> int:
        return sum(count * self.values[i] for i, count in getattr(self.structure, name).items())

    def _with_rows(self, more: Sequence[tuple[int, _Moments]], moment: _Moment) -> tuple[Row, ...]:
        """List the rows of a moment, with the tensors that waiting further blocks have saved, the largest first."""
        sums, kept = Counter(moment.tape._rows(moment.place)), self._rows(self.structure.end)
        for number, (_, other) in zip(moment.waiting, more):
            if number:
                with_one_more = other._rows(other.structure.end)
                for term in {**kept, **with_one_more}:
                    sums[term] += number * (with_one_more.get(term, 0) - kept.get(term, 0))
        sums.update(moment.others)
        sizes = sorted(((size, term) for term, size in sums.items() if size), reverse=True)
        return tuple(Row(term, size) for size, term in sizes)

    def _num_aligned(self, other: _Moments, side: str, saved: int) -> int:
        """Count the first moments at which the other tape has run the same operations and holds ``saved`` bytes more.

        Args:
            other: the moments of a tape with one block more.
            side: "forward", counted from its end, or "backward".
            saved: bytes that one more block saves.
        """
        mine, theirs = ((getattr(tape, side), getattr(tape.structure, side)) for tape in (self, other))
        pairs = zip(*mine, *theirs)
        return next(
            (i for i, (live, op, its, its_op) in enumerate(pairs) if op[0] != its_op[0] or its - live != saved),
            min(len(mine[0]), len(theirs[0])),
        )

    def _rows(self, place: int) -> dict[str, int]:
        names = self.structure.names()
        alive = alive_after(self.structure.events, place).values()
        named = [(names.get(made.number, made.name), self.values[made.bytes]) for made in alive]
        return by_term(Row(re.sub(r"\.\d+(?=[.:])", ".*", name), size) for name, size in named)


def _between(start: int, end: int, places: Iterable[int]) -> list[tuple[int, int]]:
    """Split the range from ``start`` to ``end`` at those of ``places`` that are inside it."""
    return [*pairwise(sorted({start, end, *(place for place in places if start < place < end)}))] if start < end else []
