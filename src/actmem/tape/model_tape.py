"""The tape of a model that a factory makes, solved from tiny runs of real tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from actmem.config import ConfigError, check_choice
from actmem.measure import factories
from actmem.measure.ledger import record
from actmem.measure.whole_step import loss_of
from actmem.tape.evaluate import Event, Make, Tape
from actmem.tape.record import Recorder, record_step
from actmem.tape.solver import NO_RULES, NoFormula, Rules, draw_sizes, solve

#: The field that each of the paper's letters stands for.
_FIELDS = {names[0]: size for size, names in factories.SIZE_NAMES.items()}


def model_tape(
    target: str, letters: Sequence[str], rules: Rules = NO_RULES, fixed: Mapping[str, int] = {}, dtype: str = ""
) -> Tape:
    """The tape of ``file.py:factory``.  Raises ConfigError if it can't run or has no formulas over the letters."""
    if dtype:
        check_choice("dtype", dtype, tuple(factories.DTYPES))
    factory = factories.load_factory(target)

    def recorded(sizes: dict[str, int]) -> list[Event]:
        shown = ", ".join(f"{letter}={size}" for letter, size in sizes.items())
        try:
            return run_factory(factory, {**sizes, **fixed}, dtype)
        except NoFormula:
            raise
        except ConfigError as error:
            raise ConfigError(error.argument, f"at {shown}: {error.rule}; h:8 makes h a multiple of 8") from error

    tape = solve(recorded, letters, rules)
    sizes = {**draw_sizes(letters, rules, random.Random(0)), **fixed}
    names: dict[int, str] = {}
    run_factory(factory, sizes, dtype, names)
    for events in tape.variants.values():
        events[:] = [replace(e, name=names.get(e.number, e.name)) if isinstance(e, Make) else e for e in events]
    return tape


def run_factory(
    factory: Any, sizes: Mapping[str, int], dtype: str = "", names: dict[int, str] | None = None
) -> list[Event]:
    """One step's events.  names: gets the ledger's names of what autograd keeps, by the numbers of storages."""
    torch.manual_seed(0)
    model, inputs = factories.built_model(factory, {_FIELDS.get(x, x): size for x, size in sizes.items()}, dtype)

    def forward(recorder: Recorder):
        if names is None:
            return loss_of(factories.run_forward(model, inputs))
        with record(model) as ledger:
            loss = loss_of(factories.run_forward(model, inputs))
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
            raise ConfigError("target", f"backward raised {factories.one_line(error)}") from error

    return record_step(model, forward, backward, inputs)
