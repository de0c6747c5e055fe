"""What vit.py needs besides the network: images in batches, training and testing of any image classifier.

Images are scikit-learn's digits, or files in a folder with a subfolder for each class. Read before: vit.py.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from common.files import reading
from configurator import need
from train import adamw, learning_rate

# ---- images


class Split(NamedTuple):
    """read(i): image i, a tensor (S, S, channels) from -1 to 1. labels: (n,) int64."""

    read: Callable
    labels: torch.Tensor

    def batches(self, batch_size, generator=None):
        """Yields all images (B, S, S, channels) with their labels (B,), in random order if there is a generator."""
        n = len(self.labels)
        order = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
        for rows in order.split(batch_size):
            yield torch.stack([self.read(i) for i in rows.tolist()]), self.labels[rows]


class Data(NamedTuple):
    """A data set. channels: 1 for grey images, 3 for colours."""

    name: str
    n_classes: int
    channels: int
    train: Split
    test: Split


def read_digits():
    """scikit-learn's 1,797 digits. A fixed random fifth is held out."""
    digits = need("sklearn.datasets", "scikit-learn").load_digits()
    # (1797, 8, 8, 1); scikit-learn's pixels go from 0 to 16
    images = torch.tensor(digits.images, dtype=torch.float32)[..., None] / 8 - 1
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order.tensor_split([math.ceil(len(images) / 5)])
    splits = [Split(images[rows].__getitem__, labels[rows]) for rows in (train, test)]
    return Data("scikit-learn's digits", 10, 1, *splits)


def read_folder(folder, size):
    """The images train/<class>/* and val/<class>/* of a folder. ImageNet has this layout."""
    splits, names = [], None
    with reading(folder, "a folder of images train/<class>/* and val/<class>/*"):
        for split in ("train", "val"):
            files = sorted(Path(folder, split).glob("*/*"))
            names = names or sorted({file.parent.name for file in files})
            labels = torch.tensor([names.index(file.parent.name) for file in files])
            splits.append(Split(functools.partial(read_image, files, size), labels))
            if not files:
                raise ValueError(f"{split}/ has none")
    return Data(str(folder), len(names), 3, *splits)


def read_image(files, size, i):
    """The middle of an image file, scaled, as a tensor (size, size, 3) from -1 to 1."""
    image, ops = need("PIL.Image", "pillow"), need("PIL.ImageOps", "pillow")
    with reading(files[i], "an image"), image.open(files[i]) as file:
        pixels = np.asarray(ops.fit(file.convert("RGB"), (size, size)), dtype=np.float32)
    return torch.from_numpy(pixels / 127.5 - 1)


# ---- the loop


def steps_per_epoch(data, cfg):
    return math.ceil(len(data.train.labels) / cfg.batch_size)


def train(model, data, cfg, seed, device):
    """Train with AdamW; yields after each step. The seed alone decides the batches. cfg: a VitConfig."""
    steps = steps_per_epoch(data, cfg)
    schedule = cfg.learning_rate, 0.0, cfg.warmup_epochs * steps, cfg.epochs * steps
    optimizer = adamw(model, cfg.learning_rate, cfg.weight_decay, (0.9, 0.999), device.type)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(cfg.epochs):
        for i, (images, labels) in enumerate(data.train.batches(cfg.batch_size, generator)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(epoch * steps + i, *schedule)
            optimizer.zero_grad()
            F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
            optimizer.step()
            yield


@torch.inference_mode()
def test(model, split, batch_size, device):
    """(accuracy in %, mean loss in nats) on a split."""
    right, nats = 0, 0.0
    for images, labels in split.batches(batch_size):
        logits, labels = model(images.to(device)), labels.to(device)
        right += (logits.argmax(dim=1) == labels).sum().item()
        nats += F.cross_entropy(logits, labels, reduction="sum").item()
    return 100 * right / len(split.labels), nats / len(split.labels)
