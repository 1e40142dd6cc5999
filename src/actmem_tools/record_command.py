"""``actmem record pkg.module:factory``: list what a model saves for backward, and with --step a step's peak memory."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from actmem.config import ConfigError, check_size
from actmem.ledger.ledger_tables import bill_text, ledger_text
from actmem.ledger.recorder import Ledger, record
from actmem.ledger.save_sites import is_compiled
from actmem.ledger.whole_step import StepBill, step
from actmem.main_grad import gradient_of
from actmem.rows import size_text
from actmem_tools import load_model
from actmem_tools.command_line import Parser, one_line, writable, write
from actmem_tools.diagnosis import findings
from actmem_tools.record_page import page
from actmem_tools.tape.evaluate import parsed_sizes

#: A run on fake tensors is checked by a run on real ones if weights and saved tensors take no more bytes than this.
_CHECKED_BYTES = 256 << 20
#: Sizes, by letter, of the small runs that check larger ones; only letters that the factory takes are set.
_SMALL = {"s": 16, "b": 2, "l": 2}
_EVAL_MODE = "the model is in eval mode, where dropout and batch norm keep less: call model.train() in the factory"
#: The note on a step that ran on a CPU with oneDNN.
_WORKSPACES = (
    "what this machine's kernels (oneDNN) allocate and free inside one operation, for convolutions, recurrent layers "
    "and autocast, is not counted: it was 11 to 34% of small models' peaks"
)
_NO_GPU = (
    "there is no GPU that this torch can use; --fake lists what one would keep, with a build for CUDA: "
    "pip install torch --index-url https://download.pytorch.org/whl/cu130"
)


def main(argv: list[str]) -> int:
    """Run ``actmem record``: run the user's model, and list the tensors that its forward pass saves for backward.

    With --step it also finds the peak memory of a training step.

    Args:
        argv: what follows ``actmem record``: the function that makes the model, such as ``file.py:factory``, and
            options.

    Returns: the exit code: 0, or 2 after one line of error on bad input.
    """
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
    add("--device", choices=("cpu", "cuda"), default="cpu", help="with --fake and no GPU here: an H100's kernels")
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
    files = [Path(file).resolve() for file in (options.json, options.html) if file]
    if len({*files}) < len(files):
        raise ConfigError("json", "each result needs a file of its own")
    factory = load_model.load_factory(options.target)
    sizes = parsed_sizes(options.at) if options.at else {}
    for letter, size in sizes.items():
        check_size(letter, size)
    loss = load_model.load_factory(options.loss) if options.loss else None
    bill, failure = None, None
    with load_model.tensors_for(options.fake, options.device):
        model, inputs = load_model.built_model(factory, sizes, options.dtype, options.device)
        if options.fake and is_compiled(model):
            raise ConfigError("fake", "torch.compile does not run on fake tensors: leave out one of the two")
        notes = [] if model.training else [_EVAL_MODE]
        # Made before forward: after it FSDP's root module has its weights gathered, until backward.
        optimizer = _optimizer(options.optimizer, model) if options.step else None
        ledger = _recorded(model, inputs)
        weights = _weight_bytes(model)  # after forward, which makes those of lazy modules
        if options.step:
            try:
                step(model, inputs, loss, optimizer)
                if optimizer is not None:
                    optimizer.zero_grad()
                bill = step(model, inputs, loss, optimizer)
                notes += _step_notes(model, ledger, options)
            except ConfigError as error:
                failure = error
            except Exception as error:
                failure = ConfigError("step", f"the training step raised {one_line(error)}")
    if options.fake:
        notes += [*load_model.ASSUMED, _fake_note(factory, sizes, options, ledger, weights)]
    more = {"target": options.target, "torch": torch.__version__, "fake": options.fake, "notes": notes}
    result = as_dict(ledger, bill, more)
    _write(result, options, _text(ledger, bill, result))
    if failure is not None:  # the ledger is written: it took as long as the step
        raise failure
    return 0


def _check_device(options: argparse.Namespace) -> None:
    if options.device == "cpu" or torch.cuda.is_available():
        return
    if torch.version.cuda is None or not options.fake:
        raise ConfigError("device", _NO_GPU)
    if options.step:
        raise ConfigError("step", "backward does not run on CUDA tensors without a GPU")


def _write(result: dict[str, Any], options: argparse.Namespace, text: str) -> None:
    """Write the result to the files that were asked for, and print ``text`` unless JSON goes to the screen."""
    if options.html:
        write(_of_this_rank(options.html), page(result))
    if options.json:
        write(_of_this_rank(options.json), json.dumps(result, ensure_ascii=False) + "\n")
    if options.json != "-":
        print(text)


def _of_this_rank(file: str) -> str:
    """Return a file's name with this rank in it, if there are several: ``step-rank1.json`` for ``step.json``."""
    if file == "-" or not dist.is_initialized() or dist.get_world_size() == 1:
        return file
    path = Path(file)
    return str(path.with_stem(f"{path.stem}-rank{dist.get_rank()}"))


