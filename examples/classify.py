"""What vit.py needs besides the network: images in batches, and the training and testing of any classifier of them.

Images are scikit-learn's digits, or files in a folder with a subfolder for each class. Read before: vit.py.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from oldconfig import UserError, need
from train import adamw, learning_rate

IMAGE_FILES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


# ---- images


class Split(NamedTuple):
    """Images and their classes. images: a tensor (n, S, S, channels) from -1 to 1, or n files that are read when they
    are needed. labels: (n,) int64."""

    images: torch.Tensor | list
    labels: torch.Tensor
    size: int

    def batches(self, batch_size, generator=None):
        """Yields all images (B, S, S, channels) with their labels (B,): as they are listed, or in random order."""
        n = len(self.labels)
        order = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
        for rows in order.split(batch_size):
            if isinstance(self.images, torch.Tensor):
                images = self.images[rows]
            else:
                images = torch.stack([read_image(self.images[i], self.size) for i in rows])
            yield images, self.labels[rows]


class Data(NamedTuple):
    """A data set. channels: 1 of grey images, 3 of colours."""

    name: str
    n_classes: int
    channels: int
    train: Split
    test: Split


def cut(images, patch):
    """Images (B, S, S, channels) -> their patches, row by row (B, (S / patch)², patch * patch * channels)."""
    grid = images.unflatten(1, (-1, patch))  # (B, S / patch, patch, S, channels)
    grid = grid.unflatten(3, (-1, patch)).transpose(2, 3)  # (B, S / patch, S / patch, patch, patch, channels)
    return grid.flatten(3).flatten(1, 2)


def read_digits():
    """scikit-learn's 1,797 digits. A fifth of them, chosen by chance but always the same, is held out."""
    digits = need("sklearn.datasets", "scikit-learn").load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[..., None] / 8 - 1  # (1797, 8, 8, 1), before 0 to 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order.tensor_split([math.ceil(len(images) / 5)])
    splits = [Split(images[rows], labels[rows], 8) for rows in (train, test)]
    return Data("scikit-learn's digits", 10, 1, *splits)


def read_folder(folder, size):
    """The images in train/<class>/ and val/<class>/ of a folder, the layout of ImageNet."""
    classes = subfolders(Path(folder, "train"))
    if len(classes) < 2:
        raise UserError(f"{folder}/train has {len(classes)} subfolders; each is a class, and there must be at least 2")
    if subfolders(Path(folder, "val")) != classes:
        raise UserError(f"{folder}/val has not the subfolders of {folder}/train; each is a class")
    splits = [find_images(Path(folder, split), classes, size) for split in ("train", "val")]
    return Data(str(folder), len(classes), 3, *splits)


def subfolders(path):
    """The names of a folder's subfolders, in order."""
    if not path.is_dir():
        raise UserError(f"{path} is no folder; data_dir holds images in train/<class>/ and val/<class>/")
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir())


def find_images(path, classes, size):
    """The Split of the image files in subfolders of a folder."""
    found, labels = [], []
    for label, name in enumerate(classes):
        of_class = sorted(file for file in (path / name).iterdir() if file.suffix.lower() in IMAGE_FILES)
        if not of_class:
            raise UserError(f"{path / name} has no image, which is a file that ends in {', '.join(IMAGE_FILES)}")
        found += of_class
        labels += [label] * len(of_class)
    return Split(found, torch.tensor(labels), size)


def read_image(path, size):
    """The middle of an image file, scaled, as a tensor (size, size, 3) from -1 to 1."""
    image, ops = need("PIL.Image", "pillow"), need("PIL.ImageOps", "pillow")
    try:
        with image.open(path) as file:
            pixels = np.asarray(ops.fit(file.convert("RGB"), (size, size)), dtype=np.float32)
    except (OSError, SyntaxError, ValueError) as e:  # what PIL raises on damaged files
        raise UserError(f"{path} cannot be read as an image: {e}") from None
    return torch.from_numpy(pixels / 127.5 - 1)


# ---- the loop


def steps_per_epoch(data, cfg):
    return math.ceil(len(data.train.labels) / cfg.batch_size)


def train(model, data, cfg, seed, device):
    """Train a model with AdamW; yields after each step. The batches follow from the seed alone. cfg: a VitConfig."""
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
    """(share of right answers in %, mean loss in nats) of a model on a split."""
    right, nats = 0, 0.0
    for images, labels in split.batches(batch_size):
        logits, labels = model(images.to(device)), labels.to(device)
        right += (logits.argmax(dim=1) == labels).sum().item()
        nats += F.cross_entropy(logits, labels, reduction="sum").item()
    return 100 * right / len(split.labels), nats / len(split.labels)
