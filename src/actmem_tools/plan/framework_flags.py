"""Write a plan as the settings of three frameworks: Megatron-LM, torchtitan and Hugging Face's Trainer."""

from actmem.config import ConfigError
from actmem_more.llama_shape import LlamaShape
from actmem_tools.plan.frameworks import AWARE, LACKS
from actmem_tools.plan.planned_models import PlannedModel
from actmem_tools.plan.search import Plan, chunk_layers

#: The base of rotary positions, by how a model's name begins: 2407.21783 section 3.2, and config.json of Qwen3 and
#: Mixtral.
_ROTARY_BASES = {"llama3": 500_000, "qwen3": 1_000_000, "mixtral": 1_000_000}
#: The last flag came in March 2026; since then Megatron-FSDP adds gradients up in bfloat16 unless it is given.
_MEGATRON_FSDP = ["--overlap-param-gather", "--use-megatron-fsdp", "--use-distributed-optimizer",
                  "--no-gradient-accumulation-fusion", "--ckpt-format fsdp_dtensor",
                  "--megatron-fsdp-main-grads-dtype fp32"]  # fmt: skip
#: Megatron-LM's flags for each ZeRO stage; from stage 2 on those of Megatron-FSDP.
_MEGATRON_ZERO: dict[int, list[str]] = {
    0: [],
    1: ["--overlap-param-gather", "--use-distributed-optimizer"],
    2: [*_MEGATRON_FSDP, "--data-parallel-sharding-strategy optim_grads"],
    3: [*_MEGATRON_FSDP, "--data-parallel-sharding-strategy optim_grads_params"],
}
_MEGATRON_AWARE = ["--grad-reduce-in-bf16", "--use-precision-aware-optimizer", "--main-grads-dtype bf16"]
_MEGATRON_PRECISION = {
    "mixed": ["--accumulate-allreduce-grads-in-fp32"],
    "bf16-gradients": _MEGATRON_AWARE,
    "bf16-states": [*_MEGATRON_AWARE, "--exp-avg-dtype bf16", "--exp-avg-sq-dtype bf16"],
    "fp8": ["--accumulate-allreduce-grads-in-fp32", "--fp8-format hybrid", "--fp8-recipe tensorwise"],
}
#: What to export before a run of Megatron-LM with tensor or context parallelism: its arguments.py asks for it.
_CONNECTIONS = "export CUDA_DEVICE_MAX_CONNECTIONS=1  # not from Blackwell on"
_MEGATRON_RECOMPUTE: dict[str, list[str]] = {
    "none": [],
    "selective": ["--recompute-granularity selective", "--recompute-modules core_attn"],
    "full": [
        "--recompute-granularity full",
        "--recompute-method uniform",
        "--recompute-num-layers 1",
        "# its checkpoint recomputes all of a layer; the plan's stops early, without the layer's last matmul",
    ],
}
#: Keys that a configuration of DeepSpeed must have; "auto" takes them from TrainingArguments.
_DEEPSPEED_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def settings_lines(framework: str, model: PlannedModel, plan: Plan, global_batch_size: int) -> list[str]:
    """Return a plan as the settings of one framework.

    Args:
        framework: "Megatron-LM", "torchtitan" or "Hugging Face".
        model: the planned model that the plan trains.
        plan: the plan, from ``Request.search``.
        global_batch_size: sequences in one step, on all ranks together.

    Returns: lines to paste; or, if the framework can't run the plan, one line: a comment with the reason.
    """
    lack = LACKS[framework](model, plan.layout, plan.recompute)
    return [f"# it can't run this plan: {lack}"] if lack else _SETTINGS[framework](model, plan, global_batch_size)


