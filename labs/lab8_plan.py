"""python my/labs/lab8_plan.py

Lab 8: what fits (2205.05198 section 4.2.3, and ZeRO, 1910.02054).

Read notebooks/09_your_model.ipynb first; each exercise names its section.

Write the functions below in your own copy of this file, which make labs puts into my/labs.  The
command above judges them.  For a hint, add --hint 8.1.

Weights have 2 bytes per parameter.  Gradients are added up in float32, and Adam keeps a float32 copy
of the weights and two float32 averages.  Results are whole numbers.
"""

if __name__ == "__main__":
    from actmem_course.judge import main

    raise SystemExit(main(globals()))


# 8.1: read “What fits”
def rank_state_bytes(num_parameters: int, data_parallel_size: int, zero_stage: int) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer states on the data-parallel rank that has most of them.

    If the parameters don't divide evenly among the ranks, this rank has one parameter more than others.

    Args:
        num_parameters: the parameters of one rank after tensor and pipeline parallelism, before ZeRO divides anything.
        data_parallel_size: how many data-parallel ranks there are.
        zero_stage: what is divided among the data-parallel ranks: 0 nothing, 1 the optimizer states, 2 gradients as
            well, 3 weights as well.

    Returns:
        A dict with the bytes of "weights", "gradients" and "optimizer states".

    Source: 2205.05198 figure 1 shows stage 0; the others are 1910.02054 section 5.
    """
    raise NotImplementedError


# 8.2: read “What fits”
def largest_micro_batch_size(
    memory_bytes: int, fixed_bytes: int, bytes_per_sequence: int, pipeline_parallel_size: int, sequences: int
) -> int:
    """Return the size of the largest microbatch that fits into memory on the first of p stages under 1F1B.

    Args:
        memory_bytes: the most bytes that the stage may take.
        fixed_bytes: bytes that don't grow with the microbatch, such as weights.
        bytes_per_sequence: bytes that the stage's layers save for one sequence until its backward.
        pipeline_parallel_size: p.
        sequences: how many sequences this rank trains on in one step; they are split into microbatches of equal size.

    Returns:
        How many sequences one microbatch has; 0 if not even one sequence fits.

    Source: 2205.05198 section 4.2.3.
    """
    raise NotImplementedError
