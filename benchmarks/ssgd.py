"""More GPUs, or better overlap? S-SGD of published profiles on published networks.

Layer-wise profiles of PipeDream (computing), all-reduce lines of MG-WFBP (communication): the
speed-up over one GPU with as many samples for each GPU, and what would help most on 16 GPUs.

    python benchmarks/ssgd.py /path/to/pipedream/profiles [name …]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_gpp.cluster import uniform_cluster
from lightning_gpp.planner import plan_request
from lightning_gpp.simulate.ssgd.all_reduce_fit import PUBLISHED_FITS
from lightning_gpp.simulate.ssgd.layers import Layer, model_layers
from lightning_gpp.simulate.ssgd.program import VARIANTS, Ssgd
from lightning_gpp.simulate.what_if.levers import levers
from lightning_gpp.text_table import text_table
from lightning_gpp.units_of_measure import bytes_text, seconds_text
from lightning_gpp.workloads import read_pipedream_profile

NETWORKS = ("vgg16", "resnet50", "inception_v3", "gnmt")
OVERLAPS = tuple(name for name in VARIANTS if name != "pre-fetch")  # there is no input here
NUM_LEVERS = 3


def main(folder: Path, names: Sequence[str]) -> None:
    """Prints a table of speed-ups and of levers."""
    rows, ranked = [], []
    for name in names:
        layers = profile_layers(folder / f"{name}.txt")
        for network, fits in PUBLISHED_FITS.items():
            for num_devices, fit in fits.items():
                cases = [Ssgd(layers, fit.cluster(num_devices), variant) for variant in OVERLAPS]
                rows.append([name, network, str(num_devices), *speedups(cases)])
            ranked.append([name, network, *best_levers(cases[0])])
        gradients = sum(layer.gradient_bytes for layer in layers)
        alone_s = Ssgd(layers, uniform_cluster(1), "naive").simulate().step_s
        print(f"{name}: {bytes_text(gradients)} of gradients, {seconds_text(alone_s)} per step")
    print(text_table(["network", "links", "GPUs", *OVERLAPS], rows, left=["network", "links"]))
    header = ["network, 16 GPUs, naive", "links", *(f"{n}." for n in range(1, NUM_LEVERS + 1))]
    print(f"\n{text_table(header, ranked, left=header)}")


def profile_layers(path: Path) -> tuple[Layer, ...]:
    """The operators of a profile for the mini-batch that it was measured with."""
    workload = read_pipedream_profile(path)
    samples = workload.samples_per_device
    request = plan_request(
        workload.graph, 1, minibatch_size=samples, costs=workload.costs_for(uniform_cluster(1))
    )
    return model_layers(request, samples)


def speedups(cases: Sequence[Ssgd]) -> list[str]:
    """Speed-up of every case over one GPU."""
    alone_s = Ssgd(cases[0].layers, uniform_cluster(1), "naive").simulate().step_s
    return [f"{case.samples * alone_s / case.simulate().step_s:.2f}" for case in cases]


def best_levers(case: Ssgd) -> list[str]:
    """The changes that buy most."""
    found = levers(case)[:NUM_LEVERS]
    return [f"{lever.name} {100 * (lever.gain or 0.0):+.0f} %" for lever in found]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or NETWORKS)
