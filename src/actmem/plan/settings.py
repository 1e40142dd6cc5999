"""A plan in the words of three frameworks: their flags and keys, and what they can't do."""

from __future__ import annotations

from dataclasses import dataclass

from actmem.config import ConfigError
from actmem.llama_shape import LlamaShape
from actmem.plan.planned_models import PlannedModel
from actmem.plan.rank_bill import stage_layers
from actmem.plan.search import Plan


@dataclass(frozen=True)
class _Family:
    """Models of one name: the base of their rotary positions, and what torchtitan calls them, if it has them."""

    rotary_base: int
    titan_name: str = ""


#: Rotary bases: 2407.21783 section 3.2, and config.json of Qwen3 and Mixtral.
_FAMILIES = {"llama3": _Family(500_000, "llama3"), "qwen3": _Family(1_000_000, "qwen3"), "mixtral": _Family(1_000_000)}
_TRAINER_OPTIMIZER = {"adamw": "adamw_torch", "adamw8bit": "adamw_torch_8bit", "sgd": "sgd", "momentum": "sgd"}
_MEGATRON_OPTIMIZER = {
    "sgd": ["--optimizer sgd", "--sgd-momentum 0.0"],
    "momentum": ["--optimizer sgd"],
    "adamw8bit": ["# it has no 8-bit Adam: with --use-precision-aware-optimizer its moments have 2 bytes or fp8"],
}
#: Data-parallel sharding in Megatron-FSDP's words, by ZeRO stage.
_MEGATRON_FSDP = {2: "optim_grads", 3: "optim_grads_params"}


def megatron_settings(model: PlannedModel, plan: Plan, global_batch_size: int) -> list[str]:
    """Flags of Megatron-LM's pretrain scripts, and comments where it has no flag."""
    layout, shape = plan.layout, model.shape
    flags = [
        f"--num-layers {shape.num_layers}",
        f"--hidden-size {shape.hidden_size}",
        f"--ffn-hidden-size {shape.ffn_hidden_size}",
        f"--num-attention-heads {shape.num_attention_heads}",
        *_megatron_layer(model),
        f"--seq-length {model.seq_length}",
        f"--max-position-embeddings {model.seq_length}",
        # Its tokenizer adds a token.
        "--tokenizer-type NullTokenizer",
        f"--vocab-size {shape.vocab_size - 1}",
        "--make-vocab-size-divisible-by 1",
        f"--micro-batch-size {layout.micro_batch_size}",
        f"--global-batch-size {global_batch_size}",
        f"--tensor-model-parallel-size {layout.tensor_parallel_size}",
        f"--pipeline-model-parallel-size {layout.pipeline_parallel_size}",
        "--bf16",
        "--accumulate-allreduce-grads-in-fp32",
    ]
    groups = getattr(shape, "num_key_value_heads", shape.num_attention_heads)
    if groups != shape.num_attention_heads:
        flags += ["--group-query-attention", f"--num-query-groups {groups}"]
    if layout.sequence_parallel:
        flags.append("--sequence-parallel")
    if layout.num_model_chunks > 1:
        each = model.num_layers // (layout.pipeline_parallel_size * layout.num_model_chunks)
        flags.append(f"--num-layers-per-virtual-pipeline-stage {each}")
    if layout.pipeline_parallel_size > 1 and model.num_layers % layout.pipeline_parallel_size:
        first, *between, last = stage_layers(model.num_layers, layout.pipeline_parallel_size)
        if not between or first < between[0]:
            flags.append(f"--decoder-first-pipeline-num-layers {first}")
        flags.append(f"--decoder-last-pipeline-num-layers {last}")
    if layout.context_parallel_size > 1:
        flags.append(f"--context-parallel-size {layout.context_parallel_size}")
    if isinstance(shape, LlamaShape) and shape.num_experts:
        flags += [f"--num-experts {shape.num_experts}", f"--moe-router-topk {shape.experts_per_token}"]
        flags += [f"--expert-model-parallel-size {layout.tensor_parallel_size}", "--expert-tensor-parallel-size 1"]
        flags.append("--moe-token-dispatcher-type alltoall")
        if layout.tensor_parallel_size > 1 and not layout.sequence_parallel:
            flags.append("# it has no tensor parallelism with experts unless the sequence is cut too")
    if layout.data_parallel_size * layout.context_parallel_size > 1:
        flags.append("--overlap-grad-reduce")
    if layout.zero_stage:
        flags.append("--overlap-param-gather")
    if layout.zero_stage == 1:
        flags.append("--use-distributed-optimizer")
    flags += _MEGATRON_OPTIMIZER.get(model.optimizer, [])
    if layout.zero_stage in _MEGATRON_FSDP:
        strategy = _MEGATRON_FSDP[layout.zero_stage]
        flags += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {strategy}", "--use-distributed-optimizer"]
        flags += ["--no-gradient-accumulation-fusion", "--ckpt-format fsdp_dtensor"]
    recompute = {
        "none": [],
        "selective": ["--recompute-granularity selective", "--recompute-modules core_attn"],
        "full": ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"],
    }
    flags += recompute.get(plan.recompute, [f"# no flag recomputes exactly {plan.recompute}: see --recompute-modules"])
    if plan.whole_microbatches:
        whole = f"# {plan.whole_microbatches} of the microbatches in flight keep everything (appendix C)"
        flags.append(f"{whole}: its code has --recompute-num-layers, but nothing for each microbatch")
    return flags


