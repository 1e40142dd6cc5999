"""The labs and their exercises: number, function, and the section of the chapter to read for it; our solutions.

Loads no torch: cases are loaded by the ranks.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

from actmem.config import ConfigError
from actmem_course.judge.mistake import Mistake


@cache
def _hints() -> dict[str, tuple[str, ...]]:
    """The hints of ``hints.md`` by exercise: each is an item of the list below its heading."""
    text = (Path(__file__).parent / "hints.md").read_text(encoding="utf-8")
    _, *parts = re.split(r"^## (\S+).*", text, flags=re.MULTILINE)
    lists = (re.split(r"^- ", part, flags=re.MULTILINE)[1:] for part in parts[1::2])
    return {number: tuple(" ".join(hint.split()) for hint in items) for number, items in zip(parts[::2], lists)}


@dataclass(frozen=True)
class Exercise:
    """One function to write, and how it is judged.

    case: its name in the lab's file of cases, if that isn't the function's.  section: of the chapter to read, and
    chapter the chapter, if it isn't the lab's.  seconds: a rank that works on it for longer is taken to be stuck.
    takes_group: it is handed a process group, and is judged on several.
    """

    number: str
    function: str
    section: str
    case: str = ""
    seconds: int = 30
    takes_group: bool = False
    chapter: str = ""

    @property
    def hints(self) -> tuple[str, ...]:
        """From a nudge to nearly the answer."""
        return _hints()[self.number]

    @property
    def lab(self) -> str:
        """The lab's name."""
        return next(lab.name for lab in ALL_LABS if self in lab.exercises)

    @property
    def check(self) -> Callable:
        """Called with a CaseRun: says what it sees, and raises Wrong where that needs no comparison; a remark, or
        None."""
        return getattr(cases_of(self.lab), self.case or self.function)


@dataclass(frozen=True)
class Lab:
    """A lab: its exercises in order.

    one_process: it needs no ranks.  fewest_virtual: it is judged on no fewer virtual ranks, because a mistake is
    none on fewer.
    """

    name: str
    title: str
    chapter: str
    exercises: tuple[Exercise, ...]
    one_process: bool = False
    fewest_virtual: int = 1

    def chapter_of(self, exercise: Exercise) -> str:
        """The chapter that explains an exercise."""
        return exercise.chapter or self.chapter

    def choose(self, numbers: list[str], argument: str) -> tuple[Exercise, ...]:
        """The exercises of these numbers, all if there are none.  Raises ConfigError on an unknown number."""
        if not numbers:
            return self.exercises
        known = [exercise.number for exercise in self.exercises]
        for number in numbers:
            if number not in known:
                raise ConfigError(argument, f"must be one of {', '.join(known)}, got {number}")
        return tuple(exercise for exercise in self.exercises if exercise.number in numbers)