def megatron_settings(model: PlannedModel, plan: Plan, global_batch_size: int) -> list[str]:
    """Return a plan as flags of Megatron-LM's pretrain scripts.

    If the plan needs an environment variable, the first line exports it.

    Args:
        model: the planned model that the plan trains.
        plan: the plan; ``frameworks.megatron_lack`` must have returned "" for it.
        global_batch_size: sequences in one step, on all ranks together.
    """
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
        # NullTokenizer adds one token to the vocabulary.
        "--tokenizer-type NullTokenizer",
        f"--vocab-size {shape.vocab_size - 1}",
        "--make-vocab-size-divisible-by 1",
        f"--micro-batch-size {layout.micro_batch_size}",
        f"--global-batch-size {global_batch_size}",
        f"--tensor-model-parallel-size {t}",
        f"--pipeline-model-parallel-size {p}",
        "--bf16",
        *_MEGATRON_PRECISION[model.precision],
    ]
    if groups != shape.num_attention_heads:
        flags += ["--group-query-attention", f"--num-query-groups {groups}"]
    if layout.sequence_parallel:
        flags.append("--sequence-parallel")
    each, first, last = _layers_of_stages(model, plan)
    if m > 1:
        flags.append(f"--num-layers-per-virtual-pipeline-stage {each}")
        flags += ["--account-for-embedding-in-pipeline-split"] if first < each else []
        flags += ["--account-for-loss-in-pipeline-split"] if last < each else []
    elif last < each:
        if p == 2 or first < each:
            flags.append(f"--decoder-first-pipeline-num-layers {first}")
        flags.append(f"--decoder-last-pipeline-num-layers {last}")
    if layout.context_parallel_size > 1:
        flags.append(f"--context-parallel-size {layout.context_parallel_size}")
    if isinstance(shape, LlamaShape) and shape.num_experts:
        flags += [f"--num-experts {shape.num_experts}", f"--moe-router-topk {shape.experts_per_token}"]
        flags += [f"--expert-model-parallel-size {layout.expert_ranks}", "--expert-tensor-parallel-size 1"]
        flags.append("--moe-token-dispatcher-type alltoall")
    if layout.replicas > 1:
        flags.append("--overlap-grad-reduce")
    # The precision-aware optimizer is the distributed one, on one replica too.
    alone = ["--use-distributed-optimizer"] if model.precision in AWARE and layout.replicas == 1 else []
    flags += _MEGATRON_ZERO[layout.zero_stage] + alone + [*model.optimizer.megatron]
    flags += _MEGATRON_RECOMPUTE[plan.recompute]
    # Megatron-FSDP refuses to run with that variable.
    connections = max(t, layout.context_parallel_size) > 1 and layout.zero_stage < 2
    return [_CONNECTIONS, *flags] if connections else flags


def _layers_of_stages(model: PlannedModel, plan: Plan) -> tuple[int, int, int]:
    """Return three numbers of layers: those of most stages, of the first, and of the last; each chunk is a stage."""
    sizes = chunk_layers(model.num_layers, plan.layout.pipeline_parallel_size, plan.layout.num_model_chunks)
    return max(sizes), sizes[0], sizes[-1]


