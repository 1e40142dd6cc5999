"""Right answers to lab 8: other formulas, and other plans."""

from collections import OrderedDict

import numpy as np

from actmem_course.judge.solutions.lab8_plan import JOBS, plan_of
from actmem_tools.plan.planned_models import planned_model_of
from actmem_tools.plan.search import find_plans
from actmem_tools.plan.step_time import DEVICES, GIBIBYTE, Cluster
from tests.right_answers.register import right


@right("8.1")
def states_rank_by_rank(num_parameters, data_parallel_size, zero_stage):
    parts = [len(range(rank, num_parameters, data_parallel_size)) for rank in range(data_parallel_size)]
    names = ("optimizer states", "gradients", "weights")
    return OrderedDict(
        (name, np.int64(size * (max(parts) if zero_stage > place else num_parameters)))
        for place, (name, size) in enumerate(zip(names, (12, 4, 2)))
    )


@right("8.2")
def largest_from_above(memory_bytes, fixed_bytes, bytes_per_sequence, p, sequences):
    for count in range(1, sequences + 1):
        b, rest = divmod(sequences, count)
        if not rest and fixed_bytes + min(p * b, sequences) * bytes_per_sequence <= memory_bytes:
            return b
    return 0


@right("8.3")
def the_planners_plan(job):
    wanted = JOBS[job]
    cluster = Cluster(wanted["gpus"], wanted["memory_gib"] * GIBIBYTE, device=DEVICES[wanted["device"]])
    fixed = {"num_model_chunks": 1, "context_parallel_size": 1}
    found = find_plans(planned_model_of(wanted["model"]), cluster, wanted["global_batch_size"], 1, fixed)
    layout = found.plans[0].layout
    names = ("tensor_parallel_size", "sequence_parallel", "pipeline_parallel_size", "zero_stage", "micro_batch_size")
    return {**{name: getattr(layout, name) for name in names}, "recompute": found.plans[0].recompute}


@right("8.3")
def the_papers_plan_of_175b(job):
    papers = {"pipeline_parallel_size": 8, "zero_stage": 3, "micro_batch_size": 1, "recompute": "selective"}
    return {**plan_of(job), **(papers if job == "175B" else {})}
