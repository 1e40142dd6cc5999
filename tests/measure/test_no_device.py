"""CUDA without a GPU: what the stand-ins do on any build, and on a CUDA build what a layer keeps, against the formulas."""

import pytest
import torch
import torch.nn.functional as F

from actmem.config import ConfigError, ModelShape
from actmem.formulas.activations import layer_extra_rows, layer_rows
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.measure_layer import rows_by_term
from actmem.ledger.recorder import record
from actmem.recipes import RECOMPUTE_MODES
from actmem.rows import compare
from actmem.torch_private import fake_tensors
from actmem_course.lab_tools.gpu_kernel import attention_rows
from actmem_more.attention_kernels import AttentionCall, attention_kernel
from actmem_more.llama import LlamaLayer
from actmem_more.llama_shape import LLAMA_MODELS
from actmem_more.llama_terms import llama_rows
from actmem_tools.__main__ import main
from actmem_tools.no_device import OLDEST, cuda_without_device, gpu_of_this_build
from actmem_tools.torch_private import torch_release
from tests.measure.corner_cases import ledger_of

HERE = "tests.measure.factories_for_tests"
has_no_build = torch.version.cuda is None or torch.cuda.is_available() or torch_release() < OLDEST
needs_build = pytest.mark.skipif(has_no_build, reason="needs a CUDA build of torch, a new one, and no GPU")


def test_an_old_torch_is_refused(monkeypatch):
    monkeypatch.setattr("actmem_tools.no_device.torch_release", lambda: (2, 9))
    with (
        pytest.raises(ConfigError, match="^device: fake cuda without a GPU needs torch 2.11, this is"),
        cuda_without_device(),
    ):
        pass


