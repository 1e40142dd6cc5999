"""Make the tape of a model from tiny runs: of the whole model, or for any number of its blocks.

To solve a tape is to find the formulas of its sizes (``tape.evaluate``).  A factory makes the model: a function that
takes sizes, such as ``s=128`` or ``seq_length=128``, and returns ``(model, inputs)``.
"""

import random
from collections.abc import Callable, Mapping, Sequence
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
from actmem_more.gpu_kernels import gpu_kernels_on_cpu
from actmem_tools import load_model
from actmem_tools.command_line import one_line, show_progress
from actmem_tools.config_file import OTHERWISE, Order
from actmem_tools.tape.config_model import ConfigModel, are_stacks, lists_of_layers, noted_layers
from actmem_tools.tape.evaluate import MAY_BE_ONE, Event, Formula, Make, Run, Tape, added, moments, read_events
from actmem_tools.tape.extrapolate_blocks import (
    LOSS_CHUNKS,
    LOSS_CODE,
    SELECTIVE,
    BlockModel,
    adapter_code,
    fewest_alike,
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
#: The type of a function that runs a model once and returns the events.  Its arguments are the sizes and options of
#: ``run_factory``.
RunModel = Callable[..., list[Event]]
#: The letter of the number of blocks.
_BLOCKS = "l"
#: How many runs find the formulas of a configuration's model, which have few powers of s and b.
_CONFIG_RUNS = 4
#: The most events that a layer may add for a longer sequence if each run has the length asked for: more take minutes.
_MOST_EVENTS = 10_000
#: Rules that are tried if a model doesn't run at the letters that were drawn: some kernels need rows of whole 16 bytes.
_KERNELS_NEED = "h:8,d:8,f:8"


def model_tape(
    target: str, letters: Sequence[str], rules: Rules = NO_RULES, fixed: Mapping[str, int] = {}, dtype: str = ""
) -> Tape:
    """Make the tape of the model that a named factory returns, from runs at several sizes.

    Args:
        target: the factory: ``file.py:factory`` or ``pkg.module:factory``.
        letters: the sizes that become letters of the formulas, such as ``["s", "b", "h"]``; the factory must take each
            of them.
        rules: the number and the letters by which each letter must be divisible, from ``solver.parsed_letters``.
        fixed: further sizes that the factory takes; they are the same in all runs.
        dtype: dtype of weights and floating-point inputs, such as "bfloat16"; "" keeps the factory's dtypes.

    Raises: ConfigError if the model doesn't run, or if its sizes have no formulas over the letters.
    """
    if dtype:
        check_choice("dtype", dtype, tuple(load_model.DTYPES))
    return tape_of(load_model.load_factory(target), Runs(letters, rules), fixed, dtype)


def _names(run: RunModel, runs: Runs, ones: Sequence[str]) -> dict[int, str]:
    """Return names of the storages that autograd saves, by their numbers on the tape's variant for ``ones``.

    Args:
        run: runs the model.
        runs: the letters, and their rules.
        ones: the letters that are 1.
    """
    names: dict[int, str] = {}
    run(runs.draw(random.Random(0), ones), names=names)
    return names


def _tape(run: RunModel, runs: Runs, known: list[Formula] | None = None) -> Tape:
    """Solve a model's tape, on which storages have the names of the operations that made them.

    The formulas are then checked by one larger run, unless another tape of the same model was solved before, or one of
    the runs had the sizes that were asked for.

    Args:
        run: runs the model.
        runs: the letters, and which runs are made.
        known: the list of all formulas of the model's earlier tapes, to which new formulas are appended; None or an
            empty list for the first tape.
    """

    def recorded(sizes: dict[str, int]) -> list[Event]:
        shown = ", ".join(f"{letter}={size}" for letter, size in sizes.items())
        try:
            return run(sizes)
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
    """Make the tape of a factory's model; storages that autograd saves get the names that the ledger gives them.

    Of dropout, RMSNorm and attention with dropout, whose CPU kernels save more, the tape has the tensors that GPU
    kernels save (``gpu_kernels``).

    Args:
        factory: makes the model and its inputs.
        runs: the letters of the formulas, and at which sizes the model is run.
        more_sizes: further sizes that the factory gets, the same in each run.
        dtype: dtype of weights and floating-point inputs, such as "bfloat16"; "" keeps the factory's dtypes.
    """

    def run(sizes: Mapping[str, int], **options: Any) -> list[Event]:
        return run_factory(factory, {**sizes, **more_sizes}, dtype, **options)

    with gpu_kernels_on_cpu():
        tape = _tape(run, runs)
        for ones, events in tape.variants.items():
            names = _names(run, runs, ones)
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
    code: str = "",
    is_first: bool = False,
) -> list[Event]:
    """Make a model, run forward and backward of one microbatch, and return the recorded events.

    Args:
        factory: makes the model and its inputs.
        sizes: all sizes that the factory gets, by letter.
        dtype: dtype of weights and floating-point inputs, such as "bfloat16"; "" keeps the factory's dtypes.
        names: a dict; then only forward runs, and this function puts into the dict the ledger's names of the tensors
            that autograd saves, by the storage's number.  None: forward and backward run.
        code: Python that changes the variable ``model`` before it runs; "" changes nothing.
        is_first: True records the first microbatch of a step, in which no weight has a ``.grad`` before backward.

    Raises: ConfigError if the model doesn't run.
    """
    model, inputs = _built(factory, sizes, dtype)
    exec(code, {"model": model, "torch": torch})

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
    """Find a model's equal blocks, and return BlockModels, which predict the model with any number of blocks.

    The tapes of a BlockModel are made when they are first needed.  A run with more blocks then checks that each further
    block adds the same bytes.

    Args:
        factory: makes the model; it must take the number of layers.
        letters: the letters of the formulas, without the letter for the number of layers.
        rules: the number and the letters by which each letter must be divisible, from ``solver.parsed_letters``.
        dtype: dtype of weights and floating-point inputs, such as "bfloat16"; "" keeps the factory's dtypes.
        may_be_one: letters that are also tried with the value 1, where other operations may run.
        parts: the parts of a block that may be recomputed: "" for the whole block, "operations",
            "every-second-matmul", or names of modules such as "mlp" (``extrapolate_blocks.recompute_code``).
        at: the sizes that the user asked for; if there is a ``config``, one run has exactly these sizes.
        lora: rank of the LoRA adapters that are added to the model before it runs (``adapter_code``); 0 for none.
        config: the Hugging Face configuration from which the factory comes; None for a factory of the user's own.
        held: a dict of letters whose value is the same in all runs.
        fake: whether to run on fake tensors.

    Returns: a dict from each of ``parts`` to a BlockModel.

    Raises: ConfigError, now or when a tape is made, if no blocks are found or if the blocks aren't equal.
    """
    order, few_blocks = (config.order, 2) if config else (Order(), 5)
    sizes = dict(at) if config else draw_sizes(letters, rules, random.Random(0), held)
    show_progress(f"running {few_blocks} blocks")
    with load_model.tensors_for(fake), gpu_kernels_on_cpu():
        found_blocks = _blocks_of(factory, sizes, dtype, parts, order, few_blocks)
        if lora:
            factory = _changed(factory, adapter_code(place_of(found_blocks.path), lora))
            found_blocks = _blocks_of(factory, sizes, dtype, parts, order, few_blocks)
        elements = _elements(factory, letters, rules, dtype, held, 1 if config else 0, found_blocks)
    path = place_of(found_blocks.path)
    notes = tuple(filter(None, [load_model.gradient_note(found_blocks.without_gradient)]))
    models: dict[str, BlockModel] = {}
    known: list[Formula] = []
    checked: set[str] = set()
    runs = Runs(letters, rules, held, may_be_one, _CONFIG_RUNS if config else len(letters) + 2, at if config else {})

    # The first ``recomputed`` blocks recompute ``part``, and ``saving`` more blocks save everything.
    def run_of(part: str, recomputed: int, saving: int) -> RunModel:
        code = recompute_code(path, order.num_layers(recomputed), part)

        def run(sizes: Mapping[str, int], **options: Any) -> list[Event]:
            with load_model.tensors_for(fake), gpu_kernels_on_cpu():
                return run_factory(factory, {**sizes, _BLOCKS: recomputed + saving}, dtype, code=code, **options)

        return run

    @cache
    def solved(part: str, recomputed: int, saving: int, only: tuple[str, ...] | None) -> Tape:
        show_progress(f"solving {recomputed + saving} blocks, of which {recomputed} run again")
        return _tape(run_of(part, recomputed, saving), replace(runs, only=only), known)

    def tape(part: str, recomputed: int, saving: int, is_one: bool) -> Tape:
        # Few plans ask for all tapes both at b = 1 and above.  The first one has both: on it formulas are found.
        only = (("b",) if is_one else ()) if config and (recomputed, saving) != (0, 1) else None
        found_tape = solved(part if recomputed else parts[0], recomputed, saving, only)
        if recomputed and saving and part not in checked:
            checked.add(part)
            check(models[part], 2, 2, part, {**sizes, "b": 1 if is_one else max(2, sizes["b"])})
        return found_tape

    @cache
    def names(part: str, recomputed: int, saving: int, ones: tuple[str, ...]) -> dict[int, str]:
        return _names(run_of(part, recomputed, saving), runs, ones)

    def check(model: BlockModel, recomputed: int, saving: int, part: str, sizes: Mapping[str, int] = sizes) -> None:
        if config:  # a model with fewer blocks is solved here too: what it raises, ``_solved_config`` can mend
            saving = min(saving, config.num_blocks)
            recomputed = min(recomputed, config.num_blocks - saving)
        events = run_of(part, recomputed, saving)(sizes, is_first=True)
        live = [live for event, live, _ in moments(events) if isinstance(event, Run)]
        measured = read_events(events).kept_bytes, max(live)
        need = model.need(sizes, recomputed, saving, is_first=True)
        if (need.kept_bytes, need.peak.bytes) != measured:
            rule = f"blocks of {path} aren't alike: {recomputed + saving} of them keep {measured[0]:,} B and need"
            rule += f" {measured[1]:,} B, {need.kept_bytes:,} and {need.peak.bytes:,} by runs of fewer:"
            raise ConfigError("target", " ".join([rule, f"{OTHERWISE} works.", *notes]))

    for part in parts:
        of_all = found_blocks.element_size, order, notes, found_blocks.recompute
        model = BlockModel(partial(tape, part), path, elements, *of_all, names=partial(names, part))
        models[part] = replace(model, fewest=cache(partial(fewest_alike, model, partial(check, part=part))))
        if len(models) == 1:
            check(models[part], 0, 3, part)
    return models


