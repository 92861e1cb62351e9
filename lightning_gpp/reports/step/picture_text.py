"""What is written around the picture of a step."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpp.common.units_of_measure import count_text, number_text, percent_text
from lightning_gpp.simulate.timeline.shares import path_shares, shares
from lightning_gpp.simulate.timeline.span import SpanKind
from lightning_gpp.simulate.timeline.timeline import LOSS, Timeline, TimelineStage


def title(timeline: Timeline, measured: Timeline | None = None) -> str:
    """What was measured or predicted, how long it takes, and how much of it is bubble.

    Args:
        timeline: the step.
        measured: with which a predicted step is compared.
    """
    step = "" if timeline.step is None else f" {timeline.step}"
    bubble = percent_text(shares(timeline).bubble_share, 1)
    beside = ""
    if measured is not None and measured is not timeline and measured.step_s:
        part = timeline.step_s / measured.step_s - 1
        how = "less" if part < 0 else "more"
        beside = f" ({percent_text(abs(part), 1)} {how} than {measured.source})"
    took = f"{number_text(timeline.step_s * 1e3)} ms"
    name = f" ({timeline.name})" if timeline.name else ""
    what = f"step{step}"
    if timeline.num_minibatches > 1:
        first = "" if timeline.step is None else f" from {timeline.step} on"
        what = f"steps{first}, {timeline.num_minibatches} that overlap"
    text = f"{timeline.source} {what}{name}: {took}{beside}, bubble {bubble}"
    return text[0].upper() + text[1:]


def subtitle(timeline: Timeline) -> str:
    """The schedule, the stages and ranks, the micro-batches."""
    num_stages = _num_stages(timeline.stages)
    parts = [
        f"schedule {timeline.schedule}",
        f"{count_text(num_stages, 'stage')} on {count_text(timeline.num_ranks, 'rank')}",
        _batches(timeline),
    ]
    if timeline.weights:
        parts.append(f"weights {timeline.weights}")
    if error_s := max(timeline.clock_error_s, default=0.0):
        parts.append(f"clocks agree within {error_s * 1e3:.2g} ms")
    return "  ·  ".join(parts)


def versions_text(timeline: Timeline) -> str:
    """How to read which weights bars had; empty where mini-batches do not overlap."""
    if all(span.updates is None for span in timeline.spans):
        return ""
    return "below the mini-batch: updates before it; 12→15: its backward comes after 15"


def _num_stages(stages: Sequence[TimelineStage]) -> int:
    """As the plan counts them: replicas are one stage, and the loss is none."""
    return len({stage.title.partition(".")[0] for stage in stages if stage.title != LOSS})


def _batches(timeline: Timeline) -> str:
    """How many mini-batches and micro-batches there are."""
    if timeline.num_minibatches > 1:
        return f"{timeline.num_minibatches} mini-batches"
    minibatches = 1 + max((span.minibatch for span in timeline.spans), default=0)
    text = count_text(num_microbatches(timeline) // minibatches, "micro-batch")
    return f"{text} in each of {minibatches} mini-batches" if minibatches > 1 else text


def path_text(timeline: Timeline) -> str:
    """What the critical path consists of; empty where it is not known."""
    if not timeline.critical_path:
        return ""
    found = path_shares(timeline)
    parts = [f"{name} {percent_text(share, 1)}" for name, share in found.items() if share >= 0.005]
    inferred = "" if timeline.source == "predicted" else ", as far as spans tell"
    return f"critical path{inferred}: {', '.join(parts)}"


def num_microbatches(timeline: Timeline) -> int:
    """Most micro-batches that a stage runs forward in the step."""
    counts = [0] * len(timeline.stages)
    for span in timeline.spans:
        if span.kind is SpanKind.FORWARD and span.stage is not None:
            counts[span.stage] += 1
    return max(counts, default=0)


def stage_lines(stages: Sequence[TimelineStage], columns: int) -> list[list[str]]:
    """What the stages are, in lines of some columns."""
    most = 130 // columns
    replicas: dict[tuple[str, str], list[str]] = {}
    for stage in stages:
        of_plan = stage.title.partition(".")[0]
        replicas.setdefault((of_plan, stage.label), []).append(stage.name)
    texts = [
        of_plan + (f" ({names[0]} to {names[-1]})" if len(names) > 1 else "") + f": {label}"
        for (of_plan, label), names in replicas.items()
        if label
    ]
    texts = [text if len(text) <= most else f"{text[: most - 1]}…" for text in texts]
    num_lines = -(-len(texts) // columns)
    return [texts[number::num_lines] for number in range(num_lines)]