ALL_LABS = (
    Lab("lab1_count_bytes", "Lab 1: count bytes", "02_counting_bytes", (
        Exercise("1.1", "layer_bytes", "One rule"),
        Exercise("1.2", "rank_bytes", "Table 2: six ways to train a layer", chapter="05_recomputation"),
        Exercise("1.3", "gated_mlp_bytes", "On your own module"),
        Exercise("1.4", "crossover_seq_length", "Where attention takes over"),
    ), one_process=True),
    Lab("lab2_tensor_parallel", "Lab 2: tensor parallelism", "03_tensor_parallelism", (
        Exercise("2.1", "f", "f and f̄", takes_group=True),
        Exercise("2.2", "f_bar", "f and f̄", takes_group=True),
        Exercise("2.3", "column_parallel_linear", "Columns, then rows", takes_group=True),
        Exercise("2.4", "row_parallel_linear", "Columns, then rows", takes_group=True),
        Exercise("2.5", "split_attention", "Attention: whole heads", takes_group=True),
        Exercise("2.6", "mlp", "Columns, then rows", takes_group=True),
        Exercise("2.7", "attention", "Attention: whole heads", takes_group=True),
        Exercise("2.8", "vocab_parallel_cross_entropy", "What divides and what does not", takes_group=True),
    )),
    Lab("lab3_sequence_parallel", "Lab 3: sequence parallelism", "04_sequence_parallelism", (
        Exercise("3.1", "g", "The ranks, before and after", takes_group=True),
        Exercise("3.2", "g_bar", "The ranks, before and after", takes_group=True),
        Exercise("3.3", "gathering_linear", "What plain autograd saves", takes_group=True),
        Exercise("3.4", "layer", "The ranks, before and after", takes_group=True),
        Exercise("3.5", "shard_keeping_linear", "Gather again in the backward pass", takes_group=True),
        Exercise("3.6", "sum_partial_gradients", "Partial gradients", takes_group=True),
        Exercise("3.7", "dropout_generators", "The ranks, before and after", takes_group=True),
    )),
    Lab("lab4_recompute", "Lab 4: recomputation", "05_recomputation", (
        Exercise("4.1", "checkpoint", "How a checkpoint function works, in four steps"),
        Exercise("4.2", "checkpoint", "How a checkpoint function works, in four steps", case="checkpoint_of_dropout"),
        Exercise("4.3", "selective_layer", "How a checkpoint function works, in four steps"),
        Exercise("4.4", "full_layer", "How a checkpoint function works, in four steps"),
    ), one_process=True),
    Lab("lab5_pipeline", "Lab 5: the pipeline", "06_pipeline", (
        Exercise("5.1", "one_forward_one_backward", "One forward, one backward"),
        Exercise("5.2", "interleaved", "Interleaving: less idle time, more bytes"),
        Exercise("5.3", "free_output", "Figure 9: every rank, and the outputs that nothing reads"),
        Exercise("5.4", "how_many_fit", "Appendix C: recompute only what does not fit"),
    ), one_process=True),
    Lab("lab6_train", "Lab 6: train under every mode", "07_time", (
        Exercise(
            "6.1", "make_model", "Table 2: six ways to train a layer", takes_group=True, chapter="05_recomputation",
        ),
        Exercise("6.2", "gradient_norm", "Gradients of a whole step", takes_group=True),
        Exercise("6.3", "training_step", "Gradients of a whole step", takes_group=True),
        Exercise("6.4", "train", "Gradients of a whole step", takes_group=True),
    )),
    Lab("lab7_todays_layer", "Lab 7: today's layer", "08_todays_layer", (
        Exercise("7.1", "llama_layer_bytes", "The layer changed"),
        Exercise("7.2", "rms_norm", "What plain operators save instead"),
        Exercise("7.3", "swiglu", "What plain operators save instead"),
        Exercise("7.4", "split_grouped_heads", "More ranks than key heads", takes_group=True),
        Exercise("7.5", "sum_shared_gradients", "More ranks than key heads", takes_group=True),
        # On two, the ranks that share a head are all of them; on four, rank // k is as right as rank · k // t.
    ), fewest_virtual=8),
    Lab("lab8_plan", "Lab 8: what fits", "09_your_model", (
        Exercise("8.1", "rank_state_bytes", "What fits"),
        Exercise("8.2", "largest_micro_batch_size", "What fits"),
    ), one_process=True),
    Lab("lab9_the_ends", "Lab 9: the loss", "10_the_loss", (
        Exercise("9.1", "cross_entropy", "What the loss saves"),
        Exercise("9.2", "linear_cross_entropy", "A chunk at a time"),
    ), one_process=True),
    Lab("lab10_keep_less", "Lab 10: save less", "11_adapters", (
        Exercise("10.1", "frozen_linear", "A frozen weight"),
        Exercise("10.2", "lora_linear", "An adapter"),
        Exercise("10.3", "tiled_mlp", "Step 4: the MLP in tiles", chapter="12_long_sequences"),
    ), one_process=True),
)  # fmt: skip


LAB_NAMES = tuple(lab.name for lab in ALL_LABS)


def lab_of_file(script: Path, doc: str) -> Lab:
    """Which lab a learner's file is: by the line "Lab 2: …" of its docstring, or by its name.

    Raises ConfigError if neither says so.
    """
    said = re.search(r"^Lab (\d+):", doc, re.MULTILINE) or re.match(r"lab(\d+)", script.stem)
    found = [lab for lab in ALL_LABS if said and lab.name.startswith(f"lab{said[1]}_")]
    if not found:
        raise ConfigError(
            "file",
            f'which lab is it?  Name it as it was, or begin its docstring with "Lab 1: …" (1 to {len(ALL_LABS)})',
        )
    return found[0]


def load_lab(name: str) -> Lab:
    """The lab of that file name."""
    return next(lab for lab in ALL_LABS if lab.name == name)


def solution_module(name: str) -> ModuleType:
    """Our own solution."""
    return importlib.import_module(f"actmem_course.judge.solutions.{name}")


def solutions_of(name: str) -> dict:
    """What our own solution's module defines, by name."""
    return vars(solution_module(name))


def cases_of(name: str) -> ModuleType:
    """A lab's cases."""
    return importlib.import_module(f"actmem_course.judge.cases.{name}")


def mistakes_of(exercise: Exercise) -> Sequence[Mistake]:
    """The stated mistakes of an exercise, the likelier first."""
    return importlib.import_module(f"actmem_course.judge.mistakes.{exercise.lab}").MISTAKES.get(exercise.number, ())
