"""Goes through a newcomer's first hour and leaves a transcript and all pictures.

    python benchmarks/first_hour.py FOLDER                 # clone, environment, everything
    python benchmarks/first_hour.py FOLDER --installed     # with the environment of this Python
    python benchmarks/first_hour.py FOLDER --suite         # the whole tests, too: half an hour more

In FOLDER: ``transcript.md`` with every command, its seconds, how long it said nothing, exit code
and output, as terminals of 80 and of 120 columns show it; ``pictures/`` with what the runs drew,
and how Chromium shows their pages, where it is installed. Ends with 1 if a command failed (or a
mistaken one did not).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
LIMIT_S = 3600
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")

OWN_SCRIPT = """\
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TwoTowers(LightningModule):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))
        self.right = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64))
        self.head = nn.Linear(128, 1)

    def forward(self, x):
        return self.head(torch.cat([self.left(x), self.right(x)], dim=1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(1024, 16)
    data = DataLoader(TensorDataset(x, x.square().mean(1, keepdim=True)), batch_size=64)
    trainer = Trainer(strategy="graphpipe", accelerator="cpu", devices=2, max_epochs=3)
    trainer.fit(TwoTowers(), data)
    print("steps", trainer.global_step, "loss", float(trainer.callback_metrics["train_loss"]))
"""

NOTEBOOK = """\
import nbclient, nbformat
notebook = nbformat.read("clone/docs/notebook.ipynb", as_version=4)
nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
print("".join(output.get("text", "") for output in notebook.cells[-1].outputs))
"""


@dataclass
class Hour:
    """What is done, one command after the other.

    Attributes:
        folder: where everything is.
        scripts: the folder of ``python``, ``pip`` and ``graphpipe``.
        waits: seconds and what was waited for.
        silences: the longest of each command without a new line, likewise.
        failed: commands that failed.
    """

    folder: Path
    scripts: Path
    waits: list[tuple[float, str]] = field(default_factory=list)
    silences: list[tuple[float, str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Writes a line or a block of the transcript."""
        with (self.folder / "transcript.md").open("a", encoding="utf-8") as file:
            file.write(f"{text}\n\n")

    def run(
        self, command: str, *, columns: int = 120, at: str = ".", is_mistaken: bool = False
    ) -> None:
        """Runs a command line as a person at a terminal of so many columns.

        It is expected to end well, or in an error where it is mistaken.
        """
        variables = os.environ | {
            "PATH": f"{self.scripts}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": str(columns),
            "PIP_QUIET": "1",
            "PYTHONUNBUFFERED": "1",  # what is printed is there when it is
            "LIGHTNING_GPP_CACHE": str(self.folder / "cache"),
        }
        begin_s = time.monotonic()
        with subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder / at,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            text, silent_s = _read(process)
        took_s = time.monotonic() - begin_s
        self.waits.append((took_s, command))
        self.silences.append((silent_s, command))
        if bool(process.returncode) != is_mistaken:
            self.failed.append(command)
        print(f"{took_s:7.1f} s  {process.returncode}  {command}", flush=True)
        self.say(
            f"## `{command}`\n\n{took_s:.1f} s, at most {silent_s:.1f} s of them without a word, "
            f"exit code {process.returncode}, {columns} columns\n\n"
            f"```text\n{_as_shown(text)}\n```"
        )

    def say_longest(self, what: str, of: list[tuple[float, str]]) -> None:
        """Writes the five longest."""
        rows = [f"- {seconds:.1f} s: `{command}`" for seconds, command in sorted(of)[:-6:-1]]
        self.say("\n".join([f"# {what}", "", *rows]))


def _read(process: subprocess.Popen[bytes]) -> tuple[str, float]:
    """What a command says until it ends, and the seconds of its longest silence."""
    assert process.stdout is not None
    limit = threading.Timer(LIMIT_S, process.kill)
    limit.start()
    said, silent_s, last_s = b"", 0.0, time.monotonic()
    while True:
        part = os.read(process.stdout.fileno(), 1 << 16)
        now_s = time.monotonic()
        silent_s, last_s = max(silent_s, now_s - last_s), now_s
        said += part
        if not part:
            limit.cancel()
            return said.decode(errors="replace"), silent_s


def _as_shown(text: str) -> str:
    """What is left of an output on the screen, where progress bars make way for what follows."""
    lines = [line.rpartition("\r")[2] for line in text.rstrip().split("\n")]
    return "\n".join(line for line in lines if not re.search(r"[\d?]it/s", line))


def install(hour: Hour) -> None:
    """Both commands of the README, in a fresh environment."""
    for command in readme_commands():
        install_part, _, run_part = command.partition(" && ")
        hour.run(install_part, at="clone")
        if "pytest" not in run_part:
            hour.run(run_part, columns=80, at="work")


def readme_commands() -> list[str]:
    """The commands of README's first block."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    block = text.split("```bash\n", 1)[1].split("```", 1)[0]
    return [line.partition("  #")[0].strip() for line in block.splitlines()]


def use(hour: Hour) -> None:
    """What a newcomer tries next."""
    work = hour.folder / "work"
    (work / "own.py").write_text(OWN_SCRIPT, encoding="utf-8")
    page = (REPOSITORY / "docs" / "command_line.md").read_text(encoding="utf-8")
    composing = page.split("**In another Hydra application**", 1)[1]
    (work / "conf").mkdir(exist_ok=True)
    for kind, name in (("yaml", "conf/app.yaml"), ("python", "app.py")):
        block = re.search(rf"```{kind}\n(.*?)```", composing, re.DOTALL)
        assert block is not None, f"docs/command_line.md shows no {name}"
        (work / name).write_text(block[1], encoding="utf-8")
    for columns in (80, 120):
        hour.run("graphpipe --help", columns=columns, at="work")
        hour.run("graphpipe job=plan data=digits", columns=columns, at="work")
    hour.run("graphpipe data=digits hydra.run.dir=default", at="work")
    hour.run("graphpipe experiment=four_devices hydra.run.dir=four_devices", columns=80, at="work")
    hour.run("python own.py", at="work")
    hour.run(
        "graphpipe -m data=digits trainer.max_epochs=2 strategy.schedule=gpipe,1f1b", at="work"
    )
    hour.run("python app.py trainer.max_epochs=2", at="work")
    job = "ckpt_path=$(ls -d $PWD/default/lightning/checkpoints/*.ckpt | head -1)"
    hour.run(f"graphpipe job=predict data=digits {job}", at="work")
    hour.run(f"graphpipe data=digits trainer.max_epochs=12 {job}", at="work")
    hour.run("graphpipe recip=dlrm", columns=80, at="work", is_mistaken=True)
    (hour.folder / "notebook.py").write_text(NOTEBOOK, encoding="utf-8")
    hour.run("python notebook.py")


def pictures(hour: Hour) -> None:
    """Collects what was drawn, and how a browser shows the pages."""
    target = hour.folder / "pictures"
    target.mkdir(exist_ok=True)
    browser = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    for path in sorted((hour.folder / "work").rglob("*")):
        name = "-".join(path.relative_to(hour.folder / "work").parts)
        if path.suffix == ".png":
            shutil.copy(path, target / name)
        elif path.suffix == ".html" and browser is not None:
            screenshot = f"--screenshot={target / name}.png"
            flags = "--headless --no-sandbox --window-size=1400,900"
            hour.run(f"{browser} {flags} {screenshot} file://{path} 2>> browser.log")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--installed", action="store_true", help="no fresh environment")
    parser.add_argument("--suite", action="store_true", help="runs the whole tests")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if folder.exists():
        parser.error(f"{folder} is there already; name a folder to make")
    (folder / "work").mkdir(parents=True)
    scripts = Path(sys.executable).parent if arguments.installed else folder / "env" / "bin"
    hour = Hour(folder, scripts)
    hour.run(f"git clone --quiet {REPOSITORY} clone")
    if not arguments.installed:
        hour.run(f"{sys.executable} -m venv env")
        install(hour)
    use(hour)
    if arguments.suite:
        hour.run("pytest -n 2 --dist worksteal", at="clone")
    pictures(hour)
    hour.say_longest("Longest waits", hour.waits)
    hour.say_longest("Longest silences", hour.silences)
    print(f"{hour.folder / 'transcript.md'}; {len(hour.failed)} commands failed")
    sys.exit(1 if hour.failed else 0)


if __name__ == "__main__":
    main()
