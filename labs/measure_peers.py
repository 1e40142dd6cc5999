"""torchrun --nproc-per-node 2 labs/measure_peers.py

Compare this course's transformer layer with the same layer by torch's DTensor plan, under tensor and sequence
parallelism: times of forward and backward, measured in turns; bytes saved, by the same ledger; bytes at the peak.
Over gloo, DTensor's layer runs as shipped, and once more with our reduce-scatter.
On one GPU: python labs/measure_peers.py --emulate 8 --device cuda --model 22B
Exit code 0, or 2 on wrong use.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from measure_speed import PARTS, speed_shape
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, placement_types
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from actmem.config import ModelShape
from actmem.layers.attention import causal_mask
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.measure_layer import layer_input
from actmem.parallel.collectives import reduce_scatter
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem_course.figures.text import overhead_text
from actmem_course.figures.units import milliseconds, size_text
from actmem_course.lab_tools import options
from actmem_course.lab_tools.held_bytes import Runner, held_by
from actmem_course.lab_tools.machine import EMULATED, clock_name
from actmem_course.lab_tools.output import screen_of, show_progress, write_rows
from actmem_course.lab_tools.tables import numbers, table, two_lines
from actmem_course.lab_tools.timing import Work, time_in_turns
from actmem_course.process import lab
from actmem_course.ranks import Ranks, check_ranks, ranks

OURS, DTENSOR, OUR_COLLECTIVE = "ours", "DTensor", "DTensor, our collective"
MODES = ("none", "selective", "full")
NOTE = (
    "DTensor: torch's ColwiseParallel, RowwiseParallel and SequenceParallel, with torch.utils.checkpoint. It keeps the "
    "gathered inputs whole, 30/t + 4 in place of 34/t. ours ÷ it: below 1, ours is faster."
)
OVER_GLOO = (
    "Over gloo our reduce-scatter sends only what is kept; DTensor uses torch's as shipped, an all-reduce that forgets "
    "the rest, and ours where the line says so. On GPUs all use NCCL's."
)


@lab
def main() -> int:
    parser = options.timing_parser("measure_peers.py", __doc__ or "")
    args = parser.parse_args()
    with parser.refusing():
        size = check_ranks(args, parser.prog, "json")
        dtype = options.check_timing(args)
        shape = speed_shape(args, size, dtype)
    # What torch warns of while DTensors are made is not this lab's to say.
    warnings.filterwarnings("ignore")
    with ranks(args, real_tensors=True) as here:
        screen = screen_of(here.rank)
        rows = measure_peers(shape, here, getattr(torch, dtype), rounds=args.rounds)
        screen.print(peers_table(rows, f"One layer by others: {options.described(shape, here, dtype)}"))
        screen.print(NOTE)
        screen.print(f"Medians of {args.rounds} rounds ({clock_name(here.device)}), and below them the 95% interval.")
        if any(row["name"] == OUR_COLLECTIVE for row in rows):
            screen.print(OVER_GLOO)
        if here.emulated:
            screen.print(EMULATED)
        write_rows(args.json, here.rank, rows)
    return 0


class PlainLayer(nn.Module):
    """The paper's layer in plain torch for a single device: ``[s, b, h]`` in and out.

    Args:
        shape: the layer's sizes.
        recompute: what backward recomputes by ``torch.utils.checkpoint``: "none", "selective" or "full".
        p: the dropout probability.
        factory: dtype and device of the parameters.
    """

    mask: Tensor

    def __init__(self, shape: ModelShape, recompute: str, p: float, **factory):
        super().__init__()
        h = shape.hidden_size
        self.head_size, self.p, self.recompute = shape.head_size, p, recompute
        self.norm1, self.norm2 = nn.LayerNorm(h, **factory), nn.LayerNorm(h, **factory)
        self.qkv, self.projection = nn.Linear(h, 3 * h, **factory), nn.Linear(h, h, **factory)
        self.up, self.down = nn.Linear(h, 4 * h, **factory), nn.Linear(4 * h, h, **factory)
        self.register_buffer("mask", causal_mask(shape.seq_length, factory["device"]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._layer, x, use_reentrant=False) if self.recompute == "full" else self._layer(x)

    def _layer(self, x: Tensor) -> Tensor:
        x = x + dropout(self.attention(self.norm1(x)), self.p)
        return x + dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), self.p)

    def attention(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)  # [s, b, 3h/t], a plain tensor
        s, b, _ = qkv.shape
        q, k, v = (part.transpose(0, 1) for part in qkv.view(s, -1, 3, self.head_size).unbind(2))
        core = partial(checkpoint, self.core, use_reentrant=False) if self.recompute == "selective" else self.core
        return self.projection(core(q, k, v).transpose(0, 1).reshape(s, b, -1))

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(self.head_size**-0.5).masked_fill_(self.mask, float("-inf"))
        return torch.bmm(dropout(F.softmax(scores, dim=-1), self.p), v)


def dropout(x: Tensor, p: float) -> Tensor:
    """Return x after dropout with probability p.

    Saves: a mask of 1 byte per element, where F.dropout on a CPU saves a mask in the dtype of x.
    """
    return torch.native_dropout(x, p, True)[0] if p else x


class DTensorLayer(nn.Module):
    """A PlainLayer sharded by torch's DTensor plan: plain tensors ``[s/t, b, h]`` in and out.

    Args:
        shape: the layer's sizes, unsharded.
        tp: the ranks that share the layer.
        recompute: what backward recomputes: "none", "selective" or "full".
        p: the dropout probability.
        ours: this course's layer on the same rank; its weights are copied.
    """

    def __init__(self, shape: ModelShape, tp: TensorParallel, recompute: str, p: float, ours: TransformerLayer):
        super().__init__()
        weight = ours.norm1.weight
        self.layer = PlainLayer(shape, recompute, p, device=weight.device.type, dtype=weight.dtype)
        assert tp.group is not None
        self.mesh = DeviceMesh.from_group(tp.group, weight.device.type)
        norm, row = SequenceParallel(sequence_dim=0), RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
        parallelize_module(self.layer, self.mesh, {
            "norm1": norm,
            # The core attention works on plain tensors, each rank on its own heads.
            "qkv": ColwiseParallel(input_layouts=Shard(0)),
            "projection": row,
            "norm2": norm,
            "up": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
            "down": row,
        })  # fmt: skip
        # torch scatters weights from rank 0, which an emulated rank is never sent.
        own = {".".join(name.split(".")[-2:]): parameter for name, parameter in ours.named_parameters()}
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                assert isinstance(parameter, DTensor)
                parameter.to_local().copy_(own[name])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False)).to_local()


class WithMask(nn.Module):
    """This course's layer with a causal mask that is made once, as in PlainLayer, and not in every forward pass.

    Args:
        layer: this course's layer, which takes the mask as its second argument.
        mask: the causal mask, from ``causal_mask``.
    """

    def __init__(self, layer: TransformerLayer, mask: Tensor):
        super().__init__()
        self.layer = layer
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.mask)


@contextmanager
def our_reduce_scatter(tp: TensorParallel) -> Iterator[None]:
    """Make a context in which DTensor uses our reduce-scatter, so that only the layers' own times differ.

    Args:
        tp: the ranks among which it runs.
    """

    def functional(x: Tensor, op: str, scatter_dim: int, group) -> Tensor:
        assert op.lower() == "sum" and scatter_dim == 0
        return reduce_scatter(x, tp)

    old, new = "reduce_scatter_tensor", "reduce_scatter_single"  # the name before torch 2.13, and from then on
    name = new if hasattr(placement_types.funcol, new) else old
    with patch.object(placement_types.funcol, name, functional):
        yield


def runners_of(
    shape: ModelShape, here: Ranks, dtype: torch.dtype, recompute: str, p: float = 0.1
) -> tuple[Runner, Runner]:
    """Make this course's layer and DTensor's, with the same weights and the same input.

    Args:
        shape: the layer's sizes, unsharded.
        here: this rank.
        dtype: of the weights and the input.
        recompute: what backward recomputes: "none", "selective" or "full".
        p: the dropout probability.

    Returns: two ``Runner`` objects, ours first: each a layer with its input, to be timed or measured.
    """
    tp = tensor_parallel(sequence_parallel=True)
    ours = TransformerLayer(shape, tp, recompute=recompute, p=p, device=here.device, dtype=dtype)
    leaf = layer_input(shape, tp, here.device, dtype)
    masked = WithMask(ours, causal_mask(shape.seq_length, here.device))
    return Runner(masked, leaf), Runner(DTensorLayer(shape, tp, recompute, p, ours), leaf)


def measure_peers(shape: ModelShape, here: Ranks, dtype: torch.dtype, *, rounds: int) -> list[dict[str, Any]]:
    """Time both layers in every mode of recomputation, and count their bytes.  Every rank must call this function.

    All modes of all layers take turns in every round, so that modes can be compared, too.

    Args:
        shape: the layer's sizes, unsharded.
        here: this rank.
        dtype: of the weights and the input.
        rounds: how many rounds are timed.

    Returns: a dict for each mode and layer, our layer first, with these keys:
        "mode": the mode of recomputation, one of MODES.
        "name": whose layer it is: OURS, DTENSOR or OUR_COLLECTIVE.
        "forward_seconds", "backward_seconds", "combined_seconds": medians.
        "ours": how much longer our layer takes than this layer, a dict from ``Timings.over``; None for our layer.
        "over": how much longer this layer takes than it does without recomputation, also from ``Timings.over``; None
            if it recomputes nothing.
        "held_bytes", "peak_bytes": bytes that the layer holds between forward and backward, and the most at once.
    """
    over_gloo = here.device == "cpu" and here.size > 1 and not here.emulated
    work: dict[tuple[str, str], Work] = {}
    held = {}
    for mode in MODES:
        show_progress(here.rank, f"counting bytes, recompute: {mode}")
        for name, runner in zip((OURS, DTENSOR), runners_of(shape, here, dtype, mode)):
            work[mode, name], held[mode, name] = runner.work(), held_by(runner)
        if over_gloo:
            ours = partial(our_reduce_scatter, tensor_parallel(sequence_parallel=True))
            work[mode, OUR_COLLECTIVE] = work[mode, DTENSOR].under(ours)
            held[mode, OUR_COLLECTIVE] = held[mode, DTENSOR]
    timed = time_in_turns(work, here, rounds=rounds)
    return [
        {
            "mode": mode,
            "name": name,
            **timed.medians((mode, name)),
            "ours": None if name == OURS else timed.over((mode, OURS), (mode, name)),
            "over": None if mode == "none" else timed.over((mode, name), ("none", name)),
            **held[mode, name],
        }
        for mode, name in work
    ]


def peers_table(rows: list[dict[str, Any]], title: str) -> Table:
    """Make a table with a line for each mode and layer.

    Its columns are median times, our layer's time divided by the line's, the overhead of recomputation, and the bytes
    held for backward with the peak bytes below.

    Args:
        rows: the dicts from ``measure_peers``.
        title: the lines above the table.
    """
    columns = map(numbers, ("milliseconds", "ours ÷ it", "overhead", "holds, peak"))
    made = table(title, "layer", *columns, tight=True)
    for mode in MODES:
        made.add_row(f"recompute: {mode}", style="bold")
        for row in (row for row in rows if row["mode"] == mode):
            forward, backward, both = (milliseconds(row[f"{part}_seconds"]) for part in PARTS)
            ours, sizes = row["ours"], (size_text(row["held_bytes"]), size_text(row["peak_bytes"]))
            ratio = ours and two_lines(f"{1 + ours['value']:.2f}", f"{1 + ours['low']:.2f}–{1 + ours['high']:.2f}")
            times = two_lines(both, f"{forward} + {backward}")
            made.add_row(f"  {row['name']}", times, ratio or "–", overhead_text(row["over"]), two_lines(*sizes))
    return made


if __name__ == "__main__":
    sys.exit(main())
