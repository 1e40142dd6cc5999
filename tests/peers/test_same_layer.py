"""Every peer computes what our layer computes, in every mode: else a comparison of times says nothing."""

import warnings

import pytest
import torch

from actmem.config import ModelShape, Parallel
from actmem.formulas.activations import RNG_STATE_BYTES, gathered_input_bytes, layer_rows
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.recorder import record
from actmem.parallel.groups import tensor_parallel
from actmem.parallel.linear import shard
from actmem.rows import total
from actmem_course.peers import OURS, PEERS, PeerUnavailable, build

SHAPE = ModelShape(16, 2, 32, 4)
PEER_MODES = ("none", "selective", "elementwise", "full")

#: Our names of parts, and how a peer calls them.
PLAIN = {"attention.qkv": "qkv", "attention.projection": "projection", "mlp.up": "up", "mlp.down": "down"}
PLAIN |= {"norm1": "norm1", "norm2": "norm2"}
ROW_PARALLEL = ("attention.projection.weight", "mlp.down.weight")
COLUMN_PARALLEL = ("attention.qkv", "mlp.up")


def cut_dimension(name):
    return 1 if name in ROW_PARALLEL else 0 if name.startswith(COLUMN_PARALLEL) else None


def fill(peer, layer, dense, tp):
    """Give a peer this rank's part of an uncut layer's parameters."""
    parameters = {name.removeprefix("layer."): parameter for name, parameter in layer.named_parameters()}
    for name, full in dense.items():
        part, _, kind = name.rpartition(".")
        parameter = parameters[f"{PLAIN[part]}.{kind}"]
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        with torch.no_grad():
            local.copy_(shard(full, 0 if peer == "FSDP2" else cut_dimension(name), tp))


def compare_on_ranks(peer, sequence_parallel):
    """Largest difference of outputs and input gradients to the uncut layer, by mode."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    dense = TransformerLayer(SHAPE, p=0.0, dtype=torch.float64)
    for parameter in dense.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(16, 2, 32, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(16, 2, 32, dtype=torch.float64)
    y = dense(x)
    (grad_x,) = torch.autograd.grad(y, x, weight)
    tp = tensor_parallel(sequence_parallel=sequence_parallel)
    dim = 1 if peer == "FSDP2" else 0 if sequence_parallel else None
    differences = {}
    for mode in PEER_MODES:
        if mode == "elementwise":
            with pytest.raises(PeerUnavailable, match="not single tensors"):
                build(peer, SHAPE, tp, mode, "cpu", torch.float64, p=0.0)
            continue
        layer = build(peer, SHAPE, tp, mode, "cpu", torch.float64, p=0.0)
        fill(peer, layer, dense.state_dict(), tp)
        own = shard(x.detach(), dim, tp).clone().requires_grad_()
        output = layer(own)
        output.backward(shard(weight, dim, tp))
        pairs = (output, y), (own.grad, grad_x)
        differences[mode] = max(float((one - shard(whole, dim, tp)).abs().max()) for one, whole in pairs)
    return differences


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("peer", PEERS)
def test_same_numbers(pools, peer, sequence_parallel):
    for differences in pools[2].run(compare_on_ranks, peer, sequence_parallel):
        assert max(differences.values()) < 1e-11, differences


def held(name, shape, tp, mode, leaf):
    layer = build(name, shape, tp, mode, "cpu", torch.float32)
    for _ in range(2):  # FSDP makes its gathered weights in the first run
        with record(layer) as ledger:
            y = layer(leaf.clone())
        y.backward(y.detach())
    return ledger.total_bytes


def extras(shape, tokens):
    """Bytes of the two layer norms' statistics; masks are buffers of every peer."""
    return 4 * 4 * shape.micro_batch_size * tokens


@pytest.mark.by_day(1)
@pytest.mark.parametrize("t", [2, 4])
def test_dtensor_keeps_the_gathered_inputs(t):
    with emulated_rank(t, real_tensors=True):
        tp = tensor_parallel(sequence_parallel=True)
        leaf = torch.randn(16 // t, 2, 32, requires_grad=True)
        by_formula = total(layer_rows(SHAPE, Parallel(t, sequence_parallel=True), element_size=4))
        assert held(OURS, SHAPE, tp, "none", leaf) == by_formula + extras(SHAPE, 16 // t)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = held("DTensor", SHAPE, tp, "none", leaf)
        assert theirs == by_formula + extras(SHAPE, 16 // t) + gathered_input_bytes(SHAPE, t, 4)


@pytest.mark.by_day(1)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_fsdp_keeps_an_uncut_layer_and_no_weights(mode):
    shape = SHAPE.with_sizes(micro_batch_size=1)
    leaf = torch.randn(16, 1, 32, requires_grad=True)
    with emulated_rank(2, real_tensors=True):
        theirs = held("FSDP2", shape, tensor_parallel(), mode, leaf)
    by_formula = total(layer_rows(shape, recompute=mode, element_size=4))
    # torch's checkpoint holds a random-number state of its own, which no hook sees.
    state = 0 if mode == "none" else RNG_STATE_BYTES["cpu"]
    assert theirs == by_formula + state + (0 if mode == "full" else extras(shape, 16))
