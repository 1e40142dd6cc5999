"""Bad sizes are refused where they enter, in one line that names the argument: dataclasses, and what takes plain numbers.

Whether a formula answers is tried of every one, by its signature, so that a new one is tried by being there.
"""

import importlib
import inspect
import math
import pkgutil
from fractions import Fraction
from typing import Any

import pytest

import actmem.formulas
from actmem import config, models, rows
from actmem.config import ConfigError, ModelShape, Parallel, check_layer, shown
from actmem.formulas.activations import TABLE2
from actmem.formulas.communication import Exchange, pipeline_sends
from actmem.formulas.first_stage import in_flight, layers_per_chunk, stage_output_rows, stage_rows
from actmem.formulas.flops import Operation
from actmem.formulas.schedule import interleaved, one_forward_one_backward, torch_microbatches_per_round
from actmem.formulas.states import parameter_counts, state_rows
from actmem.llama_shape import LatentHeads, LlamaShape
from actmem.measure.emulate import emulated_rank
from actmem.models import TINY
from actmem.parallel.rng import DropoutMask
from actmem.recipes import PAPER_LAYER
from actmem.rows import Row
from actmem_course.bench.race import take_turns
from actmem_course.others.timeline import timeline

MODULES = [config, models, rows] + [
    importlib.import_module(f"actmem.formulas.{found.name}") for found in pkgutil.iter_modules(actmem.formulas.__path__)
]
#: What all others check with: these are given the name of an argument.
CHECKS = {"check_size", "check_sizes", "check_divides", "check_choice", "shown"}
FUNCTIONS = {
    f"{module.__name__.partition('.')[2]}.{name}": function
    for module in MODULES
    for name, function in vars(module).items()
    if inspect.isfunction(function)
    and function.__module__ == module.__name__
    and not name.startswith("_")
    and name not in CHECKS
    and inspect.signature(function).parameters
}

ORDER = one_forward_one_backward(2, 4)
#: An argument of each name that every function takes.
GOOD: dict[str, Any] = {
    "shape": ModelShape(8, 2, 16, 4, num_layers=4, vocab_size=32),
    "parallel": Parallel(2, True, 2),
    "recompute": "selective",
    "element_size": 2,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "num_model_chunks": 2,
    "num_microbatches": 4,
    "microbatches_per_round": 2,
    "pipeline_rank": 1,
    "global_batch_size": 4,
    "device_type": "cpu",
    "adam": "16-bit gradients",
    "keep_gathered_input": True,
    "sharded_inputs": True,
    "free_outputs": False,
    "short_warmup": True,
    "passes": 8,
    "chunk": 1,
    "send_time": 1,
    "routing": "even",
    "routed_tokens": 16,
    "context_parallel_size": 2,
    "context_kind": "gather-plain",
    "exchange": Exchange("all-reduce", "forward", "", 2, 64),
    "exchanges": [Exchange("all-reduce", "forward", "", 2, 64)],
    "configuration": TABLE2[2],
    "kind": "all-reduce",
    "ranks": 4,
    "payload_bytes": 64,
    "operations": [Operation("product", 8, 4, True)],
    "flops_per_second": 10,
    "bytes_per_second": 10,
    "flops": 100,
    "seconds": 1.5,
    "num_devices": 8,
    "peak_flops_per_second": 1e3,
    "hidden_size": 16,
    "vocab_size": 32,
    "multiple": 8,
    "num_attention_heads": 4,
    "fixed_share": Fraction(1, 3),
    "device_bytes": 80 * 2**30,
    "budget_bytes": 80 * 2**30,
    "microbatch": 3,
    "capacity": 1,
    "in_flight": 2,
    "actions": ORDER[0],
    "spans": timeline(ORDER),
    "rank": 1,
    "weight": lambda action: 1,
    "forward_time": 1,
    "backward_time": 2,
    "model": "tiny",
    "rows": [Row("Q", 8)],
    "terms": PAPER_LAYER,
    "term": "Q",
    "optimizer": "adamw",
    "loss": "in chunks",
    "tokens": 16,
    "predicted": [Row("Q", 8)],
    "measured": [Row("Q", 8)],
}
#: Where a name means something else.
SPECIAL = {
    ("formulas.llama_terms", "shape"): LlamaShape(8, 2, 16, 4, 2, 24),
    ("formulas.llama_terms", "routed_tokens"): None,
    **{
        (f"formulas.llama_terms.{name}", "shape"): LlamaShape(8, 2, 16, 4, 2, 24, num_experts=4, experts_per_token=2)
        for name in ("expert_mlp_rows", "most_routed_tokens", "forced_routed_tokens")
    },
    **{
        (f"formulas.llama_terms.{name}", "shape"): LlamaShape(8, 2, 16, 4, 4, 24, latent=LatentHeads(6, 5, 4, 2, 3))
        for name in ("latent_head_rows", "latent_products")
    },
    ("formulas.llama_terms.expert_mlp_rows", "routed_tokens"): 16,
    ("formulas.schedule", "ranks"): ORDER,
    ("formulas.schedule.interleaved", "num_model_chunks"): 2,
}
#: Values that no parameter of this kind may have; a name with a 0 in its range is in MAY_BE_ZERO.
JUNK: list[Any] = [None, "yes", "", b"x", 2.0, math.nan, math.inf, -1, True, [3], {}, object(), 10**5000, "a\nb" * 99]
BAD = {
    int: [*(value for value in JUNK if type(value) is not int), -1, -(10**30), 0],
    bool: [value for value in JUNK if type(value) is not bool] + [0, 1],
    str: [*(value for value in JUNK if value is not None), None, 0],
    float: [None, "1", b"x", math.nan, math.inf, -math.inf, -1, True, [1.0], object(), 0],
    object: JUNK,
}


