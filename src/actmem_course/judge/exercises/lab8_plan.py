"""Lab 8: its exercises, and the mistakes that the judge can name in each, written as edits of our solution."""

from actmem_course.judge.exercise import Exercise, Lab, Mistake, replacing, ways

LAB = Lab("lab8_plan", "Lab 8: what fits", "09_your_model", (
    Exercise("8.1", "rank_state_bytes", "What fits"),
    Exercise("8.2", "largest_micro_batch_size", "What fits"),
), one_process=True)  # fmt: skip

# fmt: off
LAB.mistakes["8.1"] = (
    Mistake("divide the parameters and round up", "then multiply by the bytes of each",
        {f"{n} * (share if zero_stage >= {stage} else num_parameters)":
            f"-(-{n} * num_parameters // data_parallel_size) if zero_stage >= {stage} else {n} * num_parameters"
         for n, stage in ((2, 3), (4, 2), (12, 1))}),
    Mistake("the fullest rank has one parameter more where they don't divide evenly", "round the share up",
        {"-(-num_parameters // data_parallel_size)": "num_parameters // data_parallel_size"}),
    Mistake("/ makes a float, which is rounded where numbers are large", "divide with //, and up by -(-a // b)",
        {"-(-num_parameters // data_parallel_size)": "-int(-num_parameters / data_parallel_size // 1)"}),
    Mistake("where the parameters divide evenly, no rank has one more", "",
        {"-(-num_parameters // data_parallel_size)": "num_parameters // data_parallel_size + 1"}),
)
LAB.mistakes["8.2"] = (
    Mistake("only powers of two are tried", "try every b that divides sequences",
        {"if sequences % b:": "if sequences % b or b & (b - 1):"}),
    Mistake("not even a microbatch of one sequence fits, so the result must be 0", "", *ways(" = 0", " = -1", " = 1")),
    Mistake("fixed_bytes are counted for each microbatch in flight", "count them once",
        {"fixed_bytes + in_flight * b * bytes_per_sequence": "in_flight * (fixed_bytes + b * bytes_per_sequence)"}),
    Mistake("fixed_bytes are left out", "they take memory as well", {"fixed_bytes + in_flight": "in_flight"}),
    *replacing("min(pipeline_parallel_size, sequences // b)",
        ("the stage holds min(p, n) microbatches at once, not one", "", "1"),
        ("all microbatches of the step are counted as in flight", "the first stage holds min(p, n)", "sequences // b"),
        ("p microbatches are counted as in flight even if the step has fewer", "min(p, n)", "pipeline_parallel_size")),
    Mistake("this is the number of microbatches", "return their size",
        {"return fitting": "return sequences // fitting if fitting else 0"}),
    Mistake("the first stage holds p microbatches, its own in backward too, not p − 1", "",
        {"min(pipeline_parallel_size, sequences // b)": "min(pipeline_parallel_size - 1, sequences // b)"},
        {", sequences // b)": " - 1, sequences // b) or 1"}),
    Mistake("what takes exactly the memory fits", "compare with <=", {"<= memory_bytes": "< memory_bytes"}),
    Mistake("the whole step in one microbatch isn't tried", "b may be sequences itself",
        {"range(1, sequences + 1)": "range(1, sequences)"}),
    Mistake("a microbatch of b sequences saves b times bytes_per_sequence", "",
        {"in_flight * b * bytes": "in_flight * bytes"}),
    Mistake("this is the smallest that fits", "expected the largest", {"fitting = b": "fitting = fitting or b"}),
)
# fmt: on
