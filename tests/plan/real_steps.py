"""Peaks of real steps, for bills of models that are planned."""

import torch

from actmem.ledger.whole_step import loss_of, watch_step

#: What a bill leaves out: inputs, buffers and the optimizer's counts of steps.
LEFT_OUT = ("input", "buffer")


def peaks_of_steps(model, inputs, code, steps=True, accumulates=False, times=1):
    """Bytes at the peaks of ``times`` rounds after a first step of AdamW, unless ``code`` makes an ``optimizer``.

    steps: whether each round steps; accumulates: whether gradients of the round before stay.
    """
    variables = {"model": model, "torch": torch}
    exec(code, variables)
    optimizer = variables.get("optimizer") or torch.optim.AdamW(model.parameters())
    group = optimizer.param_groups[0]
    group["foreach"] = not group.get("fused")  # CUDA's default
    loss_of(model(**inputs)).backward()
    optimizer.step()
    peaks = []
    for _ in range(times):
        if not accumulates:
            optimizer.zero_grad()
        with watch_step(model, optimizer, inputs) as bill:
            loss_of(model(**inputs)).backward()
            if steps:
                optimizer.step()
        peaks.append(sum(row.bytes for row in bill.peak if row.kind not in LEFT_OUT and row.op != "step"))
    return peaks
