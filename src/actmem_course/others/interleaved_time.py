"""How long an interleaved step takes with either warm-up, in closed form: what a send costs."""

from __future__ import annotations

from actmem.config import ConfigError, Parallel, check_divides


def interleaved_step_time(
    pipeline_parallel_size: int,
    num_model_chunks: int,
    num_microbatches: int,
    forward_time: int = 1,
    backward_time: int = 2,
    send_time: int = 0,
    short_warmup: bool = False,
) -> int:
    """Time of one step of ``schedule.interleaved``, from the first forward to the last backward.

    The times are those of one chunk; a send overlaps with what both ranks compute.  Both warm-ups take (nm + p − 1)(F + B)
    and their sends.  The longer one pays for the 2(pm − 1) sends of a single microbatch, the short one for 2(p − 2) more,
    and in each further round of p microbatches for 2m(p − 1): there every chunk waits for its neighbours' answers.
    Raises ConfigError unless m > 1 and p divides n, and with the longer warm-up for a send that takes longer than a
    forward or a backward, which it no longer hides.  Tested against ``timeline``.
    """
    p, m, n = pipeline_parallel_size, num_model_chunks, num_microbatches
    Parallel(pipeline_parallel_size=p, num_model_chunks=m)
    if m < 2:
        raise ConfigError("num_model_chunks", f"must be at least 2, got {m}")
    rounds = check_divides("num_microbatches", n, "pipeline_parallel_size", p)
    if not short_warmup and send_time > min(forward_time, backward_time):
        raise ConfigError("send_time", f"must be at most a forward's or a backward's time, got {send_time}")
    sends = 2 * (p * m - 1)
    if short_warmup:
        sends += 2 * (p - 2) + 2 * m * (p - 1) * (rounds - 1)
    return (n * m + p - 1) * (forward_time + backward_time) + sends * send_time
