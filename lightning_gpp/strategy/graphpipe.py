"""The strategy for a graph of stages: ``Trainer(strategy="graphpipe", devices=N)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from lightning_gpp.capture import BlockGraph
from lightning_gpp.common.checks import check_whole
from lightning_gpp.planner import GRAPHPIPE
from lightning_gpp.planner.base import FASTEST
from lightning_gpp.schedule import ONE_F_ONE_B, ONE_F_ONE_B_ASYNC, SCHEDULES
from lightning_gpp.strategy.base import BaseStrategy
from lightning_gpp.strategy.devices.devices_at_hand import ClusterLike
from lightning_gpp.strategy.ranks.pipelines import StartMethod
from lightning_gpp.strategy.settings import (
    CacheLike,
    CostsLike,
    PlanLike,
    Report,
    Settings,
    check_name,
    compile_options,
    resolve_costs,
)
from lightning_gpp.strategy.state.saving import StateDictType
from lightning_gpp.weights.policies import find_policy


class GraphPipeStrategy(BaseStrategy):
    """Trains an unmodified LightningModule split over devices as a graph of pipeline stages.

    Args:
        num_microbatches: micro-batches that a mini-batch is cut into; by default the planner
            chooses.
        schedule: ``"gpipe"``, which holds the activations of all micro-batches and is exact for
            every loss, or ``"1f1b"``, which holds few of them and runs the step once per
            micro-batch, so that the loss has to be a mean over samples. By default ``"gpipe"``
            where a plan fits into memory with it, else ``"1f1b"``, and the report says so;
            ``"fastest"`` takes ``"1f1b"`` also where that is predicted to be more than 5 % faster.
            ``"1f1b-async"`` keeps the pipeline full across steps: batches in flight meet weights
            that change meanwhile, as ``weights`` says.
        planner: name of the planner that makes the plan; by default ``"graphpipe"``. Others:
            ``"graphpipe_exclusive"``, ``"sequential"``, ``"balanced"``, ``"pipedream"``,
            ``"piper"``, ``"data_parallel"``.
        plan: a plan made by hand instead: a :class:`~lightning_gpp.Plan`, its JSON file, or a list
            with the module names of each stage.
        module: qualified name of the sub-module whose forward is pipelined; by default the
            LightningModule's own forward or, if it has none, that of its one child with parameters.
        blocks: the graph of blocks, for a forward that cannot be captured.
        leaf_modules: module types or qualified names that stay one operator each.
        cluster: the devices and links that the planner assumes, one device per rank in the order of
            the ranks: a :class:`~lightning_gpp.cluster.Cluster`, a preset (``"dgx_a100"``) or a
            file. By default the devices found, with their memory, and typical links.
        cache: whether profiles and plans are cached, or the folder to cache them in. The default
            folder is the platform's cache folder, or the one that the environment variable
            LIGHTNING_GPP_CACHE names (empty: no cache).
        costs: costs to plan with: :class:`~lightning_gpp.cost.Costs`, which replace the
            measurement; a :class:`~lightning_gpp.simulate.Refit` of recorded steps, which corrects
            it; or a file of either, such as the ``refit.json`` that
            :class:`~lightning_gpp.strategy.TimelineCallback` writes.
        use_all_devices: whether the plan has to use every device, if any plan does. False leaves
            devices idle where that is predicted to be faster.
        weights: the weights that forwards and backwards use with ``schedule="1f1b-async"``
            (:data:`lightning_gpp.weights.policies.POLICIES`). The default, ``"pipeoptim"``,
            predicts the weights of the backward.
        state_dict_type: the form of checkpoints: ``"full"``, one file, for which rank 0 gathers
            everything, or ``"sharded"``, a folder into which every rank writes its part. Either can
            be read with both settings.
        report: how much is printed about a plan: ``"short"``, three lines and the verdict, or
            ``"full"``, also a table and a picture of the stages, and whether ``"1f1b"`` would be
            faster.
        compile: whether ``torch.compile`` compiles the forwards of the stages, each as one graph;
            or its options (``{"mode": "max-autotune"}``). The plan is made with the costs of
            uncompiled stages.
        pipelines: number of pipelines that train with data parallelism. Each has N / ``pipelines``
            of the N devices and batches of its own; gradients are averaged as in DDP. ``plan`` and
            ``cluster`` describe one of them.
        replan_every_n_epochs: number of epochs after which the planner is asked again, with the
            seconds of recorded steps. A plan that is predicted to be more than 5 % faster is used
            from the next epoch on; weights and all state move to its devices.
        timeout: seconds after which a wait for another rank ends in an error.
        start_method: how processes are started on this host: ``"popen"`` runs the script again;
            ``"spawn"``, ``"fork"`` and ``"forkserver"`` are those of Python's multiprocessing.
        lightning: arguments of all Lightning strategies (``accelerator``, ``precision_plugin``).

    Raises:
        ValueError: unknown schedule or planner (the text lists the known ones), or a number that
            makes no sense.
    """

    def __init__(
        self,
        num_microbatches: int | None = None,
        schedule: str | None = None,
        planner: str | None = None,
        plan: PlanLike | None = None,
        module: str | None = None,
        *,
        blocks: BlockGraph | None = None,
        leaf_modules: Sequence[type | str] = (),
        cluster: ClusterLike | None = None,
        cache: CacheLike = True,
        costs: CostsLike | None = None,
        use_all_devices: bool = True,
        weights: str | None = None,
        state_dict_type: StateDictType = "full",
        report: Report = "short",
        compile: bool | Mapping[str, Any] = False,
        pipelines: int = 1,
        replan_every_n_epochs: int | None = None,
        timeout: float = 1800.0,
        start_method: StartMethod = "popen",
        **lightning: Any,
    ) -> None:
        if schedule is not None:
            check_name("schedule", schedule, [*SCHEDULES, FASTEST, ONE_F_ONE_B_ASYNC.name])
        if schedule == ONE_F_ONE_B_ASYNC.name:
            num_microbatches = 1 if num_microbatches is None else num_microbatches
            if weights is not None and find_policy(weights).drains:
                schedule, weights = ONE_F_ONE_B.name, None
        settings = Settings(
            num_microbatches=num_microbatches,
            schedule=schedule,
            planner=planner or GRAPHPIPE,
            plan=plan,
            module=module,
            blocks=blocks,
            leaf_modules=tuple(leaf_modules),
            timeout_s=timeout,
            cluster=cluster,
            cache=cache,
            use_all_devices=use_all_devices,
            costs=resolve_costs(costs),
            weights=weights,
            report=report,
            compile=compile_options(compile, schedule),
            replan_every_n_epochs=replan_every_n_epochs,
        )
        check_name("state_dict_type", state_dict_type, get_args(StateDictType))
        check_whole("pipelines", pipelines)
        super().__init__(settings, start_method=start_method, **lightning)
        self.state_dict_type, self.num_pipelines = state_dict_type, pipelines
