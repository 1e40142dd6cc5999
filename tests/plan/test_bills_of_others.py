"""The bill of ``plan``, line by line, is that of a real run of the code that it prints, for models that nobody here wrote."""

import inspect
import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from actmem.ledger.whole_step import loss_of
from actmem_more.gpu_kernels import gpu_kernels_on_cpu
from actmem_tools.__main__ import main
from actmem_tools.load_model import built_model
from actmem_tools.plan.own_model import FSDP_DTYPES, OwnModel, StepOptions
from actmem_tools.plan.step_time import Cluster
from actmem_tools.tape.config_model import ConfigModel
from actmem_tools.tape.evaluate import Run, moments
from actmem_tools.tape.model_tape import run_factory, solved_target
from tests.models_of_others import CAUSAL, MASKED, _language
from tests.plan.real_steps import peaks_of_steps
from tests.tape import models_for_tapes
from tests.tiers import at_night

transformers = pytest.importorskip("transformers")

#: Larger than what any tape is solved from; six blocks.
SIZES = {"s": 56, "b": 3, "h": 96, "a": 4, "k": 2, "d": 16, "f": 130, "v": 330}
LAYERS = 6


def with_layers(kind):
    """A factory of ``models_of_others`` that also takes the number of layers."""
    auto = "AutoModelForCausalLM" if kind in CAUSAL else "AutoModelForMaskedLM"
    kinds: dict[str, Any] = {**CAUSAL, **MASKED}
    names, fixed = kinds[kind]

    def factory(num_layers: int, **sizes: int):
        return _language(kind, names, fixed | {"num_hidden_layers": num_layers}, auto, **sizes)

    parameters = [inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY) for x in ("s", "b", *names, "num_layers")]
    factory.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return factory


bert, roberta, granite, deberta, mixtral, gemma, falcon = map(
    with_layers, ("bert", "roberta", "granite", "deberta-v2", "mixtral", "gemma", "falcon")
)
FACTORIES = {
    "bert": "h:8a", "roberta": "h:8a", "granite": "h:8a,a:k", "deberta": "h:8a", "mixtral": "h:8a,a:k", "gemma": "h:8a,a:k", "falcon": "h:8a"
}  # fmt: skip
CONFIGS = ("gpt2", "qwen2", "qwen3", "mistral", "phi", "phi3", "opt", "gpt_neox", "olmo2", "starcoder2", "stablelm", "cohere",
           "glm")  # fmt: skip
#: DeBERTa's blocks add gradients to positions that they share; Qwen3's share rotary tables.
BY_DAY = ("bert", "gpt2")


def real_lines(factory, sizes, code):
    """Of a step after ``code``: the lines alive at its peak, and bytes of weights, gradients and moments."""
    names = {}
    run_factory(factory, sizes, "bfloat16", names, code)
    peak, at_peak = 0, {}
    for event, live, alive in moments(run_factory(factory, sizes, "bfloat16", code=code)):
        if isinstance(event, Run) and live > peak:
            peak, at_peak = live, dict(alive)
    lines = Counter()
    for made in at_peak.values():
        lines[re.sub(r"\.\d+(?=[.:])", ".*", names.get(made.number, made.name))] += made.bytes

    model, inputs = built_model(factory, sizes, "bfloat16")
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model(**inputs)).backward()
    optimizer.step()
    static = {
        "weights": model.parameters(),
        "gradients": [p.grad for p in model.parameters()],
        "Adam first moment": [state["exp_avg"] for state in optimizer.state.values()],
        "Adam second moment": [state["exp_avg_sq"] for state in optimizer.state.values()],
    }
    return lines + Counter({term: sum(x.nbytes for x in tensors) for term, tensors in static.items()})


#: The paper's letters for what most configurations call their sizes.
FIELDS = {
    "h": "hidden_size", "a": "num_attention_heads", "k": "num_key_value_heads", "d": "head_dim",
    "f": "intermediate_size", "v": "vocab_size", "l": "num_hidden_layers",
}  # fmt: skip


