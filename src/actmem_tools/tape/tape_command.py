"""``actmem tape``: find formulas for a model's memory and FLOPs in tiny runs; or evaluate them, which needs no torch.

The file that holds the formulas is a tape (``tape.evaluate``).
"""

import argparse
import json
from pathlib import Path

from actmem.config import ConfigError
from actmem_tools.command_line import Parser, writable, write
from actmem_tools.tape.evaluate import Reading, Tape, formula_text, parsed_sizes

_HELP = """
To solve: actmem tape my_model.py:factory --letters s,b,h,a,f,v --out FILE
  The factory takes the letters (or seq_length, batch_size, hidden_size, …) as keyword arguments and returns
  (model, inputs), inputs a tuple of positional or a dict of keyword arguments. Backward starts from the output's loss,
  or else from the sum of its first floating-point tensor. h:8 says that h is a multiple of 8, h:2a of 2·a, l=2 that l
  is always 2.
To read: actmem tape FILE --at s=200,b=3,h=64,a=4,f=256,v=1000 --json OUT
  kept_bytes: alive when forward ends. peak_bytes: the most alive after any operation of backward. Neither counts
  weights, buffers, inputs or gradients of earlier microbatches; a new gradient counts until it is added to those.
  Dropout, nn.RMSNorm and attention with dropout keep what a GPU keeps of them, which is less than on a CPU.
"""


def _parser() -> Parser:
    what = "What a model's step makes and frees, solved as formulas from tiny runs, and read at any sizes."
    parser = Parser("tape", what, epilog=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="file.py:factory or pkg.module:factory to solve, or the file of a tape to read")
    parser.add_argument("--letters", metavar="s,b,h,…", help="the sizes to solve for")
    parser.add_argument("--dtype", default="", help="of weights and floating inputs, as bfloat16")
    parser.add_argument("--out", metavar="FILE", type=writable, help="where the tape goes")
    parser.add_argument("--at", metavar="s=200,b=3,…", help="the sizes to read a tape at")
    parser.add_json("the reading")
    return parser


def main(argv: list[str]) -> int:
    """Run ``actmem tape``: find formulas for a model's memory and FLOPs in tiny runs, and write them to a file.

    Without --letters it reads such a file, and evaluates its formulas at the sizes given with --at.

    Args:
        argv: what follows ``actmem tape``: the model's factory, such as ``file.py:factory``, or the file; and options.

    Returns: the exit code: 0, or 2 after one line of error on bad input.
    """
    return _parser().run(argv, lambda options: _read(options) if options.letters is None else _solve(options))


def _solve(options: argparse.Namespace) -> int:
    if options.at or options.json:
        raise ConfigError("letters", "solve first, then read the file with --at")
    if not options.out:
        raise ConfigError("out", "give a file for the tape")
    from actmem_tools.tape.model_tape import model_tape  # needs torch
    from actmem_tools.tape.solver import parsed_letters

    tape = model_tape(options.target, *parsed_letters(options.letters), options.dtype)
    write(options.out, tape.to_json() + "\n")
    print(f"{options.out}: {len(tape.formulas)} formulas in {', '.join(tape.letters)}")
    print(f"forward keeps {formula_text(tape.kept_formula(), tape.letters)} bytes")
    return 0


def _read(options: argparse.Namespace) -> int:
    if ":" in options.target and not Path(options.target).exists():
        raise ConfigError("letters", "give the letters to solve a model for, as --letters s,b,h")
    tape = Tape.from_json(Path(options.target).read_bytes())
    if options.at is None:
        raise ConfigError("at", f"give the sizes to read the tape at: {'=…,'.join(tape.letters)}=…")
    sizes = parsed_sizes(options.at)
    result = reading_as_object(sizes, tape.at(sizes))
    if options.json:
        write(options.json, json.dumps(result, ensure_ascii=False, indent=1) + "\n")
    for name in ("kept", "peak") if options.json != "-" else ():
        print(f"{name} {result[f'{name}_bytes']:,} B")
        for term, size in sorted(result[name].items(), key=lambda row: -row[1])[:10]:
            print(f"  {size:>18,}  {term}")
    return 0


def reading_as_object(sizes: dict[str, int], reading: Reading) -> dict:
    """Make the dict that ``actmem tape --json`` writes for one set of sizes.

    Args:
        sizes: the value of each letter.
        reading: memory and FLOPs at these sizes.

    Returns: a dict with these keys.
        sizes: the argument ``sizes``.
        kept_bytes: bytes alive when forward ends.
        peak_bytes: the most bytes alive after any operation of backward.
        kept: the storages alive when forward ends, a dict from names to bytes.
        peak: the storages alive at the peak, a dict from names to bytes.
        matmul_flops: FLOPs of matmuls and attention, a dict with "forward" and "backward".
        moved_bytes: bytes that operations read and write, a dict with "forward" and "backward".
    """
    return {
        "sizes": sizes,
        "kept_bytes": reading.kept_bytes,
        "peak_bytes": reading.peak_bytes,
        "kept": {row.term: row.bytes for row in reading.kept_rows},
        "peak": {row.term: row.bytes for row in reading.peak_rows},
        "matmul_flops": dict(reading.flops),
        "moved_bytes": dict(reading.moved_bytes),
    }
