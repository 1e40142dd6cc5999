"""Hints of lab 1, from a nudge to nearly the answer."""

LAYER_BYTES = (
    "Go through the forward pass and ask of each operation which of its inputs or outputs its gradient needs. Then: how many "
    "elements does that tensor have, and how many bytes per element?",
    "Four shapes occur: [s, b, h], [s, b, 4h], and for the attention weights [a, s, s] for each of b samples. A mask has 1 byte per "
    "element, everything else 2.",
    "[s, b, h] in 2 bytes is 2sbh: eight of the fifteen. [s, b, 4h] is 8sbh: two. Masks of [s, b, h]: sbh, two.",
    "The three of the core attention: softmax output 2as²b, its dropout's mask as²b, its dropout's output 2as²b.",
)
RANK_BYTES = (
    "Which of the fifteen tensors does tensor parallelism cut, and which stay whole on every rank?",
    "Whole without sequence parallelism: the inputs of both layer norms, the inputs of both blocks, both [s, b, h] masks: 10sbh. "
    "The other 24sbh and 5as²b are divided by t.",
    "With sequence parallelism the 10sbh are divided by t as well. Selective drops 5as²b/t. Full keeps only the layer's input, which "
    "sequence parallelism divides by t as well.",
    "core = 5as²b/t or 0; whole = 10sbh/t or 10sbh; whole + 24sbh/t + core; and for full 2sbh/t or 2sbh.",
)
GATED_MLP_BYTES = (
    "Five operations follow x: two linears, silu, a product, a linear. What does the gradient of each need?",
    "A linear needs its input (for the weight's gradient), silu its input, a product both of its factors.",
    "x is the input of two linears, but it is one tensor. Of [s, b, f] there are four: gate, silu(gate), up, and the product.",
    "x, gate, silu(gate), up, product: 2sbh + 4 · 2sbf.",
)
CROSSOVER = (
    "Both sides grow with s, but at different rates. Write down both.",
    "5as²b > 34sbh. Divide by sb.",
    "s > 34h/(5a): the next whole number above it, even where 34h/(5a) is a whole number. Use // and + 1.",
)
