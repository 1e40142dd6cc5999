"""A plan in the words of three frameworks: their flags and keys, and what they can't do."""

from __future__ import annotations

from actmem.config import ConfigError
from actmem_more.llama_shape import LlamaShape
from actmem_tools.plan.planned_models import PlannedModel
from actmem_tools.plan.search import Plan, stage_layers
from actmem_tools.tape.extrapolate_blocks import OFFLOAD

#: The base of rotary positions, by how names begin: 2407.21783 section 3.2, and config.json of Qwen3 and Mixtral.
_ROTARY_BASES = {"llama3": 500_000, "qwen3": 1_000_000, "mixtral": 1_000_000}
_TITAN_FAMILIES = ("llama3", "qwen3")
_MEGATRON_FSDP = ["--overlap-param-gather", "--use-megatron-fsdp", "--use-distributed-optimizer",
                  "--no-gradient-accumulation-fusion", "--ckpt-format fsdp_dtensor"]  # fmt: skip
#: By ZeRO stage; from stage 2 on in Megatron-FSDP's words.
_MEGATRON_ZERO: dict[int, list[str]] = {
    0: [],
    1: ["--overlap-param-gather", "--use-distributed-optimizer"],
    2: [*_MEGATRON_FSDP, "--data-parallel-sharding-strategy optim_grads"],
    3: [*_MEGATRON_FSDP, "--data-parallel-sharding-strategy optim_grads_params"],
}
_ALL_RECOMPUTE = (
    "# the plan keeps everything of {} of the microbatches in flight (appendix C); its code recomputes them too"
)
_NOT_ON_THE_HOST = "# layers' inputs stay on the GPU: nothing here moves them to the host"
#: Megatron-LM's arguments.py asserts the first, and warns of the second, from one tensor or context rank more on.
_CONNECTIONS = "export CUDA_DEVICE_MAX_CONNECTIONS=1  # not from Blackwell on"
_ONE_OVERLAP = (
    "# before Blackwell you get only one of two overlaps that the plan counts: tensor and context parallelism need",
    "# CUDA_DEVICE_MAX_CONNECTIONS=1, and Megatron-FSDP refuses it",
)
_MEGATRON_FULL = ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
_MEGATRON_RECOMPUTE: dict[str, list[str]] = {
    "none": [],
    "selective": ["--recompute-granularity selective", "--recompute-modules core_attn"],
    "full": _MEGATRON_FULL,
    OFFLOAD: [*_MEGATRON_FULL, _NOT_ON_THE_HOST],
}


def _whole_again(model: PlannedModel, plan: Plan) -> list[str]:
    """Megatron-LM's CheckpointFunction and torchtitan's (early_stop false) run the last matmul too, ours doesn't."""
    if plan.recompute not in ("full", OFFLOAD):
        return []
    axes = plan.layout.layer_axes
    share = model.added_work(axes, plan.recompute).matmul_flops / (3 * model.layer_work(axes).matmul_flops)
    return [
        f"# its checkpoint recomputes all of a layer, {1 / 3:.1%} more FLOPs; "
        f"the plan's stops early and adds {share:.1%}"
    ]


def megatron_settings(model: PlannedModel, plan: Plan, global_batch_size: int) -> list[str]:
    """Flags of Megatron-LM's pretrain scripts, what to export first, and comments where it has no flag."""
    layout, shape = plan.layout, model.shape
    t, p, m = layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.num_model_chunks
    groups = getattr(shape, "num_key_value_heads", shape.num_attention_heads)
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
        f"--tensor-model-parallel-size {t}",
        f"--pipeline-model-parallel-size {p}",
        "--bf16",
        "--accumulate-allreduce-grads-in-fp32",
    ]
    if groups != shape.num_attention_heads:
        flags += ["--group-query-attention", f"--num-query-groups {groups}"]
    if layout.sequence_parallel:
        flags.append("--sequence-parallel")
    if m > 1:
        flags.append(f"--num-layers-per-virtual-pipeline-stage {model.num_layers // (p * m)}")
    if p > 1 and model.num_layers % p:
        first, *between, last = stage_layers(model.num_layers, p)
        if not between or first < between[0]:
            flags.append(f"--decoder-first-pipeline-num-layers {first}")
        flags.append(f"--decoder-last-pipeline-num-layers {last}")
    if layout.context_parallel_size > 1:
        flags.append(f"--context-parallel-size {layout.context_parallel_size}")
    if isinstance(shape, LlamaShape) and shape.num_experts:
        flags += [f"--num-experts {shape.num_experts}", f"--moe-router-topk {shape.experts_per_token}"]
        flags += [f"--expert-model-parallel-size {t}", "--expert-tensor-parallel-size 1"]
        flags.append("--moe-token-dispatcher-type alltoall")
        if t > 1 and not layout.sequence_parallel:
            flags.append("# it has no tensor parallelism with experts unless the sequence is cut too")
    if layout.replicas > 1:
        flags.append("--overlap-grad-reduce")
    flags += _MEGATRON_ZERO[layout.zero_stage] + [*model.optimizer.megatron]
    flags += _MEGATRON_RECOMPUTE.get(
        plan.recompute, [f"# no flag recomputes exactly {plan.recompute}: see --recompute-modules"]
    )
    flags += _whole_again(model, plan)
    if plan.whole_microbatches:
        flags.append(_ALL_RECOMPUTE.format(plan.whole_microbatches))
    if max(t, layout.context_parallel_size) == 1:
        return flags
    return [*flags, *_ONE_OVERLAP] if layout.zero_stage >= 2 else [_CONNECTIONS, *flags]


