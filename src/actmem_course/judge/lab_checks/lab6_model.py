"""Lab 6's model: the same weights in every mode, and what each mode keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from actmem.config import ModelShape
from actmem.formulas.activations import TABLE2, Configuration
from actmem.formulas.first_stage import stage_extra_rows, stage_rows
from actmem.layers.gpt import GPT
from actmem.rows import Row, total
from actmem_course.judge.kept import Keeping
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench

_DROPOUT = 0.1


def small_shape(b: Bench) -> ModelShape:
    """A model that trains in no time; bytes are its tokens."""
    heads = 2 * b.size
    return ModelShape(4 * b.size, 2, 4 * heads, heads, num_layers=1, vocab_size=256)


def mode_named(name: str) -> Configuration:
    """The row of table 2 of that name."""
    return next(mode for mode in TABLE2 if mode.name == name)


def mode_rows(b: Bench, shape: ModelShape, mode: Configuration, recompute: str, element_size: int = 2) -> list[Row]:
    """What one microbatch keeps on a rank, by formula, with what the paper leaves out."""
    parallel = mode.parallel(b.size)
    extras = stage_extra_rows(shape, parallel, 0, recompute, element_size=element_size, device_type=b.device)
    return [*stage_rows(shape, parallel, 0, recompute, element_size=element_size), *extras]


def check_make_model(b: Bench) -> None:
    shape, reference = small_shape(b), None
    for mode in TABLE2:
        for dropout in (0.0, _DROPOUT) if mode is TABLE2[0] else (_DROPOUT,):
            torch.manual_seed(b.rank)  # ranks of a real run do not start alike
            with b.watching():
                model = b["make_model"](shape, mode, b.group, dropout=dropout, dtype=torch.float64, device=b.device)
            if not isinstance(model, GPT):
                missing = ": is a return missing?" if model is None else ""
                raise Wrong(f"expected a GPT, got {type(model).__name__}{missing}")
            _check_cut(b, model, mode)
            whole = _put_together(b, model, mode)
            reference = reference or whole
            _check_same(mode, whole, reference)
            _check_kept(b, model, mode, shape, dropout)
        b.progress()


def _check_cut(b: Bench, model: GPT, mode: Configuration) -> None:
    t, sequence_parallel = b.size if mode.tensor_parallel else 1, mode.parallel(b.size).sequence_parallel
    if model.tp.size != t:
        raise Wrong(
            f"mode {mode.name!r}: the model is shared among {model.tp.size} rank{'s' * (model.tp.size > 1)}, not {t}"
        )
    if sequence_parallel != model.tp.sequence_parallel:
        raise Wrong(
            f"mode {mode.name!r}: sequence_parallel is {model.tp.sequence_parallel}, but the mode says {sequence_parallel}: "
            "pass it to tensor_parallel(group, sequence_parallel=…)"
        )
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    if dtypes != {"float64"}:
        raise Wrong(
            f"parameters are {', '.join(sorted(dtypes))}, although dtype=float64 was given: pass **factory to GPT"
        )


def _check_same(mode: Configuration, whole: dict[str, Tensor], reference: dict[str, Tensor]) -> None:
    for name, weight in whole.items():
        if not torch.equal(weight, reference[name]):
            raise Wrong(
                f"mode {mode.name!r}: {name} is not the same as in mode {TABLE2[0].name!r}: pass seed=SEED to GPT in every mode"
            )


def _check_kept(b: Bench, model: GPT, mode: Configuration, shape: ModelShape, dropout: float) -> None:
    """Which recompute and which dropout a model has shows in what it keeps."""
    tokens = torch.zeros(shape.micro_batch_size, shape.seq_length, dtype=torch.int64, device=b.device)
    with b.watching(), Keeping([*model.parameters(), *model.buffers()]) as keeping:
        loss = model.loss(model(tokens), tokens)
        found = keeping.kept().bytes
    del loss
    expected = {
        (r, p): _bytes(b, shape, mode, r, p)
        for p in (dropout, _DROPOUT - dropout)
        for r in ("none", "selective", "full")
    }
    if found == expected[mode.recompute, dropout]:
        return
    has = next((case for case, size in expected.items() if size == found), None)
    case = f"mode {mode.name!r}, dropout={dropout}: the model keeps {found:,} B, and {expected[mode.recompute, dropout]:,} B by formula"
    if has and has[0] == mode.recompute:
        raise Wrong(f"{case}, as if dropout were {has[1]}: pass p=dropout to GPT")
    if has:
        raise Wrong(f"{case}, as with recompute={has[0]!r}: pass recompute=mode.recompute to GPT")
    raise Wrong(case)


def _bytes(b: Bench, shape: ModelShape, mode: Configuration, recompute: str, dropout: float) -> int:
    rows = mode_rows(b, shape, mode, recompute, element_size=8)
    if not dropout:  # no masks, and the softmax's own output goes on
        rows = [row for row in rows if "dropout" not in row.term]
    return total(rows)


def _put_together(b: Bench, model: GPT, mode: Configuration) -> dict[str, Tensor]:
    """The unsharded weights from all ranks' parts.  Raises Wrong if the parts do not belong together."""
    own = {name: (p.detach().cpu(), getattr(p, "partition_dim", None)) for name, p in model.named_parameters()}
    everyone, whole = b.gather(own), {}
    for name, (part, dim) in own.items():
        parts = [weights[name][0] for weights in everyone]
        if not mode.tensor_parallel or dim is None:
            if not all(torch.equal(parts[0], other) for other in parts):
                raise Wrong(
                    f"mode {mode.name!r}: {name} is replicated, but differs between the ranks: "
                    "pass seed=SEED to GPT, the same on all ranks"
                )
            whole[name] = part
            continue
        constant = (part == part.flatten()[0]).all()
        if b.size > 1 and not constant and torch.equal(parts[0], parts[1]):
            raise Wrong(
                f"mode {mode.name!r}: the ranks' parts of {name} are equal, but they are different rows of one weight: "
                "GPT(…, tp, seed=SEED) draws each rank's own"
            )
        whole[name] = torch.cat(parts, dim)
    return whole
