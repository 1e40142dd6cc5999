"""Tables 2 to 4 of the paper, and the places where it does not agree with itself, as entries."""

from __future__ import annotations

from collections.abc import Sequence

from actmem import paper
from actmem.formulas.disagreements import disagreements
from actmem.formulas.states import num_parameters, parameter_counts
from actmem.formulas.table2 import TABLE2, closed_form
from actmem.lab.paper.entries import Entry
from actmem.lab.paper.flops import count_parameters
from actmem.lab.paper.jobs import Job, Results
from actmem.lab.ranks import Ranks
from actmem.lab.table2 import Result, measure_table2
from actmem.measure.emulate import emulated_rank
from actmem.models import PAPER_MODELS

#: Table 3 names its models by their parameters.
_NAMED_PARAMETERS = {"22B": 22 * 10**9, "175B": 175 * 10**9, "530B": 530 * 10**9, "1T": 10**12}


def measure_layer_of(model_name: str) -> list[Result]:
    """Table 2 for one layer of a paper model, on one emulated rank of its t."""
    import torch

    model = PAPER_MODELS[model_name]
    t = model.parallel.tensor_parallel_size
    with emulated_rank(t):
        return measure_table2(model.shape, Ranks(0, t, "cpu", emulated=True), torch.bfloat16)


def _layer_job(name: str) -> Job:
    return Job(measure_layer_of, (name,), f"{name}, table 2")


def parameters_job(name: str) -> Job:
    """The job whose result is (parameters of the whole model, parameters on pipeline rank 0)."""
    return Job(count_parameters, (name,), f"{name}, parameters")


def table2_jobs(models: Sequence[str]) -> list[Job]:
    return [_layer_job(name) for name in models]


def table2(models: Sequence[str], results: Results) -> list[Entry]:
    """Bytes of one layer on one rank: the row's own formula, the sum of named tensors, the ledger."""
    entries = []
    for name in models:
        shape, t = PAPER_MODELS[name].shape, PAPER_MODELS[name].parallel.tensor_parallel_size
        for configuration, result in zip(TABLE2, results[_layer_job(name)]):
            entries.append(
                Entry(
                    "table2", name, configuration.name, "bytes",
                    paper=closed_form(configuration, shape, t),
                    ours_formula=result.predicted_bytes, extra=result.extra_bytes, measured=result.measured_bytes,
                    disagreement=result.disagreement, note=f"sbh({configuration.formula()})",
                )
            )
    return entries


def table3_jobs(models: Sequence[str]) -> list[Job]:
    return [parameters_job(name) for name in models]


def table3(models: Sequence[str], results: Results) -> list[Entry]:
    """Devices, and parameters of the GPT that these sizes give."""
    entries = []
    for name in models:
        model, (whole, first_rank) = PAPER_MODELS[name], results[parameters_job(name)]
        per_rank = sum(parameter_counts(model.shape, model.parallel).values())
        entries += [
            Entry("table3", name, "GPUs, t · p", "", paper.TABLE3_DEVICES[name], model.num_devices, note="as printed"),
            Entry(
                "table3", name, "parameters", "", _NAMED_PARAMETERS[name], num_parameters(model.shape),
                measured=whole, note="as its name says",
            ),
            Entry("table3", name, "parameters on rank 0", "", None, per_rank, measured=first_rank),
        ]
    return entries


def table4(models: Sequence[str], results: Results) -> list[Entry]:
    """Overhead of one 22B layer in percent: as printed, and from the printed milliseconds."""
    if "22B" not in models:
        return []
    base = paper.TABLE4["baseline, no recompute"]
    entries = []
    for name, time in paper.TABLE4.items():
        entries.append(
            Entry(
                "table4", "22B", f"{name}: {time.forward_ms} + {time.backward_ms} ms", "%",
                paper=time.overhead_percent,
                ours_formula=None if time is base else 100 * (time.combined_ms / base.combined_ms - 1),
            )
        )
    return entries


def disagreement_entries(models: Sequence[str], results: Results) -> list[Entry]:
    """Every number of ours in formulas.disagreements, beside what the paper says there."""
    return [
        Entry("disagreements", value.label, found.where, value.unit, found.printed, value.value, note=found.why)
        for found in disagreements()
        for value in found.ours
    ]
