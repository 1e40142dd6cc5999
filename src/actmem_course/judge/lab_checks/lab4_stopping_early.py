"""Lab 4's checkpoint function whose second run goes no further than backward needs."""

from __future__ import annotations

from actmem_course.judge.lab_checks.lab4_checkpoint import check_checkpoint, flops_of
from actmem_course.judge.lab_checks.lab4_random_numbers import check_checkpoint_of_dropout
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench
from actmem_course.pieces import core_attention


def check_checkpoint_stopping_early(b: Bench) -> None:
    name = "checkpoint_stopping_early"
    check_checkpoint(b, name)
    check_checkpoint_of_dropout(b, name)
    qkv = [b.random(4, 12, 8, seed=seed) for seed in (10, 11, 12)]
    plain = flops_of(core_attention, *qkv)
    # Forward is a third of it, and QKᵀ half of the forward.
    enough, whole = plain + plain // 6, plain + plain // 3
    found = flops_of(lambda *inputs: b[name](core_attention, *inputs), *qkv)
    if found == whole:
        raise Wrong(
            "the second run goes on to the end of function. Backward needs QKᵀ, softmax and dropout of core_attention; the product "
            "with V computes only the result, which nothing reads"
        )
    if found != enough:
        raise Wrong(
            f"forward and backward of core_attention take {found:,} FLOPs; {plain:,} without recomputation, {enough:,} if the second run stops early"
        )
