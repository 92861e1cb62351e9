"""The Lightning glue: strategies, and their registration.

From the Trainer to the stages: ``graphpipe``, ``gnnpipe`` (one full graph) and ``hap`` (SPMD
programs) are the strategies, ``base`` is what they share, ``settings`` what the user asked,
``session`` leads or follows the user's code, ``pipelined_run`` has what a rank has while a run
lasts, ``build`` makes the ``pipeline``, which runs what there is to run on it.

Folders: ``step`` is the life of a step, ``cutting`` cuts batches and joins results, ``state`` knows
who holds which parameters, ``logging`` carries what user code logs, ``ranks`` what ranks tell each
other, ``devices`` has the accelerators, ``planning`` finds the plan, ``recording`` lays recorded
steps beside their prediction, ``spmd`` divides a model by an SPMD program.
"""

from lightning_gpp.strategy.devices.accelerators import EmulatedAccelerator as EmulatedAccelerator
from lightning_gpp.strategy.devices.accelerators import PoolAccelerator as PoolAccelerator
from lightning_gpp.strategy.gnnpipe import GNNPipeStrategy as GNNPipeStrategy
from lightning_gpp.strategy.graphpipe import GraphPipeStrategy as GraphPipeStrategy
from lightning_gpp.strategy.hap import HAPStrategy as HAPStrategy
from lightning_gpp.strategy.one_device import single_device as single_device
from lightning_gpp.strategy.recording.timeline_callback import TimelineCallback as TimelineCallback
from lightning_gpp.strategy.state.sharded_checkpoint import unshard_checkpoint as unshard_checkpoint

ACCELERATORS = {kind.name(): kind for kind in (EmulatedAccelerator, PoolAccelerator)}
"""Accelerators by their name in Lightning's registry."""