def good(where):
    """Arguments with which this function works."""
    names = inspect.signature(FUNCTIONS[where]).parameters
    module = where.rpartition(".")[0]
    return {name: SPECIAL.get((where, name), SPECIAL.get((module, name), GOOD[name])) for name in names}


@pytest.mark.parametrize("where", FUNCTIONS)
def test_good_arguments_work(where):
    FUNCTIONS[where](**good(where))


#: Arguments that are plain sizes, by the function where they enter; a name with "?" may also be None, with "0" also 0.
ENTER = {
    "config.padded_vocab_size": "vocab_size tensor_parallel_size multiple",
    "config.check_vocab_size": "vocab_size tensor_parallel_size",
    "formulas.activations.eq2": "tensor_parallel_size",
    "formulas.activations.eq4": "tensor_parallel_size",
    "formulas.activations.gathered_input_bytes": "tensor_parallel_size",
    "formulas.activations.crossover_seq_length": "hidden_size num_attention_heads",
    "formulas.first_stage.eq5": "tensor_parallel_size",
    "formulas.first_stage.eq6": "tensor_parallel_size",
    "formulas.first_stage.interleave_factor": "pipeline_parallel_size num_model_chunks",
    "formulas.first_stage.in_flight": "num_microbatches? microbatches_per_round?",
    "formulas.first_stage.first_stage_bytes": "num_microbatches?",
    "formulas.first_stage.section43_extras": "tensor_parallel_size pipeline_parallel_size",
    "formulas.first_stage.bubble_fraction": "num_microbatches",
    "formulas.first_stage.stage_rows": "num_microbatches?",
    "formulas.microbatches.capacity": "num_microbatches?",
    "formulas.microbatches.recomputed_share": "capacity0 in_flight num_microbatches",
    "formulas.communication.pipeline_sends": "num_microbatches",
    "formulas.communication.iteration_exchanges": "num_microbatches",
    "formulas.flops.forward_products": "global_batch_size",
    "formulas.flops.hardware_flops": "global_batch_size",
    "formulas.flops.eq7": "global_batch_size",
    "formulas.flops.eq8": "global_batch_size",
    "formulas.llama_terms.context_rows": "context_parallel_size",
    "formulas.llama_terms.forced_routed_tokens": "rank0",
    "formulas.llama_terms.expert_mlp_rows": "routed_tokens0?",
    "formulas.loss_peak.loss_peak_rows": "tokens hidden_size vocab_size tensor_parallel_size chunk",
    "formulas.schedule.one_forward_one_backward": "pipeline_parallel_size num_microbatches",
    "formulas.schedule.interleaved": "pipeline_parallel_size num_model_chunks num_microbatches microbatches_per_round?",
    "formulas.schedule.torch_microbatches_per_round": "pipeline_parallel_size num_microbatches",
}
SIZES = [(where, name) for where, names in ENTER.items() for name in names.split()]
#: Names of modes and kinds; the rest of what may be chosen is a size.
CHOSEN_ALSO = {
    ("kind", "ring"),
    ("routing", "forced_routed_tokens"),
    ("optimizer", "states_with"),
    ("loss", "loss_peak_rows"),
}
CHOSEN = [
    (where, name)
    for where in FUNCTIONS
    for name in inspect.signature(FUNCTIONS[where]).parameters
    if (name in ("recompute", "context_kind", "model") and not where.endswith("Configuration"))
    or (name == "element_size" and where.endswith(("layer_rows", "llama_rows", "eq1", "eq4", "context_rows")))
    or (name == "device_type" and where.endswith("extra_rows"))
    or (name, where.rpartition(".")[2]) in CHOSEN_ALSO
]


