"""The settings that a plan prints are complete: they make the planned model, in words that each framework reads."""

import ast
import dataclasses

import pytest
import torch

from actmem.config import Parallel
from actmem_tools.plan.framework_flags import settings_lines
from actmem_tools.plan.frameworks import TITAN_FAMILIES
from actmem_tools.plan.planned_models import PLANNED_MODELS, planned_model_of
from actmem_tools.plan.search import Plan, chunk_layers, rank_parameters
from actmem_tools.plan.step_time import StepSeconds


def plan(layout, recompute="full"):
    return Plan(layout, recompute, 4, 0, 0, StepSeconds(0, 0, 0, 0, 0, 0, 0))


def model_of(name):
    """A planned model, and after a space the precision that it is trained in."""
    name, _, precision = name.partition(" ")
    return planned_model_of(name).with_optimizer("adamw", precision or "mixed")


TITANS = [name for name in PLANNED_MODELS if name.startswith(TITAN_FAMILIES)]


def toml(lines):
    return pytest.importorskip("tomllib").loads("\n".join(lines))


def flags_of(lines):
    return dict(flag.removeprefix("--").partition(" ")[::2] for flag in lines if flag.startswith("--"))


def megatrons_parameters(given):
    """What Megatron-LM makes of its flags on one tensor-parallel rank, without a pipeline: weights, biases, norms."""
    h, f, a, t = (
        int(given[name])
        for name in ("hidden-size", "ffn-hidden-size", "num-attention-heads", "tensor-model-parallel-size")
    )
    groups, d = int(given.get("num-query-groups", a)), int(given.get("kv-channels", h // a))
    v = int(given["vocab-size"]) + 1  # the tokenizer adds a token
    biases, gated = "disable-bias-linear" not in given, 2 if "swiglu" in given else 1
    norm = 1 if given.get("normalization") == "RMSNorm" else 2
    qkv = (a + 2 * groups) * d
    layer = (
        2 * norm * h + (qkv * h + h * a * d) // t + biases * (qkv // t + h) + ("qk-layernorm" in given) * 2 * norm * d
    )
    if experts := int(given.get("num-experts", 0)):
        layer += experts * h + experts // int(given["expert-model-parallel-size"]) * (gated + 1) * f * h
    else:
        layer += (gated + 1) * f * h // t + biases * (gated * f // t + h)
    positions = int(given["max-position-embeddings"]) * h if "learned" in given["position-embedding-type"] else 0
    tables = 2 if "untie-embeddings-and-output-weights" in given else 1
    return int(given["num-layers"]) * layer + tables * v * h // t + positions + norm * h


@pytest.mark.parametrize("t", [1, 4])
@pytest.mark.parametrize("name", PLANNED_MODELS)
def test_megatrons_flags_make_a_model_of_as_many_parameters(name, t):
    model = planned_model_of(name)
    layout = Parallel(t, t > 1, data_parallel_size=2, zero_stage=1)
    given = flags_of(settings_lines("Megatron-LM", model, plan(layout), 8))
    assert megatrons_parameters(given) == rank_parameters(model, layout.stage_axes, 0)[0]
    papers = name in ("22b", "175b", "530b", "1t")
    dropout = {given["hidden-dropout"], given["attention-dropout"]} == ({"0.1"} if papers else {"0.0"})
    assert dropout and ("sequence-parallel" in given) == (t > 1) and "overlap-grad-reduce" in given


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        (Parallel(8, True, 16), {"decoder-first-pipeline-num-layers": "7", "decoder-last-pipeline-num-layers": "7"}),
        (Parallel(8, True, 8, 8), {"num-layers-per-virtual-pipeline-stage": "2", "account-for-loss-in-pipeline-split": "",
                                   "account-for-embedding-in-pipeline-split": ""}),
        (Parallel(8, True, 7), {}),
    ],
    ids=str,
)  # fmt: skip
def test_the_ends_hold_fewer_layers(layout, stages):
    model, one = planned_model_of("llama3-405b"), plan(dataclasses.replace(layout, data_parallel_size=2, zero_stage=2))
    given = flags_of(settings_lines("Megatron-LM", model, one, 2048))
    assert {
        name: size for name, size in given.items() if "stage" in name or "pipeline-" in name and "-model-" not in name
    } == stages
    titan = toml(settings_lines("torchtitan", model, one, 2048))["parallelism"]
    # As its ``generate_llm_fqn_per_model_part`` spreads them.
    first, last = (titan[f"pipeline_parallel_{end}_stage_less_layers"] for end in ("first", "last"))
    each, rest = divmod(126 + first + last, layout.pipeline_parallel_size * layout.num_model_chunks)
    assert not rest and each == titan["pipeline_parallel_layers_per_stage"]
    sizes = chunk_layers(126, layout.pipeline_parallel_size, layout.num_model_chunks)
    assert (each - first, each - last) == (sizes[0], sizes[-1])


