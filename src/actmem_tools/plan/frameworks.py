"""Why Megatron-LM, torchtitan or Hugging Face's Trainer can't run a plan.

``actmem plan`` prints settings for these three frameworks.  Each ``…_lack`` function returns one sentence with the
reason why its framework can't run the plan, or "" if it can.
"""

from actmem.config import Parallel
from actmem_more.llama_shape import LlamaShape
from actmem_tools.plan.planned_models import PlannedModel

#: How the names of the planned models begin that torchtitan 0.2.2 has.
TITAN_FAMILIES = ("llama3", "qwen3")
#: What none of the three can recompute.
_NO_RECOMPUTATION = {"elementwise": "it has no setting that recomputes exactly what elementwise does"}
#: Precisions of Megatron-LM's precision-aware optimizer.
AWARE = ("bf16-gradients", "bf16-states")
#: Precisions that are billed as Megatron-LM has them.
_MEGATRONS = (*AWARE, "fp8")


def megatron_lack(model: PlannedModel, layout: Parallel, recompute: str) -> str:
    """Return in one sentence why Megatron-LM can't run this model, layout and mode of recomputation; "" if it can."""
    if model.routing and layout.tensor_parallel_size > 1 and not layout.sequence_parallel:
        return "it has no tensor parallelism with experts unless the sequence is sharded too"
    if model.precision == "bf16":
        return "it has no bf16: with bf16-states it keeps the lower halves of float32 weights too"
    shares_states = layout.zero_stage == min(1, layout.replicas - 1)
    if model.precision in _MEGATRONS and not (shares_states and model.optimizer.is_default):
        return f"{model.precision} is billed for Adam with ZeRO-1 only"
    return _NO_RECOMPUTATION.get(recompute, "")


def torchtitan_lack(model: PlannedModel, layout: Parallel, recompute: str) -> str:
    """Return in one sentence why torchtitan can't run this model, layout and mode of recomputation; "" if it can.

    Plans without FSDP2 are refused: torchtitan then trains in float32, or under autocast with float32 weights, and the
    planner predicts the bytes of neither.
    """
    if model.name.partition("-")[0] not in TITAN_FAMILIES:
        return f"it has no {model.name}"
    if not model.optimizer.is_default:
        return f"it has no {model.optimizer.name}, only Adam and AdamW"
    if model.precision in _MEGATRONS:
        return f"its {model.precision}, if it has one, keeps something else"
    if layout.zero_stage < 2:
        return "it shares states by FSDP2 only, which is ZeRO-2 or 3"
    if layout.tensor_parallel_size > 1 and not layout.sequence_parallel:
        return "its tensor parallelism is always sequence-parallel"
    shares = layout.tensor_parallel_size * layout.context_parallel_size
    if model.routing and layout.expert_ranks > 1 and layout.expert_ranks % shares:
        return f"its expert_parallel_degree must be a multiple of tensor · context ranks, {shares}"
    if recompute == "selective":
        return "its selective mode keeps other tensors"
    return _NO_RECOMPUTATION.get(recompute, "")


def hugging_face_lack(model: PlannedModel, layout: Parallel, recompute: str) -> str:
    """Return in one sentence why transformers' Trainer, with accelerate, can't run this plan; "" if it can.

    Args:
        model: the planned model.
        layout: how the GPUs share the model.
        recompute: the mode of recomputation, such as "full".
    """
    t, c = layout.tensor_parallel_size, layout.context_parallel_size
    if not isinstance(model.shape, LlamaShape):
        return f"it has no {model.name}, whose layer is the paper's"
    if model.precision in _MEGATRONS or (model.precision == "bf16" and layout.zero_stage in (1, 2)):
        return f"its {model.precision} with ZeRO-{layout.zero_stage}, if it has one, keeps something else"
    if layout.pipeline_parallel_size > 1:
        return "its Trainer has no pipeline parallelism"
    if layout.expert_ranks > 1 and model.routing:
        return "it shares experts among ranks only if the model's plan says so"
    if layout.sequence_parallel:
        return "its tensor parallelism cuts the sequence only if the model's plan says so"
    if max(t, c) > 1 and layout.zero_stage != 3:
        return "its tensor and context parallelism go with FSDP only"
    if recompute not in ("none", "full"):
        return _NO_RECOMPUTATION.get(recompute) or f"it has no {recompute} recomputation: all layers or none"
    return ""


#: For each framework's name the function that says why this framework can't run a plan.
LACKS = {"Megatron-LM": megatron_lack, "torchtitan": torchtitan_lack, "Hugging Face": hugging_face_lack}


def some_framework_runs(model: PlannedModel, layout: Parallel, recompute: str) -> bool:
    """Return whether Megatron-LM, torchtitan or Hugging Face can run this model, layout and mode of recomputation."""
    return any(not lack(model, layout, recompute) for lack in LACKS.values())
