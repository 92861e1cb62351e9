"""The job ``compare`` for a model on one graph: pipeline, graph parallelism, or both?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_gpp.common.text_table import text_table, wrapped
from lightning_gpp.common.units_of_measure import bytes_text, count_text, number_text, seconds_text
from lightning_gpp.jobs.console_width import console_width
from lightning_gpp.jobs.files import save_json, written_to
from lightning_gpp.jobs.problem.full_graph_problem import FullGraphProblem
from lightning_gpp.planner.ways.answers import WaysAnswer, numbers_of_ways

COLUMNS = (
    "Ways: devices that divide the vertices of every chunk among themselves; groups: of layers. "
    "One way is a pipeline of layers, one group is graph parallelism.",
    "Epoch: predicted. Messages: activations and gradients that devices send in an epoch. Memory: "
    "of the fullest device, histories among it.",
)


def compare_ways(problem: FullGraphProblem, planner: str, folder: Path) -> dict[str, float]:
    """Prints a table with a row per number of ways, and writes ``compare.json``.

    Returns:
        Seconds of an epoch by the number of ways.
    """
    width = console_width()
    ways = [problem.ways] if problem.ways else numbers_of_ways(problem.cluster.num_devices)
    what = f"{problem.name} on {count_text(problem.cluster.num_devices, 'device')}"
    print(f"{wrapped([f'{what}, from {problem.source}'], width)}\n", flush=True)
    found = list(problem.answers(ways, planner))
    print(describe_ways(found, max_width=width))
    print(f"\n{wrapped(COLUMNS, width)}")
    save_json([_row(answer) for answer in found], folder / "compare.json")
    print(f"\n{written_to(folder)}")
    return {f"ways_{answer.question.num_ways}": answer.evaluation.step_s for answer in found}


def describe_ways(found: Sequence[WaysAnswer], *, max_width: int = 100) -> str:
    """A table with a row per number of ways."""
    best_s = min(answer.evaluation.step_s for answer in found)
    header = ["ways", "groups", "chunks", "epoch", "than\nbest", "messages", "memory"]
    rows = [
        [
            str(answer.question.num_ways),
            str(answer.question.num_groups),
            str(answer.question.num_chunks),
            seconds_text(answer.evaluation.step_s),
            number_text(answer.evaluation.step_s / best_s),
            bytes_text(answer.message_bytes),
            bytes_text(answer.evaluation.peak_memory_bytes)
            + ("" if answer.evaluation.is_feasible else " (does not fit)"),
        ]
        for answer in found
    ]
    return text_table(header, rows, max_width=max_width)


def _row(answer: WaysAnswer) -> dict[str, float]:
    question = answer.question
    return {
        "ways": question.num_ways,
        "groups": question.num_groups,
        "chunks": question.num_chunks,
        "epoch_s": answer.evaluation.step_s,
        "message_bytes": answer.message_bytes,
        "peak_memory_bytes": answer.evaluation.peak_memory_bytes,
    }
