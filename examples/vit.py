"""The vision experiment of the paper's rebuttal: image classifiers that differ only in `value_mode`, side by side.

    python examples/vit.py                                             scikit-learn's digits, minutes on a CPU core
    python examples/vit.py examples/deit_b.py --data_dir=imagenet      DeiT-B's shape, without its augmentation

A ViT (https://arxiv.org/abs/2010.11929) is our GPT-2-like model without the causal mask. Its tokens are a class token,
which the logits are read from, and the patches of the image. So V_1 of a patch depends on its pixels and position.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.files import reading, write_json
from common.layers import MLP, Linear
from common.ranks import environment, only_process
from common.report import markdown, mean_std, plus_minus, progress
from configurator import UserError, check_fields, need, run, setting
from model import GPT
from train import adamw, learning_rate
from value_modes import ModelConfig, get_mode

MODES = ("vanilla", "neutreno", "resformer", "svformer")
NOT_IMAGENET = """Small models of digits of 8 x 8 pixels: this says nothing about ImageNet. There, the paper's rebuttal
reports top-1 accuracies of 62.53 % for DeiT-B, 61.83 % with NeuTRENO and 66.23 % as ResFormer after 50 epochs, and of
81.99, 81.64 and 81.59 % after 300, where ResFormer has the lowest training loss and the highest test loss."""


@dataclass(frozen=True)
class VitConfig:
    """Settings of examples/vit.py. The defaults suit digits of 8 x 8 pixels."""

    value_mode: tuple[str, ...] = setting(MODES, "modes to compare with the first one", group="Runs")
    seeds: tuple[int, ...] = setting((1, 2, 3), "random seeds for weights and batches; each mode runs with each", 0)
    out_file: str = setting("out/vit.json", "JSON to write: settings, machine, and each run")
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, mps")

    data_dir: str = setting("", "holds train/<class>/ and val/<class>/; empty = scikit-learn's digits", group="Data")
    image_size: int = setting(8, "pixels of a side; images of a folder are scaled and cropped to it", 1, 4096)
    patch: int = setting(2, "pixels of a patch's side", least=1)

    n_layer: int = setting(4, "layers", group="Model")
    n_head: int = setting(4, "heads")
    n_embd: int = setting(64, "width of the residual stream")
    init_std: float = setting(0.07, "spread of the initial weights; DeiT's is 0.02, at 12 times the width", 0, 100)

    epochs: int = setting(20, "passes over the training images", least=1, group="Optimization")
    batch_size: int = setting(64, "images per step", least=1)
    warmup_epochs: int = setting(2, "epochs of linear warmup; then a cosine to 0", least=0)
    learning_rate: float = setting(2e-3, "peak learning rate", least=0, most=1e6)
    weight_decay: float = setting(0.05, "AdamW's decay of matrices, embeddings included; vectors have none", least=0)

    def __post_init__(self):
        check_fields(self)
        if not self.data_dir and self.image_size != 8:
            raise UserError(f"image_size={self.image_size}: the digits have 8; set data_dir")
        if self.image_size % self.patch:
            raise UserError(f"image_size={self.image_size} is not a multiple of patch={self.patch}")
        if not self.value_mode or not self.seeds or len(set(self.value_mode)) < len(self.value_mode):
            raise UserError("give at least one mode and one seed, and no mode twice")
        for mode in self.value_mode:
            if any(residual.source == "token" for residual in get_mode(mode).residuals):
                raise UserError(f"value_mode={mode} looks up values by token id, and images have none")
            self.model_config(mode, n_classes=2)  # an impossible shape is told at once

    def model_config(self, mode, n_classes):
        n_tokens = 1 + (self.image_size // self.patch) ** 2
        shape = dict(n_layer=self.n_layer, n_head=self.n_head, n_embd=self.n_embd, init_std=self.init_std)
        sizes = dict(vocab_size=n_classes, block_size=n_tokens)
        return ModelConfig(arch="gpt2", norm_eps=1e-6, value_mode=mode, **sizes, **shape)


# ---- images


class Split(NamedTuple):
    """read(i): image i, a tensor (S, S, channels) from -1 to 1. labels: (n,) int64."""

    read: Callable
    labels: torch.Tensor

    def batches(self, batch_size, generator=None):
        """Yields all images (B, S, S, channels) with their labels (B,), in random order if there is a generator."""
        order = torch.arange(len(self.labels))
        if generator:
            order = torch.randperm(len(self.labels), generator=generator)
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


# ---- the network


class ExactMLP(MLP):
    """GPT-2's MLP with the exact GELU, not its tanh approximation."""

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class BothWays:
    """Stands in for a KV cache: it keeps nothing, and its mask lets every token attend to every token."""

    def __init__(self, T, device):
        self.mask = torch.zeros(T, T, device=device)  # we add it to the scores in place of the causal mask

    def extend(self, t, n, new):
        return new


