"""Lab 1: its exercises, and the mistakes that the judge can name in each, written as edits of our solution."""

from actmem_course.judge.exercise import Exercise, Lab, Mistake, replacing

LAB = Lab("lab1_count_bytes", "Lab 1: count bytes", "02_counting_bytes", (
    Exercise("1.1", "layer_bytes", "One rule"),
    Exercise("1.2", "rank_bytes", "Table 2: six ways to train a layer", chapter="05_recomputation"),
    Exercise("1.3", "gated_mlp_bytes", "On your own module"),
    Exercise("1.4", "crossover_seq_length", "Where attention takes over"),
), one_process=True)  # fmt: skip

# fmt: off
LAB.mistakes["1.2"] = (
    Mistake("the two layer-norm inputs, two block inputs and two masks (10sbh) are divided by t",
        "each rank saves them whole", {"tensor_parallel_size if sequence_parallel else 1": "tensor_parallel_size"}),
    Mistake("elements are counted, not bytes", "",
        {"2 * sbh //": "sbh //",
         "10 * sbh // cut + 24 * sbh // t + core": "(10 * sbh // cut + 24 * sbh // t + core) // 2"}),
    Mistake("5as/ht is rounded down before it is multiplied by sbh", "divide last",
        {"core = 5 * a * s * s * b // t": "core = sbh * (5 * a * s // (h * t))"}),
    Mistake("the matmuls see all s tokens with sequence parallelism too", "it shards only 10sbh",
        {"t = seq_length": "t = seq_length // (tensor_parallel_size if sequence_parallel else 1)",
         "10 * sbh // cut": "10 * sbh",
         "sbh // cut": "sbh"}),
    Mistake("this is what is saved without recomputation",
        "selective drops the three tensors of the core attention, 5as²b/t", {' if recompute == "none" else 0': ""}),
    Mistake("with full recomputation nothing is saved", "the layer's input is: the second run starts from it",
        {"return 2 * sbh // cut": "return 0"}),
)
LAB.mistakes["1.3"] = (
    Mistake("4h is used in place of f, which is feed_forward_size", "", {"4 * 2 * s * b * f": "4 * 2 * s * b * 4 * h"}),
)
LAB.mistakes["1.4"] = (
    Mistake("one too many", "at s − 1 the core attention already saves more than the rest",
        {"num_attention_heads) + 1": "num_attention_heads) + 2"}),
    *replacing("34 * hidden_size // (5 * num_attention_heads)",
        ("the quotient is upside down", "5as is more than 34h from s = 34h/5a on",
            "5 * num_attention_heads // (34 * hidden_size)"),
        ("34/5 is rounded down before it is multiplied by h", "divide last",
            "34 // 5 * hidden_size // num_attention_heads"),
        ("34h/5 is multiplied by a", "divide by it, because more heads make the core attention larger",
            "34 * hidden_size * num_attention_heads // 5"),
        ("h and a are swapped", "wide heads make the core attention small beside the rest",
            "34 * num_attention_heads // (5 * hidden_size)")),
    Mistake("34h/5a is rounded up", "where it is whole, the core attention saves as much as the rest there, not more",
        {"34 * hidden_size // (5 * num_attention_heads) + 1": "-(-34 * hidden_size // (5 * num_attention_heads))"}),
    Mistake("34h/5a is rounded to the nearest whole number", "round down, and take the next",
        {"34 * hidden_size // (5 * num_attention_heads": "round(34 * hidden_size / (5 * num_attention_heads)"},
        {"34 * hidden_size // (5 * num_attention_heads) + 1": "round(34 * hidden_size / (5 * num_attention_heads))"}),
    Mistake("34h/5a is rounded up, and 1 is added", "round down, and take the next",
        {"34 * hidden_size // (5 * num_attention_heads": "-(-34 * hidden_size // (5 * num_attention_heads)"}),
)
# fmt: on
