"""Initial weights: the same model for every t, every cut into stages and every dtype, drawn shard by shard."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from actmem.config import ConfigError, ModelShape
from actmem.layers.gpt import GPT
from actmem.layers.transformer import TransformerLayer
from actmem.parallel import weights
from actmem.parallel.groups import TensorParallel
from actmem.parallel.linear import ColumnParallelLinear, RowParallelLinear
from actmem.parallel.vocab import VocabParallelEmbedding
from actmem.parallel.weights import Part
from actmem_more.llama import LlamaLayer, LlamaStage
from actmem_more.llama_shape import LatentHeads, LlamaShape

SHAPE = ModelShape(16, 2, 48, 24, num_layers=3, vocab_size=120)
SEQUENCE = TensorParallel(size=2, sequence_parallel=True)


def together(make, t):
    """The unsharded parameters, put together from what each of t ranks draws."""
    ranks = [dict(make(TensorParallel(size=t, rank=rank)).named_parameters()) for rank in range(t)]
    whole = {}
    for name, parameter in ranks[0].items():
        parts = [rank[name].detach() for rank in ranks]
        dim = getattr(parameter, "partition_dim", None)
        assert dim is not None or all(torch.equal(part, parts[0]) for part in parts)
        whole[name] = parts[0] if dim is None else torch.cat(parts, dim)
    return whole


@pytest.mark.parametrize("block_elements", [1, 200, 2**20])  # a row each, blocks across the shards, one block
@pytest.mark.parametrize("t", [2, 3, 4, 8])
def test_the_ranks_together_hold_what_one_would_have_drawn(monkeypatch, t, block_elements):
    monkeypatch.setattr(weights, "BLOCK_ELEMENTS", block_elements)
    one, many = (together(lambda tp: GPT(SHAPE, tp, seed=5), size) for size in (1, t))
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)
    assert len({name for name in one if one[name].dim() > 1}) == 2 + 3 * 4


def test_other_seeds_names_layers_and_blocks_draw_other_numbers(monkeypatch):
    monkeypatch.setattr(weights, "BLOCK_ELEMENTS", 48)
    first, second = (dict(GPT(SHAPE, seed=seed).named_parameters()) for seed in (5, 6))
    rows = [row for model in (first, second) for p in model.values() if p.dim() > 1 for row in p.detach()[:, :8]]
    assert len(torch.stack(rows).unique(dim=0)) == len(rows)


def test_numbers_are_normal_with_the_usual_deviation():
    weight = ColumnParallelLinear(600, 500, TensorParallel(), seed=1).weight.detach()
    n = weight.numel()
    assert abs(weight.mean().item()) < 6 * 0.02 / n**0.5
    assert abs(weight.std().item() / 0.02 - 1) < 6 / (2 * n) ** 0.5
    assert (weight.abs() > 0.06).float().mean().item() == pytest.approx(0.0027, rel=0.3)  # three deviations


def test_stages_and_dtypes_hold_parts_of_the_one_model():
    whole = dict(GPT(SHAPE).named_parameters())
    for layers in (range(0, 1), range(1, 2), range(2, 3)):
        for name, parameter in GPT(SHAPE, layers=layers).named_parameters():
            assert torch.equal(parameter, whole[name]), name
    for name, parameter in GPT(SHAPE, dtype=torch.bfloat16).named_parameters():
        assert torch.equal(parameter, whole[name].bfloat16()), name


class LargestTensor(TorchFunctionMode):
    elements = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("block", [RowParallelLinear, ColumnParallelLinear, VocabParallelEmbedding])
def test_no_rank_makes_more_than_its_shard(monkeypatch, block):
    monkeypatch.setattr(weights, "BLOCK_ELEMENTS", 256)
    with LargestTensor() as seen:
        block(128, 64, TensorParallel(size=8, rank=3))
    assert seen.elements == 128 * 64 // 8


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: ColumnParallelLinear(8, 8, TensorParallel(), seed=seed),
        lambda seed: VocabParallelEmbedding(8, 8, TensorParallel(), seed=seed),
        lambda seed: TransformerLayer(SHAPE, seed=seed),
    ],
)
def test_without_a_seed_blocks_draw_one_from_the_default_generator(make):
    def values(seed):
        return torch.cat([p.detach().flatten() for p in make(seed).parameters()])

    torch.manual_seed(0)
    first, second = values(None), values(None)
    torch.manual_seed(0)
    assert torch.equal(first, values(None)) and not torch.equal(first, second)
    assert torch.equal(values(3), values(3)) and not torch.equal(values(3), values(4))


def test_a_fresh_seed_has_more_bits_than_would_meet_by_chance():
    assert weights.fresh_seed(torch.Generator().manual_seed(0)) > 2**32


def marks(module):
    names = ("partition_dim", "partition", "partial_gradient")
    return {name: [getattr(p, mark, None) for mark in names] for name, p in module.named_parameters()}


def test_rotary_tables_stay_in_32_bits():
    shape = LlamaShape(8, 1, 16, 4, 2, 24)
    cast, made = LlamaLayer(shape, seed=0).bfloat16(), LlamaLayer(shape, seed=0, dtype=torch.bfloat16)
    x = torch.randn(8, 1, 16, dtype=torch.bfloat16)
    assert torch.equal(cast(x), made(x))
    assert GPT(SHAPE).bfloat16().mask.dtype is torch.bfloat16


def from_meta(make):
    with torch.device("meta"):
        return make().to_empty(device="cpu")


@pytest.mark.parametrize(
    ("make", "some"),
    [
        (
            lambda: GPT(SHAPE, SEQUENCE),
            {
                "positions": [None, None, True],
                "layers.0.norm1.bias": [None, None, True],
                "layers.0.mlp.down.weight": [1, None, None],
                "words.weight": [0, None, None],
            },
        ),
        (
            lambda: LlamaLayer(LlamaShape(8, 2, 24, 4, 1, 20), SEQUENCE, seed=1),
            {"attention.k": [0, Part(1, 0), None], "norm1.weight": [None, None, True]},
        ),
    ],
)
def test_parameters_keep_their_marks_when_they_are_replaced(make, some):
    module = make()
    found = marks(module)
    assert {name: found[name] for name in some} == some
    assert marks(copy.deepcopy(module)) == marks(pickle.loads(pickle.dumps(module))) == found
    assert marks(from_meta(make)) == found
    assert marks(make().double()) == found
    values = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    module.load_state_dict(values, assign=True)
    assert marks(module) == found


def test_modules_that_shard_a_parameter_in_different_ways_cannot_share_it():
    one, same = (ColumnParallelLinear(6, 6, SEQUENCE) for _ in range(2))
    other: Any = RowParallelLinear(6, 6, SEQUENCE)
    same.weight = one.weight
    other_weight = other.weight
    for name in ("weight", "bias"):
        with pytest.raises(ConfigError, match=f"^{name}: is another module's, with marks {{'partition_dim': 0}}"):
            setattr(other, name, getattr(one, name))
    assert same.weight is one.weight and other.weight is other_weight
    assert marks(one) == marks(ColumnParallelLinear(6, 6, SEQUENCE))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_made_empty_computes_as_one_that_was_never(device):
    latents: dict[str, Any] = {"latent": LatentHeads(6, 5, 4, 2, 3)}
    shapes = [LlamaShape(8, 2, 24, 4, k, 20, vocab_size=8, **more) for k, more in ((2, {}), (4, latents))]
    models: list[Any] = [lambda: GPT(SHAPE, p=0.0)]
    models += [partial(LlamaStage, shape) for shape in shapes]
    for make in models:
        model, tokens = make(), torch.arange(16).remainder(8).view(2, 8)
        with torch.device(device):
            empty = make()
        empty.to_empty(device="cpu").load_state_dict(model.state_dict())
        assert torch.equal(empty(tokens), model(tokens))
        assert torch.equal(empty.double()(tokens), model.double()(tokens))
