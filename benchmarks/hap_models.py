"""The models of HAP's experiments as torch modules, and the graphs of their operators.

Sizes are those of the paper's release: VGG19 and ViT on CIFAR-10 (ViT: 4x4 patches, 64 tokens and a
class token), BERT-Base and BERT with a top-2 mixture of experts in every other layer on WikiText-2;
12 layers of width 768 with 12 heads, sequences of 128, 32 samples per device, two experts per
device. The loss is a part of the forward, as in the release.

The cluster: 2 machines of 8 V100 and 6 of 8 P100, joined at 10.4 Gb/s. Sustained speeds are those
in the paper's release (3.86 and 2.15 Tflop/s in float32). Not published, and assumed: 10 GB/s
between the devices of a machine (PCIe), latencies of 10 and 20 us, memory bandwidths of the data
sheets (900 and 732 GB/s) at 85 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_gpp.cluster import Cluster, ClusterLayout, DeviceKind, HostGroup, Link
from lightning_gpp.spmd.costs.machine import Machine, collective_times, device_speeds
from lightning_gpp.spmd.operator_graph import SpmdGraph
from lightning_gpp.spmd.run.export import export_forward

WIDTH, HEADS, SEQUENCE, VOCABULARY = 768, 12, 128, 33278
SAMPLES_PER_DEVICE = 32


def mean_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy, as a sum: which sharded samples can give."""
    return F.cross_entropy(scores, targets, reduction="sum") / len(targets)


class Attention(nn.Module):
    """Self-attention with one projection each for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: ``(samples, tokens, width)`` to the same."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """Two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: ``(samples, tokens, width)`` to the same."""
        return self.down(F.dropout(F.gelu(self.up(x)), 0.1, self.training))


class Experts(nn.Module):
    """Top-2 mixture of experts with a capacity per sample, by einsum (GShard, Lepikhin 2020)."""

    def __init__(self, width: int, num_experts: int, tokens: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(width, num_experts))
        self.up = nn.Parameter(torch.randn(num_experts, width, 4 * width))
        self.down = nn.Parameter(torch.randn(num_experts, 4 * width, width))
        self.num_experts = num_experts
        self.capacity = math.ceil(tokens / num_experts * 1.25 * 2)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: ``(samples, tokens, width)`` to the same."""
        scores = torch.softmax(torch.einsum("bsm,me->bse", x, self.gate), -1)
        _, which = torch.topk(scores, 2, dim=-1)
        first, second = (F.one_hot(which.select(-1, i), self.num_experts) for i in (0, 1))
        place_one = torch.cumsum(first, 1) * first
        place_two = torch.cumsum(second, 1) * second
        slots = torch.arange(1, self.capacity + 1, device=x.device)
        taken = (place_one.unsqueeze(-1) == slots) | (place_two.unsqueeze(-1) == slots)
        sent = torch.einsum("bsec,bsm->ebcm", taken.to(x.dtype), x)
        hidden = torch.relu(torch.einsum("ebcm,emh->ebch", sent, self.up))
        back = torch.einsum("ebch,ehm->ebcm", hidden, self.down)
        weights = taken * scores.unsqueeze(-1)
        return torch.einsum("bsec,ebcm->bsm", weights, back)


