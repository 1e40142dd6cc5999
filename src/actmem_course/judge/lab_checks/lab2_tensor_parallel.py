"""Lab 2's operators, linears and blocks."""

from __future__ import annotations

from actmem_course.judge.kept import check_keeps
from actmem_course.judge.lab_checks.block_checks import check_block
from actmem_course.judge.lab_checks.blocks import Block
from actmem_course.judge.lab_checks.known_blocks import (
    MLP_PROGRAM,
    ROW_PROGRAM,
    attention_program,
    column_program,
    other_cores,
    other_gelus,
    with_x,
)
from actmem_course.judge.lab_checks.lab2_heads import HEAD_SIZE, attention_weights, rows_of_rank
from actmem_course.judge.lab_checks.operators import F_BAR_OPERATOR, F_OPERATOR, check_operator, size_of
from actmem_course.judge.workbench import Bench


def check_f(b: Bench) -> None:
    check_operator(b, F_OPERATOR, [b.random(4, 3, 5, seed=1)] * b.size, b.random_by_rank(4, 3, 5, seed=2))


def check_f_bar(b: Bench) -> None:
    check_operator(b, F_BAR_OPERATOR, b.random_by_rank(4, 3, 5, seed=3), [b.random(4, 3, 5, seed=4)] * b.size)


def check_column_parallel_linear(b: Bench) -> None:
    t, biases = b.size, b.shards(b.random(5 * b.size, seed=7))
    weights = [{"weight": w, "bias": c} for w, c in zip(b.shards(b.random(5 * t, 6, seed=6)), biases)]
    returns = (
        "return this rank's own output features, [s, b, out/t], which is just what the row-parallel linear after it takes; "
        "they are different features on every rank, so there is nothing to add up"
    )
    upstream = b.shards(b.random(4, 3, 5 * t, seed=8), dim=2)
    block = Block([b.random(4, 3, 6, seed=5)] * t, weights, upstream, column_program(F_OPERATOR), returns=returns)
    _check_linear(b, "column_parallel_linear", block)


def check_row_parallel_linear(b: Bench) -> None:
    t, bias = b.size, b.random(6, seed=11)
    weights = [{"weight": w, "bias": bias} for w in b.shards(b.random(6, 5 * t, seed=10), dim=1)]
    xs = b.shards(b.random(4, 3, 5 * t, seed=9), dim=2)
    _check_linear(b, "row_parallel_linear", Block(xs, weights, [b.random(4, 3, 6, seed=12)] * t, ROW_PROGRAM))


def _check_linear(b: Bench, name: str, block: Block) -> None:
    check_block(b, block, b[name], b.group)
    x, own = block.x[b.rank], block.weights[b.rank]
    check_keeps(b, size_of(x), "x", lambda y, w, c: b[name](y, w, c, b.group), x, tuple(own.values()))


def check_mlp(b: Bench) -> None:
    h, t = 4, b.size
    ups, up_biases = b.shards(b.random(4 * h * t, h, seed=32)), b.shards(b.random(4 * h * t, seed=33))
    downs, down_bias = b.shards(b.random(h, 4 * h * t, seed=34), dim=1), b.random(h, seed=35)
    weights = [
        {"up_weight": w, "up_bias": c, "down_weight": d, "down_bias": down_bias}
        for w, c, d in zip(ups, up_biases, downs)
    ]
    x, upstream = [b.random(4, 3, h, seed=30)] * t, [b.random(4, 3, h, seed=31)] * t
    variants = {**other_gelus(), **with_x("the MLP", "down_bias")}
    check_block(b, Block(x, weights, upstream, MLP_PROGRAM, variants), b["mlp"], b.group)


def check_attention(b: Bench) -> None:
    heads, qkv, qkv_bias, projection, bias = attention_weights(b, seed=40)
    h, t = qkv.shape[1], b.size
    weights = [
        {
            "qkv_weight": rows_of_rank(b, qkv, rank),
            "qkv_bias": rows_of_rank(b, qkv_bias, rank),
            "projection_weight": own,
            "projection_bias": bias,
        }
        for rank, own in enumerate(b.shards(projection, 1))
    ]
    x, upstream = [b.random(5, 3, h, seed=45)] * t, [b.random(5, 3, h, seed=46)] * t
    variants = {**other_cores(heads, t, HEAD_SIZE), **with_x("attention", "projection_bias")}
    block = Block(x, weights, upstream, attention_program(heads // t), variants)
    check_block(b, block, b["attention"], heads, b.group)
