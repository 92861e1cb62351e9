"""Writes small graphs whose vertices have classes, in the formats that the recipe reads."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import sparse

NUM_CLASSES = 3
NUM_FEATURES = 10
NUM_PUBLIC = 500
"""Vertices that the public split of Planetoid validates on."""


def write_all_node_files(root: Path) -> None:
    """Every data set where ``LIGHTNING_GPP_DATA`` would have it."""
    for name in ("Cora", "CiteSeer"):
        write_citations(root / "planetoid", name)
    write_coauthors(root / "coauthor")
    write_flickr(root / "flickr")
    write_reddit(root / "reddit")
    write_squirrel(root / "wikipedia")


def features(num_vertices: int) -> npt.NDArray[np.float32]:
    """(vertices, features); a vertex has its class and one feature more."""
    found = np.zeros((num_vertices, NUM_FEATURES), np.float32)
    rows = np.arange(num_vertices)
    found[rows, rows % NUM_CLASSES] = 1
    found[rows, NUM_CLASSES + rows % (NUM_FEATURES - NUM_CLASSES)] = 1
    return found


def ring(num_vertices: int) -> sparse.csr_matrix:
    """Every vertex and the next one of its class, in both directions."""
    rows = np.arange(num_vertices)
    after = (rows + NUM_CLASSES) % num_vertices
    pairs = np.concatenate([rows, after]), np.concatenate([after, rows])
    return sparse.csr_matrix((np.ones(2 * num_vertices, np.float32), pairs))


def write_citations(root: Path, name: str = "Cora", num_test: int = 12) -> None:
    """Cora's files: six vertices to train on, :data:`NUM_PUBLIC` to validate, the last to test."""
    folder = root / name / "raw"
    folder.mkdir(parents=True)
    num_train = 2 * NUM_CLASSES
    count = num_train + NUM_PUBLIC + num_test
    x, graph = sparse.csr_matrix(features(count)), ring(count)
    y = np.eye(NUM_CLASSES, dtype=np.int32)[np.arange(count) % NUM_CLASSES]
    neighbours = {row: graph[row].indices.tolist() for row in range(count)}
    known = count - num_test
    parts = {"x": x[:num_train], "allx": x[:known], "tx": x[known:], "graph": neighbours}
    parts |= {"y": y[:num_train], "ally": y[:known], "ty": y[known:]}
    for part, value in parts.items():
        (folder / f"ind.{name.lower()}.{part}").write_bytes(pickle.dumps(value))
    lines = "".join(f"{row}\n" for row in range(known, count))
    (folder / f"ind.{name.lower()}.test.index").write_text(lines)


def write_coauthors(root: Path, count: int = 1600) -> None:
    """Physics; enough vertices for the sizes of the published split."""
    folder = root / "Physics" / "raw"
    folder.mkdir(parents=True)
    arrays = {"labels": np.arange(count) % NUM_CLASSES}
    for prefix, matrix in (("adj", ring(count)), ("attr", sparse.csr_matrix(features(count)))):
        for part in ("data", "indices", "indptr", "shape"):
            arrays[f"{prefix}_{part}"] = np.asarray(getattr(matrix, part))
    np.savez(folder / "ms_academic_phy.npz", **arrays)  # type: ignore[arg-type]


def write_flickr(root: Path, count: int = 60) -> None:
    """Two thirds of the vertices to train on, one sixth each to validate and test."""
    folder = root / "raw"
    folder.mkdir(parents=True)
    graph = ring(count)
    arrays = {part: getattr(graph, part) for part in ("data", "indices", "indptr", "shape")}
    np.savez(folder / "adj_full.npz", **arrays)
    np.save(folder / "feats.npy", features(count))
    classes = {str(row): row % NUM_CLASSES for row in range(count)}
    (folder / "class_map.json").write_text(json.dumps(classes))
    train, validation, test = np.split(np.arange(count), [4 * count // 6, 5 * count // 6])
    role = {"tr": train.tolist(), "va": validation.tolist(), "te": test.tolist()}
    (folder / "role.json").write_text(json.dumps(role))


def write_reddit(root: Path, count: int = 60) -> None:
    """Vertices to train, validate and test on in turn."""
    folder = root / "raw"
    folder.mkdir(parents=True)
    np.savez(
        folder / "reddit_data.npz",
        feature=features(count),
        label=np.arange(count) % NUM_CLASSES,
        node_types=1 + np.arange(count) // NUM_CLASSES % 3,
    )
    sparse.save_npz(folder / "reddit_graph.npz", ring(count).tocoo())


def write_squirrel(root: Path, count: int = 60) -> None:
    """Ten splits; in split ``s`` vertex ``v`` is to train, validate or test on by ``v + s``."""
    folder = root / "squirrel" / "geom_gcn" / "raw"
    folder.mkdir(parents=True)
    lines = ["node_id\tfeature\tlabel"]
    for row, values in enumerate(features(count).astype(int)):
        lines.append(f"{row}\t{','.join(map(str, values))}\t{row % NUM_CLASSES}")
    (folder / "out1_node_feature_label.txt").write_text("\n".join(lines) + "\n")
    pairs = ring(count).tocoo()
    lines = ["node_id\tnode_id", *(f"{a}\t{b}" for a, b in zip(pairs.row, pairs.col))]
    (folder / "out1_graph_edges.txt").write_text("\n".join(lines) + "\n")
    for split in range(10):
        part = (np.arange(count) // NUM_CLASSES + split) % 3
        names = ("train_mask", "val_mask", "test_mask")
        masks = {name: (part == number).astype(int) for number, name in enumerate(names)}
        np.savez(folder / f"squirrel_split_0.6_0.2_{split}.npz", **masks)  # type: ignore[arg-type]
