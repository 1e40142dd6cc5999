"""``actmem record pkg.module:factory``: what a model keeps for backward, and with --step its peak."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from actmem.config import ConfigError, check_size
from actmem.ledger.ledger_tables import bill_text, ledger_text, readable_size
from actmem.ledger.recorder import Ledger, record
from actmem.ledger.save_sites import is_compiled
from actmem.ledger.whole_step import StepBill, step
from actmem.main_grad import gradient_of
from actmem_tools import load_model
from actmem_tools.attention_kernels import Gpu
from actmem_tools.command_line import Parser, one_line, writable, write
from actmem_tools.diagnosis import findings
from actmem_tools.no_device import gpu_of_this_build
from actmem_tools.record_page import page
from actmem_tools.tape.evaluate import parsed_sizes

#: A fake run is checked against a real one if all of that fits into this.
_CHECKED_BYTES = 256 << 20
#: Sizes of that check, of those that were given or that the factory takes.
_SMALL = {"s": 16, "b": 2, "l": 2}
_EVAL_MODE = "the model is in eval mode, where dropout and batch norm keep less: call model.train() in the factory"
#: Of a step on a CPU with oneDNN.
_WORKSPACES = (
    "what this machine's kernels (oneDNN) allocate and free inside one operation, for convolutions, recurrent layers "
    "and autocast, is not counted: it was 11 to 34% of small models' peaks"
)
_NO_CUDA = (
    "there is no GPU that this torch can use, and --fake needs a build for CUDA: "
    "pip install torch --index-url https://download.pytorch.org/whl/cu130"
)


def main(argv: list[str]) -> int:
    """Run the command; 2 and one line on bad input."""
    return _parser().run(argv, _run)


def _parser() -> Parser:
    what = (
        "List what a model keeps for backward. The factory returns (model, inputs): a tuple of positional or a dict of"
    )
    parser = Parser("record", f"{what} keyword arguments.")
    add = parser.add_argument
    add("target", help="pkg.module:factory or file.py:factory")
    add("--fake", action="store_true", help="fake tensors: any size, no memory")
    add("--dtype", choices=tuple(load_model.DTYPES), default="", help="of weights and floating inputs")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    kernels = "with --fake --device cuda: whose kernels (default: 9.0, an H100's)"
    add("--capability", metavar="X.Y", help=kernels)
    add(
        "--at",
        metavar="s=128,b=2,…",
        help="sizes, which the factory must take, under these letters or as seq_length, …",
    )
    add("--step", action="store_true", help="run a training step too (after one to warm up), and bill its peak")
    add("--optimizer", choices=("adamw", "sgd", "none"), default="adamw", help="of --step")
    add("--loss", metavar="TARGET", help="of --step: a function of the output, as pkg.module:function")
    parser.add_json("the result")
    add("--html", metavar="FILE", type=writable, help="one page with a treemap and, with --step, the curve")
    return parser


def _run(options: argparse.Namespace) -> int:
    _check_device(options)
    if options.capability and not (options.fake and options.device == "cuda"):
        raise ConfigError("capability", "needs --fake --device cuda")
    files = [Path(file).resolve() for file in (options.json, options.html) if file]
    if len({*files}) < len(files):
        raise ConfigError("json", "each result needs a file of its own")
    factory = load_model.load_factory(options.target)
    sizes = parsed_sizes(options.at) if options.at else {}
    for letter, size in sizes.items():
        check_size(letter, size)
    loss = load_model.load_factory(options.loss) if options.loss else None
    bill, failure = None, None
    with load_model.tensors_for(options.fake, options.device, _gpu(options)):
        model, inputs = load_model.built_model(factory, sizes, options.dtype, options.device)
        if options.fake and is_compiled(model):
            raise ConfigError("fake", "torch.compile does not run on fake tensors: leave out one of the two")
        notes = [] if model.training else [_EVAL_MODE]
        # Before forward: after it FSDP's root is whole until backward.
        optimizer = _optimizer(options.optimizer, model) if options.step else None
        ledger = _recorded(model, inputs)
        weights = _weight_bytes(model)  # after forward, which makes those of lazy modules
        if options.step:
            try:
                bill = _second_step(model, inputs, loss, optimizer)
                notes += _step_notes(model, ledger, options)
            except ConfigError as error:
                failure = error
            except Exception as error:
                failure = ConfigError("step", f"the training step raised {one_line(error)}")
    if options.fake:
        notes.append(_fake_note(factory, sizes, options, ledger, weights))
    more = {"target": options.target, "torch": torch.__version__, "fake": options.fake, "notes": notes}
    result = as_dict(ledger, bill, more)
    _write(result, options, _text(ledger, bill, result))
    if failure is not None:  # the ledger is written: it took as long as the step
        raise failure
    return 0


def _check_device(options: argparse.Namespace) -> None:
    if options.device == "cpu" or torch.cuda.is_available():
        return
    if torch.version.cuda is None:
        raise ConfigError("device", _NO_CUDA)
    if not options.fake:
        raise ConfigError("device", "there is no GPU here: add --fake to list what one would keep")
    if options.step:
        raise ConfigError("step", "backward does not run on CUDA tensors without a GPU")


def _write(result: dict[str, Any], options: argparse.Namespace, text: str) -> None:
    """Write the result as was asked for."""
    if options.html:
        write(_of_this_rank(options.html), page(result))
    if options.json:
        write(_of_this_rank(options.json), json.dumps(result, ensure_ascii=False) + "\n")
    if options.json != "-":
        print(text)


def _of_this_rank(file: str) -> str:
    """The file's name with the rank in it, if there are several: ``step.json`` is ``step-rank1.json``."""
    if file == "-" or not dist.is_initialized() or dist.get_world_size() == 1:
        return file
    path = Path(file)
    return str(path.with_stem(f"{path.stem}-rank{dist.get_rank()}"))


