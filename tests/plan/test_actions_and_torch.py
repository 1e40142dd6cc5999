"""No choice of torch's own has fewer FLOPs for as few bytes: its compiler's budget, and its selective checkpoint."""

import pytest
import torch
import torch._functorch.config as compiler
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from actmem.config import ModelShape
from actmem.llama_shape import LlamaShape
from actmem.measure import record
from actmem.plan.actions import PricedLayer, frontier, recompute_choices
from tests.tiers import at_night

SHAPE = LlamaShape(128, 2, 64, 4, 4, 176)
ATEN = torch.ops.aten
ATTENTION = ATEN._scaled_dot_product_flash_attention_for_cpu
#: torch's counter has no row for the kernel on CPUs.
COUNTED = {ATTENTION: lambda q, k, v, *rest, out_val=None, **options: sdpa_flop_count(q, k, v)}
PAPERS = ModelShape(128, 2, 64, 4)


class PlainToday(nn.Module):
    """Today's layer as one writes it for a single device: ``[b, s, h]``."""

    def __init__(self):
        super().__init__()
        h, f = SHAPE.hidden_size, SHAPE.ffn_hidden_size
        self.norm1, self.norm2 = nn.RMSNorm(h), nn.RMSNorm(h)
        self.q, self.k, self.v, self.projection = (nn.Linear(h, h, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((h, f), (h, f), (f, h)))

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (
            linear(y).unflatten(2, (SHAPE.num_attention_heads, -1)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.projection(y)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class PlainPaper(nn.Module):
    """The paper's, without dropout: what a mask takes, neither side keeps."""

    def __init__(self):
        super().__init__()
        h = PAPERS.hidden_size
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.projection, self.up, self.down = (
            nn.Linear(*sizes) for sizes in ((h, 3 * h), (h, h), (h, 4 * h), (4 * h, h))
        )

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).unflatten(2, (3 * PAPERS.num_attention_heads, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, 1)
        scores = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5).softmax(-1)
        x = x + self.projection((scores @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


LAYERS = {
    PlainToday: PricedLayer.of(SHAPE, element_size=4),
    PlainPaper: PricedLayer.of(PAPERS, element_size=4),
}
each_layer = pytest.mark.parametrize("plain", LAYERS)


def counted():
    return FlopCounterMode(display=False, custom_mapping=COUNTED)


def random_input():
    return torch.randn(SHAPE.micro_batch_size, SHAPE.seq_length, SHAPE.hidden_size).requires_grad_()


def compiled(layer, budget):
    """Bytes that the compiled forward hands to backward, weights apart, and FLOPs of both."""
    flops, kept = [], {}

    def counting(graph, arguments, forward):
        def run(*arguments):
            with counted() as counter:
                results = graph(*arguments)
            flops.append(counter.get_total_flops())
            if forward:
                kept.update({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in results[1:]})
            return results

        return make_boxed_func(run)

    backend = aot_autograd(
        fw_compiler=lambda graph, arguments: counting(graph, arguments, True),
        bw_compiler=lambda graph, arguments: counting(graph, arguments, False),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch._dynamo.reset()
    with compiler.patch(activation_memory_budget=budget):
        torch.compile(layer, backend=backend, fullgraph=True)(random_input()).sum().backward()
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    return sum(size for storage, size in kept.items() if storage not in weights), sum(flops)


def selective(layer, saved):
    """The same if torch's selective checkpoint saves the results of these operations."""

    def policy(context, operation, *args, **options):
        return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE

    with counted() as counter:
        with record(layer) as ledger:
            y = checkpoint(
                layer, random_input(), use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(policy),
            )  # fmt: skip
        y.sum().backward()
    return ledger.total_bytes, counter.get_total_flops()


def check(plain, kept, flops):
    line = frontier(recompute_choices(LAYERS[plain]), lambda choice: choice.flops)
    ours = [choice for choice in line if choice.bytes <= kept]
    with counted() as counter:
        plain()(random_input()).sum().backward()
    more = flops - counter.get_total_flops()
    assert ours and ours[0].flops <= more


@pytest.mark.slow
@each_layer
@pytest.mark.parametrize("budget", [0, *(at_night(tenths / 10) for tenths in (1, 2, 3, 4, 6, 8, 10)), 0.5])
def test_the_compilers_budget_keeps_no_less_for_less(plain, budget):
    check(plain, *compiled(plain(), budget))


#: By FLOPs for each byte, the most first.
ORDER = (ATTENTION.default, ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default, ATEN.silu.default, ATEN.mul.Tensor)


@each_layer
@pytest.mark.parametrize("saved", [ORDER[:number] for number in range(len(ORDER) + 1)] + [ORDER[1:3]], ids=len)
def test_a_selective_checkpoint_keeps_no_less_for_less(plain, saved):
    check(plain, *selective(plain(), saved))