def _step_notes(model: torch.nn.Module, ledger: Ledger, options: argparse.Namespace) -> list[str]:
    """Return sentences on a step that ran: on kernels' workspaces, which aren't counted, and on missing gradients."""
    kinds = torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.RNNBase
    has_kinds = any(isinstance(part, kinds) for part in model.modules()) or "cast weight" in ledger.by_kind()
    onednn = options.device == "cpu" and not options.fake and torch.backends.mkldnn.is_available()
    missing = [name for name, p in model.named_parameters() if p.requires_grad and gradient_of(p) is None]
    return [text for text in (_WORKSPACES if has_kinds and onednn else "", load_model.gradient_note(missing)) if text]


def _recorded(model: torch.nn.Module, inputs: Any) -> Ledger:
    with record(model) as ledger:
        output = load_model.run_forward(model, inputs)
    del output
    return ledger


def _weight_bytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer | None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name == "none" or not trained:
        return None
    return torch.optim.AdamW(trained) if name == "adamw" else torch.optim.SGD(trained, lr=1e-3)


def _fake_note(factory: Any, sizes: dict[str, int], options: argparse.Namespace, ledger: Ledger, weights: int) -> str:
    """Check a run on fake tensors by a run on real ones, and return a sentence that says whether both save equal bytes.

    If the real tensors would be too large, both runs are repeated at small sizes.
    """
    where, fake_bytes = "", ledger.total_bytes
    try:
        if options.device == "cpu" and weights + fake_bytes > _CHECKED_BYTES:
            small = {name: size for name, size in _SMALL.items() if load_model.keyword_of(factory, name)}
            sizes = {**sizes, **small}
            where = f" at {', '.join(f'{name}={size}' for name, size in small.items())}"
            with load_model.tensors_for(True):
                fake_bytes, weights = _kept_bytes(factory, sizes, options.dtype)
        if options.device != "cpu" or weights + fake_bytes > _CHECKED_BYTES:
            return "fake tensors only: too large to check against real ones here; try small sizes once"
        real_bytes, _ = _kept_bytes(factory, sizes, options.dtype)
    except ConfigError as error:  # only the check failed: the run that was asked for is done
        return f"not checked against real tensors{where}: {error.rule}"
    if real_bytes == fake_bytes:
        return f"checked{where}: real tensors keep the same bytes"
    return f"real tensors keep something else{where}: {real_bytes:,} B instead of {fake_bytes:,} B on fake ones"


def _kept_bytes(factory: Any, sizes: dict[str, int], dtype: str) -> tuple[int, int]:
    """Run a model that the factory makes at these sizes; return the bytes saved for backward and the weights' bytes."""
    model, inputs = load_model.built_model(factory, sizes, dtype)
    return _recorded(model, inputs).total_bytes, _weight_bytes(model)  # in this order: forward makes lazy weights


def as_dict(ledger: Ledger, bill: StepBill | None, more: dict[str, Any]) -> dict[str, Any]:
    """Convert a recorded run to the dict that ``--json`` writes.

    Args:
        ledger: the tensors that a forward pass saved for backward.
        bill: the tensors that are alive at the peak of a training step; None if no step ran.
        more: further keys and values, such as "target" and "notes", which come first in the result.

    Returns: a dict with the keys of ``more`` and these.
        total_bytes: bytes saved for backward on the model's device.
        host_bytes: bytes saved for backward in the host's memory, if that isn't the model's device.
        by_kind: a dict from kinds of tensors, such as "activation", to bytes on the device.
        rows: the saved tensors, one dict each.
        findings: saved tensors that a change of the code would avoid, one dict each.
        peak_bytes: the most bytes alive at once; this key and the next three only if a step ran.
        peak: the storages alive at that moment, one dict each.
        curve: bytes alive after each operation of the step.
        phases: pairs of a phase's name and the index in "curve" at which it begins.
    """
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
        lines = [f"- {f['waste']}: {f['bytes']:,} B ({size_text(f['bytes'])}). {f['text']}" for f in wastes]
        parts.append("\n".join(["What could go:", *lines]))
    if bill is not None:
        parts.append(bill_text(bill))
    return "\n\n".join(parts + result["notes"])
