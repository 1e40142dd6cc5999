"""The settings that a plan prints are complete: they make the planned model, in words that each framework reads."""

import ast
import dataclasses

import pytest

from actmem.config import Parallel
from actmem_tools.plan.framework_flags import hugging_face_settings, megatron_settings, torchtitan_settings
from actmem_tools.plan.planned_models import PLANNED_MODELS, planned_model_of
from actmem_tools.plan.search import Plan, rank_parameters
from actmem_tools.plan.step_time import StepSeconds


def plan(layout, recompute="full"):
    return Plan(layout, recompute, 0, 1.0, 4, 0, 0, StepSeconds(0, 0, 0, 0, 0, 0, 0))


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
    flags = megatron_settings(model, plan(layout), 8)
    given = dict(flag.removeprefix("--").partition(" ")[::2] for flag in flags if flag.startswith("--"))
    assert megatrons_parameters(given) == rank_parameters(model, layout.stage_axes, 0)[0]
    papers = name in ("22b", "175b", "530b", "1t")
    dropout = {given["hidden-dropout"], given["attention-dropout"]} == ({"0.1"} if papers else {"0.0"})
    assert dropout and ("sequence-parallel" in given) == (t > 1) and "overlap-grad-reduce" in given


def test_megatrons_uneven_ends():
    flags = megatron_settings(planned_model_of("llama3-405b"), plan(Parallel(8, True, 16)), 2048)
    assert {"--decoder-first-pipeline-num-layers 7", "--decoder-last-pipeline-num-layers 7"} <= {*flags}
    some_whole = dataclasses.replace(plan(Parallel(1, False, 4)), whole_microbatches=3)
    for settings in (megatron_settings, torchtitan_settings):
        assert any(
            "of 3 of the microbatches" in line for line in settings(planned_model_of("llama3-8b"), some_whole, 8)
        )
    flags = megatron_settings(planned_model_of("22b"), plan(Parallel(1, False, 7)), 8)
    assert not any("first-pipeline" in flag for flag in flags)


@pytest.mark.parametrize(
    ("layout", "exports", "conflicts"),
    [
        (Parallel(1, False, 2, data_parallel_size=4, zero_stage=3), False, False),
        (Parallel(2, True, data_parallel_size=4, zero_stage=1), True, False),
        (Parallel(1, False, context_parallel_size=2), True, False),
        (Parallel(2, True, data_parallel_size=4, zero_stage=2), False, True),
    ],
    ids=str,
)
def test_megatrons_connections(layout, exports, conflicts):
    """Its arguments.py asserts them for tensor and context ranks, and refuses them with its FSDP."""
    flags = megatron_settings(planned_model_of("llama3-8b"), plan(layout), 64)
    assert any(flag.startswith("export CUDA_DEVICE_MAX_CONNECTIONS=1") for flag in flags) == exports
    assert any("only one of two overlaps" in flag for flag in flags) == conflicts


@pytest.mark.parametrize(("name", "share"), [("llama3-70b", "24.8%"), ("175b", "22.5%")])
def test_full_recomputation_of_others_runs_all_again(name, share):
    for settings in (megatron_settings, torchtitan_settings)[: 1 + name.startswith("llama")]:
        for recompute, said in (("full", True), ("none", False)):
            lines = settings(planned_model_of(name), plan(Parallel(8, True), recompute), 64)
            assert any("33.3% more FLOPs" in line and share in line for line in lines) == said


@pytest.mark.parametrize("name", PLANNED_MODELS)
def test_torchtitans_lines_are_toml_and_multiply_to_the_gpus(name):
    lines = torchtitan_settings(
        planned_model_of(name), plan(Parallel(2, True, 4, data_parallel_size=8, zero_stage=3)), 64
    )
    tomllib = pytest.importorskip("tomllib")
    found = tomllib.loads("\n".join(lines))
    if not found:
        assert lines == [f"# it has no {planned_model_of(name).name}: this plan can't be run there"]
        return
    sizes = found["parallelism"]
    degrees = ("replicate", "shard")
    ranks = [sizes[f"data_parallel_{each}_degree"] for each in degrees] + [sizes["tensor_parallel_degree"]]
    assert ranks == [1, 8, 2] and sizes["pipeline_parallel_degree"] == 4
    assert found["training"]["global_batch_size"] == 64
    step = 64 * planned_model_of(name).seq_length  # as its main branch has it
    assert f"# training.num_tokens_per_train_step = {step}, parallelism.num_pp_microbatches = 4" in lines
    # Without a pipeline it runs one microbatch after the other up to the global batch.
    alone = torchtitan_settings(planned_model_of(name), plan(Parallel(2, True, data_parallel_size=8)), 64)
    assert "local_batch_size = 1" in alone


@pytest.mark.parametrize(("stage", "optimizer"), [(0, "adamw"), (1, "adamw8bit"), (2, "momentum"), (3, "sgd")], ids=str)
def test_hugging_faces_lines_are_training_arguments(stage, optimizer):
    transformers = pytest.importorskip("transformers")
    layout = Parallel(2, data_parallel_size=8, zero_stage=stage)
    lines = hugging_face_settings(planned_model_of("llama3-8b").with_optimizer(optimizer), plan(layout), 64)
    call = ast.parse(f"TrainingArguments({', '.join(line for line in lines if not line.startswith('#'))})", mode="eval")
    assert isinstance(call.body, ast.Call)
    values = {word.arg: word.value for word in call.body.keywords}
    from transformers.training_args import OptimizerNames

    assert ast.literal_eval(values["optim"]) in {each.value for each in OptimizerNames}
    names = [word.arg for word in call.body.keywords]
    assert {*names} <= {each.name for each in dataclasses.fields(transformers.TrainingArguments)}
    assert len({*names}) == len(names)
