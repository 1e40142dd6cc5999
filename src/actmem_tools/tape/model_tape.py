"""The tape of a model that a factory makes, or tapes for any number of its blocks, solved from tiny runs of real
tensors."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from actmem.config import LARGEST_SIZE, ConfigError, check_choice, check_size
from actmem.ledger.recorder import record
from actmem.ledger.whole_step import loss_of
from actmem.rows import Row
from actmem_tools import load_model
from actmem_tools.no_device import fused_attention_on_cpu
from actmem_tools.tape.evaluate import MAY_BE_ONE, Event, Formula, Make, Run, Tape, added, moments, read_events
from actmem_tools.tape.extrapolate_blocks import (
    BASES,
    LOSS_CHUNKS,
    LOSS_CODE,
    OPERATIONS,
    BlockModel,
    adapter_code,
    operations_to_keep,
    place_of,
    recompute_code,
)
from actmem_tools.tape.record import Recorder, record_step
from actmem_tools.tape.solver import (
    NO_RULES,
    NoFormula,
    Rules,
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
#: Where a model doesn't run at sizes that are drawn, a kernel may want rows of whole 16 bytes.
_KERNELS_NEED = "h:8,d:8,f:8"


def model_tape(
    target: str, letters: Sequence[str], rules: Rules = NO_RULES, fixed: Mapping[str, int] = {}, dtype: str = ""
) -> Tape:
    """The tape of ``file.py:factory``.  Raises ConfigError if it can't run or has no formulas over the letters."""
    if dtype:
        check_choice("dtype", dtype, tuple(load_model.DTYPES))
    return tape_of(load_model.load_factory(target), letters, rules, fixed, dtype)


def tape_of(
    factory: Factory,
    letters: Sequence[str],
    rules: Rules = NO_RULES,
    fixed: Mapping[str, int] = {},
    dtype: str = "",
    prepare: Prepare = lambda model: None,
    may_be_one: Sequence[str] = MAY_BE_ONE,
    num_runs: int = 0,
    known: list[Formula] | None = None,
) -> Tape:
    """The tape of a factory's model after ``prepare(model)``; for the last three see ``solve``."""

    def recorded(sizes: dict[str, int]) -> list[Event]:
        shown = ", ".join(f"{letter}={size}" for letter, size in sizes.items())
        try:
            return run_factory(factory, {**sizes, **fixed}, dtype, prepare=prepare)
        except NoFormula:
            raise
        except ConfigError as error:
            raise type(error)(error.argument, f"at {shown}: {error.rule}; h:8 makes h a multiple of 8") from error

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the runs are tiny
    try:
        is_first = not known  # later tapes have the same formulas
        tape = solve(recorded, letters, rules, may_be_one=may_be_one, num_runs=num_runs, known=known)
        if is_first:
            check_larger(tape, recorded, rules)
    finally:
        torch.set_num_threads(threads)
    for ones, events in tape.variants.items():
        names: dict[int, str] = {}
        sizes = draw_sizes(letters, rules, random.Random(0), dict.fromkeys(ones, 1))
        run_factory(factory, {**sizes, **fixed}, dtype, names, prepare)
        events[:] = [replace(e, name=names.get(e.number, e.name)) if isinstance(e, Make) else e for e in events]
    return tape


