"""The labs and their exercises: number, function, check, hints, and the section of the chapter to read for it."""

from __future__ import annotations

from actmem_course.judge.exercise import Exercise, Lab
from actmem_course.judge.lab_checks import (
    lab1_hints,
    lab2_hints,
    lab3_hints,
    lab4_hints,
    lab5_hints,
    lab6_hints,
    lab7_hints,
    lab8_hints,
)

ALL_LABS = (
    Lab("lab1_count_bytes", "Lab 1: count bytes", "02_counting_bytes", (
        Exercise("1.1", "layer_bytes", "lab1_count_bytes:check_layer_bytes", lab1_hints.LAYER_BYTES, "One rule"),
        Exercise("1.2", "rank_bytes", "lab1_count_bytes:check_rank_bytes", lab1_hints.RANK_BYTES, "The sum"),
        Exercise("1.3", "gated_mlp_bytes", "lab1_count_bytes:check_gated_mlp_bytes", lab1_hints.GATED_MLP_BYTES, "On your own module"),
        Exercise("1.4", "crossover_seq_length", "lab1_count_bytes:check_crossover", lab1_hints.CROSSOVER, "Where attention takes over"),
    ), "lab1_count_bytes:lab1_reward", one_process=True),
    Lab("lab2_tensor_parallel", "Lab 2: tensor parallelism", "03_tensor_parallelism", (
        Exercise("2.1", "f", "lab2_tensor_parallel:check_f", lab2_hints.F, "f and f̄", takes_group=True),
        Exercise("2.2", "f_bar", "lab2_tensor_parallel:check_f_bar", lab2_hints.F_BAR, "f and f̄", takes_group=True),
        Exercise("2.3", "column_parallel_linear", "lab2_tensor_parallel:check_column_parallel_linear", lab2_hints.COLUMN, "Columns, then rows", takes_group=True),
        Exercise("2.4", "row_parallel_linear", "lab2_tensor_parallel:check_row_parallel_linear", lab2_hints.ROW, "Columns, then rows", takes_group=True),
        Exercise("2.5", "split_attention", "lab2_heads:check_split_attention", lab2_hints.SPLIT_ATTENTION, "Attention: whole heads", takes_group=True),
        Exercise("2.6", "mlp", "lab2_tensor_parallel:check_mlp", lab2_hints.MLP_BLOCK, "Columns, then rows", takes_group=True),
        Exercise("2.7", "attention", "lab2_tensor_parallel:check_attention", lab2_hints.ATTENTION_BLOCK, "Attention: whole heads", takes_group=True),
        Exercise("2.8", "vocab_parallel_cross_entropy", "lab2_vocabulary:check_cross_entropy", lab2_hints.CROSS_ENTROPY, "What divides and what does not", takes_group=True),
    ), "rewards:lab2_reward"),
    Lab("lab3_sequence_parallel", "Lab 3: sequence parallelism", "04_sequence_parallelism", (
        Exercise("3.1", "g", "lab3_sequence_parallel:check_g", lab3_hints.G, "An all-reduce, taken apart", takes_group=True),
        Exercise("3.2", "g_bar", "lab3_sequence_parallel:check_g_bar", lab3_hints.G_BAR, "An all-reduce, taken apart", takes_group=True),
        Exercise("3.3", "gathering_linear", "lab3_sequence_parallel:check_gathering_linear", lab3_hints.GATHERING_LINEAR, "What plain autograd keeps", takes_group=True),
        Exercise("3.4", "layer", "lab3_sequence_parallel:check_parallel_layer", lab3_hints.LAYER, "The ranks, before and after", takes_group=True),
        Exercise("3.5", "shard_keeping_linear", "lab3_sequence_parallel:check_shard_keeping_linear", lab3_hints.SHARD_KEEPING_LINEAR, "What plain autograd keeps", takes_group=True),
        Exercise("3.6", "sum_partial_gradients", "lab3_replicas:check_sum_partial_gradients", lab3_hints.SUM_PARTIAL_GRADIENTS, "Partial gradients", takes_group=True),
        Exercise("3.7", "dropout_generators", "lab3_replicas:check_dropout_generators", lab3_hints.DROPOUT_GENERATORS, "Between the blocks, tokens are independent", takes_group=True),
    ), "rewards:lab3_reward"),
    Lab("lab4_recompute", "Lab 4: recomputation", "05_recomputation", (
        Exercise("4.1", "checkpoint", "lab4_recompute:check_checkpoint", lab4_hints.CHECKPOINT, "How a checkpoint function works, in four steps"),
        Exercise("4.2", "checkpoint", "lab4_recompute:check_checkpoint_of_dropout", lab4_hints.RANDOM_NUMBERS, "How a checkpoint function works, in four steps"),
        Exercise("4.3", "selective_layer", "lab4_layer:check_selective_layer", lab4_hints.SELECTIVE_LAYER, "The lopsided trade"),
        Exercise("4.4", "full_layer", "lab4_layer:check_full_layer", lab4_hints.FULL_LAYER, "The lopsided trade"),
        Exercise("4.5", "checkpoint_stopping_early", "lab4_recompute:check_checkpoint_stopping_early", lab4_hints.STOPPING_EARLY, "Measured: three numbers for one overhead"),
    ), "lab4_layer:lab4_reward", one_process=True),
    Lab("lab5_pipeline", "Lab 5: the pipeline", "06_pipeline", (
        Exercise("5.1", "one_forward_one_backward", "lab5_orders:check_one_forward_one_backward", lab5_hints.ONE_FORWARD_ONE_BACKWARD, "One forward, one backward"),
        Exercise("5.2", "interleaved", "lab5_orders:check_interleaved", lab5_hints.INTERLEAVED, "Interleaving: less idle time, more bytes"),
        Exercise("5.3", "free_output", "lab5_pipeline:check_free_output", lab5_hints.FREE_OUTPUT, "Figure 9: every rank, and the outputs that nothing reads"),
        Exercise("5.4", "how_many_fit", "lab5_pipeline:check_how_many_fit", lab5_hints.HOW_MANY_FIT, "Appendix C: recompute only what does not fit"),
        Exercise("5.5", "microbatches_to_keep", "lab5_pipeline:check_microbatches_to_keep", lab5_hints.MICROBATCHES_TO_KEEP, "Appendix C: recompute only what does not fit"),
    ), "lab5_pipeline:lab5_reward", one_process=True),
    Lab("lab6_train", "Lab 6: train under every mode", "03_tensor_parallelism", (
        Exercise("6.1", "batch", "lab6_batch:check_batch", lab6_hints.BATCH, "Real processes: the same numbers as one GPU"),
        Exercise("6.2", "make_model", "lab6_model:check_make_model", lab6_hints.MAKE_MODEL, "Real processes: the same numbers as one GPU", takes_group=True),
        Exercise("6.3", "gradient_norm", "lab6_norm:check_gradient_norm", lab6_hints.GRADIENT_NORM, "What divides and what does not", takes_group=True),
        Exercise("6.4", "training_step", "lab6_step:check_training_step", lab6_hints.TRAINING_STEP, "Real processes: the same numbers as one GPU", takes_group=True),
        Exercise("6.5", "train", "lab6_curves:check_train", lab6_hints.TRAIN, "Real processes: the same numbers as one GPU"),
    ), "lab6_reward:lab6_reward"),
    Lab("lab7_todays_layer", "Lab 7: today's layer", "08_after_the_paper", (
        Exercise("7.1", "llama_layer_bytes", "lab7_bytes:check_llama_layer_bytes", lab7_hints.LLAMA_LAYER_BYTES, "The layer changed"),
        Exercise("7.2", "rms_norm", "lab7_operators:check_rms_norm", lab7_hints.RMS_NORM, "What everyone keeps instead"),
        Exercise("7.3", "swiglu", "lab7_operators:check_swiglu", lab7_hints.SWIGLU, "What everyone keeps instead"),
        Exercise("7.4", "recipe_linear", "lab7_recipe:check_recipe_linear", lab7_hints.RECIPE_LINEAR, "What needs no product"),
        Exercise("7.5", "split_grouped_heads", "lab7_grouped:check_split_grouped_heads", lab7_hints.SPLIT_GROUPED_HEADS, "More ranks than key heads", takes_group=True),
        Exercise("7.6", "sum_shared_gradients", "lab7_grouped:check_sum_shared_gradients", lab7_hints.SUM_SHARED_GRADIENTS, "More ranks than key heads", takes_group=True),
    ), "lab7_reward:lab7_reward"),
    Lab("lab8_plan", "Lab 8: plan a model", "10_plan_a_model", (
        Exercise("8.1", "rank_state_bytes", "lab8_states:check_rank_state_bytes", lab8_hints.RANK_STATE_BYTES, "The bill, line by line"),
        Exercise("8.2", "largest_micro_batch_size", "lab8_states:check_largest_micro_batch_size", lab8_hints.LARGEST_MICRO_BATCH_SIZE, "The bill, line by line"),
        Exercise("8.3", "plan_of", "lab8_plan:check_plan_of", lab8_hints.PLAN_OF, "What if", seconds=120),
    ), "lab8_plan:lab8_reward", one_process=True),
)  # fmt: skip
