"""The tape of a model that a factory makes, or tapes for any number of its blocks, solved from tiny runs of real
tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import nn

from actmem.config import ConfigError, check_choice, check_size
from actmem.ledger.recorder import record
from actmem.ledger.save_sites import is_compiled
from actmem.ledger.whole_step import loss_of
from actmem.rows import Row
from actmem_tools import load_model
from actmem_tools.command_line import one_line, show_progress
from actmem_tools.config_file import OTHERWISE, Order
from actmem_tools.no_device import fused_attention_on_cpu
from actmem_tools.tape.config_model import ConfigModel, path_of_layers
from actmem_tools.tape.evaluate import MAY_BE_ONE, Event, Formula, Make, Run, Tape, added, moments, read_events
from actmem_tools.tape.extrapolate_blocks import (
    LOSS_CHUNKS,
    LOSS_CODE,
    SELECTIVE,
    BlockModel,
    adapter_code,
    place_of,
    recompute_code,
)
from actmem_tools.tape.record import Recorder, record_step
from actmem_tools.tape.solver import (
    NO_RULES,
    NoFormula,
    Rules,
    Runs,
    check_larger,
    draw_sizes,
    parsed_letters,
    solve,
    solve_rows,
)

Factory = Callable[..., Any]
Prepare = Callable[[nn.Module], object]
#: The letter of the number of blocks.
_BLOCKS = "l"
#: Runs that tell the formulas in s and b, whose powers are few.
_CONFIG_RUNS = 4
#: Of attention with dropout.
_FUSED = (
    "Attention has dropout. The bill is of a fused kernel, as a GPU's is, which stores no scores; a CPU has none with "
    "dropout, so a run there keeps the scores."
)
#: Where a model doesn't run at sizes that are drawn, a kernel may want rows of whole 16 bytes.
_KERNELS_NEED = "h:8,d:8,f:8"


def model_tape(
    target: str, letters: Sequence[str], rules: Rules = NO_RULES, fixed: Mapping[str, int] = {}, dtype: str = ""
) -> Tape:
    """The tape of ``file.py:factory``.  Raises ConfigError if it can't run or has no formulas over the letters."""
    if dtype:
        check_choice("dtype", dtype, tuple(load_model.DTYPES))
    return tape_of(load_model.load_factory(target), Runs(letters, rules), fixed, dtype)


def _as_it_is(model: nn.Module) -> None:
    """Change nothing."""


@dataclass(frozen=True)
class _Model:
    """A factory's model.  more_sizes: what the factory takes beside a run's sizes.  prepare: changes the model."""

    factory: Factory
    more_sizes: Mapping[str, int]
    dtype: str
    prepare: Prepare = _as_it_is

    def events(
        self, sizes: Mapping[str, int], names: dict[int, str] | None = None, is_first: bool = False
    ) -> list[Event]:
        """See ``run_factory``."""
        return run_factory(self.factory, {**sizes, **self.more_sizes}, self.dtype, names, self.prepare, is_first)

    def names(self, runs: Runs, ones: Sequence[str]) -> dict[int, str]:
        """The ledger's names of what autograd keeps, by the numbers of storages; for sizes where ``ones`` are 1."""
        names: dict[int, str] = {}
        self.events(runs.draw(random.Random(0), ones), names)
        return names

    def tape(self, runs: Runs, known: list[Formula] | None = None) -> Tape:
        """Its tape, by the names of operations.  known: see ``solve``.

        Unless one of the runs is at sizes asked for, one more run checks the formulas at larger sizes.
        """

        def recorded(sizes: dict[str, int]) -> list[Event]:
            shown = ", ".join(f"{letter}={size}" for letter, size in sizes.items())
            try:
                return self.events(sizes)
            except NoFormula:
                raise
            except ConfigError as error:
                helps = "; h:8 makes h a multiple of 8" if "h" in sizes else ""
                raise type(error)(error.argument, f"at {shown}: {error.rule}{helps}") from error

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the runs are tiny
        try:
            is_first = not known  # later tapes have the same formulas
            tape = solve(recorded, runs, known)
            if is_first and not runs.at:
                check_larger(tape, recorded, runs.rules)
            return tape
        finally:
            torch.set_num_threads(threads)


