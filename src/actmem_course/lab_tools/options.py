"""Options that several labs have.  ``actmem_course.arguments`` has the parser, and ``actmem_course.ranks`` the
ranks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from actmem.config import PAPER_MODELS, ConfigError, ModelShape, check_size
from actmem_course.arguments import ELEMENT_SIZES, LabParser, add_json_argument, given_sizes, shape_from
from actmem_course.lab_tools.machine import usual_dtype

#: The layer that ``layer_shape`` chooses, in words.
DEFAULT_LAYER = "tiny; 22B on GPUs"
#: Fewer tokens than this are not worth a GPU.
LEAST_TOKENS = 256


def lab_parser(script: str, doc: str, spelled: dict[str, str] | None = None) -> LabParser:
    """A parser with --json.

    Args:
        script: the lab's file name.
        doc: the lab's docstring; its second paragraph is the description.
        spelled: options by the argument that a ConfigError names, where the two differ.
    """
    parser = LabParser(prog=script, description=doc.split("\n\n")[1], spelled=spelled)
    add_json_argument(parser)
    return parser


def add_dtype_argument(parser: argparse.ArgumentParser) -> None:
    """--dtype of the activations: bfloat16 by default."""
    parser.add_argument(
        "--dtype", choices=tuple(ELEMENT_SIZES), default="bfloat16", help="of the activations (default: bfloat16)"
    )


def add_timing_arguments(parser: argparse.ArgumentParser) -> None:
    """--dtype and --rounds; ``check_timing`` reads them."""
    parser.add_argument(
        "--dtype",
        choices=tuple(ELEMENT_SIZES),
        help="of the activations (default: bfloat16 on GPUs that have it, else float16; float32 on CPUs)",
    )
    parser.add_argument(
        "--rounds", type=int, default=20, metavar="N", help="how often each is timed (default: %(default)s)"
    )


def check_timing(args: argparse.Namespace) -> str:
    """The dtype's name, chosen if none is given.  Raises ConfigError on a bad number of rounds."""
    check_size("rounds", args.rounds, largest=100_000)
    return args.dtype or usual_dtype(args.device)


def add_file_argument(parser: argparse.ArgumentParser, name: str, meaning: str) -> None:
    """An option that names a file to write; ``files.check_files`` checks it before any work is done."""
    parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=meaning)


def add_choices_argument(parser: argparse.ArgumentParser, name: str, choices: Sequence[str], metavar: str) -> None:
    """An option that may be repeated; ``chosen`` reads it."""
    meaning = f"one of {', '.join(choices)}; may be repeated (default: all)"
    parser.add_argument(f"--{name}", action="append", choices=tuple(choices), metavar=metavar, help=meaning)


def chosen(given: Sequence[str] | None, choices: Sequence[str]) -> list[str]:
    """What a repeated option named, in the order of the choices; all of them where it was not given."""
    return [choice for choice in choices if choice in (given or choices)]


def check_single_process(script: str) -> None:
    """Raise ConfigError under torchrun."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ConfigError("started by torchrun", f"needs a single process: python labs/{script}")


def layer_shape(args: argparse.Namespace, check: Callable[[ModelShape], object]) -> ModelShape:
    """The layer to measure: the one that the command line names; by default the 22B model's on GPUs, a tiny one on
    CPUs.

    Where a GPU has no room for the 22B layer, the default has half the tokens, or fewer.

    Args:
        args: parsed options of ``add_shape_arguments`` and ``add_rank_arguments``.
        check: raises ConfigError about "model shape" where a layer is too large.
    """
    if args.device == "cpu" or args.model is not None or given_sizes(args):
        shape = shape_from(args)
        check(shape)
        return shape
    shape = PAPER_MODELS["22B"].shape
    while True:
        try:
            check(shape)
            return shape
        except ConfigError as error:
            if error.argument != "model shape" or shape.seq_length <= LEAST_TOKENS:
                raise
        shape = shape.with_sizes(seq_length=shape.seq_length // 2)


def shortened(shape: ModelShape) -> str:
    """A sentence for a layer of ``layer_shape`` that has fewer tokens than the 22B model's; "" for any other."""
    whole = PAPER_MODELS["22B"].shape
    if shape.seq_length < whole.seq_length and shape.with_sizes(seq_length=whole.seq_length) == whole:
        return f"The 22B model's layer with {shape.seq_length:,} of its {whole.seq_length:,} tokens: more do not fit."
    return ""
