"""Predict the activations of one GPU for sequences of up to a million tokens, after each step that frees some."""

from collections.abc import Mapping
from dataclasses import dataclass

from actmem.config import Parallel
from actmem.formulas.communication import wire_bytes
from actmem.rows import total
from actmem_more.llama_shape import LlamaShape
from actmem_more.llama_terms import context_collectives, llama_matmuls, llama_recomputed_flops, llama_rows
from actmem_more.loss_peak import loss_peak_rows

INPUTS, ATTENTION, MLP, LOSS = "inputs of the layers", "attention of one layer", "MLP of one layer", "loss"


#: Tokens of a tile of the MLP and of a chunk of the loss.
TILE, _CHUNK = 4096, 1024


@dataclass(frozen=True)
class LongStep:
    """One step towards longer sequences, taken in addition to the steps before it.

    Attributes:
        name: What the step does, such as "loss in chunks".
        asked: Where the step comes from: a paper, or an issue that asks for it.
        parts: Bytes at the peak of training after this step, without weights and their gradients.  The keys are INPUTS
            and LOSS, or INPUTS, ATTENTION and MLP.
        added_flops: FLOPs that the step adds, as a share of a training step's FLOPs.
        copied_bytes: Bytes that a training step copies to the host, and back.
        sent_bytes: Bytes that each GPU sends to others in a training step.
    """

    name: str
    asked: str
    parts: Mapping[str, int]
    added_flops: float = 0
    copied_bytes: int = 0
    sent_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of all parts together."""
        return sum(self.parts.values())


def mlp_peak_bytes(tokens: int, hidden_size: int, ffn_hidden_size: int, tile: int | None = None) -> int:
    """Return the peak bytes of a gated MLP's forward and backward in 16 bits, without weights and their gradients.

    Without tiles these are 6h + 10f bytes per token: 6h for the input x, the output y and y's gradient; 10f for gate
    and up, their gradients, and the gradient of the down projection's input. With tiles the peak is the larger of two
    moments: at the end, when the tiles of x's gradient are joined, 10h per token; before that, 8h per token plus
    10f − 2h per token of the last tile.

    Args:
        tokens: how many tokens the MLP processes.
        hidden_size: h.
        ffn_hidden_size: f.
        tile: tokens in a tile; None: the MLP runs without tiles.
    """
    h, f = hidden_size, ffn_hidden_size
    if tile is None:
        return tokens * (6 * h + 10 * f)
    return max(10 * tokens * h, 8 * tokens * h + min(tile, tokens) * (10 * f - 2 * h))


def _peak(shape: LlamaShape, loss: str, tile: int | None = None, on_host: bool = False) -> dict[str, int]:
    """Return the parts at the fuller of two moments: the loss, and the backward pass of a recomputed layer's MLP."""
    tokens, h = shape.seq_length * shape.micro_batch_size, shape.hidden_size
    rows = {row.term: row.bytes for row in llama_rows(shape)}
    x = rows["norm 1 input"]
    # Two on the device, of which one is on its way, or all; and what comes after the last layer, later its gradient.
    inputs = x * (2 if on_host else shape.num_layers) + x
    attention = sum(rows.values()) - x - sum(rows[term] for term in ("gate and up input", "gate", "up", "down input"))
    # The MLP's output isn't there any more, and its gradient is among the inputs.
    mlp = mlp_peak_bytes(tokens, h, shape.ffn_hidden_size, tile) - 4 * tokens * h
    at_the_loss = {INPUTS: inputs, LOSS: total(loss_peak_rows(loss, tokens, h, shape.vocab_size, chunk=_CHUNK))}
    in_a_layer = {INPUTS: inputs, ATTENTION: attention, MLP: mlp}
    return max(at_the_loss, in_a_layer, key=lambda parts: sum(parts.values()))


def everything_kept(shape: LlamaShape) -> int:
    """Return the bytes of activations on one GPU if no layer is recomputed, before the first of ``long_steps``.

    The loss is computed from 16-bit logits. Weights, gradients and optimizer states don't count.

    Args:
        shape: the model's sizes, with ``num_layers`` and ``vocab_size``.
    """
    tokens = shape.seq_length * shape.micro_batch_size
    last = loss_peak_rows("16 bits", tokens, shape.hidden_size, shape.vocab_size)
    return shape.num_layers * total(llama_rows(shape)) + 2 * tokens * shape.hidden_size + total(last)


def long_steps(shape: LlamaShape, c: int = 8) -> list[LongStep]:
    """Return the steps towards longer sequences in order, each with its bytes.

    The first step recomputes all layers. Each later step is taken in addition to all steps before it.

    Args:
        shape: the model's sizes, with ``num_layers`` and ``vocab_size``.
        c: how many GPUs share the sequence in the last step; its bytes are those of one GPU.
    """
    layers, tokens = shape.num_layers, shape.seq_length * shape.micro_batch_size
    matmuls = llama_matmuls(shape)
    output = 2 * tokens * shape.hidden_size * shape.vocab_size
    step = 3 * (layers * sum(matmuls.values()) + output)

    copied = 2 * tokens * shape.hidden_size * layers
    sent = layers * wire_bytes(context_collectives(shape, Parallel(context_parallel_size=c), recompute="full"))
    again = layers * llama_recomputed_flops(shape, "full")
    of_mlp = layers * (matmuls["gate and up"] + matmuls["down"])
    shared = shape.with_sizes(seq_length=shape.seq_length // c)
    return [
        LongStep("layers recomputed", "Chen et al., 2016", _peak(shape, "16 bits"), again / step),
        LongStep("loss in chunks", "Cut Your Losses, 2411.09009", _peak(shape, "in chunks"), output / step),
        LongStep(
            "the layers' inputs on the host",
            "pytorch#158657",
            _peak(shape, "in chunks", on_host=True),
            copied_bytes=copied,
        ),
        LongStep("MLP in tiles", "Megatron-LM#3644", _peak(shape, "in chunks", TILE, on_host=True), of_mlp / step),
        LongStep(
            f"{c} GPUs for one sequence",
            "TRL#6846",
            _peak(shared, "in chunks", TILE, on_host=True),
            sent_bytes=sent,
        ),
    ]
