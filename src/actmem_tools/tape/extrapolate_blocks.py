"""A foreign model with any number of blocks, of which the first are recomputed in backward.

Solved from runs of one to three blocks.  A tape holds a fixed number of them.  What one block more adds is the
difference of two tapes, moment by moment.  Line two tapes up where forward turns into backward: while both run the same
operations, the longer one holds exactly one block's saved bytes more, until the shorter one's only block frees what
all blocks share, as rotary tables.  From there the longer one is read, and in it the second block too, which adds to
gradients that the first has made.  Later blocks of backward do the same with fewer left.
``model_tape.solved_blocks`` solves them, and checks this on a run of more.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from itertools import accumulate, pairwise, product

from actmem.config import LARGEST_SIZE
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

#: Pairs of blocks that are recomputed and blocks that save everything, of which the second has one block more.
_ALIKE = ((0, 1), (0, 2)), ((1, 0), (2, 0))

#: Parts that are all of a block but some operations, the second as torchtitan has it: what is saved, and which matmuls.
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
#: What ``--loss`` takes, and the code of each, of Hugging Face's models; chunks of all tokens.
LOSS_CHUNKS = 8
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
    """How Python reaches a part of a module.

    Returns: ``layers``, or ``get_submodule("1.0")``, as a Sequential's parts have no names.
    """
    return path if all(map(str.isidentifier, path.split("."))) else f'get_submodule("{path}")'


def adapter_code(path: str, rank: int) -> str:
    """Python that freezes the model and puts an adapter of that rank (LoRA) beside each linear of ``model.<path>``.

    None for rank 0.
    """
    return _ADAPTERS.format(path=path, rank=rank) if rank else ""


def recompute_code(path: str, again: int, part: str) -> str:
    """Python that recomputes the first blocks in ``model.<path>``, or a part of each, in backward.

    Args:
        path: where the blocks are in the model.
        again: how many of them are recomputed.
        part: ``""`` for all of a block; one of ``SELECTIVE``; or the name of a module in it.
    """
    if part in SELECTIVE:
        return _RECOMPUTE_SELECTIVE.format(path=path, again=again, saved=SELECTIVE[part][1])
    return _RECOMPUTE.format(path=path, again=again, part=f"block.{place_of(part)}" if part else "block")


@dataclass(frozen=True)
class Peak:
    """The most bytes alive after any operation.

    named_rows: makes its rows, which takes longer than the bytes.
    """

    bytes: int
    named_rows: Callable[[], tuple[Row, ...]] = field(default=tuple, repr=False, compare=False)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The bytes line by line, the largest first."""
        return self.named_rows()


@dataclass(frozen=True)
class Sharded:
    """Bytes of a block whose weights the ranks share (FSDP2), field by field.

    Its weights, gathered while the block before runs; all its gradients in float32, there while the next block runs;
    and the part of them that stays then.
    """

    weights: int = 0
    gradients: int = 0
    part: int = 0


@dataclass(frozen=True)
class Need:
    """What a model's step needs at given sizes on one rank, without weights, gradients, buffers and inputs.

    kept_bytes: alive when forward ends.
    ends: the peak of forward, and of backward until its first block.
    blocks: the peak of what follows.
    matmul_flops, moved_bytes: of forward, backward and recomputation.
    """

    kept_bytes: int
    ends: Peak
    blocks: Peak
    matmul_flops: int
    moved_bytes: int

    @property
    def peak(self) -> Peak:
        """Of the whole step."""
        return max(self.ends, self.blocks, key=lambda peak: peak.bytes)


