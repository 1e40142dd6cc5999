"""A plan of a model of one's own: what it says is what the code that it prints does."""

import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from actmem.config import ConfigError
from actmem_more.gpu_kernels import gpu_kernels_on_cpu
from actmem_tools.__main__ import main
from actmem_tools.config_file import Order, order_of
from actmem_tools.plan.framework_flags import hugging_face_config
from actmem_tools.plan.own_model import FSDP_DTYPES, OwnModel, StepOptions
from actmem_tools.plan.planned_models import planned_model_of
from actmem_tools.plan.step_time import Cluster
from actmem_tools.tape import model_tape
from actmem_tools.tape.config_model import ConfigModel, lists_of_layers
from actmem_tools.tape.evaluate import Run, moments
from actmem_tools.tape.extrapolate_blocks import LOSS_CODE, BlockModel
from actmem_tools.tape.model_tape import run_factory, solved_target
from tests.plan.real_steps import peaks_of_steps
from tests.tape import models_for_tapes
from tests.tiers import at_night

MODELS = Path(models_for_tapes.__file__)
SIZES = {"s": 64, "b": 4, "h": 96}
ENDS = {"f": 256, "v": 300}
AT = ",".join(f"{letter}={size}" for letter, size in SIZES.items()) + ",l=6"
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "vocab_size": 500,
}  # fmt: skip


def planned(capsys, *options):
    """Exit code and the object that the command prints."""
    code = main(["plan", *options, "--json"])
    return code, json.loads(capsys.readouterr().out)


def peak(factory, sizes, layers, code, is_first=True):
    """The most bytes that a microbatch of the factory's model, after ``code``, has alive beside weights.

    is_first: of the step; else beside gradients too, those of an earlier one.
    """
    code = textwrap.dedent(code)
    events = run_factory(factory, {**sizes, "l": layers}, "bfloat16", code=code, is_first=is_first)
    return max(live for event, live, _ in moments(events) if isinstance(event, Run))


SOLVED: dict[str, tuple] = {}


@pytest.fixture(autouse=True)
def solved_once(monkeypatch):
    """A command takes the tapes of an earlier one that asked for the same."""

    def once(*request):
        if repr(request) not in SOLVED:
            SOLVED[repr(request)] = solved_target(*request)
        parts, sizes, number = SOLVED[repr(request)]
        return parts, dict(sizes), number

    monkeypatch.setattr(model_tape, "solved_target", once)


@pytest.mark.slow
def test_the_bill_is_of_the_code_that_is_printed(capsys):
    options = [f"{MODELS}:short_stack", "--at", AT, "--again", "mlp,operations,every-second-matmul", "--allowance", "0"]
    code, free = planned(capsys, *options, "--memory", "1")
    assert code == 0 and free["fits"] and free["asked"]["code"] == []
    assert sum(row["bytes"] for row in free["bill"]) == free["asked"]["bytes"]
    elements = sum(p.numel() for p in models_for_tapes.short_stack(**SIZES, num_layers=6)[0].parameters())
    assert free["num_parameters"] == elements
    held = 3 * 2 * elements  # weights and two moments, of 2 bytes
    assert free["asked"]["bytes"] == held + peak(models_for_tapes.short_stack, SIZES, 6, "")
    again, whole = (planned(capsys, *options, "--memory", "1", "--global-batch", n)[1]["asked"] for n in ("8", "4"))
    assert again["bytes"] == held + 2 * elements + peak(models_for_tapes.short_stack, SIZES, 6, "", False)
    assert whole["bytes"] == free["asked"]["bytes"]

    less = free["asked"]["bytes"] - 1
    code, found = planned(capsys, *options, "--memory", str(less / 2**30))
    assert code == 1 and not found["fits"] and len(found["ways"]) > 1
    of_operations = [way for way in found["all_blocks"] if " but " in way["text"]]
    assert of_operations[1]["bytes"] < of_operations[0]["bytes"] < free["asked"]["bytes"]
    for way in found["ways"] + of_operations:
        sizes, code = {**SIZES, "b": way["micro_batch_size"]}, "\n".join(way["code"])
        is_first = sizes["b"] == 4
        waits = 0 if is_first else 2 * elements
        assert way["bytes"] == held + waits + peak(models_for_tapes.short_stack, sizes, 6, code, is_first) <= less
    assert {way["text"].partition(" of ")[0] for way in found["ways"]} >= {"b 4, mlp"}
    seconds = [way["seconds"] for way in found["ways"]]
    assert seconds == sorted(seconds)


