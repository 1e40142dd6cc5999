"""The labs and their exercises: number, function, check, and the section of the chapter to read for it."""

from __future__ import annotations

from actmem_course.judge.exercise import Exercise, Lab

ALL_LABS = (
    Lab("lab1_count_bytes", "Lab 1: count bytes", "02_counting_bytes", (
        Exercise("1.1", "layer_bytes", "lab1_count_bytes:check_layer_bytes", "One rule"),
        Exercise("1.2", "rank_bytes", "cases.lab1_count_bytes", "The sum"),
        Exercise("1.3", "gated_mlp_bytes", "cases.lab1_count_bytes", "On your own module"),
        Exercise("1.4", "crossover_seq_length", "cases.lab1_count_bytes", "Where attention takes over"),
    ), "lab1_count_bytes:lab1_reward", one_process=True),
    Lab("lab2_tensor_parallel", "Lab 2: tensor parallelism", "03_tensor_parallelism", (
        Exercise("2.1", "f", "cases.lab2_tensor_parallel", "f and f̄", takes_group=True),
        Exercise("2.2", "f_bar", "cases.lab2_tensor_parallel", "f and f̄", takes_group=True),
        Exercise("2.3", "column_parallel_linear", "cases.lab2_tensor_parallel", "Columns, then rows", takes_group=True),
        Exercise("2.4", "row_parallel_linear", "cases.lab2_tensor_parallel", "Columns, then rows", takes_group=True),
        Exercise("2.5", "split_attention", "lab2_heads:check_split_attention", "Attention: whole heads", takes_group=True),
        Exercise("2.6", "mlp", "cases.lab2_tensor_parallel", "Columns, then rows", takes_group=True),
        Exercise("2.7", "attention", "cases.lab2_tensor_parallel", "Attention: whole heads", takes_group=True),
        Exercise("2.8", "vocab_parallel_cross_entropy", "cases.lab2_tensor_parallel", "What divides and what does not", takes_group=True),
    ), "rewards:lab2_reward"),
    Lab("lab3_sequence_parallel", "Lab 3: sequence parallelism", "04_sequence_parallelism", (
        Exercise("3.1", "g", "cases.lab3_sequence_parallel", "An all-reduce, taken apart", takes_group=True),
        Exercise("3.2", "g_bar", "cases.lab3_sequence_parallel", "An all-reduce, taken apart", takes_group=True),
        Exercise("3.3", "gathering_linear", "cases.lab3_sequence_parallel", "What plain autograd keeps", takes_group=True),
        Exercise("3.4", "layer", "cases.lab3_sequence_parallel", "The ranks, before and after", takes_group=True),
        Exercise("3.5", "shard_keeping_linear", "cases.lab3_sequence_parallel", "What plain autograd keeps", takes_group=True),
        Exercise("3.6", "sum_partial_gradients", "cases.lab3_sequence_parallel", "Partial gradients", takes_group=True),
        Exercise("3.7", "dropout_generators", "cases.lab3_sequence_parallel", "Between the blocks, tokens are independent", takes_group=True),
    ), "rewards:lab3_reward"),
    Lab("lab4_recompute", "Lab 4: recomputation", "05_recomputation", (
        Exercise("4.1", "checkpoint", "cases.lab4_recompute", "How a checkpoint function works, in four steps"),
        Exercise("4.2", "checkpoint", "cases.lab4_recompute:checkpoint_of_dropout", "How a checkpoint function works, in four steps"),
        Exercise("4.3", "selective_layer", "cases.lab4_recompute", "The lopsided trade"),
        Exercise("4.4", "full_layer", "cases.lab4_recompute", "The lopsided trade"),
        Exercise("4.5", "checkpoint_stopping_early", "cases.lab4_recompute", "Measured: three numbers for one overhead"),
    ), "lab4_reward:lab4_reward", one_process=True),
    Lab("lab5_pipeline", "Lab 5: the pipeline", "06_pipeline", (
        Exercise("5.1", "one_forward_one_backward", "lab5_orders:check_one_forward_one_backward", "One forward, one backward"),
        Exercise("5.2", "interleaved", "lab5_orders:check_interleaved", "Interleaving: less idle time, more bytes"),
        Exercise("5.3", "free_output", "lab5_pipeline:check_free_output", "Figure 9: every rank, and the outputs that nothing reads"),
        Exercise("5.4", "how_many_fit", "cases.lab5_pipeline", "Appendix C: recompute only what does not fit"),
        Exercise("5.5", "microbatches_to_keep", "lab5_pipeline:check_microbatches_to_keep", "Appendix C: recompute only what does not fit"),
    ), "lab5_pipeline:lab5_reward", one_process=True),
    Lab("lab6_train", "Lab 6: train under every mode", "03_tensor_parallelism", (
        Exercise("6.1", "batch", "lab6_batch:check_batch", "Real processes: the same numbers as one GPU"),
        Exercise("6.2", "make_model", "lab6_model:check_make_model", "Real processes: the same numbers as one GPU", takes_group=True),
        Exercise("6.3", "gradient_norm", "cases.lab6_train", "What divides and what does not", takes_group=True),
        Exercise("6.4", "training_step", "cases.lab6_train", "Real processes: the same numbers as one GPU", takes_group=True),
        Exercise("6.5", "train", "lab6_curves:check_train", "Real processes: the same numbers as one GPU"),
    ), "lab6_reward:lab6_reward"),
    Lab("lab7_todays_layer", "Lab 7: today's layer", "08_after_the_paper", (
        Exercise("7.1", "llama_layer_bytes", "lab7_bytes:check_llama_layer_bytes", "The layer changed"),
        Exercise("7.2", "rms_norm", "cases.lab7_todays_layer", "What everyone keeps instead"),
        Exercise("7.3", "swiglu", "cases.lab7_todays_layer", "What everyone keeps instead"),
        Exercise("7.4", "recipe_linear", "cases.lab7_todays_layer", "What needs no product"),
        Exercise("7.5", "split_grouped_heads", "cases.lab7_todays_layer", "More ranks than key heads", takes_group=True),
        Exercise("7.6", "sum_shared_gradients", "cases.lab7_todays_layer", "More ranks than key heads", takes_group=True),
    ), "lab7_reward:lab7_reward", fewest_virtual=4),  # on two, the ranks that share a head are all of them
    Lab("lab8_plan", "Lab 8: plan a model", "10_plan_a_model", (
        Exercise("8.1", "rank_state_bytes", "cases.lab8_plan", "The bill, line by line"),
        Exercise("8.2", "largest_micro_batch_size", "cases.lab8_plan", "The bill, line by line"),
        Exercise("8.3", "plan_of", "lab8_plan:check_plan_of", "What if", seconds=45),
    ), "lab8_plan:lab8_reward", one_process=True),
)  # fmt: skip