def _second_step(model: torch.nn.Module, inputs: Any, loss: Any, optimizer: Any) -> StepBill:
    step(model, inputs, loss, optimizer)
    if optimizer is not None:
        optimizer.zero_grad()
    return step(model, inputs, loss, optimizer)


def _step_notes(model: torch.nn.Module, ledger: Ledger, options: argparse.Namespace) -> list[str]:
    """What is to be known of a step that ran: workspaces that aren't counted, trained weights without a gradient."""
    kinds = torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.RNNBase
    uses = any(isinstance(part, kinds) for part in model.modules()) or "cast weight" in ledger.by_kind()
    here = options.device == "cpu" and not options.fake and torch.backends.mkldnn.is_available()
    missing = [name for name, p in model.named_parameters() if p.requires_grad and gradient_of(p) is None]
    return [note for note in (_WORKSPACES if uses and here else "", load_model.gradient_note(missing)) if note]


def _recorded(model: torch.nn.Module, inputs: Any) -> Ledger:
    with record(model) as ledger:
        output = load_model.run_forward(model, inputs)
    del output
    return ledger


def _weight_bytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _gpu(options: argparse.Namespace) -> Gpu | None:
    """The GPU that fake CUDA tensors stand for."""
    if options.device != "cuda" or torch.cuda.is_available():
        return None
    asked = options.capability or "9.0"
    if not re.fullmatch(r"[0-9]+\.[0-9]", asked):
        raise ConfigError("capability", f"must be a compute capability as 9.0 (H100) or 7.5 (T4), got {asked}")
    major, minor = map(int, asked.split("."))
    return gpu_of_this_build((major, minor))


def _optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer | None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "none" or not trained:
        return None
    return torch.optim.AdamW(trained) if name == "adamw" else torch.optim.SGD(trained, lr=1e-3)


def _fake_note(factory: Any, sizes: dict[str, int], options: argparse.Namespace, ledger: Ledger, weights: int) -> str:
    """Whether real tensors give the same bytes, where they are small enough to try, or else at small sizes."""
    where, told = "", ledger.total_bytes
    try:
        if options.device == "cpu" and weights + told > _CHECKED_BYTES:
            small = {name: size for name, size in _SMALL.items() if load_model.keyword_of(factory, name)}
            sizes = {**sizes, **small}
            where = f" at {', '.join(f'{name}={size}' for name, size in small.items())}"
            with load_model.tensors_for(True):
                told, weights = _kept_bytes(factory, sizes, options.dtype)
        if options.device != "cpu" or weights + told > _CHECKED_BYTES:
            return "fake tensors only: too large to check against real ones here; try small sizes once"
        real, _ = _kept_bytes(factory, sizes, options.dtype)
    except ConfigError as error:  # of this trial: what was asked for ran
        return f"not checked against real tensors{where}: {error.rule}"
    if real == told:
        return f"checked{where}: real tensors keep the same bytes"
    return f"real tensors keep something else{where}: {real:,} B instead of {told:,} B on fake ones"


def _kept_bytes(factory: Any, sizes: dict[str, int], dtype: str) -> tuple[int, int]:
    """What stays for backward, and the weights."""
    model, inputs = load_model.built_model(factory, sizes, dtype)
    kept = _recorded(model, inputs).total_bytes
    return kept, _weight_bytes(model)


def as_dict(ledger: Ledger, bill: StepBill | None, more: dict[str, Any]) -> dict[str, Any]:
    """The result as plain values, for JSON: ``rows`` add up to ``total_bytes`` and ``host_bytes``, ``peak`` to
    ``peak_bytes``."""
    result = {**more, "total_bytes": ledger.total_bytes, "host_bytes": ledger.host_bytes, "by_kind": ledger.by_kind()}
    result["rows"] = [row.as_dict() for row in ledger.tensors]
    result["findings"] = [{"waste": f.waste, "bytes": f.bytes, "text": f.text} for f in findings(ledger.tensors)]
    if bill is not None:
        result |= {"peak_bytes": bill.peak_bytes, "peak": [row.as_dict() for row in bill.peak]}
        result |= {"curve": bill.curve, "phases": bill.phases}
    return result


def _text(ledger: Ledger, bill: StepBill | None, result: dict[str, Any]) -> str:
    parts = [ledger_text(ledger)]
    if wastes := result["findings"]:
        lines = [f"- {f['waste']}: {f['bytes']:,} B ({readable_size(f['bytes'])}). {f['text']}" for f in wastes]
        parts.append("\n".join(["What could go:", *lines]))
    if bill is not None:
        parts.append(bill_text(bill))
    return "\n\n".join(parts + result["notes"])
