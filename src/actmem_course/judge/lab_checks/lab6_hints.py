"""Hints of lab 6, from a nudge to nearly the answer."""

BATCH = (
    "A piece of seq_length + 1 tokens holds both: all but the last, and all but the first.",
    "All ranks must choose the same pieces, and the same ones again when a run is repeated: derive them from step alone.",
    "generator=torch.Generator().manual_seed(SEED + step) for torch.randint(len(text) - seq_length, (batch_size,), …).",
    "windows = text[starts.unsqueeze(1) + torch.arange(seq_length + 1)]; return windows[:, :-1], windows[:, 1:].",
)
MAKE_MODEL = (
    "GPT draws each rank's part of the weights from seed: with one seed, the ranks together hold what one rank alone would draw.",
    "So give it the same seed, SEED, on every rank and in every mode.",
    "tp is tensor_parallel(group, sequence_parallel=mode.sequence_parallel), or TensorParallel() if the mode has no tensor parallelism. "
    "recompute=mode.recompute goes to GPT.",
    "return GPT(shape, tp, recompute=mode.recompute, p=dropout, seed=SEED, **factory).",
)
GRADIENT_NORM = (
    "Some parameters are cut among the ranks, some are replicated. How often does each square occur in the ranks' sums?",
    'hasattr(parameter, "partition_dim") tells them apart. Sum the squares of the cut ones over the ranks; count the others once.',
    "If model.tp.size is 1, exchange nothing; otherwise all-reduce over model.tp.group.",
    "dist.all_reduce(cut, group=model.tp.group); return math.sqrt(cut + whole).",
)
TRAINING_STEP = (
    "The order: zero_grad, forward and backward of every microbatch, the partial gradients of sequence parallelism, the norm, the step.",
    "Gradients of several backwards add up. By what must you divide each loss so that the sum is the gradient of the mean?",
    "After the last backward: reduce_partial_gradients(model, model.tp). Only then is the gradient complete, and gradient_norm right.",
    "if norm > max_norm: parameter.grad *= max_norm / norm for each; optimizer.step(); return the sum of the divided losses as a float.",
)
TRAIN = (
    "All the parts are there: make_model, batch, training_step.",
    "A batch of a step has NUM_MICROBATCHES * shape.micro_batch_size sequences: cut it with chunk.",
    "microbatches = list(zip(tokens.chunk(NUM_MICROBATCHES), targets.chunk(NUM_MICROBATCHES))); losses.append(training_step(model, "
    "optimizer, microbatches, MAX_NORM)).",
)
