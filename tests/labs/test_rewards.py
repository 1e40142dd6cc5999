"""What a solved lab shows: bytes equal to the formula, in a terminal of 80 columns and as a page."""

import io

import plotly.graph_objects as go
import pytest
from rich.console import Console

from actmem_course.judge import reward as rewards
from actmem_course.judge.lab_checks import lab6_reward
from actmem_course.judge.lab_checks.lab6_reward import ModesReward, curve
from actmem_course.judge.outline import LAB_NAMES, load_lab, solutions_of
from actmem_course.results import ModeCost
from actmem_course.show.measured import training_figure
from tests.labs.judged import real_bench


def reward_of(name):
    # In this rank's own process; more steps and rounds show nothing new.
    lab6_reward._FEWEST = lab6_reward._MOST = 3
    rewards._SECONDS, rewards._FEWEST_ROUNDS = 0.0, 1
    return load_lab(name).reward(real_bench(dict(solutions_of(name))))


def shown(reward, width=80):
    output = io.StringIO()
    reward.show(Console(file=output, width=width, highlight=False))
    return output.getvalue()


@pytest.mark.parametrize("name", [name for name in LAB_NAMES if name != "lab6_train"])
def test_bytes_equal_the_formula(pools, name, tmp_path):
    alone = load_lab(name).one_process
    for reward in [reward_of(name)] if alone else pools[2].run(reward_of, name):
        counted = [measure for measure in reward.measures if measure.unit != "ms"]
        assert counted and all(
            len(set(measure.values.values())) == 1 and len(measure.values) > 1 for measure in counted
        ), counted
        text = shown(reward)
        assert reward.what in " ".join(text.split()) and "…" not in text
    reward.write_html(tmp_path / "page.html")
    assert reward.measures[0].name in (tmp_path / "page.html").read_text()


def test_lab_6_trains_the_modes_alike(pools, tmp_path):
    for reward in pools[2].run(reward_of, "lab6_train"):
        kept = [mode.kept_bytes for mode in reward.modes]
        assert kept == [mode.formula_bytes for mode in reward.modes] and kept[0] == max(kept) > kept[-1] == min(kept)
        assert {len(mode.losses) for mode in reward.modes} == {3} and reward.spread() < 1e-3
        assert all(mode.step_seconds > 0 for mode in reward.modes)
        assert "Kept bytes equal their formulas in all 6 modes, to the byte." in shown(reward)
    reward.write_html(tmp_path / "page.html")
    assert "6 modes, one loss curve" in (tmp_path / "page.html").read_text()


MODES = (ModeCost("none", 4000, 4000, 0.25, (5.5, 5.0, 4.0)), ModeCost("full", 1000, 1024, 0.5, (5.5, 5.25, 4.0)))


def test_modes_side_by_side():
    reward = ModesReward("A GPT", MODES, "By hand.")
    text = shown(reward)
    lines = [line.split() for line in text.splitlines() if line.startswith(("none ", "full "))]
    assert [line[:4] + line[4:6] for line in lines] == [
        ["none", "4,000", "B", "━" * 9, "250.0", "ms"],
        ["full", "1,024", "B", "━━", "500.0", "ms"],
    ]
    assert "full: 1,000 B by formula, 1,024 B kept" in text and "equal their formulas" not in text
    assert reward.spread() == 0.25 and "at most 2.5e-01" in text and text.rstrip().endswith("By hand.")


def test_a_curve_falls_from_the_highest_to_the_lowest_block():
    assert curve([3.0, 2.0, 1.0])[0] == "█" and curve([3.0, 2.0, 1.0])[-1] == "▁"
    assert len(curve([float(n) for n in range(100)])) == 12 and len(curve([1.0])) == 1


def test_training_figure_is_valid_and_says_what_it_shows():
    drawing = training_figure(MODES, "A GPT", 0.25, "By hand.\nTwice.")
    spec = drawing.spec()
    go.Figure({"data": spec["data"], "layout": spec["layout"]})
    assert "full keeps 1,024 B and takes 500 ms" in drawing.alt
    assert drawing.layout["title"]["text"] == "2 modes, one loss curve; none keeps 3.9 times the bytes of full"
    assert (
        drawing.layout["title"]["subtitle"]["text"]
        == "A GPT<br>Between the modes' losses of one step at most 2.5e-01.<br>By hand.<br>Twice."
    )
    formula = next(trace for trace in spec["data"] if trace["name"] == "bytes by formula")
    kept = spec["data"][0]
    assert [a / c for a, c in zip(formula["x"], kept["x"])] == [1, 1000 / 1024]