class ViT(GPT):
    """Images (B, S, S, channels) from -1 to 1 -> logits (B, classes).

    cfg: a ModelConfig. Its vocab_size is the number of classes, its block_size T = 1 + the number of patches. Blocks,
    positions and last norm are GPT's.
    """

    def __init__(self, cfg, patch, channels, seed=0):
        super().__init__(cfg, init=False)
        self.patch = patch
        del self.embed  # there are no token ids
        self.patches = Linear(patch * patch * channels, {"patches": cfg.n_embd}, bias=True)
        self.class_token = nn.Embedding(1, cfg.n_embd)
        for block in self.blocks:
            block.mlp = ExactMLP(cfg)
        self.head = Linear(cfg.n_embd, {"head": cfg.vocab_size}, bias=True)
        if not self.head.weight.is_meta:
            self.init_weights(seed)

    def forward(self, images):
        # The class token, then the patches
        class_token = self.class_token.weight.expand(len(images), 1, -1)  # (B, 1, C)
        x = torch.cat([class_token, self.patches(cut(images, self.patch))], dim=1)  # (B, T, C)
        x = x + self.positions.weight
        x = self.through_blocks(x, None, {}, BothWays(x.size(1), x.device))
        return self.head(self.norm(x[:, 0]))


def cut(images, patch):
    """Images (B, S, S, channels) -> their patches, row by row (B, (S / patch)², patch * patch * channels)."""
    grid = images.unflatten(1, (-1, patch))  # (B, S / patch, patch, S, channels)
    grid = grid.unflatten(3, (-1, patch)).transpose(2, 3)  # (B, S / patch, S / patch, patch, patch, channels)
    return grid.flatten(3).flatten(1, 2)


# ---- the experiment


def steps_per_epoch(data, cfg):
    return math.ceil(len(data.train.labels) / cfg.batch_size)


def train(model, data, cfg, seed, device, bar):
    """Train with AdamW. The seed alone decides the batches."""
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
            bar.update(1)


@torch.inference_mode()
def test(model, split, batch_size, device):
    """(accuracy in %, mean loss in nats) on a split."""
    right, nats = 0, 0.0
    for images, labels in split.batches(batch_size):
        logits, labels = model(images.to(device)), labels.to(device)
        right += (logits.argmax(dim=1) == labels).sum().item()
        nats += F.cross_entropy(logits, labels, reduction="sum").item()
    return 100 * right / len(split.labels), nats / len(split.labels)


def train_and_test(mode, seed, cfg, data, device, bar):
    """The record of one run. Modes share weights and batches, because both follow from the seed."""
    model = ViT(cfg.model_config(mode, data.n_classes), cfg.patch, data.channels, seed).to(device)
    train(model, data, cfg, seed, device, bar)
    record = dict(value_mode=mode, seed=seed, parameters=sum(p.numel() for p in model.parameters()))
    record["accuracy"], record["loss"] = test(model, data.test, cfg.batch_size, device)
    record["train_accuracy"], record["train_loss"] = test(model, data.train, cfg.batch_size, device)
    if not math.isfinite(record["loss"] + record["train_loss"]):
        raise UserError(f"{mode}, seed {seed}: the loss is not finite; try a lower learning_rate")
    return record


def table(runs, modes):
    """Markdown: means over seeds ± standard deviations, and the same of the differences to the first mode, seed by
    seed."""
    of_mode = {mode: [r for r in runs if r["value_mode"] == mode] for mode in modes}
    first = of_mode[modes[0]]
    rows = []
    for mode, mine in of_mode.items():
        row = [mode]
        for name, digits in (("accuracy", 2), ("loss", 4), ("train_loss", 4)):
            gaps = [r[name] - other[name] for r, other in zip(mine, first, strict=True)]
            row.append(plus_minus(*mean_std([r[name] for r in mine]), digits))
            row.append("-" if mine is first else plus_minus(*mean_std(gaps), digits, sign=True))
        rows.append([*row, f"{mine[0]['parameters']:,}"])
    versus = f"vs {modes[0]}"
    return markdown(["mode", "accuracy, %", versus, "loss", versus, "train loss", versus, "parameters"], rows)


def main(cfg: VitConfig):
    device = only_process(cfg.device, fixed_lengths=True).device
    if not cfg.data_dir:
        torch.set_num_threads(1)  # such small products are slower on several
    data = read_folder(cfg.data_dir, cfg.image_size) if cfg.data_dir else read_digits()
    jobs = [(mode, seed) for seed in cfg.seeds for mode in cfg.value_mode]
    record = {"what": "vit", "data": data.name, "train_images": len(data.train.labels)}
    record |= {"test_images": len(data.test.labels), "settings": dataclasses.asdict(cfg), **environment(), "runs": []}
    with progress("train", len(jobs) * cfg.epochs * steps_per_epoch(data, cfg), "step") as bar:
        for mode, seed in jobs:
            write_json(cfg.out_file, record)  # before each run: a path that cannot be written shows at once
            record["runs"].append(train_and_test(mode, seed, cfg, data, device, bar))
    write_json(cfg.out_file, record)

    # Few images are held out, so an accuracy has an error besides that of the seeds.
    share = record["runs"][0]["accuracy"] / 100
    error = 100 * math.sqrt(share * (1 - share) / record["test_images"])
    print(table(record["runs"], cfg.value_mode))
    print(f"\n{data.name}: {record['train_images']:,} images to train on, {record['test_images']:,} held out.")
    print(f"Means over {len(cfg.seeds)} seeds ± standard deviations; vs: differences of equal seeds.")
    print(f"An accuracy has a standard error of {error:.2f} points besides, because so few images are held out.")
    if not cfg.data_dir:
        print(NOT_IMAGENET)


if __name__ == "__main__":
    run(main, __doc__)