def _built(factory: Factory, sizes: Mapping[str, int], dtype: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return load_model.built_model(factory, sizes, dtype)


def run_factory(
    factory: Factory,
    sizes: Mapping[str, int],
    dtype: str = "",
    names: dict[int, str] | None = None,
    prepare: Prepare = lambda model: None,
    is_first: bool = False,
) -> list[Event]:
    """One microbatch's events, the step's first or another.  names: gets the ledger's names of what autograd keeps, by
    the numbers of storages."""
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
            loss.backward()
        except Exception as error:
            raise load_model.Raised("target", f"backward raised {load_model.one_line(error)}") from error

    return record_step(model, forward, backward, inputs, is_first)


#: The paper's letters for what a Hugging Face configuration calls its sizes; b and s are of the inputs.
_CONFIG_SIZES = {
    "h": "hidden_size",
    "a": "num_attention_heads",
    "k": "num_key_value_heads",
    "d": "head_dim",
    "f": "intermediate_size",
    "v": "vocab_size",
    "l": "num_hidden_layers",
}


def _without_code(fields: dict) -> dict:
    """A JSON object, unless transformers would fetch the kernel that it names, as ``attn_implementation:
    "owner/name"``, and run it."""
    for name, value in fields.items():
        if name.endswith("_implementation") and "/" in str(value):
            raise ValueError(f"{name} is somebody's kernel, whose code isn't run")
    return fields


def config_factory(target: str | dict) -> tuple[Callable[..., Any], dict[str, int], str, tuple[int, int]]:
    """A factory of the causal language model that a Hugging Face ``config.json``, or its content, describes, its sizes
    by letter, rules, and the tokens of its sliding window and its positions, LARGEST_SIZE if it names none.

    Rules as ``--letters`` takes them.  Where positions turn only a part of each head, heads are multiples of 8.

    Weights are random; nothing is downloaded and no code of the model's author runs.  Raises ConfigError if
    transformers doesn't have the model, or if its layers aren't alike.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("target", "a config.json needs transformers: pip install transformers") from error
    try:
        given = dict(
            target
            if isinstance(target, dict)
            else json.loads(Path(target).read_text(encoding="utf-8"), object_hook=_without_code)
        )
        transformers.utils.logging.set_verbosity_error()
        kind = given.pop("model_type")
        config = transformers.AutoConfig.for_model(kind, **given)
    except Exception as error:
        raise ConfigError(
            "target", f"{target} is no configuration that transformers knows: {load_model.one_line(error)}"
        ) from error
    if getattr(config, "quantization_config", None):
        raise ConfigError("target", f"{target} has a quantization_config, which has no bill here: leave it out")
    sizes = {x: getattr(config, name, None) for x, name in _CONFIG_SIZES.items()}
    found = {x: size for x, size in sizes.items() if isinstance(size, int)}
    if found.get("a", 1) % (found.get("k") or 1):
        raise ConfigError("target", f"{target} has {found['a']} query heads and {found['k']} key heads, no multiple")
    if "d" in found and found["d"] * found.get("a", 0) == found.get("h"):
        del found["d"]
    if len({*(getattr(config, "layer_types", None) or ["full_attention"])}) > 1:
        raise ConfigError("target", f"{target} has layers of several kinds, which have no formula as one block")
    kinds = [getattr(config, "layer_types", None) or [""]][0][:1]

    def factory(s: int, b: int, **letters: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
        if window and s > window:
            raise ConfigError("s", f"is above the sliding window of {window}")
        own = transformers.AutoConfig.for_model(kind, **given)
        for letter, size in letters.items():
            setattr(own, _CONFIG_SIZES[letter], size)
        derived = isinstance(getattr(type(own), "head_dim", None), property)
        if "d" not in letters and not derived and getattr(own, "head_dim", None) is not None:
            own.head_dim = letters["h"] // letters["a"]
        if getattr(own, "layer_types", None):
            own.layer_types = kinds * letters["l"]
        own.use_cache, own.pad_token_id, own.bos_token_id, own.eos_token_id = False, None, 0, 0
        ids = torch.randint(0, letters["v"], (b, s))
        return transformers.AutoModelForCausalLM.from_config(own), {"input_ids": ids, "labels": ids}

    # By its letters, as the factories of others.
    parameters = [inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY) for x in ("s", "b", *found)]
    factory.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    given_rotary = {**given, **(given.get("rope_parameters") or {})}
    part = min(given_rotary.get(name) or 1 for name in ("partial_rotary_factor", "rotary_pct"))
    rules = "" if part == 1 else "d:8" if "d" in found else "h:8a"
    limits = (window, getattr(config, "max_position_embeddings", None))
    window, positions = (limit if isinstance(limit, int) else LARGEST_SIZE for limit in limits)
    return factory, found, rules, (window, positions)


def solved_blocks(
    factory: Factory,
    letters: Sequence[str],
    rules: Rules,
    dtype: str = "",
    may_be_one: Sequence[str] = (),
    parts: Sequence[str] = ("",),
    at: Mapping[str, int] = {},
    lora: int = 0,
) -> dict[str, BlockModel]:
    """Solve a factory's model, whose ``num_layers`` is free, for each part of a block that may run again, ``""`` for
    all of it.

    letters: without that of the layers.  at: sizes at which ``operations`` among the parts, after ``""``, are chosen.
    lora: the rank of ``extrapolate_blocks.adapter_code``, which runs first.  Raises
    ConfigError if there are no blocks, or if one more run shows that they aren't alike.
    """
    rng = random.Random(0)
    sizes = draw_sizes(letters, rules, rng)
    factory = _changed(factory, adapter_code(_blocks_of(factory, sizes, dtype, parts)[0], lora))
    path, first_block, element_size, early, is_frozen = _blocks_of(factory, sizes, dtype, parts)

    def ends_and_block(trained: bool) -> tuple[Formula, Formula]:
        one, two = (_elements(factory, letters, rules, blocks, dtype, trained) for blocks in (1, 2))
        block = _minus(two, one)
        return _minus(one, block), block

    first = _elements(factory, letters, rules, 1, dtype, names=early) if early else ()
    elements = *ends_and_block(True), first
    frozen = ends_and_block(False) if is_frozen else ((), ())
    found: dict[str, BlockModel] = {}
    tapes: dict[tuple[int, int], Tape] = {}
    known: list[Formula] = []
    waiting = list(parts)
    while waiting:
        part = waiting.pop(0)
        if part == OPERATIONS:
            waiting[:0] = operations_to_keep(found[""], at, first_block)
            continue

        def prepare(again: int, model: nn.Module, part: str = part) -> None:
            exec(recompute_code(path, again, part), {"model": model})

        for again, whole in BASES:
            if again or (again, whole) not in tapes:
                fixed, ready = {_BLOCKS: again + whole}, partial(prepare, again)
                tapes[again, whole] = tape_of(
                    factory, letters, rules, fixed, dtype, ready, may_be_one, len(letters) + 2, known
                )
        solved = BlockModel(dict(tapes), path, elements, element_size, frozen)
        again, whole = 2, 3
        more = {**sizes, _BLOCKS: again + whole}
        for is_first in (False, True):
            events = run_factory(factory, more, dtype, prepare=partial(prepare, again), is_first=is_first)
            live = [live for event, live, _ in moments(events) if isinstance(event, Run)]
            real = read_events(events).kept_bytes, max(live)
            need = solved.need(sizes, again, whole, is_first)
            if (need.kept_bytes, need.peak.bytes) != real:
                rule = (
                    f"blocks of {path} aren't alike: {again + whole} of them keep {real[0]:,} B and need {real[1]:,} B"
                )
                raise ConfigError("target", f"{rule}, {need.kept_bytes:,} and {need.peak.bytes:,} by runs of fewer")
        found[part] = solved
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
    """Tapes of ``file.py:factory`` or of a ``config.json``, all its sizes without the number of blocks, and that
    number.

    asked: sizes by letter; those of a config.json are its own unless they are here.  rules_text: as ``h:8a``.
    parts, lora: see ``solved_blocks``.  loss: a key of ``extrapolate_blocks.LOSS_CODE``, for a config.json only.
    """
    check_choice("dtype", dtype, tuple(load_model.DTYPES))
    check_choice("loss", loss, LOSS_CODE)
    sizes, window, positions = dict(asked), LARGEST_SIZE, LARGEST_SIZE
    built_in: list[str] = []
    if isinstance(target, dict) or target.endswith(".json"):
        factory, own, own_rules, (window, positions) = config_factory(target)
        built_in += [own_rules] if own_rules else []
        built_in += [f"s:{LOSS_CHUNKS}"] if LOSS_CODE[loss] else []
        if sizes["s"] > window:
            raise ConfigError(
                "at", f"s = {sizes['s']} is above the sliding window of {window}: no formula holds for both"
            )
        sizes = own | sizes
    elif LOSS_CODE[loss]:
        raise ConfigError("loss", "is what the factory's model returns: change it there")
    else:
        factory = load_model.load_factory(target)
    if _BLOCKS not in sizes:
        raise ConfigError("at", f"{_BLOCKS}, the number of layers, is missing")
    number = check_size(_BLOCKS, sizes.pop(_BLOCKS), 10_000)
    own_text = {part.strip().partition(":")[0]: part for part in rules_text.split(",") if part.strip()}
    for letter in own_text:
        if letter not in sizes:
            raise ConfigError("letters", f"there is no {letter}, only {', '.join(sizes)}")
    text = ",".join(own_text.get(letter, letter) for letter in sizes)
    may_be_one = [letter for letter in MAY_BE_ONE if letter == "b" or sizes.get(letter) == 1]

    def solved_with(*more: str) -> dict[str, BlockModel]:
        letters, rules, _ = parsed_letters(text, ",".join([*built_in, *more]))
        tiny = {**draw_sizes(letters, rules, random.Random(0)), _BLOCKS: 1}
        longest = min(window, _longest(factory, tiny, sizes["s"], positions))
        changed = _with_loss(factory, loss, tiny)
        with fused_attention_on_cpu() as dropouts:
            solved = solved_blocks(changed, letters, rules, dtype, may_be_one, parts, sizes, lora)
        drops_scores = bool(dropouts)
        return {part: replace(one, longest=longest, drops_scores=drops_scores) for part, one in solved.items()}

    try:
        found = solved_with()
    except load_model.Raised as error:
        try:
            found = solved_with(_KERNELS_NEED)
        except load_model.Raised:
            raise error from None
    return found, sizes, number


def _longest(factory: Factory, tiny: Mapping[str, int], asked: int, positions: int) -> int:
    """The longest sequence that a model of so many positions reads.

    Some learn a vector for each position, and others have a number of positions that they never ask for.
    """
    if positions < LARGEST_SIZE and not _has_rows(_built(factory, tiny, "")[0], positions, tiny):
        return LARGEST_SIZE
    if asked > positions:
        raise ConfigError("at", f"s = {asked} is above the {positions} positions that the model has vectors for")
    return positions


def _with_loss(factory: Factory, loss: str, tiny: Mapping[str, int]) -> Factory:
    """The factory of a Hugging Face model with another way to compute the loss, which is checked."""
    changed = _changed(factory, LOSS_CODE[loss])
    if LOSS_CODE[loss] and not torch.allclose(_padded_loss(factory, tiny), _padded_loss(changed, tiny)):
        raise ConfigError("loss", "this model does more to its logits than code in chunks does: give a factory")
    return changed


def _has_rows(model: nn.Module, positions: int, sizes: Mapping[str, int]) -> bool:
    """Whether a table has a row for each position, as OPT's with two more."""
    rows = {part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)} - {sizes.get("v")}
    return any(positions <= number <= positions + 2 for number in rows)


