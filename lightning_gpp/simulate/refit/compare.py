"""How far predictions of a step are from what was measured, by kinds of what ranks do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_gpp.common.text_table import text_table
from lightning_gpp.simulate.timeline.span import SpanKind
from lightning_gpp.simulate.timeline.timeline import Timeline

PARTS: Mapping[str, tuple[SpanKind, ...]] = {
    "data": (SpanKind.DATA,),
    "prepare": (SpanKind.PREPARE,),
    "user's step": (SpanKind.FEED, SpanKind.LOSS),
    "forward": (SpanKind.FORWARD,),
    "backward": (SpanKind.BACKWARD,),
    "send": (SpanKind.SEND, SpanKind.FLUSH),
    "receive": (SpanKind.RECEIVE,),
    "reduce": (SpanKind.REDUCE,),
    "finish": (SpanKind.FINISH,),
    "optimizer": (SpanKind.OPTIMIZER,),
    "validation": (SpanKind.VALIDATION,),
}
"""Name -> kinds of spans; the rest of a step is waiting or idle."""

WAIT_AND_IDLE = "wait and idle"


def seconds_by_part(timeline: Timeline) -> dict[str, float]:
    """Seconds of the ranks' mean in every part of the step; they add up to the step."""
    count = timeline.num_ranks
    seconds = {
        name: sum(span.duration_s for span in timeline.spans if span.kind in kinds) / count
        for name, kinds in PARTS.items()
    }
    return seconds | {WAIT_AND_IDLE: max(0.0, timeline.step_s - sum(seconds.values()))}


@dataclass(frozen=True)
class Comparison:
    """A measured step beside predictions of it.

    Attributes:
        measured: the step.
        predicted: by what -> the predicted step (``"profile"``, ``"refit"``).
    """

    measured: Timeline
    predicted: Mapping[str, Timeline]

    def error(self, name: str) -> float:
        """By which part of it the predicted step is longer than the measured one."""
        return self.predicted[name].step_s / self.measured.step_s - 1

    def metrics(self) -> dict[str, float]:
        """The numbers by the names under which they are logged.

        Seconds of the step and its parts, errors as parts of the measured step.
        """
        known = seconds_by_part(self.measured)
        named = {"prediction/measured/step_s": self.measured.step_s}
        named |= {f"prediction/measured/{_name(part)}_s": s for part, s in known.items()}
        for source, timeline in self.predicted.items():
            where = f"prediction/{_name(source)}"
            named[f"{where}/step_s"] = timeline.step_s
            named[f"{where}/error"] = self.error(source)
            for part, seconds in seconds_by_part(timeline).items():
                named[f"{where}/{_name(part)}_s"] = seconds
        return named

    def table(self) -> str:
        """The parts of the step as a table, in milliseconds of the ranks' mean."""
        known = seconds_by_part(self.measured)
        found = [seconds_by_part(timeline) for timeline in self.predicted.values()]
        rows = [
            [part, _ms(known[part]), *_cells([each[part] for each in found], known[part])]
            for part in known
            if max(known[part], *(each[part] for each in found)) > 0
        ]
        steps = [timeline.step_s for timeline in self.predicted.values()]
        measured_s = self.measured.step_s
        rows.append(["step", _ms(measured_s), *_cells(steps, measured_s)])
        header = ["ms", "measured"]
        for name in self.predicted:
            header += [name, "error"]
        return text_table(header, rows, left=["ms"])


def _cells(predicted_s: Sequence[float], known_s: float) -> list[str]:
    return [
        cell
        for seconds in predicted_s
        for cell in (_ms(seconds), f"{(seconds / known_s - 1) * 100:+.0f} %" if known_s else "")
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _name(text: str) -> str:
    return re.sub(r"\W+", "_", text.replace("'", ""))