@dataclass(frozen=True)
class BlockModel:
    """A model made of equal blocks: its tapes, and how many elements its weights have.

    tapes: of so many blocks that are recomputed and so many that save everything.
    names: of a tape's storages, by these two numbers and the letters that are 1; those that aren't there have their
        operation's.
    path: where the blocks are, as Python has it after ``model.``.
    elements: of trained weights, outside the blocks, of one block, and of those outside that have their gradients
        before any block has; of weights that need no gradient, outside the blocks and of one block.
    element_size: bytes of a weight's element.
    order: of the layers, of which a block may be several.
    notes: what else is to be known of the model.
    recompute: whether its blocks run again in backward as they are.
    shortest, longest: sequence that the model can read and the tapes hold for.
    """

    tapes: Callable[[int, int], Tape]
    path: str
    elements: tuple[Formula, ...]
    element_size: int
    order: Order = Order()
    notes: tuple[str, ...] = ()
    recompute: bool = False
    shortest: int = 2
    longest: int = LARGEST_SIZE
    names: Callable[[int, int, tuple[str, ...]], Mapping[int, str]] = lambda again, whole, ones: {}

    @property
    def letters(self) -> tuple[str, ...]:
        """Of the sizes that ``need`` takes, without the number of blocks."""
        return self.tapes(0, 1).letters

    def num_elements(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Elements of all weights at these sizes.

        Returns: of trained weights, outside the blocks, of one block, and of those outside whose gradients come
            before any block's; then of frozen ones, outside the blocks and of one block.
        """
        own = [sizes[letter] for letter in self.letters]
        return tuple(value(formula, own) for formula in self.elements)

    def need(
        self,
        sizes: Mapping[str, int],
        again: int,
        whole: int,
        is_first: bool = False,
        sharded: Sharded = Sharded(),
    ) -> Need:
        """A microbatch of ``again`` blocks that are recomputed, the first ones, and ``whole`` that save everything.

        Args:
            is_first: of the step, so that gradients are what it makes.
            sharded: bytes of a block's weights and gradients under FSDP2.
        """
        base, at = (min(again, 1), min(whole, 1)), tuple(sizes.items())
        fewest = self._moments(*base, at, is_first)  # first: its runs are the shortest
        more = [(again - base[0], self._moments(base[0] + 1, base[1], at, is_first))] if again else []
        more += [(whole - base[1], self._moments(base[0], base[1] + 1, at, is_first))] if whole else []
        return fewest.with_more(more, self._head(at), sharded)

    def _head(self, at: tuple) -> int:
        """Operations of backward before its first block; the same at all sizes, but for those that are 1.

        What follows the only block of a tape can begin as a block does: of two kinds of blocks the shorter is right.
        """
        sizes = dict(at)
        pairs = [[self._structure(*each, self.tapes(*each).ones(sizes), False) for each in some] for some in _ALIKE]
        return min(one.num_alike(two) - one.num_more(two) for one, two in pairs)

    @cached_property
    def _structure(self) -> Callable[[int, int, tuple[str, ...], bool], _Structure]:
        return cache(
            lambda again, whole, ones, is_first: _Structure(
                self.tapes(again, whole).variants[ones], is_first, partial(self.names, again, whole, ones)
            )
        )

    @cached_property
    def _moments(self) -> Callable[[int, int, tuple, bool], _Moments]:
        """The last that were asked for: searches vary only the number of blocks."""

        def made(again: int, whole: int, at: tuple, is_first: bool) -> _Moments:
            tape, sizes = self.tapes(again, whole), dict(at)
            tape.check(sizes)
            structure = self._structure(again, whole, tape.ones(sizes), is_first)
            return _Moments(structure, tape.values(structure.used, sizes))

        return lru_cache(32)(made)


@dataclass(frozen=True)
class _Moment:
    """A place of a tape, with how many more blocks of each kind wait, and what others hold or have left, in bytes."""

    bytes: int
    tape: _Moments
    place: int
    waiting: list[int]
    others: dict[str, int]


class _Structure:
    """What a tape does whatever its sizes, which are numbers of its formulas here.

    used: those numbers.  changes: after each event the number of what comes and of what goes.
    forward, backward: of each operation its name and its place among the events; forward from its end.
    flops, moved: how often each number is added.
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

    def num_alike(self, other: _Structure) -> int:
        """For how many operations of backward the other tape runs the same."""
        pairs = zip(self.backward, other.backward)
        return next((i for i, (mine, theirs) in enumerate(pairs) if mine[0] != theirs[0]), len(self.backward))

    def num_more(self, other: _Structure) -> int:
        """How many more operations of backward the other tape has: those of one block."""
        return len(other.backward) - len(self.backward)


class _Moments:
    """The moments of a tape at some sizes.

    forward, backward: bytes alive after each operation, of forward from its end.
    """

    def __init__(self, structure: _Structure, values: Mapping[int, int]):
        self.structure, self.values = structure, values
        live = [*accumulate(values[come] - values[gone] for come, gone in structure.changes)]
        self.forward = [live[place] for _, place in structure.forward]
        self.backward = [live[place] for _, place in structure.backward]
        self.kept = live[structure.end]
        self.left = live[-1]  # at the end: gradients, in the first microbatch

    def with_more(self, more: Sequence[tuple[int, _Moments]], head: int, sharded: Sharded) -> Need:
        """What the step needs with further blocks.

        Args:
            more: further blocks of each kind, those that backward meets last first, and the moments of a tape with one
                of them.
            head: operations of backward before its first block.
            sharded: see ``BlockModel.need``.
        """
        added = [other.kept - self.kept for _, other in more]
        done = [other.left - self.left + sharded.part for _, other in more]
        found: dict[bool, _Moment] = {}

        def consider(in_blocks: bool, tape: _Moments, fullest: tuple[int, int], waiting: list[int], ran: list[int],
                     inside: int) -> None:  # fmt: skip
            """inside: of the tape's own blocks those that have run."""
            others = {GRADIENTS: inside * sharded.part + sum(number * each for number, each in zip(ran, done))}
            if inside or any(ran):
                others["float32 gradients"] = sharded.gradients
            if in_blocks and inside + sum(ran) + 1 < sum(numbers) + num_own:
                others["gathered weights"] = sharded.weights
            live, place = fullest
            live += sum(number * each for number, each in zip(waiting, added)) + sum(others.values())
            if in_blocks not in found or live > found[in_blocks].bytes:
                found[in_blocks] = _Moment(live, tape, place, waiting, others)

        numbers, none, num_own = [number for number, _ in more], [0 for _ in more], len(more)
        # In forward only what all tapes end with is known to come last.
        same = min(self._alike(other, "forward", each) for (_, other), each in zip(more, added))
        if same:
            consider(False, self, self._fullest("forward", 0, same), numbers, none, 0)
        alike = [self._alike(other, "backward", each) for (_, other), each in zip(more, added)]
        lengths = [self.structure.num_more(other.structure) for _, other in more]
        ends = [*accumulate(reversed(lengths), initial=head)][1:]
        for start, end in _between(0, len(self.backward), [head, *alike, *ends]):
            waiting = [number if start < length else 0 for number, length in zip(numbers, alike)]
            ran = [number - each for number, each in zip(numbers, waiting)]
            fullest = self._fullest("backward", start, end)
            consider(start >= head, self, fullest, waiting, ran, sum(place <= start for place in ends))
        for k, ((number, other), first) in enumerate(zip(more, alike)):
            last = self.structure.num_alike(other.structure) + lengths[k]
            ends = [*accumulate([*reversed(lengths[k:]), *reversed(lengths[: k + 1])], initial=head)][1:]
            # From the second of these blocks to the last, bytes change by the same from one to the next.
            counts = {count for count in (number - 1, number - 2, 0) if count >= 0}
            for (start, end), waits in product(_between(first, last, ends), counts if number else ()):
                ran = [*none[:k], number - 1 - waits, *numbers[k + 1 :]]
                waiting = [*numbers[:k], waits, *none[k + 1 :]]
                fullest = other._fullest("backward", start, end)
                consider(True, other, fullest, waiting, ran, sum(place <= start for place in ends))

        def whole(name: str) -> int:
            each = self._total(name)
            return each + sum(number * (other._total(name) - each) for number, other in more)

        kept = self.kept + sum(number * each for number, each in zip(numbers, added))
        ends_peak, blocks_peak = (
            Peak(found[in_blocks].bytes, partial(self._with_rows, more, found[in_blocks]))
            if in_blocks in found
            else Peak(0)
            for in_blocks in (False, True)
        )
        return Need(kept, ends_peak, blocks_peak, whole("flops"), whole("moved"))

    def _fullest(self, side: str, start: int, end: int) -> tuple[int, int]:
        """The most bytes alive after the operations from ``start`` to before ``end``, and their place in the events."""
        live = getattr(self, side)
        i = max(range(start, end), key=live.__getitem__)
        return live[i], getattr(self.structure, side)[i][1]

    def _total(self, name: str) -> int:
        return sum(count * self.values[i] for i, count in getattr(self.structure, name).items())

    def _with_rows(self, more: Sequence[tuple[int, _Moments]], moment: _Moment) -> tuple[Row, ...]:
        """The rows at a moment, with the kept rows of the blocks that wait."""
        sums, kept = Counter(moment.tape._rows(moment.place)), self._rows(self.structure.end)
        for number, (_, other) in zip(moment.waiting, more):
            if number:
                theirs = other._rows(other.structure.end)
                for term in {**kept, **theirs}:
                    sums[term] += number * (theirs.get(term, 0) - kept.get(term, 0))
        sums.update(moment.others)
        found = sorted(((each, term) for term, each in sums.items() if each), reverse=True)
        return tuple(Row(term, each) for each, term in found)

    def _alike(self, other: _Moments, side: str, each: int) -> int:
        """For how many moments the other tape runs the same and holds ``each`` bytes more."""
        mine, theirs = ((getattr(one, side), getattr(one.structure, side)) for one in (self, other))
        pairs = zip(*mine, *theirs)
        return next(
            (i for i, (live, op, more, its) in enumerate(pairs) if op[0] != its[0] or more - live != each),
            min(len(mine[0]), len(theirs[0])),
        )

    def _rows(self, place: int) -> dict[str, int]:
        names = self.structure.names()
        alive = alive_after(self.structure.events, place).values()
        named = [(names.get(made.number, made.name), self.values[made.bytes]) for made in alive]
        return by_term(Row(re.sub(r"\.\d+(?=[.:])", ".*", name), size) for name, size in named)


def _between(start: int, end: int, places: Iterable[int]) -> list[tuple[int, int]]:
    """The range from ``start`` to ``end`` cut at places."""
    return [*pairwise(sorted({start, end, *(place for place in places if start < place < end)}))] if start < end else []
