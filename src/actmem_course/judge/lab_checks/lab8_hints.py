"""Hints of lab 8, from a nudge to nearly the answer."""

RANK_STATE_BYTES = (
    "How many bytes does one parameter take as a weight, as a gradient, and in Adam? Which of the three does each stage divide?",
    "2 for the weight, 4 for the gradient, 12 for Adam: a float32 copy and two float32 averages. Stage 1 divides the 12, stage 2 the "
    "4 as well, stage 3 the 2 as well.",
    "Divide parameters, not bytes, and round up: −(−n // d).",
    "share = -(-n // d); weights 2 · (share if stage >= 3 else n), gradients 4 · (share if stage >= 2 else n), and so on.",
)
LARGEST_MICRO_BATCH_SIZE = (
    "How many microbatches does the first stage hold at once under 1F1B, and how many sequences are in them?",
    "It holds min(p, n) of the n = sequences / b microbatches: with a large b there are fewer than p.",
    "Try every b that divides sequences. b fits if fixed_bytes + min(p, sequences // b) · b · bytes_per_sequence <= memory_bytes.",
    "max((b for b in range(1, sequences + 1) if sequences % b == 0 and …), default=0) with the condition of the hint before.",
)
PLAN_OF = (
    "Add up the states first, by 8.1: 18 bytes a parameter. What must divide them so that something is left for activations?",
    "Divide as little as fits: t only within a node, p only if t and ZeRO aren't enough, recomputation only of what is left over. "
    "The judge's message names the line of the bill that overflows.",
    "Recompute what needs no matrix product before anything else: elementwise is nearly free. Full costs a quarter of the step.",
    "python -m actmem plan llama3-8b --gpus 8 --memory 40 --device a100 --global-batch 64 --chunks 1 lists plans, fastest first; so for the others.",
)
