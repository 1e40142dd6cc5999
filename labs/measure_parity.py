"""torchrun --nproc-per-node 2 labs/measure_parity.py

Compare one layer shared by all ranks with the same layer on one rank: its output and every gradient, in float64.  Also
show the collectives of forward and backward, and the parameters whose gradients must be summed over the ranks.
Exit code 0 if all numbers agree, 1 if any does not, 2 on wrong use.
"""

import math
import sys
from typing import Any

import torch
from torch import Tensor, nn

from actmem.config import ConfigError, ModelShape, Parallel, check_layer
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.comms import count_collectives
from actmem.parallel.collectives import all_gather
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import load_dense, reduce_partial_gradients, shard
from actmem_course.arguments import add_rank_arguments
from actmem_course.lab_tools.options import add_shape_arguments, lab_parser, shape_from
from actmem_course.lab_tools.output import gather_rows, screen_of, status, write_rows
from actmem_course.lab_tools.tables import numbers, red_if, table
from actmem_course.process import lab
from actmem_course.ranks import Ranks, check_ranks, ranks

#: How a layer can be shared: the arguments of ``tensor_parallel`` for each.
FORMS: dict[str, dict[str, Any]] = {
    "tensor": {},
    "tensor+sequence": {"sequence_parallel": True},
    "tensor+sequence, plain": {"sequence_parallel": True, "keep_gathered_input": True},
}
#: Beyond rounding in float64; elements of size 1 and less are compared as they are, larger ones by their share.
LARGEST_ERROR = 1e-12


@lab
def main() -> int:
    parser = lab_parser("measure_parity.py", __doc__ or "")
    add_shape_arguments(parser)
    add_rank_arguments(parser, emulate=False)
    args = parser.parse_args()
    with parser.refusing():
        shape = shape_from(args)
        check_shape(shape, check_ranks(args, parser.prog, "json"))

    with ranks(args) as here:
        screen = screen_of(here.rank)
        with status(here.rank, "measuring"):
            rows = gather_rows(here, [measure(shape, form, here) for form in FORMS])
        columns = ("rank", "largest error", "forward", "backward", "in part")
        shown = table("Beside one rank: error, collectives, partial gradients", "form", *map(numbers, columns))
        for row in rows:
            collectives = [str(sum(row[when].values())) for when in ("forward", "backward")]
            error, partial = f"{row['largest_error']:.1e}", str(len(row["partial_gradients"]))
            shown.add_row(row["form"], str(row["rank"]), error, *collectives, partial, style=red_if(not row["exact"]))
        screen.print(shown)
        agree = sum(row["exact"] for row in rows)
        screen.print(f"{agree} of {len(rows)} agree with the unsharded layer to {LARGEST_ERROR}")
        write_rows(args.json, here.rank, rows)
    return 0 if agree == len(rows) else 1


def check_shape(shape: ModelShape, size: int) -> None:
    """Raise ConfigError if the ranks can't share the layer, or if it is too large to run unsharded in float64.

    Args:
        shape: the layer's sizes.
        size: how many ranks there are.
    """
    check_layer(shape, Parallel(size, sequence_parallel=True))
    a, b, h, s = shape.letters()
    if 12 * h * h + 20 * s * b * h + 4 * a * s * s * b > 2**27:
        rule = "too large for a comparison in float64 on every rank: use tiny, or sizes near it"
        raise ConfigError("model shape", rule)


def measure(shape: ModelShape, form: str, here: Ranks) -> dict[str, Any]:
    """Run a layer in one form of parallelism, and compare it with the unsharded layer of the same weights and input.

    Every rank must call this function.  There is no dropout, because each rank would draw other numbers.

    Args:
        shape: the layer's sizes.
        form: how the ranks share the layer, a key of FORMS such as "tensor+sequence".
        here: this rank.

    Returns: a dict with these keys:
        "form": the argument.
        "tensor_parallel_size", "rank": how many ranks share the layer, and the number of this rank.
        "largest_error": the largest error of the output and all gradients.
        "exact": whether the largest error is at most LARGEST_ERROR.
        "forward", "backward": how many collectives of each kind the pass ran.
        "partial_gradients": the names of the parameters whose gradients had to be added up over the ranks.
    """
    tp = tensor_parallel(**FORMS[form])
    place: dict[str, Any] = {"dtype": torch.float64, "device": here.device}
    torch.manual_seed(7)  # the same weights and input on every rank
    dense = TransformerLayer(shape, p=0.0, **place)
    for parameter in dense.parameters():  # biases and norms too, or their errors would hide
        nn.init.normal_(parameter, std=0.8 * shape.hidden_size**-0.5)
    full = torch.randn(shape.seq_length, shape.micro_batch_size, shape.hidden_size, **place)
    layer = TransformerLayer(shape, tp, p=0.0, **place)
    load_dense(layer, dense.state_dict(), tp)
    # Weights of the loss: every element of the output counts differently, so that mixed-up ranks are found.
    weights = torch.linspace(-1, 1, full.numel(), **place).view_as(full)

    x_dense, x = full.clone().requires_grad_(), own_tokens(full, tp).clone().requires_grad_()
    y_dense = dense(x_dense)
    (y_dense * weights).sum().backward()
    with count_collectives() as forward:
        y = layer(x)
    with count_collectives() as backward:
        (y * own_tokens(weights, tp)).sum().backward()

    dense_gradients = {name: gradient(parameter) for name, parameter in dense.named_parameters()}
    wanted = {
        name: shard(dense_gradients[name], getattr(parameter, "partition_dim", None), tp)
        for name, parameter in layer.named_parameters()
    }
    in_part = [name for name, p in layer.named_parameters() if error_of(gradient(p), wanted[name]) > LARGEST_ERROR]
    reduce_partial_gradients(layer, tp)
    pairs = [(gradient(parameter), wanted[name]) for name, parameter in layer.named_parameters()]
    for ours, theirs in ((y.detach(), y_dense.detach()), (gradient(x), gradient(x_dense))):
        pairs.append((all_gather(ours, tp) if tp.sequence_parallel else ours, theirs))
    largest = max(error_of(ours, theirs) for ours, theirs in pairs)
    return {
        "form": form,
        "tensor_parallel_size": tp.size,
        "rank": tp.rank,
        "largest_error": largest,
        "exact": largest <= LARGEST_ERROR,
        "forward": dict(forward.counts),
        "backward": dict(backward.counts),
        "partial_gradients": in_part,
    }


def own_tokens(tensor: Tensor, tp: TensorParallel) -> Tensor:
    """Return this rank's tokens of an unsharded tensor.

    Args:
        tensor: ``[s, …]``.
        tp: the ranks that share the layer, and whether they use sequence parallelism.

    Returns: ``[s/t, …]`` under sequence parallelism; else ``tensor`` itself.
    """
    return tensor.chunk(tp.size)[tp.rank] if tp.sequence_parallel else tensor


def gradient(tensor: Tensor) -> Tensor:
    """Return ``tensor.grad``, which backward must have set."""
    assert tensor.grad is not None
    return tensor.grad


def error_of(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest error over all elements: relative for elements of size above 1, absolute for smaller ones.

    Args:
        ours: a tensor of any shape.
        theirs: the right tensor, of the same shape.
    """
    share = (ours - theirs).abs() / theirs.abs().clamp_min(1.0)
    return share.nan_to_num(nan=math.inf, posinf=math.inf).max().item()  # max() of Python's may pass over a NaN


if __name__ == "__main__":
    sys.exit(main())