def refused(where, name, values):
    for value in values:
        with pytest.raises(ConfigError) as error:
            print(shown(value), "gives", FUNCTIONS[where](**{**good(where), name: value}))
        text = str(error.value)
        assert "\n" not in text and len(text) < 300
        assert error.value.argument == name, (text, shown(value))


@pytest.mark.bad_input
@pytest.mark.parametrize(("where", "name"), SIZES, ids=[f"{where}-{name}" for where, name in SIZES])
def test_a_bad_size_is_refused_in_one_line_that_names_it(where, name, record_property):
    zero, none = "0" in name, "?" in name
    values = [v for v in BAD[int] if not (v is None and none) and not (type(v) is int and v == 0 and zero)]
    record_property("inputs", len(values))
    refused(where, name.rstrip("0?"), values)


@pytest.mark.bad_input
@pytest.mark.parametrize(("where", "name"), CHOSEN, ids=[f"{where}-{name}" for where, name in CHOSEN])
def test_an_unknown_choice_is_refused_in_one_line_that_names_it(where, name, record_property):
    values = [value for value in JUNK if name != "recompute" or value != {}]
    record_property("inputs", len(values))
    refused(where, name, values)


#: Classes whose sizes are checked when one is made.
MADE: dict[Any, dict[str, Any]] = {
    ModelShape: {"seq_length": 8, "micro_batch_size": 2, "hidden_size": 16, "num_attention_heads": 4, "num_layers": 4},
    Parallel: {
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_parallel_size": 2,
        "num_model_chunks": 2,
    },
    Exchange: {"kind": "send", "phase": "forward", "where": "", "ranks": 2, "payload_bytes": 64, "count": 1},
}
FIELDS = [(made, name) for made, sizes in MADE.items() for name in sizes if name not in ("phase", "where")]


@pytest.mark.bad_input
@pytest.mark.parametrize(("made", "name"), FIELDS, ids=[f"{made.__name__}-{name}" for made, name in FIELDS])
def test_nothing_is_made_with_a_bad_size(made, name, record_property):
    values = BAD[type(MADE[made][name])]
    values = [value for value in values if not (made is Exchange and value == 0 and name in ("payload_bytes", "count"))]
    record_property("inputs", len(values))
    for value in values:
        with pytest.raises(ConfigError) as error:
            print(made(**{**MADE[made], name: value}))
        assert error.value.argument == name and "\n" not in str(error.value) and len(str(error.value)) < 300


def emulate(world_size=4, rank=0):
    with emulated_rank(world_size, rank):
        pass


