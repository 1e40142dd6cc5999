"""Chapter 12: the steps that let one GPU train on sequences of 8k to 1M tokens."""

from dataclasses import replace

from actmem.config import Parallel
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.layer_picture import block_picture, layer_blocks, layer_picture
from actmem_course.figures.marks import Drawing
from actmem_course.figures.style import FILLS
from actmem_course.figures.units import size_text
from actmem_course.others.paper import A100_BYTES
from actmem_course.predicted.long_sequences import (
    ATTENTION,
    INPUTS,
    LOSS,
    MLP,
    LongStep,
    everything_kept,
    long_steps,
)
from actmem_more.llama_shape import LlamaShape, input_on_host, llama_layer_terms

_FILLS = {
    INPUTS: FILLS["layer-norm input"],
    ATTENTION: FILLS["Q, K, V"],
    MLP: FILLS["GeLU input"],
    LOSS: FILLS["logits and loss"],
}


def cost(step: LongStep) -> str:
    """Return a short text with what a step towards longer sequences costs in each training step.

    Args:
        step: one of ``long_steps``, such as offloading the layers' inputs.

    Returns: "copies 4.00 GiB" if bytes are copied to the host; else "each sends 4.00 GiB" if GPUs send bytes to each
        other; else the FLOPs added, such as "+33% FLOPs".
    """
    if step.copied_bytes:
        return f"copies {size_text(step.copied_bytes)}"
    if step.sent_bytes:
        return f"each sends {size_text(step.sent_bytes)}"
    return f"+{100 * step.added_flops:.2g}% FLOPs"


def long_bars(shape: LlamaShape, c: int = 8) -> Drawing:
    """Draw the peak memory after each method of ``long_steps`` (recompute, offload, …) is added to those before it.

    The text after a bar has the peak and the method's cost; the bar's hover text names the paper or issue that asks for
    the method.

    Args:
        shape: The model's sizes, with ``num_layers`` and ``vocab_size``.
        c: How many context-parallel ranks the last method uses.
    """
    steps = {step.name: step for step in long_steps(shape, c)}
    first, *_, on_one, _ = steps.values()
    # Beside such a bar the others would be too thin to see.
    beyond = [name for name, step in steps.items() if step.bytes > 4 * A100_BYTES]
    return bar_chart(
        f"{shape.seq_length:,} tokens on one GPU: {size_text(first.bytes)} become {size_text(on_one.bytes)}<br>"
        f"({size_text(everything_kept(shape))} if nothing is recomputed)",
        {
            part: {name: 0 if name in beyond else step.parts.get(part, 0) for name, step in steps.items()}
            for part in _FILLS
        },
        "at the peak, besides weights",
        fills=tuple(_FILLS.values()),
        notes={
            name: f"{size_text(step.bytes)}, {'beyond this axis' if name in beyond else cost(step)}"
            for name, step in steps.items()
        },
        about={name: step.asked for name, step in steps.items()},
    )


def input_on_the_host(shape: LlamaShape) -> Drawing:
    """Draw a layer that is recomputed from its input, which is offloaded to the host's memory until backward."""
    return layer_picture(shape, recompute=input_on_host(llama_layer_terms(shape)))


def layer_at_work(shape: LlamaShape, tile: int = 0) -> Drawing:
    """Draw the tensors that a recomputed layer has in memory while its backward pass runs.

    Args:
        shape: The layer's sizes.
        tile: How many tokens the MLP processes at once, which is the length of its widest tensors; 0 for all tokens.
    """
    blocks = layer_blocks(shape)
    if tile:
        blocks = [
            replace(block, held=block.held * tile // shape.seq_length, formula=f"{block.formula} of a tile")
            if block.row.term in ("gate", "up", "down input")
            else block
            for block in blocks
        ]
    held = size_text(sum(block.held for block in blocks))
    return block_picture(blocks, f"A recomputed layer holds {held} while it runs backward,<br>without its gradients")


def shared_sequence(shape: LlamaShape, way: str, c: int = 4) -> Drawing:
    """Draw the layer under context parallelism, with the collectives of the forward pass.

    Args:
        shape: The layer's sizes.
        way: How the ranks share the sequence: "gather", "ring" or "ulysses".
        c: How many ranks share the sequence.
    """
    return layer_picture(shape, Parallel(context_parallel_size=c), collectives="forward", context_kind=way)