@pytest.mark.parametrize(
    ("layout", "exports"),
    [
        (Parallel(1, False, 2, data_parallel_size=4, zero_stage=3), False),
        (Parallel(2, True, data_parallel_size=4, zero_stage=1), True),
        (Parallel(1, False, context_parallel_size=2), True),
        (Parallel(2, True, data_parallel_size=4, zero_stage=2), False),
    ],
    ids=str,
)
def test_megatrons_connections(layout, exports):
    """Its arguments.py asserts them for tensor and context ranks, and refuses them with its FSDP."""
    flags = settings_lines("Megatron-LM", planned_model_of("llama3-8b"), plan(layout), 64)
    assert any(flag.startswith("export CUDA_DEVICE_MAX_CONNECTIONS=1") for flag in flags) == exports


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "layout", "recompute"),
    [
        ("llama3-405b", Parallel(8, True, 8, 8, data_parallel_size=4, context_parallel_size=2), "full"),
        ("llama3-405b", Parallel(8, True, 16, data_parallel_size=2), "none"),
        ("llama3-8b", Parallel(2, True, data_parallel_size=4, zero_stage=2), "none"),
        ("llama3-8b bf16-gradients", Parallel(2, True, data_parallel_size=4), "none"),
        ("llama3-8b bf16-states", Parallel(2, True, zero_stage=0), "none"),
        ("llama3-8b fp8", Parallel(2, True, data_parallel_size=4), "none"),
        ("llama3-8b", Parallel(data_parallel_size=8, zero_stage=3), "full"),
        ("175b", Parallel(4, True, 8, 6, data_parallel_size=4), "selective"),
        ("qwen3-30b-a3b", Parallel(data_parallel_size=16, expert_parallel_size=8), "none"),
        ("mixtral-8x7b", Parallel(2, True, 2, data_parallel_size=4, expert_parallel_size=8), "full"),
    ],
    ids=str,
)
def test_megatrons_own_parser_takes_the_flags(name, layout, recompute, monkeypatch):
    arguments = pytest.importorskip("megatron.training.arguments", exc_type=ImportError)
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 9)  # an H100's
    n, p = 8 * layout.pipeline_parallel_size, layout.pipeline_parallel_size
    batch = n * layout.data_parallel_size * layout.micro_batch_size
    model = model_of(name)
    lines = settings_lines("Megatron-LM", model, plan(layout, recompute), batch)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    for variable, value in (line.split()[1].split("=") for line in lines if line.startswith("export")):
        monkeypatch.setenv(variable, value)
    for variable, size in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", layout.num_devices)):
        monkeypatch.setenv(variable, str(size))
    flags = " ".join(line for line in lines if line.startswith("--")).split()
    monkeypatch.setattr("sys.argv", ["pretrain", *flags, "--lr", "1e-4", "--train-iters", "1"])
    found = arguments.validate_args(arguments.parse_args())
    chunks = found.virtual_pipeline_model_parallel_size or 1
    sizes = found.tensor_model_parallel_size, found.pipeline_model_parallel_size, chunks, found.data_parallel_size
    assert sizes == (layout.tensor_parallel_size, p, layout.num_model_chunks, layout.data_parallel_size)
    assert (found.recompute_granularity or "none") == recompute
    gradients = found.megatron_fsdp_main_grads_dtype if layout.zero_stage > 1 else found.main_grads_dtype
    assert found.accumulate_allreduce_grads_in_fp32 == (gradients is torch.float32)
    main = torch.float32 if model.precision in ("mixed", "fp8") else torch.int16
    assert (found.fp8 == "hybrid", found.fp8_recipe == "tensorwise") == (model.precision == "fp8",) * 2
    states = torch.bfloat16, gradients, main, found.exp_avg_dtype, found.exp_avg_sq_dtype
    assert [dtype.itemsize for dtype in states] == [state.bytes_per_parameter for state in model.states]


def test_flags_recompute_what_is_billed():
    model = planned_model_of("llama3-70b")
    for recompute, said in (("full", True), ("none", False)):
        lines = settings_lines("Megatron-LM", model, plan(Parallel(8, True), recompute), 64)
        assert any("its checkpoint recomputes all of a layer" in line for line in lines) == said
    titan = settings_lines("torchtitan", model, plan(Parallel(8, True, data_parallel_size=2, zero_stage=3)), 64)
    assert titan[-2:] == ['mode = "full"', "early_stop = true"]


