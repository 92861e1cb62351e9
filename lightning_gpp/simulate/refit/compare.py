"""How far predictions of a step are from what was measured, by kinds of what ranks do."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
        named = {}
        for source, timeline in {"measured": self.measured, **self.predicted}.items():
            where = f"prediction/{_name(source)}"
            named[f"{where}/step_s"] = timeline.step_s
            named |= {f"{where}/{_name(p)}_s": s for p, s in seconds_by_part(timeline).items()}
            if source in self.predicted:
                named[f"{where}/error"] = self.error(source)
        return named

    def table(self) -> str:
        """The parts of the step as a table, in milliseconds of the ranks' mean."""
        columns = [
            seconds_by_part(timeline) | {"step": timeline.step_s}
            for timeline in (self.measured, *self.predicted.values())
        ]
        rows = []
        for part, known_s in columns[0].items():
            row = [part, f"{known_s * 1e3:.2f}"]
            for column in columns[1:]:
                error = f"{(column[part] / known_s - 1) * 100:+.0f} %" if known_s else ""
                row += [f"{column[part] * 1e3:.2f}", error]
            if any(column[part] > 0 for column in columns):
                rows.append(row)
        header = ["ms", "measured", *(h for name in self.predicted for h in (name, "error"))]
        return text_table(header, rows, left=["ms"])


def _name(text: str) -> str:
    return re.sub(r"\W+", "_", text.replace("'", ""))