@pytest.mark.slow
def test_blocks_that_recompute_already_are_planned_as_they_are(capsys):
    options = ["--at", AT, "--again", "mlp", "--memory", "1", "--allowance", "0", "--optimizer", "sgd"]
    _, found = planned(capsys, f"{MODELS}:checkpointed_stack", *options)
    assert found["asked"]["text"] == "b 4, 6 of 6 blocks recompute already"
    real = peak(models_for_tapes.checkpointed_stack, SIZES, 6, "")
    assert found["asked"]["bytes"] == 2 * found["num_parameters"] + real
    assert {way["text"][5:] for way in found["ways"]} == {"6 of 6 blocks recompute already"}
    assert len(found["all_blocks"]) == 1 and [*found["largest"]] == ["all blocks run again"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention_stack", at_night("dropout_by_name"), "dropout_by_position"])
def test_attention_is_billed_as_a_fused_kernel_runs_it_and_that_is_said(name, capsys):
    options = ["--at", "s=512,b=1,h=64,a=4,l=4", "--memory", "1", "--allowance", "0"]
    _, found = planned(capsys, f"{MODELS}:{name}", *options)
    plain = peak(models_for_tapes.attention_stack, {"s": 512, "b": 1, "h": 64, "a": 4}, 4, "")
    assert found["asked"]["bytes"] == 3 * 2 * found["num_parameters"] + plain
    main(["plan", f"{MODELS}:{name}", *options])
    assert "The bill is of a GPU's kernels" in capsys.readouterr().out and len(found["notes"]) == 1


@pytest.mark.slow
def test_dropout_and_rms_norm_are_billed_as_a_gpu_runs_them(capsys):
    options = ["--at", "s=512,b=2,h=64,l=4", "--memory", "1", "--allowance", "0"]
    _, found = planned(capsys, f"{MODELS}:dropped_stack", *options)
    rows, elements = 512 * 2, 512 * 2 * 64
    # Of each layer: the norm's input (of the first the model's, which isn't counted), 4 bytes a row, the linear's input
    # and the mask; and the loss's input stays until backward begins.
    assert found["kept_bytes"] == 3 * 2 * elements + 4 * (4 * rows + 2 * elements + elements) + 2
    with gpu_kernels_on_cpu():  # by the same stand-ins: tests/measure/test_gpu_kernels.py holds these against CUDA
        real = peak(models_for_tapes.dropped_stack, {"s": 512, "b": 2, "h": 64}, 4, "")
    assert found["asked"]["bytes"] == 3 * 2 * found["num_parameters"] + real
    assert real < peak(models_for_tapes.dropped_stack, {"s": 512, "b": 2, "h": 64}, 4, "")


@pytest.mark.slow
def test_a_loss_in_chunks_is_billed_as_it_runs(capsys):
    at = AT.replace("h=96", "h=16")  # narrow blocks: the peak is at the loss
    options = ["--at", at, "--letters", "s:4", "--memory", "1", "--allowance", "0"]
    peaks = {}
    for name in ("short_stack", "chunked_stack"):
        _, found = planned(capsys, f"{MODELS}:{name}", *options)
        peaks[name] = found["asked"]["bytes"] - 3 * 2 * found["num_parameters"]
        assert peaks[name] == peak(getattr(models_for_tapes, name), {**SIZES, "h": 16}, 6, "")
    assert peaks["chunked_stack"] < peaks["short_stack"] - 64 * 4 * 300 * 4


@pytest.mark.slow
def test_the_bill_of_an_optimizers_step_is_a_real_one(capsys):
    sizes = {**SIZES, "s": 2, "b": 2}
    options = [f"{MODELS}:unused_stack", "--at", AT.replace("s=64,b=4", "s=2,b=2"), "--memory", "1", "--allowance", "0"]
    for name in ("adamw", "adamw-fused", "sgd", "momentum"):
        _, found = planned(capsys, *options, "--optimizer", name)
        model, inputs = models_for_tapes.unused_stack(**sizes, num_layers=6)
        code = "\n".join(found["asked"]["code"])
        assert [found["asked"]["bytes"]] == peaks_of_steps(model.to(torch.bfloat16), inputs, code)
    _, found = planned(capsys, *options, "--optimizer", "adamw8bit")
    held = sum(row["bytes"] for row in found["bill"] if "moments" in row["term"])
    number = found["num_trained"]
    assert 2 * number < held == 2 * (number + 4 * math.ceil(number / 256)) < 2.04 * number


@pytest.mark.slow
def test_adapters_leave_weights_without_gradients(capsys):
    sizes = {**SIZES, **ENDS}
    at = ",".join(f"{letter}={size}" for letter, size in sizes.items()) + ",l=6"
    options = [f"{MODELS}:adapted_stack", "--at", at, "--memory", "1", "--gpus", "2", "--allowance", "0"]
    _, found = planned(capsys, *options)
    assert main(["plan", *options, "--precision", "mixed"]) == 2  # frozen weights aren't sharded
    parameters = list(models_for_tapes.adapted_stack(**sizes, num_layers=6)[0].parameters())
    every, trained = (sum(p.numel() for p in parameters if p.requires_grad >= least) for least in (False, True))
    assert (found["num_parameters"], found["num_trained"]) == (every, trained) and 0 < trained < every
    for way in found["all_blocks"]:
        real = peak(models_for_tapes.adapted_stack, sizes, 6, "\n".join(way["code"]))
        assert way["bytes"] == 2 * every + 3 * 2 * trained + real and not way["sharded"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--lora", "5"], *map(at_night, (["--loss", "chunked"], ["--lora", "3", "--loss", "chunked"]))]
)
def test_adapters_and_a_loss_in_chunks_of_a_configuration(options, capsys, tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    _, found = planned(capsys, str(path), "--at", "s=64,b=3", "--memory", "1", "--allowance", "0", *options)
    every, trained = found["num_parameters"], found["num_trained"]
    assert (trained < every) == ("--lora" in options)
    config = ConfigModel(LLAMA)
    for way in found["all_blocks"]:
        with gpu_kernels_on_cpu():
            real = peak(config.factory(), {"s": 64, "b": 3}, config.num_blocks, "\n".join(way["code"]))
        assert way["bytes"] == 2 * every + 2 * 2 * trained + real


def fsdp_peak(code, sizes, layers, is_first):
    """The most bytes alive in one microbatch, the first of a step or the second, of a rank that runs ``code``."""
    model, inputs = models_for_tapes.stack(**sizes, num_layers=layers)
    # At times gloo frees what it sent a moment later.
    return min(peaks_of_steps(model, inputs, code, steps=False, accumulates=not is_first, times=3))


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("vocab", "again", "is_first"),
    [
        (300, 0, False),
        at_night((300, 6, False)),
        at_night((300, 2, True)),
        at_night((16, 0, True)),
        (16, 6, True),
        (16, 6, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", FSDP_DTYPES)
def test_fsdp_on_two_processes(vocab, again, is_first, precision, pools):
    """To the byte where the peak is at the model's ends; in a block at most its own gradients below, and never above."""
    sizes = {**SIZES, **ENDS, "v": vocab}
    parts, own, layers = solved_target(f"{MODELS}:stack", {**sizes, "l": 6}, "", "bfloat16", [""])
    del own["b"]
    cluster = Cluster(2, 2**30, allowance_bytes=0)
    model = OwnModel(parts, own, layers, cluster, 8 if is_first else 16, precision=precision)
    way = StepOptions(4, again, True)
    real = pools[2].run(fsdp_peak, "\n".join(model.code(way, "bfloat16")), sizes, layers, is_first)
    told = model.bytes(way)
    if vocab == 300:
        assert set(real) == {told}
    else:
        assert all(told - 2 * model.num_elements()[1] <= each <= told for each in real), (told, real)


@pytest.mark.nightly
def test_a_named_model_in_hugging_faces_code(capsys, tmp_path):
    transformers = pytest.importorskip("transformers")
    options = ["llama3-8b", "--framework", "hugging-face", "--gpus", "8", "--memory", "78", "--global-batch", "8"]
    with_adapters = planned(capsys, "llama3-8b", "--lora", "16", "--memory", "80")[1]
    assert with_adapters["num_trained"] == 16 * 32 * (2 * 4096 + 2 * (4096 + 1024) + 2 * 4096 + 3 * (4096 + 14336))
    code, found = planned(capsys, *options)
    assert code == 1 and found["num_parameters"] == planned_model_of("llama3-8b").num_parameters
    assert 74 < found["asked"]["bytes"] / 2**30 < 75
    assert [way["text"].partition(" of ")[0] for way in found["ways"]] == ["b 1, mlp", "b 1, 1", "b 1, self_attn"]
    for name in ("llama3-8b", "qwen3-32b"):
        small = planned_model_of(name).with_sizes(num_layers=2)
        config = transformers.AutoConfig.for_model(**hugging_face_config(small))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        assert sum(p.numel() for p in model.parameters()) == small.num_parameters


def test_what_depends_on_values_says_that_fake_tensors_have_none(capsys):
    assert main(["record", f"{MODELS}:positive", "--at", "s=8,b=2,h=8", "--fake"]) == 2
    assert "depends on values, which fake tensors don't have; record works without --fake" in capsys.readouterr().err


PICTURES = {
    "model_type": "vit", "image_size": [32, 16], "patch_size": 8, "hidden_size": 64, "num_attention_heads": 4,
    "intermediate_size": 96, "num_hidden_layers": 6,
}  # fmt: skip


@pytest.mark.slow
def test_a_model_of_pictures_is_planned_without_a_length(capsys, tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PICTURES))
    options = ["--memory", "1", "--allowance", "0", "--at"]
    _, found = planned(capsys, str(path), *options, "b=40")
    with gpu_kernels_on_cpu():
        real = peak(ConfigModel(PICTURES).factory(), {"b": 40}, 6, "")
    assert found["asked"]["bytes"] == 3 * 2 * found["num_parameters"] + real
    assert [*found["largest"]["no block runs again"]] == ["b"]
    main(["plan", str(path), *options, "b=40"])
    assert "no block runs again: b = " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "at", "loss", "says"),
    [
        (PICTURES, "b=2,s=8", "whole", "at: s is the configuration's own"),
        (PICTURES, "b=2", "chunked", "loss: in chunks is a language model's"),
        ({"model_type": "t5", "d_model": 64}, "b=2,s=8", "chunked", "loss: in chunks is a language model's"),
        (LLAMA, "b=2", "whole", "at: s is missing"),
        at_night(({**LLAMA, "model_type": "mamba"}, "b=2,s=4096", "whole", "target: operations grow with s: ")),
    ],
)
def test_only_a_model_that_reads_text_has_a_length(config, at, loss, says, capsys, tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main(["plan", str(path), "--at", at, "--loss", loss, "--memory", "9"]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_a_second_name_of_the_number_of_layers_is_set_too():
    pytest.importorskip("transformers")
    config = ConfigModel({"model_type": "xlstm", "hidden_size": 64, "num_heads": 4, "num_hidden_layers": 6})
    model, _ = config.factory()(s=8, b=2, l=3)
    assert len([*model.get_submodule(lists_of_layers(model, 3)[0]).children()]) == 3


def test_below_its_window_a_layer_is_billed_without_a_mask():
    pytest.importorskip("transformers")
    config = ConfigModel({**LLAMA, "model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 4096})
    assert (config.limits(4095), config.step(4095, 1)) == ((2, 4095), 1)
    assert (config.limits(4096)[0], config.step(8192, 8)) == (4096, 4096)


def test_a_scan_of_one_chunk_is_billed_apart():
    pytest.importorskip("transformers")
    config = ConfigModel({**LLAMA, "model_type": "falcon_h1", "num_hidden_layers": 2, "mamba_chunk_size": 32})
    assert (config.limits(32), config.limits(64)[0]) == ((2, 63), 64)


@pytest.mark.slow
def test_a_model_of_two_blocks_without_a_formula_has_the_length_that_was_asked_for():
    pytest.importorskip("transformers")
    given = {**LLAMA, "model_type": "qwen3_5_text", "num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}
    given |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
    assert solved_target(given, {"s": 64, "b": 2}, "", "bfloat16", [""])[0][""].longest == 64


def test_each_layer_may_have_a_window_of_its_own():
    pytest.importorskip("transformers", "5.20")
    config = ConfigModel({**LLAMA, "model_type": "neomme", "num_hidden_layers": 17, "head_dim": 16})
    assert [config.limits(s) for s in (255, 256, 2048)] == [(2, 255), (256, 1023), (1024, config.positions)]


@pytest.mark.parametrize(
    ("kinds", "order"),
    [("AAAA", Order(0, 1)), ("A", Order()), ("AB", None), ("ABAB", Order(0, 2)), ("DDMMMM", Order(2, 1)),
     ("SSSSSFSSSSSFSS", Order(2, 6)), ("ABCCAB", None)],
)  # fmt: skip
def test_the_order_of_layers_is_the_shortest_that_repeats(kinds, order):
    if order is None:
        with pytest.raises(ConfigError, match="repeat in no order.*record --fake --at"):
            order_of(kinds)
    else:
        assert order_of(kinds) == order
        assert [kinds[order.place(i)] for i in range(len(kinds))] == [*kinds]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"hidden_size": 8}', "names no model_type"),
        ("[" * 100_000, "is no configuration"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}', "leave it out"),
    ],
)
def test_a_configuration_is_refused_before_anything_is_imported(content, says, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(content)
    command = ["plan", str(path), "--at", "s=64,b=1", "--memory", "80"]
    code = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None; from actmem_tools.__main__ import main; "
    ran = subprocess.run(
        [sys.executable, "-c", f"{code}sys.exit(main({command!r}))"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2 and says in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--at", "s=0,b=2,h=32,l=2"], "s: must be at least 2, got 0"),
        (["--at", "s=8,b=99999,h=8,l=2"], "b: must be at most 16384"),
        (["--at", "s=60,b=2,h=8,l=2", "--loss", "chunked"], "s: 60 must be divisible by the loss's chunks = 8"),
    ],
)
def test_bad_values_are_refused_before_anything_runs(options, says, monkeypatch, capsys):
    monkeypatch.setattr(model_tape, "solved_target", None)
    assert main(["plan", "--memory", "9", f"{MODELS}:short_stack", *options]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_with_a_vector_for_each_position_has_a_longest_sequence(monkeypatch):
    pytest.importorskip("transformers")
    nothing = {"": BlockModel(lambda again, whole, is_one: pytest.fail("a tape is read"), "", (), 2)}
    monkeypatch.setattr(model_tape, "solved_blocks", lambda *others, **more: nothing)
    gpt2 = {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 300}
    longest = {}
    for name, config in (("gpt2", gpt2), ("llama", {**LLAMA, "max_position_embeddings": 300})):
        parts, *_ = solved_target(config, {"s": 256, "b": 1}, "", "bfloat16", [""])
        longest[name] = parts[""].longest
    assert longest["gpt2"] == 300 < longest["llama"]
    with pytest.raises(ConfigError, match="at: s = 301 is above the 300 positions"):
        solved_target(gpt2, {"s": 301, "b": 1}, "", "bfloat16", [""])


def test_a_loss_in_chunks_is_checked_with_padding_and_tokens_without_a_label(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(model_tape, "solved_blocks", lambda *others, **more: {})
    request = LLAMA, {"s": 64, "b": 2}, "", "bfloat16", [""], "chunked"
    assert solved_target(*request)
    every_token = LOSS_CODE["chunked"].replace("(targets != -100).sum()", "targets[:, 1:].numel()")
    monkeypatch.setitem(LOSS_CODE, "chunked", every_token)
    with pytest.raises(ConfigError, match="loss: this model does more to its logits"):
        solved_target(*request)


@pytest.mark.parametrize(
    ("target", "options", "says"),
    [
        ("{models}:short_stack", ["--at", "s=64,b=4", "--memory", "9"], "l, the number of layers"),
        ("{models}:short_stack", ["--at", AT, "--memory", "9", "--again", "attention"], "has no attention, only mlp, norm"),
        ("{models}:short_stack", ["--at", AT, "--memory", "9", "--gpus", "2", "--global-batch", "12"], "gpus · b = 8"),
        ("{models}:short_stack", ["--at", AT + ",z=3", "--memory", "9"], "z"),
        ("{models}:short_stack", ["--at", AT, "--memory", "9", "--precision", "mixed"], "precision: mixed is of FSDP2"),
        ("{models}:short_stack", ["--at", AT, "--memory", "9", "--precision", "bf16", "--dtype", "float32"], "of FSDP2"),
        ("175b", ["--framework", "hugging-face", "--memory", "9"], "whose layer is the paper's"),
        ("mixtral-8x7b", ["--framework", "hugging-face", "--memory", "9"], "has experts"),
        ("llama3-8b", ["--framework", "ours", "--memory", "9"], "framework: must be one of hugging-face"),
        ("{models}:odd_mlp", ["--at", "s=8,b=2,h=8,f=8,l=2", "--memory", "9"], "num_layers"),
        (
            "{models}:short_stack",
            ["--at", AT, "--memory", "9", "--loss", "chunked"],
            "loss: is what the factory's model",
        ),
        ("{folder}/other.json", ["--at", "s=8,b=2", "--memory", "9"], "nobody's is no configuration"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(target, options, says, tmp_path, capsys):
    (tmp_path / "other.json").write_text('{"model_type": "nobody\'s"}')
    named = {"models": MODELS, "folder": tmp_path}
    code = main(["plan", target.format(**named), *(option.format(**named) for option in options)])
    output = capsys.readouterr()
    assert code == 2 and says in output.err and output.err.count("\n") == 1, output.err