#: What measures and drops, with the values that its argument may not have.
OTHERS: dict[str, tuple[Any, list]] = {
    "p": (lambda p: DropoutMask(p, None), [value for value in BAD[float] if value != 0] + [1, 1.5, 10**5000]),
    "world_size": (emulate, BAD[int]),
    "rank": (emulate, [value for value in BAD[int] if value != 0] + [4, 10**30]),
    "rounds": (lambda rounds: take_turns({}, rounds=rounds), BAD[int]),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_measured_or_dropped_with_a_bad_argument(name, record_property):
    call, values = OTHERS[name]
    record_property("inputs", len(values))
    for value in values:
        with pytest.raises(ConfigError, match=f"^{name}: .{{1,200}}$"):
            print(shown(value), call(**{name: value}))


SHARED = [where for where in FUNCTIONS if {"shape"} < set(good(where)) & {"shape", "parallel", "tensor_parallel_size"}]


@pytest.mark.parametrize("where", SHARED)
def test_no_number_where_ranks_cannot_share_the_layer(where):
    """A rounded-down share would be a wrong number."""
    if where == "formulas.first_stage.layers_per_chunk" or "llama_terms" in where:
        return  # t is not in it; another shape
    shape = GOOD["shape"].with_sizes(seq_length=9, num_attention_heads=4, vocab_size=27)
    for t in (2, 3, 5):
        for parallel in (Parallel(t, True, 2), Parallel(t, t != 2, 2)):
            with pytest.raises(ConfigError):
                check_layer(shape, parallel)
                check_layer(shape, Parallel(t))
                config.check_divides("vocab_size", shape.vocab_size, "t", t)
            arguments = {**good(where), "shape": shape, "parallel": parallel, "tensor_parallel_size": t}
            arguments = {name: arguments[name] for name in good(where)}
            fits = not t % 2 and not 4 % t and "vocab" not in inspect.getsource(FUNCTIONS[where])
            if parallel.sequence_parallel and "parallel" in arguments or not fits:
                with pytest.raises(ConfigError):
                    print(FUNCTIONS[where](**arguments))


#: Sizes that are good by themselves, and do not fit together, or have a rule of their own.
LINES = [
    (lambda: Parallel(2, JUNK[1]), "sequence_parallel: must be True or False, got 'yes'"),
    (lambda: Parallel(num_model_chunks=2), "num_model_chunks: interleaving needs pipeline_parallel_size of at least 2"),
    (lambda: interleaved(1, 2, 4), "num_model_chunks: interleaving needs pipeline_parallel_size of at least 2"),
    (lambda: interleaved(4, 2, 6), "num_microbatches: 6 must be divisible by pipeline_parallel_size = 4"),
    (lambda: interleaved(4, 2, 6, 5), "num_microbatches: 6 must be divisible by microbatches_per_round = 5"),
    (lambda: one_forward_one_backward(2, 10**9), "num_microbatches: the schedule would list 2,000,000,000 forward"),
    (lambda: torch_microbatches_per_round(2, 7), "num_microbatches: 7 must be divisible by the number of rounds = 3"),
    (lambda: layers_per_chunk(TINY, Parallel(1, False, 3)), "num_layers: 4 must be divisible by pipeline_parallel_size = 3"),
    (lambda: layers_per_chunk(TINY, Parallel(1, False, 2, 3)), "num_layers: 4 must be divisible by pipeline_parallel_size · num_model_chunks = 6"),
    (lambda: in_flight(Parallel(1, False, 4, 2), 0, 6), "num_microbatches: 6 must be divisible by pipeline_parallel_size = 4"),
    (lambda: in_flight(Parallel(1, False, 4), 4), "pipeline_rank: must be from 0 to 3, got 4"),
    (lambda: stage_rows(TINY, Parallel(1, False, 3)), "num_layers: 4 must be divisible by pipeline_parallel_size = 3"),
    (lambda: stage_rows(TINY, Parallel(1, False, 2, 2), 0, "none", 3), "num_microbatches: 3 must be divisible by pipeline_parallel_size = 2"),
    (lambda: stage_output_rows(TINY, Parallel(1, False, 2), 2), "pipeline_rank: must be from 0 to 1, got 2"),
    (lambda: pipeline_sends(TINY, Parallel(1, False, 2), 4, 2), "pipeline_rank: must be from 0 to 1, got 2"),
    (lambda: parameter_counts(TINY, Parallel(), -1), "pipeline_rank: must be from 0 to 0, got -1"),
    (lambda: state_rows(TINY, adam="sgd"), "adam: must be one of float32 gradients; "),
]  # fmt: skip


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "line"), LINES, ids=lambda value: value if isinstance(value, str) else "")
def test_lines(call, line):
    with pytest.raises(ConfigError) as error:
        call()
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_a_call_that_does_not_fit_stays_a_type_error():
    with pytest.raises(TypeError, match="layer_rows.*'shape'"):
        actmem.formulas.activations.layer_rows()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="layer_rows.*'size'"):
        actmem.formulas.activations.layer_rows(GOOD["shape"], size=3)  # type: ignore[call-arg]
