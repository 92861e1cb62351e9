"""Models that nobody tuned a planner on, as workloads: other people's shapes, and random costs.

Written with ``torch.nn`` alone, as their papers describe them, and captured by our own tracer on
the ``meta`` device, so that no weights are held: an Inception-like network, a residual one, a
U-Net, a transformer with an encoder and a decoder, two towers of transformers (CLIP-like), a
mixture of experts, and a network with an exit of its own behind every part. Beside them chains and
towers of any number of operators, with times drawn once.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_gpp.capture import capture
from lightning_gpp.cost import Costs, OpProfile, Profile, graph_work
from lightning_gpp.graph import GraphInput, ModelGraph, OpNode, Parameter, TensorSpec, Value
from lightning_gpp.workloads import Workload

SAMPLES = 8
"""Of the micro-batch that is captured, and of a mini-batch for every device."""

TOWERS = {"chain": 1, "towers": 4}


def conv(channels: int, out: int, size: int = 3, stride: int = 1) -> nn.Sequential:
    """A convolution with its normalization."""
    layer = nn.Conv2d(channels, out, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(out), nn.ReLU())


class Inception(nn.Module):
    """Blocks of four branches side by side (Szegedy et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 64, 7, 2), nn.MaxPool2d(2), conv(64, 256))
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [
                    conv(256, 64, 1),
                    nn.Sequential(conv(256, 96, 1), conv(96, 128)),
                    nn.Sequential(conv(256, 16, 1), conv(16, 32, 5)),
                    nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(256, 32, 1)),
                ]
            )
            for _ in range(6)
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: images; class scores."""
        x = self.stem(x)
        for block in self.blocks:
            x = torch.cat([branch(x) for branch in block], 1)  # type: ignore[attr-defined]
        return self.head(x)


class Residual(nn.Module):
    """Blocks with a skip edge each (He et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 128, 7, 2), nn.MaxPool2d(2))
        self.blocks = nn.ModuleList(
            nn.ModuleList([conv(128, 64, 1), conv(64, 64), conv(64, 128, 1)]) for _ in range(12)
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 1000))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: images; class scores."""
        x = self.stem(x)
        for first, second, third in self.blocks:
            x = x + third(second(first(x)))
        return self.head(x)


class UNet(nn.Module):
    """Down and up again, with long skip edges (Ronneberger et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        widths = [32, 64, 128, 256, 512]
        self.first = conv(3, 32)
        self.down = nn.ModuleList(conv(a, b, stride=2) for a, b in zip(widths, widths[1:]))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, 2) for a, b in zip(widths[-2::-1], widths[:0:-1])
        )
        self.merge = nn.ModuleList(conv(2 * width, width) for width in widths[-2::-1])
        self.last = nn.Conv2d(32, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: images; two maps of the same size."""
        x = self.first(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips)):
            x = merge(torch.cat([up(x), skip], 1))
        return self.last(x)


def encoder(width: int, count: int) -> nn.ModuleList:
    """Encoder layers, each kept whole by the tracer."""
    return nn.ModuleList(
        nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True) for _ in range(count)
    )


class Translator(nn.Module):
    """An encoder, and a decoder of which every layer reads its end (Vaswani et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(8000, 512), nn.Embedding(8000, 512)
        self.encoder = encoder(512, 6)
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(512, 8, 2048, batch_first=True) for _ in range(6)
        )
        self.scores = nn.Linear(512, 8000)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Shapes: tokens, tokens; scores of tokens."""
        memory = self.source(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.target(target)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.scores(x)


class TwoTowers(nn.Module):
    """Images and texts in towers of unequal size, which meet at the end (Radford et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.tokens = nn.Linear(768, 768), nn.Embedding(8000, 512)
        self.image, self.text = encoder(768, 8), encoder(512, 8)
        self.image_end, self.text_end = nn.Linear(768, 256), nn.Linear(512, 256)

    def forward(self, patches: Tensor, tokens: Tensor) -> Tensor:
        """Shapes: ``(n, 49, 768)``, tokens; ``(n,)`` likenesses."""
        x, y = self.patches(patches), self.tokens(tokens)
        for layer in self.image:
            x = layer(x)
        for layer in self.text:
            y = layer(y)
        return (self.image_end(x.mean(1)) * self.text_end(y.mean(1))).sum(1)


class Experts(nn.Module):
    """Layers of eight experts side by side, weighted by a gate (Jacobs et al., 1991)."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(1024, 8) for _ in range(3))
        self.layers = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
                for _ in range(8)
            )
            for _ in range(3)
        )
        self.last = nn.Linear(1024, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: ``(n, 1024)``; ``(n, 10)``."""
        for gate, experts in zip(self.gates, self.layers):
            weights = gate(x).softmax(1)
            found = [expert(x) for expert in experts]  # type: ignore[attr-defined]
            x = (torch.stack(found, 2) @ weights.unsqueeze(2)).squeeze(2)
        return self.last(x)


class Exits(nn.Module):
    """A chain with an exit behind every part, all of them outputs (Teerapittayanon, 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(conv(3 if not number else 128, 128), conv(128, 128))
            for number in range(8)
        )
        self.exits = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100))
            for _ in range(8)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """Shapes: images; scores of every exit."""
        found = []
        for part, out in zip(self.parts, self.exits):
            x = part(x)
            found.append(out(x))
        return found


def images(size: int) -> tuple[Tensor, ...]:
    """Images of some size."""
    return (torch.empty(SAMPLES, 3, size, size, device="meta"),)


def tokens(length: int) -> Tensor:
    """Texts of some length."""
    return torch.empty(SAMPLES, length, dtype=torch.long, device="meta")


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "inception": (Inception, lambda: images(224)),
    "residual": (Residual, lambda: images(224)),
    "unet": (UNet, lambda: images(256)),
    "translator": (Translator, lambda: (tokens(64), tokens(48))),
    "two_towers": (
        TwoTowers,
        lambda: (torch.empty(SAMPLES, 49, 768, device="meta"), tokens(76)),
    ),
    "experts": (Experts, lambda: (torch.empty(SAMPLES, 1024, device="meta"),)),
    "exits": (Exits, lambda: images(64)),
}


def foreign_workload(name: str) -> Workload:
    """A model as the tracer sees it, with estimated costs."""
    make, arguments = MODELS[name]
    with torch.device("meta"):
        module = make()
    graph = capture(module, arguments()).graph
    return Workload(name, graph, graph_work(graph), SAMPLES, "foreign")


def random_workload(name: str, num_operators: int) -> Workload:
    """A chain, or four towers that join: linear layers, activations and sums, always the same.

    Half, once or twice the time of its kind is drawn for every operator.
    """
    rng, spec = random.Random(num_operators), (TensorSpec((1, 1024), "float32", 0),)
    nodes: list[OpNode] = []
    parameters, profile, ends = [], {}, []
    for tower in range(TOWERS[name]):
        reads = "x"
        for depth in range((num_operators - 1) // TOWERS[name]):
            node, weights = f"t{tower}_{depth}", ()
            if depth % 3 == 0:
                parameters.append(Parameter(f"{node}.weight", 4 * 1024**2))
                weights = (parameters[-1].name,)
            target = ("torch.nn.Linear", "torch.tanh", "torch.add")[depth % 3]
            nodes.append(OpNode(node, target, "", (reads,), (Value(f"{node}_out", spec),), weights))
            forward_s = (100e-6, 5e-6, 5e-6)[depth % 3] * rng.choice((0.5, 1.0, 2.0))
            profile[node] = OpProfile(forward_s, 2 * forward_s, 4096)
            reads = f"{node}_out"
        ends.append(reads)
    nodes.append(OpNode("join", "torch.add", "", tuple(ends), (Value("y", spec),)))
    profile["join"] = OpProfile(5e-6, 10e-6, 4096)
    graph = ModelGraph((GraphInput(Value("x", spec)),), tuple(nodes), ("y",), tuple(parameters))
    return Workload(name, graph, Costs((Profile(profile, 1, "any"),)), SAMPLES, "random")
