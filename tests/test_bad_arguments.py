"""Bad sizes are refused where they enter, in one line that names the argument and the rule; what sizes know of themselves."""

import importlib
import math
import pickle
from typing import Any

import pytest
import torch

from actmem.config import (
    TINY,
    ConfigError,
    ModelShape,
    Parallel,
    check_layer,
    check_vocab_size,
    padded_vocab_size,
    shown,
)
from actmem.formulas.activations import layer_rows
from actmem.formulas.schedule import interleaved, one_forward_one_backward, torch_microbatches_per_round
from actmem.formulas.stages import in_flight, layers_per_chunk
from actmem.formulas.states import parameter_counts, state_rows
from actmem.layers.gpt import GPT
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.emulate import emulated_rank
from actmem.parallel.groups import TensorParallel
from actmem.parallel.linear import ColumnParallelLinear, RowParallelLinear
from actmem.parallel.rng import DropoutMask
from actmem.parallel.vocab import VocabParallelCrossEntropy
from actmem.pipeline import check_pipeline
from actmem.recipes import PAPER_LAYER, Recompute
from actmem.rows import Row
from actmem_course.others.ring import ring
from actmem_more.chunked_loss import LinearCrossEntropy
from actmem_more.context import ContextParallel, attend_part
from actmem_more.llama import LlamaLayer, LlamaStage
from actmem_more.llama_shape import LatentHeads, LlamaShape, llama_shape, own_context_shape
from actmem_more.llama_terms import expert_mlp_rows, llama_rows
from actmem_more.loss_peak import loss_peak_rows
from actmem_more.store import HostMemory
from actmem_tools.plan.planned_models import planned_model_of
from actmem_tools.plan.step_time import Cluster

S, P, LLAMA = ModelShape(8, 2, 16, 4, num_layers=4, vocab_size=32), Parallel(2, True, 2), LlamaShape(8, 2, 16, 4, 2, 24)
EXPERTS = LLAMA.with_sizes(num_experts=4, experts_per_token=2)
LATENT, FOUR = LlamaShape(8, 2, 16, 4, 4, 24, latent=LatentHeads(6, 5, 4, 2, 3)), TensorParallel(None, 4, 0)
LAYER: dict[str, Any] = {"shape": S, "parallel": P}
STAGE: dict[str, Any] = {**LAYER, "num_microbatches": 4}


def emulate(world_size, rank):
    with emulated_rank(world_size, rank):
        pass


