"""Any number of blocks, some of which run again, by tapes of one to three: equal to real runs at sizes not seen."""

import random
from functools import partial
from pathlib import Path

import pytest
import torch

from actmem.config import ConfigError
from actmem.tape.blocks import recompute_code
from actmem.tape.evaluate import BACKWARD, Mark, Run, moments, read_events
from actmem.tape.model_tape import run_factory, solved_blocks, solved_target
from actmem.tape.solver import draw_sizes, parsed_letters
from tests.tape import models_for_tapes
from tests.tiers import at_night

MODELS = Path(models_for_tapes.__file__)


def real(factory, sizes, blocks, again, path, part):
    """Kept and peak bytes of forward and backward, FLOPs and bytes moved, of a real run."""

    def prepare(model):
        exec(recompute_code(path, again, part), {"model": model})

    events = run_factory(factory, {**sizes, "l": blocks}, prepare=prepare)
    kept = next(live for event, live, _ in moments(events) if isinstance(event, Mark) and event.name == BACKWARD)
    peak = max(live for event, live, _ in moments(events) if isinstance(event, Run))
    reading = read_events(events)
    return kept, peak, reading.flops.total(), reading.moved_bytes.total()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "letters", "parts"),
    [("stack", "s,b,h,f,v", ("mlp",)), at_night(("llama", "s,b,h,a,k,f,v", ("", "mlp", "self_attn", "operations")))],
)
def test_any_number_of_blocks_is_a_real_run(name, letters, parts):
    if name.startswith("llama"):
        pytest.importorskip("transformers")
    factory = getattr(models_for_tapes, name)
    letters, rules, _ = parsed_letters(letters)
    solved = solved_blocks(
        factory, letters, rules, may_be_one=("b",), parts=parts, at=draw_sizes(letters, rules, random.Random(1))
    )
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for part, blocks, again in [(part, *counts) for part in solved for counts in ((7, 0), (6, 6), (7, 3), (3, 1))]:
        sizes = draw_sizes(letters, rules, rng) | {"s": rng.randrange(40, 90), "b": rng.choice((1, 4))}
        need = solved[part].need(sizes, again, blocks - again)
        told = need.kept_bytes, need.peak.bytes, need.product_flops, need.moved_bytes
        assert told == real(factory, sizes, blocks, again, solved[part].path, part)
        assert sum(row.bytes for row in need.peak.rows) == need.peak.bytes
        model = factory(**{**sizes, "num_layers": blocks})[0]
        ends, block, early, *frozen = solved[part].num_elements(sizes)
        assert ends + blocks * block == sum(p.numel() for p in model.parameters())
        outputs = [
            p.numel()
            for name, p in model.named_parameters()
            if name in ("output.weight", "lm_head.weight", "model.norm.weight")
        ]
        assert early == sum(outputs) and frozen == [0, 0]


@pytest.mark.nightly
def test_blocks_that_are_not_alike_are_refused():
    letters, rules, _ = parsed_letters("s,b,h,f,v")
    with pytest.raises(ConfigError, match="aren't alike: 5 of them keep .* by runs of fewer"):
        solved_blocks(models_for_tapes.odd_stack, letters, rules)


def test_a_model_without_blocks_is_refused():
    def mlp(s, b, h, l):  # noqa: E741
        return torch.nn.Linear(h, h), (torch.randn(b, s, h),)

    with pytest.raises(ConfigError, match="must have a list of 5 blocks"):
        solved_blocks(mlp, *parsed_letters("s,b,h")[:2])


@pytest.mark.nightly
def test_solving_leaves_the_number_of_threads():
    before = torch.get_num_threads()
    with pytest.raises(ConfigError, match="the number of layers, is missing"):
        solved_target(f"{MODELS}:stack", {"s": 8, "b": 1}, "", "float32", [""])
    solved_target(f"{MODELS}:stack", {"s": 8, "b": 2, "h": 8, "f": 8, "v": 8, "l": 2}, "", "float32", [""])
    assert torch.get_num_threads() == before


def test_the_recomputation_is_checkpoint_on_the_first_blocks():
    model = models_for_tapes.Stack(8, 8, 8, 3)
    exec(recompute_code("blocks", 2, "mlp"), {"model": model})
    again = [isinstance(vars(block.mlp).get("forward"), partial) for block in model.blocks.children()]
    assert again == [True, True, False]
