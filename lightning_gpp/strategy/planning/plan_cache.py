"""Caches plans by the question that they answer."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

from lightning_gpp.cluster import cluster_to_json
from lightning_gpp.common.document_cache import DocumentCache, content_hash, folder_of
from lightning_gpp.cost import costs_to_json
from lightning_gpp.graph import graph_to_json
from lightning_gpp.planner.base import PlanRequest
from lightning_gpp.planner.make_plan import answer
from lightning_gpp.planner.plan.plan import Plan, plan_from_json, plan_to_json
from lightning_gpp.strategy.settings import CacheLike


def kept_answer(given: CacheLike, request: PlanRequest, planner: str) -> Plan:
    """The plan of a planner: the one that it found before, or a new one, which is kept.

    Args:
        given: the folder, as :func:`~.profile_cache.profiled` takes it.
        request: the question.
        planner: name of the planner.
    """
    documents, key = DocumentCache(folder_of(given)), {}
    if documents.folder is not None:
        key = {"planner": planner, "sources": _newest_source_ns(), **_content(request)}
        if (found := documents.read("plan", key, plan_from_json)) is not None:
            return found[0]
    plan = answer(request, planner)
    documents.write("plan", key, plan_to_json(plan))
    return plan


def _content(request: PlanRequest) -> dict[str, Any]:
    plain = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    texts = {"graph": graph_to_json, "cluster": cluster_to_json, "costs": costs_to_json}
    return plain | {name: content_hash(text(plain[name])) for name, text in texts.items()}


@cache
def _newest_source_ns() -> int:
    """Another one after every change of the package, which may plan otherwise."""
    package = Path(__file__).parents[2]
    return max(path.stat().st_mtime_ns for path in package.rglob("*.py"))