def _megatron_layer(model: PlannedModel) -> list[str]:
    """The flags that make its GPT this model: without them it has biases, GELU, LayerNorm, learned positions and dropout."""
    shape = model.shape
    if not isinstance(shape, LlamaShape):
        return ["--position-embedding-type learned_absolute", "--hidden-dropout 0.1", "--attention-dropout 0.1"]
    flags = [
        "--swiglu",
        "--normalization RMSNorm",
        "--disable-bias-linear",
        "--position-embedding-type rope",
        f"--kv-channels {shape.d}",
        "--hidden-dropout 0.0",
        "--attention-dropout 0.0",
    ]
    if family := next((family for name, family in _FAMILIES.items() if model.name.startswith(name)), None):
        flags.append(f"--rotary-base {family.rotary_base}")
    flags += [] if shape.tied_embeddings else ["--untie-embeddings-and-output-weights"]
    return flags + (["--qk-layernorm"] if shape.qk_norm else [])


def torchtitan_settings(model: PlannedModel, plan: Plan, global_batch_size: int) -> list[str]:
    """Lines of a torchtitan configuration file, and comments where it has no key."""
    layout = plan.layout
    replicate = layout.data_parallel_size if layout.zero_stage in (0, 1) else 1
    recompute = {"none": "none", "full": "full"}.get(plan.recompute, "selective")
    family = next((family for name, family in _FAMILIES.items() if model.name.startswith(name)), None)
    if family is None or not family.titan_name:
        return [f"# it has no {model.name}: this plan can't be run there"]
    lines = [
        "[model]",
        f'name = "{family.titan_name}"',
        f'flavor = "{model.name.partition("-")[2].upper()}"',
        "[optimizer]",
        'name = "AdamW"' if model.optimizer == "adamw" else f"# it has no {model.optimizer}, only Adam and AdamW",
        "[training]",
        'mixed_precision_param = "bfloat16"',
        'mixed_precision_reduce = "float32"',
        f"local_batch_size = {layout.micro_batch_size * plan.num_microbatches}",
        f"global_batch_size = {global_batch_size}",
        f"seq_len = {model.seq_length}",
        "[parallelism]",
        f"data_parallel_replicate_degree = {replicate}",
        f"data_parallel_shard_degree = {layout.data_parallel_size // replicate}",
        f"tensor_parallel_degree = {layout.tensor_parallel_size}",
        f"context_parallel_degree = {layout.context_parallel_size}",
        f"pipeline_parallel_degree = {layout.pipeline_parallel_size}",
    ]
    if model.routing:
        lines += [f"expert_parallel_degree = {layout.tensor_parallel_size}", "expert_tensor_parallel_degree = 1"]
    if layout.pipeline_parallel_size > 1:
        schedule = "Interleaved1F1B" if layout.num_model_chunks > 1 else "1F1B"
        lines += [
            f'pipeline_parallel_schedule = "{schedule}"',
            f"pipeline_parallel_microbatch_size = {layout.micro_batch_size}",
        ]
    if layout.zero_stage in (2, 3):
        policy = "always" if layout.zero_stage == 3 else "never"
        lines.append(f'fsdp_reshard_after_forward = "{policy}"')
    lines += ["[activation_checkpoint]", f'mode = "{recompute}"']
    if layout.zero_stage == 1:
        lines.append("# it has no ZeRO-1: replicated, every rank keeps all optimizer states")
    if layout.tensor_parallel_size > 1 and not layout.sequence_parallel:
        lines.append("# its tensor parallelism is always sequence-parallel")
    if recompute == "selective":
        lines.append(f"# its selective mode keeps other tensors than {plan.recompute}")
    return lines


