"""CUDA without a GPU: what the stand-ins do on any build, and on a CUDA build what a layer keeps, against the formulas."""

import pytest
import torch
import torch.nn.functional as F

from actmem.__main__ import main
from actmem.config import ModelShape
from actmem.formulas.activations import eq1, layer_rows
from actmem.formulas.extras import layer_extra_rows
from actmem.measure.ledger import record
from actmem.measure.no_device import cuda_without_device
from actmem.measure.term_names import rows_by_term
from actmem.model.layer import TransformerLayer
from actmem.recipes import RECOMPUTE_MODES
from actmem.rows import compare
from actmem.torch_private import fake_tensors

HERE = "tests.measure.factories_for_tests"
needs_build = pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(), reason="needs a CUDA build of torch and no GPU"
)


def kept_on_cuda(shape, recompute):
    with fake_tensors(), cuda_without_device():
        layer = TransformerLayer(shape, device="cuda", dtype=torch.bfloat16, recompute=recompute)
        sizes = shape.seq_length, shape.micro_batch_size, shape.hidden_size
        x = torch.randn(sizes, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with record(layer) as ledger:
            y = layer(x)
        del y
    return ledger


@needs_build
@pytest.mark.parametrize("recompute", RECOMPUTE_MODES)
def test_a_layer_keeps_what_the_formulas_say_of_cuda(recompute):
    shape = ModelShape(64, 2, 48, 4)
    rows = layer_rows(shape, recompute=recompute) + layer_extra_rows(shape, recompute=recompute, device_type="cuda")
    comparison = compare(rows, rows_by_term(kept_on_cuda(shape, recompute).saved))
    assert comparison.exact, comparison.describe()


@needs_build
def test_gpt3s_layer_is_equation_1_and_float32_statistics():
    shape = ModelShape(2048, 1, 12288, 96)
    assert kept_on_cuda(shape, "none").total_bytes == eq1(shape) + 2 * 2 * 4 * 2048 == 2_868_936_704


@needs_build
def test_attention_takes_the_flash_kernel():
    with fake_tensors(), cuda_without_device():
        q = torch.randn(2, 4, 32, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        assert "Flash" in str(F.scaled_dot_product_attention(q, q, q, is_causal=True).grad_fn)
        assert F.scaled_dot_product_attention(q, q[:, :2], q[:, :2], enable_gqa=True).shape == q.shape
        assert "Flash" not in str(F.scaled_dot_product_attention(q.float(), q.float(), q.float()).grad_fn)


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
    ("arguments", "message"),
    [([], "device: there is no GPU here: add --fake"), (["--fake", "--step"], "step: backward does not run on CUDA")],
)
def test_without_a_gpu_it_is_one_line_and_2(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["record", f"{HERE}:tiny", "--device", "cuda", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
