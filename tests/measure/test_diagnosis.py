"""Each known waste, planted in a small model, is found; what is none, in 40 models of others too, is not called one."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from actmem.ledger.census import arguments_of
from actmem_tools.diagnosis import findings
from actmem_tools.tape.solver import parsed_letters
from tests.measure.corner_cases import Run, ledger_of, x
from tests.models_of_others import HUGGING_FACE, LETTERS, MODELS
from tests.tiers import sampled

S, A, D = 8, 4, 6


def wastes(module, *inputs):
    return {finding.waste: finding for finding in findings(ledger_of(module, *inputs).tensors)}


def gelu_by_hand(m, x):
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3))))


def upcast_norm(m, x):
    wide = x.float()
    return m.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()


def heads(count=A, dtype=torch.float32):
    return x(1, count, S, D, dtype=dtype)


def attention(m, q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)


def masked(scores):
    return scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)


def swiglu(m, x):
    return F.silu(x + 1) * (x - 1)


TYPES = Run(lambda m, index: m.ids.gather(0, index), ids=nn.Buffer(torch.zeros(8, dtype=torch.int64)))
IDS = torch.arange(4) % 3
PLANTED = {
    "GeLU in several operations": (Run(gelu_by_hand), (x(),)),
    "norms in float32": (Run(lambda m, x: m.norm(x), norm=Run(upcast_norm, weight=nn.Parameter(torch.ones(8, dtype=torch.bfloat16)))), (x(dtype=torch.bfloat16),)),
    "attention that keeps s²": (Run(lambda m, q: attention(m, q, q, q, dropout_p=0.1)), (heads(),)),
    "repeated K and V": (Run(lambda m, q, k: attention(m, q, k[:, :, None].expand(1, 2, 2, S, D).reshape(1, A, S, D), q)), (heads(), heads(2))),
    "SiLU kept twice": (Run(swiglu), (x(),)),
    "expert weights copied per token": (Run(lambda m, x, choice: torch.bmm(x.unsqueeze(1), m.experts[choice]), experts=nn.Parameter(torch.ones(3, 8, 8))), (x(), IDS)),
    "masks of s²": (Run(lambda m, q: masked(q @ q.mT).softmax(-1) @ q), (heads(),)),
    "attention that keeps s² for learned queries": (Run(lambda m, x: (m.q(m.ask.weight) @ x.mT).softmax(-1) @ x, q=nn.Linear(8, 8), ask=nn.Linear(8, 5)), (x(2, 4, 8),)),
    "GELU kept twice": (Run(lambda m, x: F.gelu(x + 1) * (x - 1)), (x(),)),
    "casts of weights": (nn.Linear(8, 8), (x(),)),
}  # fmt: skip
CLEAN = {
    "F.gelu": (nn.GELU(), (x(),)),
    "layer norm": (nn.LayerNorm(8, dtype=torch.bfloat16), (x(dtype=torch.bfloat16),)),
    "flash attention": (Run(lambda m, q: attention(m, q, q, q)), (heads(),)),
    "a square weight": (nn.Linear(8, 8), (x(4, 8),)),
    "a mask of anything": (Run(lambda m, x: masked(x)), (x(8, 8),)),
    "a mask beside a fused kernel": (Run(lambda m, q, mask: F.scaled_dot_product_attention(q, q, q, mask.detach()[:, None, None])), (heads(), x(1, S))),
    "a float32 norm of float32": (Run(lambda m, x, y: m.norm(x) * y.float(), norm=nn.LayerNorm(8)), (x(), x(dtype=torch.bfloat16))),
    "an expanded tensor": (Run(lambda m, x: x[:, None].expand(4, 2, 8).reshape(8, 8).sin()), (x(),)),
    "token types": (Run(lambda m, x, i: m.words(m.types(i)) + x, words=nn.Embedding(3, 8), types=TYPES), (x(), IDS)),
    "attention of channels": (Run(lambda m, x: (x @ x.mT).softmax(-1) @ x), (x(1, 8, 300),)),
    "a gate of a sigmoid": (Run(lambda m, x: x * torch.sigmoid(x)), (x(),)),
    "tanh in a cell": (Run(lambda m, x: torch.tanh(x + 1) * (x + 2) * torch.sigmoid(x)), (x(),)),
    "a gate beside a norm": (Run(lambda m, x: torch.tanh(x + 1) * (x + 2) + x * x.pow(2).mean(-1, keepdim=True).rsqrt()), (x(),)),
    "a softmax of a normed weight's product": (nn.Sequential(weight_norm(nn.Linear(8, 16, bias=False)), nn.Softmax(-1), nn.Linear(16, 8)), (x(),)),
    "a copy of a weight": (Run(lambda m, x: F.linear(x, m.linear.weight.clone()), linear=nn.Linear(8, 8)), (x(),)),
}  # fmt: skip
#: What models of others waste: read their code.
GATED, SCORES = "SiLU kept twice", "attention that keeps s²"
SPLIT, COPIED = "GeLU in several operations", "repeated K and V"
TRUE = {
    **dict.fromkeys("llama mistral qwen2 phi3 olmo2 granite qwen3 mamba efficientnet squeeze".split(), {GATED}),
    # Attention with dropout has no fused kernel on a CPU; the rest compute it by hand.
    **dict.fromkeys("bert roberta distilbert t5 bloom swin beit encoder transformer unet".split(), {SCORES}),
    "gemma": {"GELU kept twice"},
    "gemma2": {SCORES, COPIED, "GELU kept twice"},
    "mixtral": {GATED, "expert weights copied per token"},
    "gpt2": {SCORES, SPLIT},
    "albert": {SPLIT},
    "falcon": {SCORES, COPIED},
    "deberta-v2": {SCORES, "masks of s²"},
}
#: As many tokens as features, as a head's features, and as nothing else.
SIZES = ({"s": 32, "h": 32, "k": 2}, {"s": 8, "h": 32, "k": 2}, {"s": 21, "h": 64, "k": 4})
BY_DAY = ("llama", "squeeze", "contrast")


@pytest.mark.parametrize("waste", PLANTED)
def test_a_planted_waste_is_found(waste):
    module, inputs = PLANTED[waste]
    with torch.autocast("cpu", torch.bfloat16, enabled=waste == "casts of weights"):
        found = wastes(module, *inputs)
    waste = waste.partition(" for ")[0]
    assert waste in found, list(found)
    assert found[waste].bytes > 0 and found[waste].floor >= 0 and found[waste].text.endswith(".")


@pytest.mark.parametrize("name", CLEAN)
def test_what_wastes_nothing_is_not_called_a_waste(name):
    module, inputs = CLEAN[name]
    assert wastes(module, *inputs) == {}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", sampled(MODELS, 0, always=BY_DAY))
def test_wastes_of_models_of_others_are_true_and_all(name, sizes):
    if name in HUGGING_FACE and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install transformers")
    every = {"b": 2, "a": 4, "f": 48, "v": 64, "i": 32, "c": 32, **sizes}
    model, inputs = MODELS[name](**{letter: every[letter] for letter in parsed_letters(LETTERS[name])[0]})
    args, kwargs = arguments_of(inputs)
    found = {finding.waste: finding for finding in findings(ledger_of(model, *args, **kwargs).tensors)}
    same_heads = {COPIED} if name == "gemma2" and every["k"] == every["a"] else set()
    assert found.keys() == TRUE.get(name, set()) - same_heads
    s, b, layers = every["s"], every["b"], 2
    if name == "llama":
        assert found[GATED].bytes == layers * 4 * s * b * every["f"]
    if name == "bert":  # probabilities, what dropout leaves of them, and its mask
        assert found[SCORES].bytes == layers * 3 * 4 * every["a"] * s * s * b
    if name == "mixtral":  # two experts a token; gate, up and down
        assert found["expert weights copied per token"].bytes == layers * 2 * s * b * 3 * 4 * every["h"] * every["f"]


def test_repeated_heads_cost_what_they_repeat():
    module, inputs = PLANTED["repeated K and V"]
    finding = wastes(module, *inputs)["repeated K and V"]
    assert (finding.bytes, finding.floor) == (2 * S * D * 4, 2 * S * D * 4)


def test_gathered_inputs_are_found(pools):
    assert all(pools[2].run(gathered_waste))


def gathered_waste():
    from torch.distributed._functional_collectives import all_gather_tensor_autograd

    def gather(m, x):
        return m.linear(all_gather_tensor_autograd(x, 0, torch.distributed.group.WORLD))

    return "gathered inputs" in wastes(Run(gather, linear=nn.Linear(8, 8)), x())
