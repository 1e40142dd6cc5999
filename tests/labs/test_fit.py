"""``labs/fit.py``: what it predicts is what it counts, and what it says of a try."""

import fit
import pytest

from actmem.config import PAPER_MODELS, Parallel
from actmem.ledger.emulate import emulated_rank

SHAPE = PAPER_MODELS["22B"].shape.with_sizes(num_layers=2)


@pytest.mark.parametrize(
    ("tensor", "sequence", "recompute"), [(False, False, "none"), (True, True, "selective"), (True, True, "full")]
)
def test_the_bill_is_what_is_counted(tensor, sequence, recompute):
    parallel = Parallel(8 if tensor else 1, sequence, micro_batch_size=SHAPE.micro_batch_size)
    bill = fit.predicted(SHAPE, parallel, recompute, "cpu")
    with emulated_rank(8):
        counted = fit.counted_peak(SHAPE, tensor, sequence, recompute)
    mask, token_ids = 2 * SHAPE.seq_length**2, 8 * SHAPE.micro_batch_size * SHAPE.seq_length
    loss = 4  # one float32, the caller's
    assert counted == bill.bytes + mask + token_ids + loss


def run(monkeypatch, *options):
    monkeypatch.setattr("sys.argv", ["fit.py", *options])
    return fit.main()


def test_a_try_that_fits_hears_what_would_do(monkeypatch, capsys):
    assert run(monkeypatch, "--layers", "2", "--tensor", "--sequence", "--recompute", "full") == 0
    shown = capsys.readouterr().out
    assert "Less recomputation would do: --recompute none" in shown and "The planner's first choice" in shown


def test_a_try_that_does_not_fit(monkeypatch, capsys):
    assert run(monkeypatch, "--layers", "1", "--card", "2") == 1
    assert "GiB more than the card has" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--sequence",), "sequence: needs --tensor"),
        (("--card", "0"), "card: must be a number of GiB above 0, got 0"),
        (("--ranks", "7", "--tensor"), "num_attention_heads: 64 must be divisible by tensor_parallel_size = 7"),
    ],
)
def test_wrong_use_is_one_line(monkeypatch, capsys, options, line):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *options)
    assert line in capsys.readouterr().err.splitlines()[-1]