def kept_on_cuda(shape, recompute):
    with fake_tensors(), cuda_without_device():
        layer = TransformerLayer(shape, device="cuda", dtype=torch.bfloat16, recompute=recompute)
        sizes = shape.seq_length, shape.micro_batch_size, shape.hidden_size
        x = torch.randn(sizes, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        return ledger_of(layer, x)


@needs_build
@pytest.mark.parametrize("recompute", RECOMPUTE_MODES)
def test_a_layer_keeps_what_the_formulas_say_of_cuda(recompute):
    shape = ModelShape(64, 2, 48, 4)
    rows = layer_rows(shape, recompute=recompute) + layer_extra_rows(shape, recompute=recompute, device_type="cuda")
    comparison = compare(rows, rows_by_term(kept_on_cuda(shape, recompute).saved))
    assert comparison.exact, comparison.describe()


def layer_rows_on(capability, shape, dtype, recompute="none"):
    """What a Llama layer keeps on such a GPU, and what the formulas and the table of kernels say of it."""
    gpu = gpu_of_this_build(capability)
    name = str(dtype).removeprefix("torch.")
    with fake_tensors(), cuda_without_device(gpu):
        layer = LlamaLayer(shape, recompute=recompute, routing="even", device="cuda", dtype=dtype)
        x = torch.randn(shape.seq_length, shape.micro_batch_size, shape.hidden_size, device="cuda", dtype=dtype)
        ledger = ledger_of(layer, x.requires_grad_())
    heads, lengths = (shape.num_attention_heads, shape.num_key_value_heads), 2 * (shape.seq_length,)
    kernel = attention_kernel(gpu, AttentionCall(name, shape.d, shape.value_size, *heads, *lengths, causal=True))
    predicted = llama_rows(shape, recompute=recompute, element_size=dtype.itemsize)
    if any(row.term == "log-sum-exp" for row in predicted):
        predicted += attention_rows(kernel, shape.micro_batch_size, heads[0], shape.seq_length)
    return kernel, compare(predicted, rows_by_term(ledger.saved))


@needs_build
@pytest.mark.parametrize("recompute", ["none", "elementwise"])
@pytest.mark.parametrize(
    ("capability", "dtype", "kernels"),
    [
        ((9, 0), torch.bfloat16, {"cuDNN"}),
        ((8, 0), torch.bfloat16, {"flash", "memory-efficient"}),  # the second: latent heads of two widths
        ((9, 0), torch.float32, {"memory-efficient"}),
        ((7, 5), torch.float16, {"memory-efficient"}),
    ],
)
def test_named_layers_keep_what_the_table_of_kernels_says(capability, dtype, kernels, recompute):
    if "memory-efficient" in kernels and torch_release() < (2, 14):
        pytest.skip("older torch has grouped queries in 16 bits on sm_80 only")
    found = {}
    for model, shape in LLAMA_MODELS.items():
        # a length that 32 does not divide, where the log-sum-exp is padded
        found[model], comparison = layer_rows_on(capability, shape.with_sizes(seq_length=1000), dtype, recompute)
        assert comparison.exact, f"{model}: {comparison.describe()}"
    assert set(found.values()) == kernels


@needs_build
def test_attention_keeps_what_its_kernel_keeps():
    def kept(capability, q, k, **options):
        with cuda_without_device(gpu_of_this_build(capability)), record(torch.nn.Identity()) as ledger:
            y = F.scaled_dot_product_attention(q, k, k, **options)
        node = y.grad_fn.name()
        del y
        return node, ledger.total_bytes

    with fake_tensors():
        q = torch.randn(2, 4, 40, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k = torch.randn(2, 2, 40, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        inputs, output, log_sum_exp = 2 * (q.numel() + k.numel()), 2 * q.numel(), 4 * 2 * 4 * 40
        # K and V are one tensor here, and are not repeated.
        assert kept((8, 0), q, k, is_causal=True, enable_gqa=True) == (
            "ScaledDotProductFlashAttentionBackward0",
            inputs + output + log_sum_exp + 24,
        )
        assert kept((9, 0), q, k, enable_gqa=True)[1] == inputs + output + log_sum_exp + 16
        mask = torch.ones(40, 40, device="cuda", dtype=torch.bool)
        node, held = kept((8, 0), q, q, attn_mask=mask)
        assert node.startswith("ScaledDotProductEfficient")
        assert held == 2 * output + 4 * 2 * 4 * 64 + 16 + 2 * 40 * 40
        node, held = kept((8, 0), q.detach().float().requires_grad_(), q.detach().float())
        assert node.startswith("ScaledDotProductEfficient")
        assert held == 3 * 2 * output + 4 * 2 * 4 * 64 + 16
        narrow = q.detach()[..., :12].requires_grad_()
        padded = 2 * 2 * 4 * 40 * 16
        assert kept((8, 0), narrow, narrow) == ("SliceBackward0", 4 * padded + log_sum_exp + 24)
        assert "Dot" not in kept((8, 0), q.detach().double().requires_grad_(), q.detach().double())[0]


@needs_build
def test_the_command_moves_a_model_there(capsys):
    assert main(["record", f"{HERE}:tiny", "--device", "cuda", "--fake"]) == 0
    assert capsys.readouterr().out.startswith("384 B")


def test_stand_ins_leave_the_cpu_alone_and_go_again():
    before = torch.Generator, F.scaled_dot_product_attention
    q = torch.randn(1, 2, 8, 4)
    plain = F.scaled_dot_product_attention(q, q, q)
    with cuda_without_device():
        on_cpu, on_cuda = torch.Generator("cpu").manual_seed(3), torch.Generator("cuda").manual_seed(3)
        assert torch.equal(torch.rand(3, generator=on_cpu), torch.rand(3, generator=before[0]().manual_seed(3)))
        assert (on_cuda.get_state().numel(), on_cuda.get_state().dtype) == (16, torch.uint8)
        assert on_cuda.set_state(on_cuda.get_state()) is on_cuda
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), plain)
    assert (torch.Generator, F.scaled_dot_product_attention) == before


@pytest.mark.parametrize(
    ("build", "arguments", "message"),
    [
        (None, [], "pip install torch --index-url"),
        ("13.0", [], "device: there is no GPU that this torch can use; --fake"),
        ("13.0", ["--fake", "--step"], "step: backward does not run on CUDA"),
    ],
)
def test_without_a_gpu_it_is_one_line_and_2(build, arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", build)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["record", f"{HERE}:tiny", "--device", "cuda", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
