"""Forty of transformers' newest models, and encoders with decoders: each bill is a real step's to the byte.

Where it isn't, ``newest_configs.json`` says by how many bytes and why.
"""

import json
from pathlib import Path

import pytest

from actmem.config import ConfigError
from actmem_more.gpu_kernels import gpu_kernels_on_cpu
from actmem_tools.load_model import built_model
from actmem_tools.plan.own_model import OwnModel, StepOptions
from actmem_tools.plan.step_time import Cluster
from actmem_tools.tape.config_model import ConfigModel
from actmem_tools.tape.model_tape import solved_target
from tests.plan.real_steps import peaks_of_steps

LISTS = json.loads(Path(__file__).with_name("newest_configs.json").read_text(encoding="utf-8"))
MODELS = LISTS["models"]


def test_of_forty_models_at_least_36_are_equal_and_the_others_have_a_reason():
    equal = [model for model in MODELS if not {"refused", "off"} & model.keys()]
    assert len({model["config"]["model_type"] for model in MODELS}) == 40 and len(equal) >= 36
    assert all(model["why"] for model in MODELS if model not in equal)


@pytest.mark.nightly
@pytest.mark.parametrize("model", LISTS["older"] + MODELS, ids=lambda model: model["config"]["model_type"])
def test_the_bill_of_a_configuration_is_a_real_step_at_unseen_sizes(model):
    pytest.importorskip("transformers", model["release"])
    given, dtype = model["config"], model.get("dtype", "bfloat16")
    try:
        config = ConfigModel(given)
        asked = {letter: {"s": 64, "b": 2}[letter] for letter in config.letters}
        parts, _, number = solved_target(given, asked, "", dtype, [""])
    except ConfigError as error:
        assert str(error) == model.get("refused")
        return
    off = []
    for s, b in model.get("sizes", [[45, 3], [83, 1]]):
        sizes = {"s": s} if "s" in asked else {}
        bill = OwnModel(parts, sizes, number, Cluster(1, 2**40, allowance_bytes=0), b)
        assert ("The encoder" in "".join(bill.notes())) == config.order.after_encoder
        for way in (StepOptions(b, 0, False), StepOptions(b, number, False)):
            with gpu_kernels_on_cpu():
                real, inputs = built_model(config.factory(), {**sizes, "b": b, "l": config.num_blocks}, dtype)
                off.append(peaks_of_steps(real, inputs, "\n".join(bill.code(way, dtype)))[0] - bill.bytes(way))
    assert "refused" not in model and off == model.get("off", [0] * 4)