def _megatron_layer(model: PlannedModel) -> list[str]:
    """The flags that make its GPT this model.

    Without them it has biases, GELU, LayerNorm, learned positions and dropout.
    """
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
    flags += [f"--rotary-base {base}" for name, base in _ROTARY_BASES.items() if model.name.startswith(name)]
    flags += [] if shape.tied_embeddings else ["--untie-embeddings-and-output-weights"]
    return flags + (["--qk-layernorm"] if shape.qk_norm else [])


def torchtitan_settings(model: PlannedModel, plan: Plan, global_batch_size: int) -> list[str]:
    """Lines of a configuration file of torchtitan 0.2.2, and comments where it has no key."""
    layout, n = plan.layout, plan.num_microbatches
    replicate = layout.data_parallel_size if layout.zero_stage in (0, 1) else 1
    recompute = {"none": "none", "full": "full", OFFLOAD: "full"}.get(plan.recompute, "selective")
    family, _, flavor = model.name.partition("-")
    if family not in _TITAN_FAMILIES:
        return [f"# it has no {model.name}: this plan can't be run there"]
    lines = [
        "# for torchtitan 0.2.2. Its main branch has no TOML since #2386 (February 2026): set the same fields of a "
        "Trainer.Config.",
        "# Since #4121 (August 2026) these replace the batch sizes, seq_len and the pipeline's microbatch_size:",
        f"# training.num_tokens_per_microbatch_per_dp_rank = {layout.micro_batch_size * model.seq_length}, "
        f"training.max_context_length = {model.seq_length},",
        f"# training.num_tokens_per_train_step = {global_batch_size * model.seq_length}, "
        f"parallelism.num_pp_microbatches = {n}",
        "[model]",
        f'name = "{family}"',
        f'flavor = "{flavor.upper()}"',
        "[optimizer]",
        'name = "AdamW"' if model.optimizer.is_default else f"# it has no {model.optimizer.name}, only Adam and AdamW",
        "[training]",
        'mixed_precision_param = "bfloat16"',
        'mixed_precision_reduce = "float32"',
        # Its pipeline splits this into microbatches; without one it accumulates up to the global batch.
        f"local_batch_size = {layout.micro_batch_size * (n if layout.pipeline_parallel_size > 1 else 1)}",
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
    if plan.recompute == OFFLOAD:
        lines.append(_NOT_ON_THE_HOST)
    if plan.whole_microbatches:
        lines.append(_ALL_RECOMPUTE.format(plan.whole_microbatches))
    if recompute == "selective":
        lines.append(f"# its selective mode keeps other tensors than {plan.recompute}")
    return lines + _whole_again(model, plan)


def hugging_face_settings(model: PlannedModel, plan: Plan, global_batch_size: int) -> list[str]:
    """Arguments of transformers' TrainingArguments with accelerate, and comments where they can't do it."""
    layout = plan.layout
    if layout.pipeline_parallel_size > 1:
        return ["# Trainer has no pipeline parallelism for training: this plan can't be run there"]
    lines = [
        f"per_device_train_batch_size={layout.micro_batch_size}",
        f"gradient_accumulation_steps={plan.num_microbatches}",
        "bf16=True",
        f"gradient_checkpointing={plan.recompute in ('full', OFFLOAD)}",
        *model.optimizer.trainer,
    ]
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
    if plan.recompute == OFFLOAD:
        lines.append(_NOT_ON_THE_HOST)
    elif plan.recompute not in ("none", "full"):
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