class Layer(nn.Module):
    """A layer of a transformer, normalised first."""

    def __init__(self, width: int, heads: int, mixer: nn.Module) -> None:
        super().__init__()
        self.attention, self.mixer = Attention(width, heads), mixer
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: ``(samples, tokens, width)`` to the same."""
        x = x + F.dropout(self.attention(self.one(x)), 0.1, self.training)
        return x + F.dropout(self.mixer(self.two(x)), 0.1, self.training)


class Bert(nn.Module):
    """Token and position embeddings, layers, and the scores of the vocabulary."""

    def __init__(self, num_layers: int = 12, num_experts: int = 0, vocabulary: int = VOCABULARY):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.layers = nn.ModuleList(
            Layer(
                WIDTH,
                HEADS,
                Experts(WIDTH, num_experts, SEQUENCE)
                if num_experts and number % 2
                else FeedForward(WIDTH),
            )
            for number in range(num_layers)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Shapes: both ``(samples, tokens)``; returns the loss."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        return mean_loss(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class VisionTransformer(nn.Module):
    """ViT for images of 32x32 in patches of 4x4."""

    def __init__(self, num_layers: int = 12, num_classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Linear(48, WIDTH)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, 65, WIDTH))
        self.layers = nn.ModuleList(
            Layer(WIDTH, HEADS, FeedForward(WIDTH)) for _ in range(num_layers)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, num_classes)

    def forward(self, image: Tensor, targets: Tensor) -> Tensor:
        """Shapes: ``(samples, 3, 32, 32)`` and ``(samples,)``; returns the loss."""
        x = image.view(-1, 3, 8, 4, 8, 4).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        first = self.first.expand(x.shape[0], -1, -1)
        x = torch.cat([first, self.patches(x)], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return mean_loss(self.head(self.norm(x)[:, 0]), targets)


class VGG19(nn.Module):
    """VGG19 with its three wide linear layers, for images of 32x32 (pooled to 7x7 as published)."""

    CHANNELS = (64, 64, 0, 128, 128, 0, *(256,) * 4, 0, *(512,) * 4, 0, *(512,) * 4, 0)

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for channels in self.CHANNELS:
            if channels:
                layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
                before = channels
            else:
                layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            *(nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Dropout()),
            *(nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()),
            nn.Linear(4096, num_classes),
        )

    def forward(self, image: Tensor, targets: Tensor) -> Tensor:
        """Shapes: ``(samples, 3, 32, 32)`` and ``(samples,)``; returns the loss."""
        x = F.adaptive_avg_pool2d(self.features(image), 7)
        return mean_loss(self.classifier(torch.flatten(x, 1)), targets)


Batch = tuple[Tensor, Tensor]


def _images(samples: int) -> Batch:
    return torch.zeros(samples, 3, 32, 32, device="meta"), _numbers(samples)


def _tokens(samples: int) -> Batch:
    return _numbers(samples, SEQUENCE), _numbers(samples, SEQUENCE)


def _numbers(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int64, device="meta")


MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], Batch]]] = {
    "VGG19": (lambda _: VGG19(), _images),
    "ViT": (lambda _: VisionTransformer(), _images),
    "ViT-24": (lambda _: VisionTransformer(24), _images),
    "ViT-48": (lambda _: VisionTransformer(48), _images),
    "BERT-Base": (lambda _: Bert(), _tokens),
    "BERT-MoE": (lambda devices: Bert(num_experts=2 * devices), _tokens),
}
"""Name -> module and batch, by the number of devices (samples)."""


def hap_graph(name: str, num_devices: int) -> SpmdGraph:
    """The operators of a model for so many devices, 32 samples each."""
    module, batch = MODELS[name]
    with torch.device("meta"):
        built = module(num_devices)
    return export_forward(built.train(), batch(SAMPLES_PER_DEVICE * num_devices)).graph


KINDS = (
    DeviceKind("V100", {"float32": 3.86e12}, 900e9, 16 * 10**9, memory_efficiency=0.85),
    DeviceKind("P100", {"float32": 2.15e12}, 732e9, 16 * 10**9, memory_efficiency=0.85),
)


def hap_cluster(num_v100_machines: int = 2, num_p100_machines: int = 6) -> Cluster:
    """So many machines of 8 devices each."""
    numbers = (("V100", num_v100_machines), ("P100", num_p100_machines))
    return ClusterLayout(
        tuple(HostGroup(kind, 8, number) for kind, number in numbers if number),
        host_link=Link(10e9, 10e-6),
        rack_link=Link(10.4e9 / 8, 20e-6, is_shared=True),
        device_kinds=KINDS,
    ).cluster()


def hap_machine(cluster: Cluster, *, has_limits: bool = True) -> Machine:
    """Speeds, collectives and memory of the cluster's devices."""
    memory = [device.memory_bytes or np.inf for device in cluster.devices]
    return Machine(
        device_speeds(cluster),
        collective_times(cluster),
        np.array(memory, dtype=float) if has_limits else np.full(len(memory), np.inf),
    )
