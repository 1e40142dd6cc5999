"""Options that several labs have.  ``actmem_course.arguments`` has the parser, and ``actmem_course.ranks`` the
ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

from actmem.config import PAPER_MODELS, ModelShape, check_size, model_shape
from actmem_course.arguments import LabParser, add_json_argument
from actmem_course.lab_tools.machine import usual_dtype

#: Bytes of one activation element by the name on the command line.
ELEMENT_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
#: The layer that ``layer_shapes`` chooses, in words.
DEFAULT_LAYER = "tiny; 22B on GPUs"
#: Fewer tokens than this are not worth a GPU.
LEAST_TOKENS = 256

_SIZES = {
    "seq_length": "tokens of one sequence (s)",
    "micro_batch_size": "sequences of one microbatch (b)",
    "hidden_size": "hidden size (h)",
    "num_attention_heads": "attention heads (a)",
}


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


def add_shape_arguments(parser: argparse.ArgumentParser, default: str = "tiny") -> None:
    """--model, and a size option for each of s, b, h, a that overrides the model's own.  default: in words."""
    parser.add_argument(
        "--model", choices=("tiny", *PAPER_MODELS), help=f"model whose layer is used (default: {default})"
    )
    for name, meaning in _SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=meaning)


def shape_from(args: argparse.Namespace) -> ModelShape:
    """The shape that the arguments name.  Raises ConfigError on sizes that do not fit together."""
    return model_shape(args.model or "tiny").with_sizes(**_given(args))


def names_a_shape(args: argparse.Namespace) -> bool:
    """Whether the command line names a model or a size."""
    return args.model is not None or bool(_given(args))


def _given(args: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(args, name) for name in _SIZES if getattr(args, name) is not None}


def layer_shapes(args: argparse.Namespace) -> list[ModelShape]:
    """The layer that the command line names; by default a tiny one on CPUs, and on GPUs the 22B model's, from which
    ``machine.first_that_fits`` chooses: whole, or with half the tokens, and so on."""
    if args.device == "cpu" or names_a_shape(args):
        return [shape_from(args)]
    shapes = [PAPER_MODELS["22B"].shape]
    while shapes[-1].seq_length > LEAST_TOKENS:
        shapes.append(shapes[-1].with_sizes(seq_length=shapes[-1].seq_length // 2))
    return shapes


def shortened(shape: ModelShape) -> str:
    """A sentence for a layer of ``layer_shapes`` that has fewer tokens than the 22B model's; "" for any other."""
    whole = PAPER_MODELS["22B"].shape
    if shape.seq_length < whole.seq_length and shape.with_sizes(seq_length=whole.seq_length) == whole:
        return f"The 22B model's layer with {shape.seq_length:,} of its {whole.seq_length:,} tokens: more do not fit."
    return ""


def add_dtype_argument(parser: argparse.ArgumentParser) -> None:
    """--dtype of the activations: bfloat16 by default."""
    meaning = "of the activations (default: bfloat16)"
    parser.add_argument("--dtype", choices=tuple(ELEMENT_SIZES), default="bfloat16", help=meaning)


def add_timing_arguments(parser: argparse.ArgumentParser) -> None:
    """--dtype and --rounds; ``check_timing`` reads them."""
    meaning = "of the activations (default: bfloat16 on GPUs that have it, else float16; float32 on CPUs)"
    parser.add_argument("--dtype", choices=tuple(ELEMENT_SIZES), help=meaning)
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="how often each is timed (default: 20)")


def check_timing(args: argparse.Namespace) -> str:
    """The dtype's name, chosen if none is given.  Raises ConfigError on a bad number of rounds."""
    check_size("rounds", args.rounds, largest=100_000)
    return args.dtype or usual_dtype(args.device)


def add_file_argument(parser: argparse.ArgumentParser, name: str, meaning: str) -> None:
    """An option that names a file to write; ``files.check_files`` checks it before any work is done."""
    parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=meaning)
