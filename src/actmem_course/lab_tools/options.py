"""Options that several labs have. ``actmem_course.arguments`` has the parser, ``actmem_course.ranks`` the ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from actmem.config import PAPER_MODELS, ModelShape, check_size, model_shape
from actmem_course.arguments import LabParser, add_json_argument, add_rank_arguments
from actmem_course.lab_tools.machine import ranks_in_words, usual_dtype

if TYPE_CHECKING:
    from actmem_course.ranks import Ranks

#: Bytes of one activation element, by the dtype's name on the command line.
ELEMENT_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
#: The layer that ``layer_shapes`` chooses, in words.
DEFAULT_LAYER = "tiny; 22B on GPUs"
#: ``layer_shapes`` offers no layer with fewer tokens than this: it would not be worth a GPU.
LEAST_TOKENS = 256

_SIZES = {
    "seq_length": "tokens of one sequence (s)",
    "micro_batch_size": "sequences of one microbatch (b)",
    "hidden_size": "hidden size (h)",
    "num_attention_heads": "attention heads (a)",
}


def lab_parser(script: str, doc: str, spelled: dict[str, str] | None = None) -> LabParser:
    """Make the parser of a lab's command line, which has the option --json.

    Args:
        script: the lab's file name, such as "measure_paper.py".
        doc: the lab's docstring; its second paragraph becomes the description in --help.
        spelled: for arguments whose option has another name, the option that an error about this argument must name:
            {"num_layers": "--layers"}.
    """
    parser = LabParser(prog=script, description=doc.split("\n\n")[1], spelled=spelled)
    add_json_argument(parser)
    return parser


def add_shape_arguments(parser: argparse.ArgumentParser, default: str = "tiny") -> None:
    """Add --model to a parser, and an option for each of s, b, h and a that overrides the model's own size.

    Args:
        parser: the lab's parser; the options are added to it.
        default: which model the lab takes without --model; it is only printed in the help text.
    """
    parser.add_argument(
        "--model", choices=("tiny", *PAPER_MODELS), help=f"model whose layer is used (default: {default})"
    )
    for name, meaning in _SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=meaning)


def shape_from(args: argparse.Namespace) -> ModelShape:
    """Return the shape that --model and the options for sizes describe.

    Args:
        args: parsed options of ``add_shape_arguments``.

    Raises: ConfigError on impossible sizes.
    """
    return model_shape(args.model or "tiny").with_sizes(**_given(args))


def names_a_shape(args: argparse.Namespace) -> bool:
    """Return whether the user has given --model or an option for a size.

    Args:
        args: parsed options of ``add_shape_arguments``.
    """
    return args.model is not None or bool(_given(args))


def _given(args: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(args, name) for name in _SIZES if getattr(args, name) is not None}


def layer_shapes(args: argparse.Namespace) -> list[ModelShape]:
    """Return the shapes of the layers to try, in order, from which ``machine.first_that_fits`` chooses.

    If the user has named a model or sizes, the list has this layer only. Otherwise it has a tiny layer on CPUs; on GPUs
    it has the 22B model's layer, then this layer with half as many tokens, and so on down to LEAST_TOKENS.

    Args:
        args: parsed options of ``add_shape_arguments`` and --device, which is "cpu" or "cuda" by now.
    """
    if args.device == "cpu" or names_a_shape(args):
        return [shape_from(args)]
    shapes = [PAPER_MODELS["22B"].shape]
    while shapes[-1].seq_length > LEAST_TOKENS:
        shapes.append(shapes[-1].with_sizes(seq_length=shapes[-1].seq_length // 2))
    return shapes


def described(shape: ModelShape, here: Ranks, dtype: str) -> str:
    """Return lines of text for a title: the sizes and the dtype; the ranks, the device and torch's version.

    A third line says if ``shape`` is the 22B model's layer with fewer tokens than in table 3: ``layer_shapes`` offers
    such shorter layers for GPUs with less memory.

    Args:
        shape: the layer's sizes s, b, h, a.
        here: this rank, which knows the number of ranks and the device.
        dtype: its name, such as "bfloat16".
    """
    a, b, h, s = shape.letters()
    lines, paper = f"s={s} b={b} h={h} a={a}, {dtype}\n{ranks_in_words(here)}", PAPER_MODELS["22B"].shape
    if s < paper.seq_length and shape.with_sizes(seq_length=paper.seq_length) == paper:
        lines += f"\nThe 22B model's layer with {s:,} of its {paper.seq_length:,} tokens: more do not fit."
    return lines


def add_dtype_argument(parser: argparse.ArgumentParser) -> None:
    """Add --dtype, the dtype of activations, to a parser; bfloat16 by default."""
    meaning = "of the activations (default: bfloat16)"
    parser.add_argument("--dtype", choices=tuple(ELEMENT_SIZES), default="bfloat16", help=meaning)


def timing_parser(script: str, doc: str) -> LabParser:
    """Make the parser of a lab that times a layer: options for sizes, ranks, dtype and rounds (``check_timing``)."""
    parser = lab_parser(script, doc)
    add_shape_arguments(parser, DEFAULT_LAYER)
    add_rank_arguments(parser)
    meaning = "of the activations (default: bfloat16 on GPUs that have it, else float16; float32 on CPUs)"
    parser.add_argument("--dtype", choices=tuple(ELEMENT_SIZES), help=meaning)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="how often each is timed (default: 20)")
    return parser


def check_timing(args: argparse.Namespace) -> str:
    """Check --rounds, and return the name of the dtype: --dtype, or ``usual_dtype`` without --dtype.

    Args:
        args: parsed options of ``timing_parser``, and --device, which is "cpu" or "cuda" by now.

    Raises:
        ConfigError: The number of rounds is not allowed.
    """
    check_size("rounds", args.rounds, largest=100_000)
    return args.dtype or usual_dtype(args.device)


def add_file_argument(parser: argparse.ArgumentParser, name: str, meaning: str) -> None:
    """Add an option that names a file to write; ``files.check_files`` checks the file before any work is done.

    Args:
        parser: the lab's parser; the option is added to it.
        name: the option without its dashes, such as "trace".
        meaning: its help text.
    """
    parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=meaning)
