"""Right answers to lab 8: another plan."""

from actmem_course.judge.solutions.lab8_plan import JOBS
from actmem_tools.plan.planned_models import planned_model_of
from actmem_tools.plan.search import find_plans
from actmem_tools.plan.step_time import DEVICES, GIBIBYTE, Cluster
from tests.right_answers.register import right


@right("8.3")
def the_planners_plan(job):
    wanted = JOBS[job]
    cluster = Cluster(wanted["gpus"], wanted["memory_gib"] * GIBIBYTE, device=DEVICES[wanted["device"]])
    fixed = {"num_model_chunks": 1, "context_parallel_size": 1}
    found = find_plans(planned_model_of(wanted["model"]), cluster, wanted["global_batch_size"], 1, fixed)
    layout = found.plans[0].layout
    names = ("tensor_parallel_size", "sequence_parallel", "pipeline_parallel_size", "zero_stage", "micro_batch_size")
    return {**{name: getattr(layout, name) for name in names}, "recompute": found.plans[0].recompute}