def _megatron_layer(model: PlannedModel) -> list[str]:
    """Return the flags that give Megatron-LM's GPT the layers of this model.

    Without any flags Megatron-LM's GPT has biases, GELU, LayerNorm, learned positions and dropout.
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
    """Return a plan as the lines of a configuration file (TOML) of torchtitan 0.2.2.

    Args:
        model: the planned model that the plan trains.
        plan: the plan; ``frameworks.torchtitan_lack`` must have returned "" for it.
        global_batch_size: sequences in one step, on all ranks together.
    """
    layout, n = plan.layout, plan.num_microbatches
    family, _, flavor = model.name.partition("-")
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
        'name = "AdamW"',
        "[training]",
        f'dtype = "{"bfloat16" if model.precision == "bf16" else "float32"}"',
        'mixed_precision_param = "bfloat16"',
        'mixed_precision_reduce = "float32"',
        # With a pipeline, torchtitan splits this into microbatches; without one it runs so many sequences at a time
        # until it has the global batch.
        f"local_batch_size = {layout.micro_batch_size * (n if layout.pipeline_parallel_size > 1 else 1)}",
        f"global_batch_size = {global_batch_size}",
        f"seq_len = {model.seq_length}",
        "[parallelism]",
        "data_parallel_replicate_degree = 1",
        f"data_parallel_shard_degree = {layout.data_parallel_size}",
        f"tensor_parallel_degree = {layout.tensor_parallel_size}",
        f"context_parallel_degree = {layout.context_parallel_size}",
        f"pipeline_parallel_degree = {layout.pipeline_parallel_size}",
    ]
    if model.routing:
        lines += [f"expert_parallel_degree = {layout.expert_ranks}", "expert_tensor_parallel_degree = 1"]
    if layout.pipeline_parallel_size > 1:
        schedule = "Interleaved1F1B" if layout.num_model_chunks > 1 else "1F1B"
        each, first, last = _layers_of_stages(model, plan)
        lines += [
            f"pipeline_parallel_layers_per_stage = {each}",
            f"pipeline_parallel_first_stage_less_layers = {each - first}",
            f"pipeline_parallel_last_stage_less_layers = {each - last}",
            f'pipeline_parallel_schedule = "{schedule}"',
            f"pipeline_parallel_microbatch_size = {layout.micro_batch_size}",
        ]
    policy = "always" if layout.zero_stage == 3 else "never"
    lines.append(f'fsdp_reshard_after_forward = "{policy}"')
    # early_stop: as in the plan, recomputation stops at the last tensor that backward reads.
    return [*lines, "[activation_checkpoint]", f'mode = "{plan.recompute}"', "early_stop = true"]


def hugging_face_settings(model: PlannedModel, plan: Plan, global_batch_size: int) -> list[str]:
    """Return a plan as arguments of transformers' TrainingArguments, whose Trainer runs on accelerate.

    Args:
        model: the planned model that the plan trains.
        plan: the plan; ``frameworks.hugging_face_lack`` must have returned "" for it.
        global_batch_size: sequences in one step, on all ranks together; not read, as it follows from the plan.
    """
    layout, checkpoints = plan.layout, plan.recompute == "full"
    lines = [
        f"per_device_train_batch_size={layout.micro_batch_size}",
        f"gradient_accumulation_steps={plan.num_microbatches}",
        "bf16=True" if model.precision == "mixed" else "bf16=False",
        *model.optimizer.trainer,
    ]
    if model.precision == "bf16":
        lines.insert(0, "# for a model that from_pretrained(..., dtype=torch.bfloat16) made")
    if layout.zero_stage == 3:
        lines += ["fsdp=True", f"fsdp_config={ {'version': 2, 'activation_checkpointing': checkpoints} }"]
    else:
        lines.append(f"activation_checkpointing={checkpoints}")
    if layout.zero_stage in (1, 2):
        stage = {"zero_optimization": {"stage": layout.zero_stage}, "bf16": {"enabled": True}}
        lines.append(f"deepspeed={stage | dict.fromkeys(_DEEPSPEED_SIZES, 'auto')}")
    sizes = [f"tp_size={layout.tensor_parallel_size}"] if layout.tensor_parallel_size > 1 else []
    sizes += [f"cp_size={layout.context_parallel_size}"] if layout.context_parallel_size > 1 else []
    if sizes:
        lines.append(
            f"parallelism_config=ParallelismConfig({', '.join(sizes)}, dp_shard_size={layout.data_parallel_size})"
        )
    return lines


def hugging_face_config(model: PlannedModel) -> dict:
    """Return a planned model as a configuration of Hugging Face's transformers.

    Args:
        model: one of ``PLANNED_MODELS``, such as "llama3-8b".

    Returns: the fields of a ``config.json``, with ``model_type``, as arguments of ``AutoConfig.for_model``.

    Raises: ConfigError if transformers has no such model, or if the model has experts, for which this library has no
        formulas of transformers' layers.
    """
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


_SETTINGS = {
    "Megatron-LM": megatron_settings,
    "torchtitan": torchtitan_settings,
    "Hugging Face": hugging_face_settings,
}
