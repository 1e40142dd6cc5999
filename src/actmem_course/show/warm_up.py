"""The interleaved schedule's warm-up: what its second p − r − 1 forwards buy when sends take time."""

from __future__ import annotations

from actmem.formulas.schedule import Schedule, interleaved, peak_in_flight
from actmem.formulas.timeline import timeline
from actmem_course.show.drawing import Drawing
from actmem_course.show.style import BLUE, INK, VERMILION

#: A forward's time in the units of the simulation, so that a send may take a part of one.
_FORWARD, _BACKWARD = 4, 8
_SENDS = tuple(range(_FORWARD + 1))


def warm_up_times(p: int, m: int, n: int, send_quarters: int) -> Drawing:
    """Time of a step over the time of a send, for both warm-ups; the markers are at ``send_quarters`` quarters of a forward."""
    long, short = interleaved(p, m, n), interleaved(p, m, n, short_warmup=True)
    held = {name: peak_in_flight(ranks)[0] for name, ranks in (("long", long), ("short", short))}
    now = {"long": _step(long, send_quarters), "short": _step(short, send_quarters)}
    slower = now["short"] / now["long"] - 1
    costs = f"takes {slower:.0%} longer" if slower > 0 else "takes no longer"
    send = "nothing" if not send_quarters else f"{send_quarters}/{_FORWARD} of a forward"
    traces = [
        *_traces("long: 2(p − r − 1) + (m − 1)p", long, send_quarters, BLUE, "solid"),
        *_traces("short: (p − r − 1) + (m − 1)p", short, send_quarters, VERMILION, "dash"),
    ]
    title = f"A send takes {send}: the short warm-up {costs}<br>and holds {held['short']} chunks on rank 0, not {held['long']}"
    layout = {
        "title": {"text": title},
        "xaxis": {"title": {"text": "time of a send, in forwards of a chunk"}, "range": [-0.05, 1.05]},
        "yaxis": {"title": {"text": "one step, in forwards of a chunk"}, "rangemode": "tozero"},
    }
    alt = (
        f"Two lines over the time of a send for p={p}, m={m}, n={n}: where a send takes {send}, a step takes {now['long']:g} forwards with "
        f"the long warm-up and {now['short']:g} with the short one, which holds {held['short']} chunks on rank 0 in place of {held['long']}."
    )
    return Drawing(traces, layout, alt)


def _step(ranks: Schedule, send: int) -> float:
    """Time of a step, in forwards."""
    return max(span.end for span in timeline(ranks, _FORWARD, _BACKWARD, send)) / _FORWARD


def _traces(name: str, ranks: Schedule, now: int, colour: str, dash: str) -> list[dict]:
    hover = f"<b>{name}</b><br>a send of %{{x:.2f}} forwards: a step takes %{{y:g}}<extra></extra>"
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": [send / _FORWARD for send in _SENDS],
            "y": [_step(ranks, send) for send in _SENDS],
            "line": {"color": colour, "width": 3, "dash": dash},
            "hovertemplate": hover,
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": f"{name}, now",
            "x": [now / _FORWARD],
            "y": [_step(ranks, now)],
            "marker": {"color": colour, "size": 13, "line": {"color": INK, "width": 1.5}},
            "hovertemplate": hover,
            "showlegend": False,
        },
    ]