def small_config(kind):
    """The content of a configuration of this kind at ``SIZES``."""
    config = transformers.AutoConfig.for_model(kind)
    sizes = {**SIZES, "l": LAYERS}
    if getattr(config, "num_key_value_heads", None) == config.num_attention_heads:
        sizes["k"] = sizes["a"]
    if getattr(config, "head_dim", None) in (None, config.hidden_size // config.num_attention_heads):
        del sizes["d"]
    named = {name: sizes[letter] for letter, name in FIELDS.items() if letter in sizes and hasattr(config, name)}
    return {"model_type": kind, "pad_token_id": 0} | {config.attribute_map.get(x, x): y for x, y in named.items()}


@pytest.fixture
def solved(request):
    """A target's factory, its sizes, and the model that ``plan`` solves of it."""
    target = request.param
    if target in FACTORIES:
        factory, place = globals()[target], f"{__name__}:{target}"
        own: Any = inspect.signature(factory).parameters
        sizes = {letter: size for letter, size in {**SIZES, "l": LAYERS}.items() if letter in own or letter in "sbl"}
    else:
        place, sizes = small_config(target), {letter: SIZES[letter] for letter in "sb"}
        factory = ConfigModel(place).factory()
    parts, without, layers = solved_target(place, sizes, FACTORIES.get(target, ""), "bfloat16", [""])
    del without["b"]
    return factory, {**sizes, "l": layers}, OwnModel(parts, without, layers, Cluster(1, 2**30, allowance_bytes=0), 6)


@pytest.mark.by_day(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "solved", [case if case in BY_DAY else at_night(case) for case in (*FACTORIES, *CONFIGS)], indirect=True
)
def test_each_line_is_that_of_a_real_run(solved):
    """The run has a GPU's dropout and RMSNorm, as the plan has: for these it is no independent count, since a CPU's save
    other tensors.  What a GPU's save is tested in tests/measure/test_gpu_kernels.py."""
    factory, sizes, model = solved
    for again in (0, 2, LAYERS):
        way = StepOptions(sizes["b"], again, False)
        bill = Counter()
        for row in [*model.static_rows(way), *model.need(way).peak.rows]:  # the optimizer's step can need more
            bill[row.term] += row.bytes
        code = "\n".join(model.code(way, ""))
        with gpu_kernels_on_cpu():
            assert bill == real_lines(factory, sizes, code), again
            first = run_factory(factory, sizes, "bfloat16", code=code, is_first=True)
        told = replace(model, global_batch_size=sizes["b"]).need(way).peak.bytes
        assert told == max(live for event, live, _ in moments(first) if isinstance(event, Run))


def test_a_configuration_fetches_no_kernel(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "text_config": {"attn_implementation": "somebody/kernel"}}))
    assert main(["plan", str(config), "--at", "s=8,b=2", "--memory", "9"]) == 2
    error = capsys.readouterr().err
    assert "somebody's kernel" in error and error.count("\n") == 1


def llamas_peaks(code, sizes):
    """Bytes at the peak of a rank's second microbatch."""
    with gpu_kernels_on_cpu():
        model, inputs = models_for_tapes.llama(**sizes, num_layers=LAYERS)
        return peaks_of_steps(model.float(), inputs, code, steps=False, accumulates=True)[0]


@pytest.mark.nightly
@pytest.mark.parametrize("precision", FSDP_DTYPES)
def test_fsdp_of_a_model_whose_blocks_share_tables(precision, pools):
    sizes = {letter: size for letter, size in SIZES.items() if letter != "d"} | {
        "v": 900
    }  # so that the peak is at the loss
    target = f"{models_for_tapes.__file__}:llama"
    parts, own, layers = solved_target(target, {**sizes, "l": LAYERS}, "h:8a,a:k", "bfloat16", [""])
    del own["b"]
    model = OwnModel(parts, own, layers, Cluster(2, 2**30, allowance_bytes=0), 12, precision=precision)
    way = StepOptions(sizes["b"], 0, True)
    assert set(pools[2].run(llamas_peaks, "\n".join(model.code(way, "bfloat16")), sizes)) == {model.bytes(way)}
