"""A GPU's kernels on a CPU: what they save is what fake CUDA tensors save, and a bill is of them however they are called."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import dropout as dropout_by_name
from torch.nn.functional import scaled_dot_product_attention as attention_by_name

from actmem.ledger.recorder import record
from actmem_more.gpu_kernels import gpu_kernels_on_cpu
from actmem_tools.load_model import tensors_for
from tests.measure.test_no_device import needs_build
from tests.models_of_others import Of


def block(call):
    """Attention with dropout, called as ``call`` does."""
    run = lambda m, x: call(*m["project"](x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4))  # noqa: E731
    return Of(run, project=nn.Linear(32, 96))


def of_torch():
    """Which calls it by position."""
    run = lambda m, x: m["attention"](x, x, x, need_weights=False)[0]  # noqa: E731
    return Of(run, attention=nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True))


ATTENTION = {
    "attribute": lambda: block(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)),
    "imported": lambda: block(lambda q, k, v: attention_by_name(q, k, v, dropout_p=0.1)),
    "positional": lambda: block(lambda q, k, v: attention_by_name(q, k, v, None, 0.1, True)),
    "in C++": lambda: block(lambda q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v, dropout_p=0.1)),
    "torch's layer": of_torch,
}


def scores(model, **there):
    """Bytes kept of attention's scores."""
    with record(model) as ledger:
        y = model(torch.randn(2, 16, 32, **there))
    assert y.requires_grad and ledger.saved
    return sum(row.bytes for row in ledger.saved if row.shape[-2:] == (16, 16))


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_fused_however_it_is_called(name):
    with gpu_kernels_on_cpu():
        assert scores(ATTENTION[name]()) == 0
    assert scores(ATTENTION[name]()) > 0  # as a CPU runs it


@needs_build
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_a_gpus_however_it_is_called(name):
    with tensors_for(True, "cuda"):
        gpu = torch.device("cuda", 0)  # without a number torch 2.9 asks the driver for the present one
        model = ATTENTION[name]().to(device=gpu, dtype=torch.bfloat16)
        assert scores(model, device=gpu, dtype=torch.bfloat16) == 0


DROPOUT = {
    "module": lambda: nn.Dropout(0.1),
    "imported": lambda: Of(lambda m, x: dropout_by_name(x, 0.1)),
    "positional": lambda: Of(lambda m, x: F.dropout(x, 0.1, True, False)),
    "torch's": lambda: Of(lambda m, x: torch.dropout(x, 0.1, True)),
    "in C++": lambda: Of(lambda m, x: torch.ops.aten.dropout(x, 0.1, True)),
}


@pytest.mark.parametrize("name", DROPOUT)
def test_a_dropouts_mask_has_one_byte_however_it_is_called(name):
    x = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
    assert saved(DROPOUT[name](), x) == [("bfloat16", 2 * x.numel())]  # as a CPU runs it
    with gpu_kernels_on_cpu():
        assert saved(DROPOUT[name](), x) == [("bool", x.numel())]


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_a_dropout_that_draws_nothing_saves_no_mask(p):
    with gpu_kernels_on_cpu():
        kept = saved(Of(lambda m, x: F.dropout(2 * x, p)), torch.randn(8, 16, requires_grad=True))
    assert sum(size for _, size in kept) <= 4


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("weight", [True, False])
def test_an_rms_norm_of_a_gpu_computes_the_same(weight, trained):
    norm = nn.RMSNorm((3, 16), elementwise_affine=weight, dtype=torch.float64).requires_grad_(trained)
    x = torch.randn(5, 3, 16, dtype=torch.float64, requires_grad=True)
    wanted = [x, *norm.parameters()] if trained else [x]

    def results():
        y = norm(x)
        return y, *torch.autograd.grad(y.sin().sum(), wanted)

    torch.testing.assert_close(on_gpu(results), results(), rtol=1e-12, atol=1e-12)


def on_gpu(function):
    with gpu_kernels_on_cpu():
        return function()


def saved(module, x):
    """What backward needs beside parameters: dtypes and bytes."""
    with record(module) as ledger:
        y = module(x)
    assert y.requires_grad
    return sorted((str(row.dtype).removeprefix("torch."), row.bytes) for row in ledger.saved if row.bytes)


#: Operations that are billed as a CPU runs them: by how many bytes more a GPU saves of [6, 4, 16], in 16 and in 32 bits.
DIFFERENT = {"layer norm": (2 * 2 * 24, 0), "logsigmoid": (-2 * 6 * 4 * 16, -4 * 6 * 4 * 16)}
OPERATIONS = {
    "dropout": nn.Dropout(0.1),
    "dropout in place": Of(lambda m, x: F.dropout(2 * x, 0.1, inplace=True)),
    "dropout of a view": Of(lambda m, x: F.dropout(x.transpose(0, 1), 0.1)),
    "dropout of channels": Of(lambda m, x: F.dropout1d(x, 0.1)),
    "alpha dropout": Of(lambda m, x: F.alpha_dropout(x, 0.1, True)),
    "RMS norm": nn.RMSNorm(16),
    "RMS norm without weight": Of(lambda m, x: F.rms_norm(x, (16,))),
    "RMS norm of a view": Of(lambda m, x: F.rms_norm(x.transpose(0, 1), (16,))),
    "RMS norm of heads": Of(lambda m, x: F.rms_norm(x.view(6, 4, 2, 8).transpose(1, 2), (8,))),
    "RMS norm with a float32 weight": Of(lambda m, x: F.rms_norm(x, (16,), torch.ones(16, device=x.device))),
    "layer norm": nn.LayerNorm(16),
    "group norm": nn.GroupNorm(2, 4),
    "logsigmoid": nn.LogSigmoid(),
    "softmax": nn.Softmax(-1),
    "softmax in float32": Of(lambda m, x: F.softmax(x, -1, dtype=torch.float32).to(x.dtype)),
    "log softmax": nn.LogSoftmax(-1),
    "gelu": nn.GELU(),
    "silu": nn.SiLU(),
    "swiglu": Of(lambda m, x: F.silu(x) * (2 * x)),
    "linear": nn.Linear(16, 8),
    "matmul": Of(lambda m, x: x @ x.transpose(1, 2)),
    "cross entropy": Of(lambda m, x: F.cross_entropy(x.flatten(0, 1), torch.zeros(24, dtype=torch.long, device=x.device))),
    "vector norm": Of(lambda m, x: F.normalize(x, dim=-1)),
    "top k": Of(lambda m, x: x.topk(2)[0]),
}  # fmt: skip


@needs_build
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_saves_on_a_cpu_what_it_saves_on_a_gpu(name, dtype):
    def kept(device):
        module = copy.deepcopy(OPERATIONS[name]).to(device=device, dtype=dtype)
        return saved(module, torch.randn(6, 4, 16, device=device, dtype=dtype, requires_grad=True))

    with tensors_for(True, "cuda"):
        of_gpu = kept("cuda:0")
    here = on_gpu(lambda: kept("cpu"))
    if more := DIFFERENT.get(name, (0, 0))[dtype is torch.float32]:
        assert sum(size for _, size in of_gpu) == sum(size for _, size in here) + more
    else:
        assert of_gpu == here
