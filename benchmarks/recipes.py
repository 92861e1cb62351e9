"""The table of the README: every recipe on one device and on four ranks, with its final metrics.

Runs the `graphpipe` command as a person would, with the recipes' defaults. Without a data root the
recipes train on generated or library-shipped data.

    python benchmarks/recipes.py --data-root $DATA
    python benchmarks/recipes.py --recipes dlrm --options trainer.max_epochs=1
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

RECIPES = {
    "multimodal": ["strategy.num_microbatches=8"],
    "dlrm": [],
    "gnn": [],
}
PLACES = {
    "one device": ["strategy=single_device"],
    "four ranks": ["strategy=graphpipe", "trainer.devices=4"],
}


def run(options: list[str]) -> tuple[dict[str, float], float]:
    """Runs the command; its final metrics and the seconds that it took as a whole."""
    with tempfile.TemporaryDirectory() as folder:
        start_s = time.perf_counter()
        subprocess.run(
            ["graphpipe", *options, f"hydra.run.dir={folder}"],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        seconds = time.perf_counter() - start_s
        metrics: dict[str, float] = json.loads((Path(folder) / "metrics.json").read_text())
    return metrics, seconds


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", nargs="+", choices=[*RECIPES], default=[*RECIPES])
    parser.add_argument("--data-root", default=os.environ.get("LIGHTNING_GPP_DATA"))
    parser.add_argument("--options", nargs="*", default=[], help="more options of graphpipe")
    arguments = parser.parse_args()
    if arguments.data_root:
        os.environ["LIGHTNING_GPP_DATA"] = arguments.data_root
    print("| recipe | runs on | final metrics | whole command |\n|---|---|---|---|", flush=True)
    for recipe in arguments.recipes:
        for place, options in PLACES.items():
            own = RECIPES[recipe] if place == "four ranks" else []
            metrics, seconds = run([f"recipe={recipe}", *options, *own, *arguments.options])
            shown = ", ".join(
                f"`{name}` {value:.5g}"
                for name, value in sorted(metrics.items())
                if name.startswith("val_")
            )
            print(f"| `{recipe}` | {place} | {shown} | {seconds:.0f} s |", flush=True)


if __name__ == "__main__":
    main()