def _changed(factory: Factory, code: str) -> Factory:
    """Return a factory that makes the same model and then runs ``code``, which changes it; "" changes nothing."""
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
    """Find the formulas of the model that the user gave to ``actmem plan``, for any number of its blocks.

    Args:
        target: a factory, such as ``file.py:factory``; or the content of a Hugging Face ``config.json``.
        asked: the sizes that the user asked for, by letter; only s and b if ``target`` is a configuration.
        rules_text: by what letters must be divisible, such as ``h:8a``: h by 8·a; only if ``target`` is a factory.
        dtype: dtype of weights and floating-point inputs, such as "bfloat16".
        parts: the parts of a block that may be recomputed: "" for the whole block, "operations",
            "every-second-matmul", or names of modules such as "mlp".
        loss: how the loss is computed: "whole", all logits at once; or for a configuration "chunked", in eight chunks
            of tokens.
        lora: rank of the LoRA adapters; 0 for none.

    Returns: three items: a dict from each of ``parts`` to a BlockModel; the sizes asked for, without the number of
        layers; and the number of blocks.

    Raises: ConfigError if the model can't be run or solved.
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
    rule_of = {rule.strip().partition(":")[0]: rule for rule in rules_text.split(",") if rule.strip()}
    for letter in rule_of:
        if letter not in sizes:
            raise ConfigError("letters", f"there is no {letter}, only {', '.join(sizes)}")
    text = ",".join(rule_of.get(letter, letter) for letter in sizes)
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


def _solved_config(
    config: ConfigModel, asked: Mapping[str, int], dtype: str, parts: Sequence[str], loss: str, lora: int
) -> tuple[dict[str, BlockModel], dict[str, int], int]:
    """Find the formulas of a Hugging Face configuration's model, as ``solved_target`` returns them.

    If no formulas hold for several lengths of the sequence, all runs have the length that was asked for.
    """
    for letter in asked:
        if letter not in config.letters:
            raise ConfigError("at", f"{letter} is the configuration's own: change it there")
    if len(asked) < len(config.letters):  # of b the command sees to it
        raise ConfigError("at", "s is missing")
    if LOSS_CODE[loss] and ("s" not in config.letters or config.order.after_encoder):
        raise ConfigError("loss", "in chunks is a language model's: this one reads pictures or has an encoder")
    s = asked.get("s", 0)
    if s > config.positions:
        raise ConfigError("at", f"s = {s} is above the {config.positions} positions that the model has vectors for")
    factory = _changed(config.factory(), LOSS_CODE[loss])
    if LOSS_CODE[loss]:
        _check_loss(config.factory(vocab_size=64), loss)

    def solved_with(step: int) -> dict[str, BlockModel]:
        rules, held = ({"s": (step, ())}, {}) if step else ({}, {"s": s})
        models = solved_blocks(factory, config.letters, rules, dtype, "b", parts, asked, lora, config, held, fake=True)
        shortest, longest = config.limits(s) if step else (s, s)
        in_chunks = partial(replace, shortest=shortest, longest=longest, multiple=multiple if step else 1)
        return {part: in_chunks(model) for part, model in models.items()}

    # A layer that loops over its tokens has no formula, and each run at a real length would take minutes.
    if s > 128:
        with load_model.tensors_for(True):
            few, many = (len(run_factory(factory, {"s": n, "b": 1, _BLOCKS: 1}, dtype)) for n in (64, 128))
        if (many - few) * s // 64 > _MOST_EVENTS:
            raise ConfigError("target", f"operations grow with s: {few:,} at 64, {many:,} at 128; {OTHERWISE} works")
    multiple = config.multiple(LOSS_CHUNKS if LOSS_CODE[loss] else 1)
    step = config.step(s, multiple)
    try:
        return solved_with(step), dict(asked), config.num_blocks
    except NoFormula:
        if not step:
            raise
        return solved_with(0), dict(asked), config.num_blocks


def _check_loss(factory: Factory, loss: str) -> None:
    """Raise ConfigError unless the code for ``loss`` computes the same loss as a Hugging Face model without layers."""
    sizes = {"s": 2 * LOSS_CHUNKS, "b": 2, _BLOCKS: 0}
    if not torch.allclose(_padded_loss(factory, sizes), _padded_loss(_changed(factory, LOSS_CODE[loss]), sizes)):
        raise ConfigError("loss", "this model does more to its logits than code in chunks does: give a factory")


def _padded_loss(factory: Factory, sizes: Mapping[str, int]) -> torch.Tensor:
    """Return the loss of a Hugging Face model in which the last two tokens are padding, and three have no label.

    The tokens without a label are the two of padding and one more.
    """
    model, inputs = _built(factory, sizes, "")
    mask, labels = torch.ones_like(inputs["input_ids"]), inputs["labels"].clone()
    mask[:, -2:], labels[:, -2:], labels[:, 1] = 0, -100, -100
    return loss_of(load_model.run_forward(model, {**inputs, "labels": labels, "attention_mask": mask}))


@dataclass(frozen=True)
class _Blocks:
    """Facts on a model's blocks that one run of the model with a few blocks shows.

    Attributes:
        path: the path of the submodule whose children are the blocks, such as "model.layers".
        element_size: bytes of a weight's element.
        early: names of the weights outside the blocks that get their gradients before any weight of a block does.
        without_gradient: names of trained weights that got no gradient.
        recompute: whether the model itself recomputes every block in backward.
    """

    path: str
    element_size: int
    early: frozenset[str]
    without_gradient: tuple[str, ...]
    recompute: bool


def _blocks_of(
    factory: Factory, sizes: Mapping[str, int], dtype: str, parts: Sequence[str], order: Order, few_blocks: int
) -> _Blocks:
    """Run a model with a few blocks once, and return the path of the blocks and other facts on them.

    Args:
        factory: makes the model and its inputs.
        sizes: the sizes that the factory gets, without the number of layers.
        dtype: dtype of weights and floating-point inputs.
        parts: the parts of a block that may be recomputed; a module's name among them must be in every block.
        order: which layers make up a block.
        few_blocks: how many blocks the model gets.
    """
    model, inputs = _built(factory, {**sizes, _BLOCKS: few_blocks}, dtype)
    path, *others = lists_of_layers(model, order.num_layers(few_blocks))
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
    in_order = noted_layers(model, (path, *others))
    loss = loss_of(load_model.run_forward(model, inputs))
    if stacks := [other for other in others if are_stacks(in_order, path, other)]:
        longer, _ = _built(factory, {**sizes, _BLOCKS: few_blocks + 1}, dtype)
        if stacks[0] in lists_of_layers(longer, order.num_layers(few_blocks + 1)):
            rule = f"{stacks[0]} and {path} both grow with the number of layers, and plan varies one list of blocks:"
            raise ConfigError("target", f"{rule} it works if the factory fixes the length of the other")
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
    found: _Blocks,
) -> tuple[Formula, ...]:
    """Find formulas for the numbers of the weights' elements, in the order of ``BlockModel.elements``.

    A block's weights are those that a second block adds to a model with one block, outside the list of blocks too.
    Weights that get no gradient count as frozen: an optimizer skips them.

    Args:
        factory: makes the model; it must take the number of layers.
        letters: the letters of the formulas.
        rules: the number and the letters by which each letter must be divisible.
        dtype: dtype of weights and floating-point inputs.
        held: letters with a value that is the same in all runs.
        num_runs: how many runs are made; 0 for as many as formulas with any powers need.
        found: the model's blocks.
    """

    def rows(sizes: dict[str, int]) -> list[Row]:
        counts = []
        for num_blocks in (1, 2):
            model, _ = _built(factory, {**sizes, _BLOCKS: num_blocks}, dtype)
            for name, p in model.named_parameters():
                trained = p.requires_grad and name not in found.without_gradient
                counts.append(Row(f"{'trained' if trained else 'frozen'} of {num_blocks}", p.numel()))
                if num_blocks == 1 and name in found.early:
                    counts.append(Row("early", p.numel()))
        return counts

    formulas, elements = solve_rows(rows, letters, rules, held, num_runs), []
    for kind in ("trained", "frozen"):
        with_one, with_two = (formulas.get(f"{kind} of {num_blocks}", ()) for num_blocks in (1, 2))
        elements += [added([with_one, with_one, _times(-1, with_two)]), added([with_two, _times(-1, with_one)])]
    return *elements[:2], formulas.get("early", ()), *elements[2:]


def _times(number: int, formula: Formula) -> Formula:
    return tuple((number * coefficient, powers) for coefficient, powers in formula)
