"""Lab 5: its exercises, and the mistakes that the judge can name in each, written as edits of our solution."""

from actmem_course.judge.exercise import Exercise, Lab, Mistake, replacing

LAB = Lab("lab5_pipeline", "Lab 5: the pipeline", "06_pipeline", (
    Exercise("5.1", "one_forward_one_backward", "One forward, one backward"),
    Exercise("5.2", "interleaved", "Interleaving: less idle time, more bytes"),
    Exercise("5.3", "free_output", "Outputs that nothing reads any more"),
    Exercise("5.4", "how_many_fit", "Recompute only what does not fit"),
), one_process=True)  # fmt: skip

# fmt: off
LAB.mistakes["5.1"] = (
    Mistake("a rank runs one forward too many ahead, p − r, and so holds one microbatch too many",
        "run p − r − 1 ahead", {"rank - 1, num": "rank, num"}),
    Mistake("one forward too few comes before the first backward, so a rank waits", "run p − r − 1 ahead of the first",
        {"pipeline_parallel_size - rank - 1": "max(pipeline_parallel_size - rank - 2, 0)"}),
    Mistake("the latest microbatch's backward runs first", "backwards come in the order of the microbatches",
        {"i - ahead)": "i)", "range(num_microbatches - ahead, num_microbatches": "reversed(range(ahead)"}),
    Mistake("every rank but the last runs one forward ahead", "rank r needs p − r − 1",
        {"pipeline_parallel_size - rank - 1, num_microbatches":
            "1, min(pipeline_parallel_size - rank - 1, num_microbatches)"}),
    Mistake("with few microbatches too few forwards run ahead", "min(p − r − 1, n)",
        {"min(pipeline_parallel_size - rank - 1, num_microbatches":
            "max(0, min(pipeline_parallel_size - rank - 1, num_microbatches - 2)"}),
    *replacing("min(pipeline_parallel_size - rank - 1, num_microbatches)",
        ("every rank runs all forwards first and holds all microbatches",
            "start backwards as soon as the first gradient comes back. 1F1B holds p − r microbatches on rank r, at "
            "most n", "num_microbatches"),
        ("the later a rank is, the more forwards it runs ahead; it is the other way round", "rank r runs p − r − 1",
            "min(rank, num_microbatches)"),
        ("no rank runs a forward ahead, so each waits for the backward of every microbatch",
            "rank r runs p − r − 1 before its first backward", "0")),
    Mistake("every rank runs equally many forwards ahead", "rank r needs p − r − 1 of them, the last rank none",
        {"pipeline_parallel_size - rank - 1,": "pipeline_parallel_size - 1,"}),
    Mistake("the last backwards run in reverse", "backwards come in the order of the microbatches",
        {"range(num_microbatches - ahead, num_microbatches":
            "reversed(range(num_microbatches - ahead, num_microbatches)"}),
)
LAB.mistakes["5.2"] = (
    Mistake("all microbatches go through one chunk before any goes through the next",
        "p microbatches go through one chunk, then the same p through the next chunk",
        {", chunk, i) for chunk, i in passes": ", chunk, i) for chunk in range(m) for i in range(n)"},
        {"first + i) for first in range(0, n, p) for chunk in range(m) for i in range(p":
            "i) for chunk in range(m) for i in range(n", "(m - 1) * p": "(m - 1) * n"},
        {"first + i) for first in range(0, n, p) for chunk in range(m) for i in range(p":
            "i) for chunk in range(m) for i in range(n"}),
    Mistake("the later a rank is, the more forwards it runs ahead; it is the other way round",
        "2(p − r − 1) + (m − 1)p", {"2 * (p - rank - 1)": "2 * rank"}),
    Mistake("of p microbatches that go through a chunk together, the last comes back first",
        "they come in the forwards' order",
        {"m - 1 - chunk, i) for": "m - 1 - chunk, i // p * p + p - 1 - i % p) for"}),
    Mistake("a rank runs p forwards too many ahead", "2(p − r − 1) + (m − 1)p", {"(m - 1) * p": "m * p"}),
    Mistake("where n = p all forwards run first, as in Megatron-LM", "later ranks then hold more than they need",
        {"ahead = min(": "ahead = n * m if n == p else min("}),
    Mistake("each microbatch goes through all chunks before the next one",
        "p microbatches go through one chunk, then the same p through the next chunk",
        {"first + i) for first in range(0, n, p) for chunk in range(m) for i in range(p":
            "i) for i in range(n) for chunk in range(m"}),
    Mistake("the backwards take each microbatch through all chunks before the next one",
        "p microbatches go through one chunk, then the same p through the next chunk, from the last chunk to the "
        "first", {"- chunk, i) for chunk, i in passes": "- chunk, i) for i in range(n) for chunk in range(m)"}),
    Mistake("backwards begin with the last chunk", "they run in the reverse order of chunks",
        {'("B", m - 1 - chunk, i)': '("B", chunk, i)'}),
    *replacing("2 * (p - rank - 1) + (m - 1) * p",
        ("a rank runs (m − 1)p forwards before its first backward, and lacks 2(p − r − 1)",
            "the first gradient is as many steps away", "(m - 1) * p"),
        ("a rank runs 2(p − r − 1) forwards before its first backward, and lacks (m − 1)p",
            "a microbatch goes through all chunks first", "2 * (p - rank - 1)"),
        ("a rank runs p − r − 1 forwards before its first backward, as without chunks",
            "it needs 2(p − r − 1) + (m − 1)p", "p - rank - 1"),
        ("every rank runs equally many forwards ahead", "rank r needs 2(p − r − 1) + (m − 1)p", "m * p")),
    Mistake("every rank runs all forwards first", "it needs 2(p − r − 1) + (m − 1)p of them before its first backward",
        {"min(2 * (p - rank - 1) + (m - 1) * p, n * m)": "n * m"},
        {"first + i) for first in range(0, n, p) for chunk in range(m) for i in range(p":
            "i) for chunk in range(m) for i in range(n", "min(2 * (p - rank - 1) + (m - 1) * p, n * m)": "n * m"}),
    Mistake("a rank runs one forward too many ahead", "2(p − r − 1) + (m − 1)p", {"* p, n * m": "* p + 1, n * m"}),
    Mistake("a rank runs one forward too few ahead", "2(p − r − 1) + (m − 1)p",
        {"(m - 1) * p, n * m)": "(m - 1) * p - 1, n * m)"}),
    Mistake("the last backwards run in reverse", "they go on in the order of the others",
        {"backwards[n * m - ahead :]": "backwards[n * m - ahead :][::-1]"}),
    Mistake("a rank runs 2(p − r − 1) + m − 1 forwards before its first backward",
        "it needs 2(p − r − 1) + (m − 1)p: p microbatches go through each chunk", {"(m - 1) * p": "(m - 1)"}),
)
LAB.mistakes["5.3"] = (
    Mistake("the tensor must stay on its device", "make its storage smaller, and leave the tensor as it is",
        {"output.untyped_storage().resize_(0)": 'output.data = output.data.to("meta")'}),
)
LAB.mistakes["5.4"] = (
    Mistake("one recomputed microbatch is taken off the budget", "all in flight save recomputed_bytes",
        {"in_flight * recomputed_bytes": "recomputed_bytes"}),
    Mistake("what is left is divided by full_bytes",
        "one that saves everything takes full_bytes − recomputed_bytes more",
        {", full_bytes - recomputed_bytes": ", full_bytes"}),
    Mistake("no more than in_flight can save everything", "min(in_flight, …)",
        {"min(in_flight, left // more)": "left // more"}),
    Mistake("all may save everything, not all but one", "",
        {"min(in_flight, left // more)": "min(in_flight - 1, left // more)"},
        {", left // more) if more else in_flight": " - 1, left // more if more else in_flight)"}),
    Mistake("either all save everything or none", "some may, while the others are recomputed",
        {"min(in_flight, left // more": "(in_flight if budget_bytes // in_flight >= full_bytes else 0"}),
    Mistake("budget // full_bytes leaves no room for what the recomputed ones save", "",
        {"left // more) if more else in_flight": "budget_bytes // full_bytes)"},
        {"return -1": "return min(in_flight, budget_bytes // full_bytes)",
         "left // more) if more else in_flight": "budget_bytes // full_bytes)"}),
    Mistake("-1 is for a budget in which not even recomputing all fits",
        "where none can save everything the result is 0", {"left < 0": "left < more"}),
    Mistake("this is how many are recomputed", "return how many save everything",
        {"min(in_flight, left // more) if more else in_flight":
            "in_flight - (min(in_flight, left // more) if more else in_flight)"},
        {"min(in_flight, left // more)": "(in_flight - min(in_flight, left // more))"}),
    Mistake("what the recomputed ones save is not taken off the budget",
        "divide budget_bytes − in_flight · recomputed_bytes", {"left // more": "budget_bytes // more"}),
    Mistake("not even recomputing all fits, so the result must be -1", "", {"return -1": "return 0"},
        {"if left < 0:": "if False:"}),
    Mistake("those that save everything take exactly the budget, and that does not exceed it",
        "compare with <=, not with <", {"if left < 0": "if left <= 0", "left // more": "(left - 1) // more"},
        {"min(in_flight, left // more)": "max(0, min(in_flight, (left - 1) // more))"}),
    Mistake("one too many", "the last one that saves everything does not fit any more",
        {"left // more": "left // more + 1"}),
    Mistake("/ makes a float, which is rounded where numbers are large", "divide with //",
        {"left // more": "int(left / more)"}),
    Mistake("the quotient is rounded up, and there is no room for the last one", "round down",
        {"left // more": "-(-left // more)"}),
)
# fmt: on