#: Functions and classes, or where they are, with arguments that work.  Of the names after them each is refused if it is bad; a name
#: with "?" may also be None, with "0" also 0.
ENTER: list[tuple[Any, dict[str, Any], str]] = [
    ("config.padded_vocab_size", {"vocab_size": 32, "tensor_parallel_size": 2, "multiple": 8}, "vocab_size tensor_parallel_size multiple"),
    ("config.check_vocab_size", {"vocab_size": 32, "tensor_parallel_size": 2}, "vocab_size tensor_parallel_size"),
    ("config.model_shape", {"model": "tiny"}, "model"),
    ("rows.on_device", {"rows": [Row("Q", 8)], "terms": PAPER_LAYER, "recompute": "none", "element_size": 2}, "recompute"),
    ("formulas.activations.eq1", {"shape": S}, "element_size"),
    ("formulas.activations.eq2", {"shape": S, "tensor_parallel_size": 2}, "tensor_parallel_size element_size"),
    ("formulas.activations.eq4", {"shape": S, "tensor_parallel_size": 2}, "tensor_parallel_size element_size"),
    ("formulas.activations.gathered_input_bytes", {"shape": S, "tensor_parallel_size": 2}, "tensor_parallel_size element_size"),
    ("formulas.activations.crossover_seq_length", {"hidden_size": 16, "num_attention_heads": 4}, "hidden_size num_attention_heads"),
    ("formulas.activations.layer_rows", LAYER, "recompute element_size"),
    ("formulas.activations.layer_bytes", {**LAYER, "recompute": "full"}, "recompute element_size"),
    ("formulas.activations.layer_extra_rows", {**LAYER, "recompute": "full"}, "recompute element_size device_type"),
    ("formulas.stages.eq5", {"shape": S, "tensor_parallel_size": 2}, "tensor_parallel_size"),
    ("formulas.stages.interleave_factor", {"pipeline_parallel_size": 2, "num_model_chunks": 2}, "pipeline_parallel_size num_model_chunks"),
    ("formulas.stages.in_flight", {"parallel": P}, "pipeline_rank0 num_microbatches? microbatches_per_round?"),
    ("formulas.stages.section43_extras", {"shape": S, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "tensor_parallel_size pipeline_parallel_size"),
    ("formulas.stages.bubble_fraction", {"parallel": P, "num_microbatches": 4}, "num_microbatches"),
    ("formulas.stages.stage_rows", LAYER, "num_microbatches? recompute element_size device_type"),
    ("formulas.stages.embedding_rows", LAYER, "num_microbatches"),
    ("formulas.stages.output_rows", LAYER, "element_size device_type"),
    ("formulas.stages.stage_output_rows", LAYER, "num_microbatches? element_size"),
    ("formulas.schedule.recomputed_share", {"capacity": 1, "in_flight": 2, "num_microbatches": 4}, "capacity0 in_flight num_microbatches"),
    ("formulas.communication.layer_collectives", LAYER, "recompute element_size"),
    ("actmem_course.predicted.pipeline_sends.pipeline_sends", STAGE, "num_microbatches element_size"),
    ("parallel.groups.TensorParallel", {"size": 2, "rank": 1}, "size rank0"),
    ("formulas.flops.hardware_flops", {"shape": S, "global_batch_size": 4}, "global_batch_size recompute"),
    ("formulas.flops.eq7", {"shape": S, "global_batch_size": 4}, "global_batch_size"),
    ("actmem_more.llama_terms.llama_rows", {"shape": LLAMA, "parallel": P}, "recompute element_size context_kind"),
    ("actmem_more.llama_terms.forced_routed_tokens", {"shape": EXPERTS, "parallel": P, "routing": "even", "rank": 0}, "rank0 routing"),
    ("actmem_more.llama_terms.expert_mlp_rows", {"shape": EXPERTS, "parallel": P}, "routed_tokens0?"),
    ("actmem_more.loss_peak.loss_peak_rows", {"tokens": 16, "hidden_size": 16, "vocab_size": 32, "loss": "in chunks"}, "tokens hidden_size vocab_size chunk loss"),
    ("formulas.schedule.one_forward_one_backward", {"pipeline_parallel_size": 2, "num_microbatches": 4}, "pipeline_parallel_size num_microbatches"),
    ("parallel.rng.DropoutMask", {"p": 0.1, "generator": None}, "p0"),
    ("actmem_course.lab_tools.timing.take_turns", {"candidates": {}, "rounds": 2}, "rounds"),
    (emulate, {"world_size": 4, "rank": 0}, "world_size rank0"),
    ("config.ModelShape", {"seq_length": 8, "micro_batch_size": 2, "hidden_size": 16, "num_attention_heads": 4, "num_layers": 4}, "seq_length micro_batch_size hidden_size num_attention_heads num_layers"),
    ("config.Parallel", {"tensor_parallel_size": 2, "sequence_parallel": True, "pipeline_parallel_size": 2, "num_model_chunks": 2}, "tensor_parallel_size sequence_parallel pipeline_parallel_size num_model_chunks"),
    ("formulas.communication.PredictedCollective", {"kind": "send", "phase": "forward", "ranks": 2, "payload_bytes": 64, "count": 1}, "kind ranks payload_bytes0 count0"),
    ("formulas.schedule.interleaved", {"pipeline_parallel_size": 2, "num_model_chunks": 2, "num_microbatches": 4}, "num_microbatches microbatches_per_round?"),
]  # fmt: skip
CHOSEN = ("recompute", "element_size", "device_type", "model", "context_kind", "routing", "loss", "optimizer")
#: Values that no parameter of this kind may have; a name with a 0 in its range is in MAY_BE_ZERO.
JUNK: list[Any] = [None, "yes", "", b"x", 2.0, math.nan, math.inf, -1, True, [3], {}, object(), 10**5000, "a\nb" * 99]
BAD = {
    int: [*(value for value in JUNK if type(value) is not int), -1, -(10**30), 0],
    bool: [value for value in JUNK if type(value) is not bool] + [0, 1],
    str: [*(value for value in JUNK if value is not None), None, 0],
    float: [None, "1", b"x", math.nan, math.inf, -math.inf, -1, True, [1.0], object(), 0],
    object: JUNK,
}
PLACES = [(where, good, name) for where, good, names in ENTER for name in names.split()]


def found(where):
    if callable(where):
        return where
    module, _, name = where.rpartition(".")
    return getattr(importlib.import_module(module if module.startswith("actmem_") else f"actmem.{module}"), name)


IDS = [f"{getattr(where, '__name__', where)}-{name}" for where, _, name in PLACES]


@pytest.mark.parametrize(("where", "good", "name"), PLACES, ids=IDS)
def test_a_bad_argument_is_refused_in_one_line_that_names_it(where, good, name):
    argument, zero, none = name.rstrip("0?"), "0" in name, "?" in name
    if argument in CHOSEN:
        values = [value for value in JUNK if argument != "recompute" or value != {}]
    else:
        values = BAD[type(good.get(argument, 1))]
        values = [v for v in values if not (v is None and none) and not (type(v) is int and v == 0 and zero)]
    found(where)(**good)
    for value in values:
        with pytest.raises(ConfigError) as error:
            print(shown(value), "gives", found(where)(**{**good, argument: value}))
        text = str(error.value)
        assert "\n" not in text and len(text) < 300
        assert error.value.argument == argument, (text, shown(value))


@pytest.mark.parametrize("where", [where for where, good, _ in ENTER if good.get("shape") is S])
def test_no_number_where_ranks_cannot_share_the_layer(where):
    """A rounded-down share would be a wrong number."""
    (good,) = (good for one, good, _ in ENTER if one == where)
    shape = S.with_sizes(seq_length=9, vocab_size=27)
    odd = {"tensor_parallel_size": 3, "parallel": Parallel(3, True, 2)}
    if odd.keys() & good.keys():
        with pytest.raises(ConfigError):
            print(found(where)(**{**good, "shape": shape, **{name: odd[name] for name in odd.keys() & good.keys()}}))


#: Sizes that are good by themselves, and do not fit together, or have a rule of their own.
LINES = [
    (lambda: LlamaLayer(LLAMA.with_sizes(num_experts=4, experts_per_token=2), routing=JUNK[1]), "routing: must be one of learned, even, one-sided, got 'yes'"),
    (lambda: LlamaStage(LLAMA.with_sizes(num_layers=4), layers=range(2, 6)), "layers: range(2, 6) must be a part of range(0, 4)"),
    (lambda: ContextParallel(TensorParallel(None, 2)).own_tokens(torch.arange(10)), "sequence length: 10 must be divisible by the number of chunks = 4"),
    (lambda: attend_part((q := torch.zeros(1, 2, 5, 4)), q, q, ContextParallel(TensorParallel(None, 2, 0), "gather-plain")), "sequence length: 5 must be divisible by the chunks of a rank = 2"),
    (lambda: Parallel(num_model_chunks=2), "num_model_chunks: interleaving needs pipeline_parallel_size of at least 2"),
    (lambda: in_flight(Parallel(1, False, 4, 2), 0, None, 2), "microbatches_per_round: must be at least 3 on 4 ranks"),
    (lambda: interleaved(4, 2, 6, 5), "num_microbatches: 6 must be divisible by microbatches_per_round = 5"),
    (lambda: one_forward_one_backward(2, 10**9), "num_microbatches: the schedule would list 2,000,000,000 forward"),
    (lambda: torch_microbatches_per_round(2, 7), "num_microbatches: 7 must be divisible by the number of rounds = 3"),
    (lambda: layers_per_chunk(TINY, Parallel(1, False, 2, 3)), "num_layers: 4 must be divisible by pipeline_parallel_size · num_model_chunks = 6"),
    (lambda: in_flight(Parallel(1, False, 4, 2), 0, 6), "num_microbatches: 6 must be divisible by pipeline_parallel_size = 4"),
    (lambda: in_flight(Parallel(1, False, 4), 4), "pipeline_rank: must be at most 3, got 4"),
    (lambda: parameter_counts(TINY, Parallel(), -1), "pipeline_rank: must be at least 0, got -1"),
    (lambda: state_rows(TINY, adam="sgd"), "adam: must be one of float32 gradients; "),
    (lambda: LlamaShape(12, 3, 32, 8, 3, 40), "num_attention_heads: 8 must be divisible by num_key_value_heads = 3"),
    (lambda: LlamaShape(12, 3, 24, 8, 2, 40), "head_size: 3 must be even"),
    (lambda: LLAMA.with_sizes(qk_norm=1), "qk_norm: must be one of False, True, got 1"),
    (lambda: llama_rows(LlamaShape(8, 1, 24, 6, 2, 30), Parallel(3)), "num_key_value_heads: 2 must divide"),
    (lambda: LlamaLayer(LLAMA, recompute={"gelu"}), "recompute: 'gelu' is no term of this layer"),
    (lambda: llama_shape("llama9"), "model: must be one of tiny-llama"),
    (lambda: EXPERTS.with_sizes(experts_per_token=5), "experts_per_token: must be at most num_experts = 4"),
    (lambda: S.with_sizes(hidden_size=15), "hidden_size: 15 must be divisible by num_attention_heads = 4"),
    (lambda: check_layer(S.with_sizes(seq_length=9), Parallel(2, True)), "seq_length: 9 must be divisible by tensor_parallel_size = 2"),
    (lambda: EXPERTS.with_sizes(num_experts=None), "experts_per_token: goes with num_experts"),
    (lambda: LlamaLayer(EXPERTS.with_sizes(num_experts=6), FOUR), "num_experts: 6 must be divisible by tensor_parallel_size = 4"),
    (lambda: expert_mlp_rows(EXPERTS, routed_tokens=33), "routed_tokens: must be at most 32, got 33"),
    (lambda: layer_rows(S, Parallel(context_parallel_size=2)), "context_parallel_size: must be 1, got 2: the paper's layer"),
    (lambda: Cluster(8, 10**9, allowance_bytes=-1), "allowance_bytes: must be at least 0, got -1"),
    (lambda: Cluster(8, 8e10), "memory: must be a whole number, got 80000000000.0"),  # type: ignore[arg-type]
    (lambda: planned_model_of("llama3-8b").with_routing("one-sided"), "routing: llama3-8b has no experts"),
    (lambda: planned_model_of("mixtral-8x7b").with_routing("learned"), "routing: must be one of even, one-sided"),
    (lambda: llama_rows(LLAMA, routed_tokens=1), "routed_tokens: this layer has no experts"),
    (lambda: LatentHeads(20, 14, 6, 3, 8), "rope_head_size: 3 must be even"),
    (lambda: LATENT.with_sizes(num_key_value_heads=2), "num_key_value_heads: latent attention has a key for each of 4"),
    (lambda: LATENT.with_sizes(head_size=6), "head_size: latent attention has sizes and norms of its own"),
    (lambda: LATENT.with_sizes(sigmoid_router=True), "sigmoid_router: goes with num_experts"),
    (lambda: LlamaLayer(EXPERTS.with_sizes(num_shared_experts=1, ffn_hidden_size=41), FOUR), "the shared experts' width: 41 must be divisible by tensor_parallel_size = 4"),
    (lambda: own_context_shape(LATENT, Parallel(context_parallel_size=2)), "context_parallel_size: must be 1, got 2"),
    (lambda: llama_rows(LLAMA, Parallel(4, True, context_parallel_size=4)), "seq_length: 2 must be divisible by tensor_parallel_size"),
    (lambda: llama_rows(LLAMA, Parallel(context_parallel_size=4), context_kind="ulysses"), "num_key_value_heads: 2 must be divisible by tensor_parallel_size · context_parallel_size = 4"),
    (lambda: LlamaLayer(LLAMA, context=ContextParallel(TensorParallel(None, 3, 0))), "seq_length: 8 must be divisible by 2 · context_parallel_size = 6"),
    (lambda: LlamaLayer(LLAMA, context=ContextParallel(TensorParallel(None, 2, 0)))(torch.zeros(3, 3, 16)), "seq_length: the model was made for 4 tokens a sequence, got 3"),
    (lambda: ModelShape(2**31, 1, 4, 1), "seq_length: must be at most 2147483647, got 2147483648"),
    (lambda: check_vocab_size(50257, 4), "vocab_size: 50257 must be divisible by tensor_parallel_size = 4; padded_vocab_size(50257, 4) = 50688 is; the loss takes vocab_size=50257"),
    (lambda: Recompute.of([1]), "recompute: must be one of none, selective, elementwise, full, paper-selective, paper-full, or"),  # type: ignore[list-item]
    (lambda: loss_peak_rows("in place", 8, 8, 9, 2), "vocab_size: 9 must be divisible by tensor_parallel_size = 2"),
    (lambda: VocabParallelCrossEntropy(FOUR, vocab_size=9)((z := torch.zeros(2, 2, 2)), z[0].long()), "vocab_size: must be at most 8, got 9"),
    (lambda: LinearCrossEntropy(FOUR, vocab_size=0)((x := torch.zeros(2, 2, 2)), x[0], x[0].long()), "vocab_size: must be at least 1, got 0"),
    (lambda: TensorParallel(size=2, rank=5), "rank: must be at most 1, got 5"),
    (lambda: LinearCrossEntropy(TensorParallel(), 0), "chunk: must be at least 1, got 0"),
    (lambda: DropoutMask(1, None), "p: must be at least 0 and less than 1, got 1"),
    (lambda: emulate(4, 4), "rank: must be at most 3, got 4"),
    (lambda: ring("broadcast", 2, 8), "kind: must be one of reduce-scatter"),
    (lambda: HostMemory(0), "ahead: must be at least 1, got 0"),
    (lambda: TransformerLayer(S, recompute={"GeLU input": "offload"}, stores={"offload": 4}), "stores: must have one for 'offload', as actmem_more.store has, got"),  # type: ignore[dict-item]
    (lambda: TransformerLayer(S)(torch.zeros(9, 2, 16)), "seq_length: the model was made for 8 tokens a sequence, got 9"),
    (lambda: TransformerLayer(S)(torch.zeros(0, 2, 16)), "batch: must have at least one token, got sizes [0, 2, 16]"),
    (lambda: LlamaLayer(LLAMA)(torch.zeros(8, 0, 16)), "batch: must have at least one token, got sizes [8, 0, 16]"),
    (lambda: GPT(S, TensorParallel(size=2, sequence_parallel=True))(torch.zeros(2, 7, dtype=torch.int64)), "sequence length: 7 must be divisible by tensor_parallel_size = 2"),
    (lambda: GPT(S.with_sizes(vocab_size=30), FOUR), "vocab_size: 30 must be divisible by tensor_parallel_size = 4"),
    (lambda: ColumnParallelLinear(8, 10, FOUR), "out_features: 10 must be divisible by tensor_parallel_size = 4"),
    (lambda: RowParallelLinear(10, 8, FOUR), "in_features: 10 must be divisible by tensor_parallel_size = 4"),
    (lambda: check_pipeline(S, 2, 2, 5, False), "num_microbatches: 5 must be divisible by pipeline_parallel_size = 2"),
    (lambda: check_pipeline(S, 4, 1, 3, False), "num_microbatches: torch's 1F1B needs at least one a stage"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "line"), LINES, ids=lambda value: value if isinstance(value, str) else "")
def test_lines(call, line):
    with pytest.raises(ConfigError) as error:
        call()
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


GOOD = dict(seq_length=6, micro_batch_size=2, hidden_size=12, num_attention_heads=3, num_layers=4, vocab_size=10)


@pytest.mark.parametrize(
    "sizes",
    [
        {"seq_length": 2**30, "hidden_size": 3},  # the scores: as²b
        {"seq_length": 2**28, "micro_batch_size": 2**10, "hidden_size": 2**20, "num_attention_heads": 1},
        {"hidden_size": 2**30, "num_attention_heads": 1},  # a weight: 4h²
        {"vocab_size": 2**31 - 1, "hidden_size": 2**28 + 1, "num_attention_heads": 1},  # the embedding: vh
    ],
)
def test_tensors_that_no_machine_can_address(sizes):
    with pytest.raises(ConfigError, match="^model shape: one tensor would have .* elements") as error:
        ModelShape(**{**GOOD, **sizes})
    assert "\n" not in str(error.value)


def test_another_process_can_raise_it_again():
    error = pickle.loads(pickle.dumps(ConfigError("size", "must be at least 1")))
    assert str(error) == "size: must be at least 1" and error.argument == "size"


def test_padded_vocabulary():
    assert padded_vocab_size(50257, 4) == 50688 and padded_vocab_size(50257, 1) == 50304
    assert padded_vocab_size(51200, 8) == 51200 and padded_vocab_size(10, 3, multiple=1) == 12
    assert check_vocab_size(50688, 4) == 12672