def tape_of(factory: Factory, runs: Runs, more_sizes: Mapping[str, int] = {}, dtype: str = "") -> Tape:
    """The tape of a factory's model, by the names of what autograd keeps.  more_sizes: what else the factory takes."""
    model = _Model(factory, more_sizes, dtype)
    tape = model.tape(runs)
    for ones, events in tape.variants.items():
        names = model.names(runs, ones)
        events[:] = [replace(e, name=names.get(e.number, e.name)) if isinstance(e, Make) else e for e in events]
    return tape


def _built(factory: Factory, sizes: Mapping[str, int], dtype: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, inputs = load_model.built_model(factory, sizes, dtype)
    if is_compiled(model):
        rule = "a compiled model makes other kernels at each size, which have no formula: leave torch.compile out"
        raise ConfigError("target", f"{rule}, or see `actmem record` for what it saves at one size")
    return model, inputs


def run_factory(
    factory: Factory,
    sizes: Mapping[str, int],
    dtype: str = "",
    names: dict[int, str] | None = None,
    prepare: Prepare = _as_it_is,
    is_first: bool = False,
) -> list[Event]:
    """One microbatch's events, the step's first or another.

    names: gets the ledger's names of what autograd keeps, by the numbers of storages; then backward doesn't run.
    """
    model, inputs = _built(factory, sizes, dtype)
    prepare(model)

    def forward(recorder: Recorder):
        if names is None:
            return loss_of(load_model.run_forward(model, inputs))
        with record(model, adds_up=False) as ledger:
            loss = loss_of(load_model.run_forward(model, inputs))
            for storage, number in recorder.numbers():
                if saved := ledger.names_of(storage):
                    names[number] = ", ".join(dict.fromkeys(saved))
        return loss

    def backward(loss, recorder: Recorder):
        if not loss.requires_grad or loss.numel() != 1:
            raise ConfigError("target", "the loss must be one number that needs a gradient")
        try:
            if names is None:
                loss.backward()
        except Exception as error:
            raise load_model.Raised("target", f"backward raised {one_line(error)}") from error

    return record_step(model, forward, backward, inputs, is_first)


def solved_blocks(
    factory: Factory,
    letters: Sequence[str],
    rules: Rules,
    dtype: str = "",
    may_be_one: Sequence[str] = (),
    parts: Sequence[str] = ("",),
    at: Mapping[str, int] = {},
    lora: int = 0,
    config: ConfigModel | None = None,
    held: Mapping[str, int] = {},
    fake: bool = False,
) -> dict[str, BlockModel]:
    """Solve a factory's model, whose ``num_layers`` is free, for each part of a block that may run again, ``""`` for
    all of it.

    letters: without that of the layers.  at: of a configuration, sizes of one of the runs.
    lora: the rank of ``extrapolate_blocks.adapter_code``, which runs first.  config: whose factory it is, if any.
    held: sizes that don't vary.  fake: run on fake tensors.

    Tapes are solved when they are asked for.  Then and here ConfigError is raised if there are no blocks, or if one
    more run shows that they aren't alike.
    """
    order, few_blocks = (config.order, 2) if config else (Order(), 5)
    sizes = dict(at) if config else draw_sizes(letters, rules, random.Random(0), held)
    show_progress(f"running {few_blocks} blocks")
    with _running(fake) as dropouts:
        found_blocks = _blocks_of(factory, sizes, dtype, parts, order, few_blocks)
        if lora:
            factory = _changed(factory, adapter_code(place_of(found_blocks.path), lora))
            found_blocks = _blocks_of(factory, sizes, dtype, parts, order, few_blocks)
        elements = _elements(factory, letters, rules, dtype, held, 1 if config else 0, found_blocks.early)
    path = place_of(found_blocks.path)
    remarks = load_model.gradient_note(found_blocks.without_gradient), _FUSED if dropouts else ""
    notes = tuple(remark for remark in remarks if remark)
    found: dict[str, BlockModel] = {}
    known: list[Formula] = []
    checked: set[str] = set()
    runs = Runs(letters, rules, held, may_be_one, _CONFIG_RUNS if config else len(letters) + 2, at if config else {})

    def prepare(part: str, again: int, model: nn.Module) -> None:
        exec(recompute_code(path, order.num_layers(again), part), {"model": model})

    def model_of(part: str, again: int, whole: int) -> _Model:
        return _Model(factory, {_BLOCKS: again + whole}, dtype, partial(prepare, part, again))

    @cache
    def solved(part: str, again: int, whole: int) -> Tape:
        show_progress(f"solving {again + whole} blocks, of which {again} run again")
        with _running(fake):
            return model_of(part, again, whole).tape(runs, known)

    def tape(part: str, again: int, whole: int) -> Tape:
        found_tape = solved(part if again else parts[0], again, whole)
        if (again, whole) == (1, 1) and part not in checked:
            checked.add(part)
            check(part, 2, 2)
        return found_tape

    @cache
    def names(part: str, again: int, whole: int, ones: tuple[str, ...]) -> dict[int, str]:
        with _running(fake):
            return model_of(part, again, whole).names(runs, ones)

    def check(part: str, again: int, whole: int) -> None:
        if config and again + whole > config.num_blocks:
            return
        with _running(fake):
            events = model_of(part, again, whole).events(sizes, is_first=True)
        live = [live for event, live, _ in moments(events) if isinstance(event, Run)]
        real = read_events(events).kept_bytes, max(live)
        need = found[part].need(sizes, again, whole, is_first=True)
        if (need.kept_bytes, need.peak.bytes) != real:
            rule = f"blocks of {path} aren't alike: {again + whole} of them keep {real[0]:,} B and need {real[1]:,} B"
            told = f"{need.kept_bytes:,} and {need.peak.bytes:,} by runs of fewer"
            raise ConfigError("target", " ".join([f"{rule}, {told}: {OTHERWISE} works.", *notes]))

    for part in parts:
        alike = found_blocks.element_size, order, notes, found_blocks.recompute
        found[part] = BlockModel(partial(tape, part), path, elements, *alike, names=partial(names, part))
        if len(found) == 1:
            check(part, 0, 3)
    return found


def _changed(factory: Factory, code: str) -> Factory:
    """The factory, whose model ``code`` has changed."""
    if not code:
        return factory

    @wraps(factory)  # with its signature, which names its letters
    def changed(**sizes: Any) -> Any:
        model, inputs = factory(**sizes)
        exec(code, {"model": model})
        return model, inputs

    return changed


def solved_target(
    target: str | dict,
    asked: Mapping[str, int],
    rules_text: str,
    dtype: str,
    parts: Sequence[str],
    loss: str = "whole",
    lora: int = 0,
) -> tuple[dict[str, BlockModel], dict[str, int], int]:
    """Tapes of ``file.py:factory`` or of a configuration's content, all sizes without the number of blocks, and that
    number.

    asked: sizes by letter, of a configuration s and b.  rules_text: as ``h:8a``, of a factory only.
    parts, lora: see ``solved_blocks``.  loss: a key of ``extrapolate_blocks.LOSS_CODE``, of a configuration only.
    """
    check_choice("dtype", dtype, tuple(load_model.DTYPES))
    check_choice("loss", loss, LOSS_CODE)
    if isinstance(target, dict):
        return _solved_config(ConfigModel(target), asked, dtype, parts, loss, lora)
    if LOSS_CODE[loss]:
        raise ConfigError("loss", "is what the factory's model returns: change it there")
    factory, sizes = load_model.load_factory(target), dict(asked)
    if _BLOCKS not in sizes:
        raise ConfigError("at", f"{_BLOCKS}, the number of layers, is missing")
    number = check_size(_BLOCKS, sizes.pop(_BLOCKS), 10_000)
    own_text = {part.strip().partition(":")[0]: part for part in rules_text.split(",") if part.strip()}
    for letter in own_text:
        if letter not in sizes:
            raise ConfigError("letters", f"there is no {letter}, only {', '.join(sizes)}")
    text = ",".join(own_text.get(letter, letter) for letter in sizes)
    may_be_one = [letter for letter in MAY_BE_ONE if letter == "b" or sizes.get(letter) == 1]

    def solved_with(more: str) -> dict[str, BlockModel]:
        letters, rules, _ = parsed_letters(text, more)
        return solved_blocks(factory, letters, rules, dtype, may_be_one, parts, sizes, lora)

    try:
        return solved_with(""), sizes, number
    except load_model.Raised as error:
        try:
            return solved_with(_KERNELS_NEED), sizes, number
        except load_model.Raised:
            raise error from None


@contextmanager
def _running(fake: bool) -> Iterator[set[float]]:
    """Where a model is solved: its attention by a fused kernel, and on fake tensors if asked for.

    Yields: the dropouts of attention that ran.
    """
    with load_model.tensors_for(fake), fused_attention_on_cpu() as dropouts:
        yield dropouts


def _solved_config(
    config: ConfigModel, asked: Mapping[str, int], dtype: str, parts: Sequence[str], loss: str, lora: int
) -> tuple[dict[str, BlockModel], dict[str, int], int]:
    """See ``solved_target``.  Where what runs depends on the sequence's length, it doesn't vary."""
    for letter in asked:
        if letter not in config.letters:
            raise ConfigError("at", f"{letter} is the configuration's own: change it there")
    if len(asked) < len(config.letters):  # of b the command sees to it
        raise ConfigError("at", "s is missing")
    if LOSS_CODE[loss] and "s" not in config.letters:
        raise ConfigError("loss", "is a language model's: this one reads pictures")
    s = asked.get("s", 0)
    if s > config.positions:
        raise ConfigError("at", f"s = {s} is above the {config.positions} positions that the model has vectors for")
    factory = _changed(config.factory(), LOSS_CODE[loss])
    if LOSS_CODE[loss]:
        _check_loss(config.factory(vocab_size=64), loss)

    def solved_with(step: int) -> dict[str, BlockModel]:
        rules, held = ({"s": (step, ())}, {}) if step else ({}, {"s": s})
        found = solved_blocks(factory, config.letters, rules, dtype, "b", parts, asked, lora, config, held, fake=True)
        shortest, longest = config.limits(s) if step else (s, s)
        return {part: replace(one, shortest=shortest, longest=longest) for part, one in found.items()}

    step = config.step(s, LOSS_CHUNKS if LOSS_CODE[loss] else 1)
    try:
        return solved_with(step), dict(asked), config.num_blocks
    except NoFormula:
        if not step:
            raise
        return solved_with(0), dict(asked), config.num_blocks


def _check_loss(factory: Factory, loss: str) -> None:
    """Raise ConfigError if the loss computed otherwise isn't that of a Hugging Face model, here without any layer."""
    sizes = {"s": 2 * LOSS_CHUNKS, "b": 2, _BLOCKS: 0}
    if not torch.allclose(_padded_loss(factory, sizes), _padded_loss(_changed(factory, LOSS_CODE[loss]), sizes)):
        raise ConfigError("loss", "this model does more to its logits than code in chunks does: give a factory")


def _padded_loss(factory: Factory, sizes: Mapping[str, int]) -> torch.Tensor:
    """The loss of a Hugging Face model whose last tokens are padding, without a label, as is one more."""
    model, inputs = _built(factory, sizes, "")
    mask, labels = torch.ones_like(inputs["input_ids"]), inputs["labels"].clone()
    mask[:, -2:], labels[:, -2:], labels[:, 1] = 0, -100, -100
    return loss_of(load_model.run_forward(model, {**inputs, "labels": labels, "attention_mask": mask}))


@dataclass(frozen=True)
class _Blocks:
    """What one run of a few blocks tells.

    path: where the list of them is in the model.
    element_size: bytes of a weight's element.
    early: names of the weights outside with the first gradients.
    without_gradient: names of trained weights that got none.
    recompute: whether every block runs again in backward as it is.
    """

    path: str
    element_size: int
    early: frozenset[str]
    without_gradient: tuple[str, ...]
    recompute: bool


def _blocks_of(
    factory: Factory, sizes: Mapping[str, int], dtype: str, parts: Sequence[str], order: Order, few_blocks: int
) -> _Blocks:
    """Find the blocks of a model that is made with a few of them, in one run.  order: of the layers."""
    model, inputs = _built(factory, {**sizes, _BLOCKS: few_blocks}, dtype)
    path = path_of_layers(model, order.num_layers(few_blocks))
    element_sizes = {p.element_size() for p in model.parameters()}
    if len(element_sizes) > 1:
        raise ConfigError("target", "its weights must be of one dtype, or give --dtype")
    blocks = dict(model.get_submodule(path).named_children())
    inside = set.intersection(*({name for name, _ in block.named_modules()} for block in blocks.values()))
    for part in parts:
        if part not in inside and part not in SELECTIVE:
            there = ", ".join(sorted(name for name in inside if name and "." not in name))
            raise ConfigError("again", f"a block of {path} has no {part}, only {there}")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    order_of_gradients: list[str] = []
    for name in trained:
        hook = lambda _, name=name: order_of_gradients.append(name)  # noqa: E731
        model.get_parameter(name).register_post_accumulate_grad_hook(hook)
    loss = loss_of(load_model.run_forward(model, inputs))
    ran_again: set[str] = set()
    for name, block in blocks.items():
        for part_of_block in block.modules():
            part_of_block.register_forward_pre_hook(lambda *_, name=name: ran_again.add(name))
    loss.backward()
    prefix = f"{path}." if path else ""
    inner = (i for i, name in enumerate(order_of_gradients) if name.startswith(prefix))
    early = frozenset(order_of_gradients[: next(inner, len(order_of_gradients))])
    missing = tuple(name for name in trained if name not in order_of_gradients)
    return _Blocks(path, element_sizes.pop(), early, missing, ran_again == blocks.keys())


def _elements(
    factory: Factory,
    letters: Sequence[str],
    rules: Rules,
    dtype: str,
    held: Mapping[str, int],
    num_runs: int,
    early: frozenset[str],
) -> tuple[Formula, ...]:
    """The elements of a factory's weights, as ``BlockModel`` has them.  num_runs: see ``solve_rows``.

    A block's are what a second one adds, outside the list of blocks too.  early: see ``_Blocks``.
    """

    def rows(sizes: dict[str, int]) -> list[Row]:
        found = []
        for number in (1, 2):
            model, _ = _built(factory, {**sizes, _BLOCKS: number}, dtype)
            for name, p in model.named_parameters():
                found.append(Row(f"{'trained' if p.requires_grad else 'frozen'} of {number}", p.numel()))
                if number == 1 and name in early:
                    found.append(Row("early", p.numel()))
        return found

    formulas, found = solve_rows(rows, letters, rules, held, num_runs), []
    for what in ("trained", "frozen"):
        one, two = (formulas.get(f"{what} of {number}", ()) for number in (1, 2))
        found += [added([one, one, _times(-1, two)]), added([two, _times(-1, one)])]
    return *found[:2], formulas.get("early", ()), *found[2:]


def _times(number: int, formula: Formula) -> Formula:
    return tuple((number * coefficient, powers) for coefficient, powers in formula)