def hugging_face_settings(model: PlannedModel, plan: Plan, global_batch_size: int) -> list[str]:
    """Arguments of transformers' TrainingArguments with accelerate, and comments where they can't do it."""
    layout = plan.layout
    if layout.pipeline_parallel_size > 1:
        return ["# Trainer has no pipeline parallelism for training: this plan can't be run there"]
    lines = [
        f"per_device_train_batch_size={layout.micro_batch_size}",
        f"gradient_accumulation_steps={plan.num_microbatches}",
        "bf16=True",
        f"gradient_checkpointing={plan.recompute == 'full'}",
        f'optim="{_TRAINER_OPTIMIZER[model.optimizer]}"',
    ]
    if model.optimizer == "momentum":
        lines.append('optim_args="momentum=0.9"')
    if layout.zero_stage == 3:
        lines += ['fsdp="full_shard auto_wrap"', 'fsdp_config={"fsdp_version": 2}']
    elif layout.zero_stage:
        lines.append(
            f'deepspeed={{"zero_optimization": {{"stage": {layout.zero_stage}}}, "bf16": {{"enabled": true}}}}'
        )
    sizes = [f"tp_size={layout.tensor_parallel_size}"] if layout.tensor_parallel_size > 1 else []
    sizes += [f"cp_size={layout.context_parallel_size}"] if layout.context_parallel_size > 1 else []
    if sizes:
        lines.append(
            f"parallelism_config=ParallelismConfig({', '.join(sizes)}, dp_shard_size={layout.data_parallel_size})"
        )
    if model.routing and layout.tensor_parallel_size > 1:
        lines.append("# it shares experts among ranks only if the model's plan says so")
    if layout.sequence_parallel:
        lines.append("# its tensor parallelism leaves norms whole unless the model's plan says otherwise")
    if plan.recompute not in ("none", "full"):
        lines.append(f"# it has no {plan.recompute} recomputation: all layers or none")
    return lines


def hugging_face_config(model: PlannedModel) -> dict:
    """Hugging Face's own configuration of a named model.  Raises ConfigError if its code has no such layer, or if its
    layers can't be solved."""
    shape = model.shape
    if not isinstance(shape, LlamaShape):
        raise ConfigError("framework", f"Hugging Face has no {model.name}, whose layer is the paper's")
    if shape.num_experts:
        raise ConfigError("framework", f"{model.name} has experts, whose loads no tape of Hugging Face's layer knows")
    return {
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.d,
        "num_hidden_layers": shape.num_layers,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_embeddings,
    }


#: By the framework's name.
FRAMEWORK_SETTINGS = {
    "Megatron-LM": megatron_settings,
    "torchtitan": torchtitan_settings,
    "Hugging Face": hugging_face_settings,
}