def _padded_loss(factory: Factory, sizes: Mapping[str, int]) -> torch.Tensor:
    """The loss of a Hugging Face model whose last tokens are padding, without a label, as is one more."""
    model, inputs = _built(factory, sizes, "")
    mask, labels = torch.ones_like(inputs["input_ids"]), inputs["labels"].clone()
    mask[:, -2:], labels[:, -2:], labels[:, 1] = 0, -100, -100
    return loss_of(load_model.run_forward(model, {**inputs, "labels": labels, "attention_mask": mask}))


def _blocks_of(
    factory: Factory, sizes: Mapping[str, int], dtype: str, parts: Sequence[str]
) -> tuple[str, str, int, frozenset[str], bool]:
    """Where the list of blocks is, the first one's name, the bytes of a weight's element, the weights outside with the
    first gradients, and whether any weight is frozen."""
    number = 5
    model, inputs = _built(factory, {**sizes, _BLOCKS: number}, dtype)
    found = [
        (sum(p.numel() for p in part.parameters()), name)
        for name, part in model.named_modules()
        if len(list(part.children())) == number and len({type(child) for child in part.children()}) == 1
    ]
    if not found:
        raise ConfigError(
            "target", "with num_layers=5 the model must have a list of 5 blocks of one class, and has none"
        )
    element_sizes = {p.element_size() for p in model.parameters()}
    if len(element_sizes) > 1:
        raise ConfigError("target", "its weights must be of one dtype, or give --dtype")
    path = max(found)[1]
    blocks = dict(model.get_submodule(path).named_children())
    inside = {name for block in blocks.values() for name, _ in block.named_modules()}
    for part in parts:
        if part not in inside and part != OPERATIONS:
            there = ", ".join(sorted(name for name in inside if name and "." not in name))
            raise ConfigError("again", f"a block of {path} has no {part}, only {there}")
    order: list[str] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    loss_of(load_model.run_forward(model, inputs)).backward()
    prefix = f"{path}." if path else ""
    first = next((i for i, name in enumerate(order) if name.startswith(prefix)), len(order))
    is_frozen = not all(p.requires_grad for p in model.parameters())
    return place_of(path), prefix + next(iter(blocks)), element_sizes.pop(), frozenset(order[:first]), is_frozen


def _elements(
    factory: Factory,
    letters: Sequence[str],
    rules: Rules,
    blocks: int,
    dtype: str,
    trained: bool = True,
    names: Collection[str] = (),
) -> Formula:
    """The elements of all weights that need gradients, or need none, or of those with these names, as a formula."""

    def rows(sizes: dict[str, int]) -> list[Row]:
        model, _ = _built(factory, {**sizes, _BLOCKS: blocks}, dtype)
        some = [(name, p) for name, p in model.named_parameters() if p.requires_grad == trained]
        return [Row(name, p.numel()) for name, p in some if not names or name in names]

    return solve_rows(rows, letters, rules)


def _minus(one: Formula, other: Formula) -> Formula:
    return added((one, tuple((-coefficient, powers) for coefficient, powers in other)))
