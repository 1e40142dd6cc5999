"""The ledger on small models: each is answered, none crashes, none is short."""

import pytest
import torch

from actmem.ledger.census import arguments_of, census
from tests.measure.corner_cases import CASES, ledger_of


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_every_byte_is_counted(name):
    make, expected = CASES[name]
    torch.manual_seed(0)
    module, inputs = make()
    args, kwargs = arguments_of(inputs)
    ledger = ledger_of(module, *args, **kwargs)
    torch.manual_seed(0)
    module, inputs = make()
    counted = census(module, lambda: inputs)
    assert ledger.total_bytes == counted, ledger.tensors
    assert expected is None or ledger.total_bytes == expected, ledger.tensors
    assert sum(t.bytes for t in ledger.tensors) == sum(ledger.by_kind().values()) == ledger.total_bytes


@pytest.mark.filterwarnings("ignore")
def test_a_nested_tensor_that_has_no_shape_is_as_long_as_its_elements():
    make, _ = CASES["nested"]
    module, inputs = make()
    assert [tensor.shape for tensor in ledger_of(module, *inputs).tensors][:3] == [(2, 3), (4, 3), (18,)]
