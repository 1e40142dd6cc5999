"""Chapter 13: what a layer with experts saves for backward, with balanced and with one-sided routing."""

from actmem.config import Parallel
from actmem_course.figures.layer_picture import layer_picture
from actmem_course.figures.marks import Drawing
from actmem_course.figures.units import size_text
from actmem_more.llama_shape import LlamaShape, llama_shape
from actmem_more.llama_terms import forced_routed_tokens, llama_rows

#: How the router spreads the tokens: in words, and as a value of ``routing``.
ROUTINGS = {"balanced": "even", "one-sided": "one-sided"}


def experts(shape: LlamaShape, routing: str, t: int = 4) -> Drawing:
    """Draw the layer with experts on t ranks, with the forward pass's collectives.

    Args:
        shape: The layer's sizes, with experts.
        routing: How the router distributes tokens to experts: "balanced" or "one-sided".
        t: How many ranks share the layer.
    """
    parallel, assigned = Parallel(t, True), []
    if routing == "one-sided":
        assigned = [forced_routed_tokens(shape, parallel, ROUTINGS[routing], rank) for rank in range(t)]
    return layer_picture(shape, parallel, collectives="forward", routed_tokens=assigned)


#: What a layer with latent attention recomputes, in the words of a control.
RECOMPUTED = {"nothing": frozenset(), "K and V": frozenset("KV"), "Q, K and V": frozenset("QKV")}


def latent_layer(recomputed: str) -> Drawing:
    """Draw a layer of DeepSeek-V3, which has latent attention.

    Args:
        recomputed: What backward recomputes: "nothing", "K and V" or "Q, K and V".
    """
    shape, again = llama_shape("deepseek-v3"), RECOMPUTED[recomputed] or "none"
    sizes = {row.term: row.bytes for row in llama_rows(shape, recompute=again)}
    heads = sum(sizes.get(term, 0) for term in "QKV")
    title = f"DeepSeek-V3, {recomputed} recomputed: a layer saves {size_text(sum(sizes.values()))},"
    return layer_picture(shape, recompute=again, title=f"{title}<br>{size_text(heads)} of it Q, K and V")