LAYOUT = Parallel(2, True, data_parallel_size=4, zero_stage=3)
LACKING = {
    "Megatron-LM": ("llama3-8b", plan(LAYOUT, "elementwise"), "elementwise"),
    "Megatron-LM, experts": ("mixtral-8x7b", plan(dataclasses.replace(LAYOUT, sequence_parallel=False)), "experts"),
    "torchtitan": ("mixtral-8x7b", plan(LAYOUT), "no mixtral-8x7b"),
    "torchtitan, ZeRO-1": ("llama3-8b", plan(dataclasses.replace(LAYOUT, zero_stage=1)), "FSDP2 only"),
    "torchtitan, tensor": ("llama3-8b", plan(dataclasses.replace(LAYOUT, sequence_parallel=False)), "always sequence"),
    "Hugging Face": ("llama3-8b", plan(LAYOUT), "cuts the sequence only"),
    "Hugging Face, pipeline": ("llama3-8b", plan(Parallel(1, False, 2)), "pipeline"),
    "Hugging Face, GPT": ("22b", plan(Parallel()), "layer is the paper's"),
    "Hugging Face, context": ("llama3-8b", plan(Parallel(context_parallel_size=2)), "go with FSDP only"),
    "Megatron-LM, bf16": ("llama3-8b bf16", plan(LAYOUT), "lower halves of float32 weights"),
    "Megatron-LM, bf16-states": ("llama3-8b bf16-states", plan(LAYOUT), "ZeRO-1 only"),
    "torchtitan, bf16-states": ("llama3-8b bf16-states", plan(LAYOUT), "keeps something else"),
    "Hugging Face, fp8": ("llama3-8b fp8", plan(LAYOUT), "its fp8 with ZeRO-3, if it has one, keeps something else"),
    "Hugging Face, bf16": ("llama3-8b bf16", plan(Parallel(data_parallel_size=2, zero_stage=1)), "bf16 with ZeRO-1"),
}  # fmt: skip


@pytest.mark.parametrize("case", LACKING)
def test_what_a_framework_lacks_is_said_in_place_of_its_settings(case):
    name, one, reason = LACKING[case]
    (line,) = settings_lines(case.partition(",")[0], model_of(name), one, 64)
    assert line.startswith("# it can't run this plan: ") and reason in line


@pytest.mark.parametrize("name", TITANS)
def test_torchtitans_lines_are_toml_and_multiply_to_the_gpus(name):
    layout = Parallel(2, True, 4, data_parallel_size=8, zero_stage=3)
    lines = settings_lines("torchtitan", planned_model_of(name), plan(layout), 64)
    found = toml(lines)
    sizes = found["parallelism"]
    degrees = ("data_parallel_replicate", "data_parallel_shard", "tensor_parallel", "pipeline_parallel")
    assert [sizes[f"{each}_degree"] for each in degrees] == [1, 8, 2, 4]
    assert found["training"]["global_batch_size"] == 64 and found["training"]["dtype"] == "float32"
    assert 'dtype = "bfloat16"' in settings_lines("torchtitan", model_of(f"{name} bf16"), plan(layout), 64)
    step = 64 * planned_model_of(name).seq_length  # as its main branch has it
    assert f"# training.num_tokens_per_train_step = {step}, parallelism.num_pp_microbatches = 4" in lines
    # Without a pipeline it runs one microbatch after the other up to the global batch.
    assert "local_batch_size = 1" in settings_lines("torchtitan", planned_model_of(name), plan(LAYOUT), 64)


@pytest.mark.parametrize(
    ("stage", "optimizer"), [(0, "adamw"), (0, "adamw-fused"), (1, "adamw8bit"), (2, "momentum"), (3, "sgd")], ids=str
)
def test_hugging_faces_lines_are_training_arguments(stage, optimizer):
    transformers = pytest.importorskip("transformers")
    layout = Parallel(data_parallel_size=8, zero_stage=stage)
    precision = "bf16" if optimizer in ("adamw", "sgd") else "mixed"
    model = planned_model_of("llama3-8b").with_optimizer(optimizer, precision)
    lines = settings_lines("Hugging Face", model, plan(layout), 64)
    if precision == "bf16":
        assert lines.pop(0).startswith("# ")
    call = ast.parse(f"TrainingArguments({', '.join(lines)})", mode="eval")
    assert isinstance(call.body, ast.Call)
    values = {word.arg: ast.literal_eval(word.value) for word in call.body.keywords}
    from transformers.training_args import OptimizerNames

    assert values["bf16"] == (precision == "mixed")
    assert values["optim"] in {each.value for each in OptimizerNames}
    fields = {each.name: each for each in dataclasses.fields(transformers.TrainingArguments)}
    assert {*values} <= {*fields} and len(values) == len(call.body.keywords)
    assert not any("eprecated" in fields[name].metadata.get("help", "") for name in values)
    again = values["fsdp_config"]["activation_checkpointing"] if stage == 3 else values["activation_checkpointing"]
    assert again is True
    if stage in (1, 2):
        sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        assert all(values["deepspeed"][name] == "auto" for name in sizes)
