"""The vision experiment of the paper's rebuttal: image classifiers that differ only in `value_mode`, side by side.

    python -m examples.vit                  scikit-learn's digits, minutes on a CPU core

A ViT (https://arxiv.org/abs/2010.11929) is our GPT-2-like model without the causal mask. Its tokens are a class token,
which the logits are read from, and the patches of the image. So V_1 of a patch depends on its pixels and position.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from common.files import write_json
from common.ranks import environment
from common.report import markdown, plus_minus, progress
from common.statistics import mean_interval
from configurator import UserError, check_fields, need, run, setting
from model import GPT
from net.layers import MLP, Linear
from train import adamw, learning_rate
from value_modes import ModelConfig, get_mode

MODES = ("vanilla", "neutreno", "resformer", "svformer")
SIZE, PATCH = 8, 2  # pixels of an image's side and of a patch's
SHAPE = dict(n_layer=4, n_head=4, n_embd=64, init_std=0.07)  # DeiT starts from 0.02, at 12 times the width
BATCH, PEAK, DECAY, WARMUP = 64, 2e-3, 0.05, 2  # images per step; learning rate; weight decay; epochs of warmup


@dataclass(frozen=True)
class VitConfig:
    """Settings of examples/vit.py."""

    value_mode: tuple[str, ...] = setting(MODES, "modes to compare with the first one")
    seeds: tuple[int, ...] = setting((1, 2, 3), "random seeds for weights and batches; each mode runs with all", 0)
    epochs: int = setting(20, "passes over the training images", least=1)
    out_file: str = setting("out/vit.json", "JSON to write: settings, machine, and each run")

    def __post_init__(self):
        check_fields(self)
        for mode in self.value_mode:
            if any(residual.source == "token" for residual in get_mode(mode).residuals):
                raise UserError(f"value_mode={mode} looks up values by token id, and images have none")
            model_config(mode)  # an impossible shape is told at once


def model_config(mode, **shape):
    sizes = dict(vocab_size=10, block_size=1 + (SIZE // PATCH) ** 2)
    return ModelConfig(arch="gpt2", norm_eps=1e-6, value_mode=mode, **sizes, **SHAPE | shape)


def batches(split, generator=None):
    """Yields all images (B, 8, 8) with their labels (B,), in random order if there is a generator."""
    images, labels = split
    order = torch.randperm(len(labels), generator=generator) if generator else torch.arange(len(labels))
    for rows in order.split(BATCH):
        yield images[rows], labels[rows]


def read_digits():
    """scikit-learn's 1,797 digits: two splits, to train on and held out, a fixed random fifth. A split is its images
    (n, 8, 8) from -1 to 1 and their labels (n,) from 0 to 9."""
    digits = need("sklearn.datasets", "scikit-learn").load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 8 - 1  # (1797, 8, 8); they go from 0 to 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order.tensor_split([math.ceil(len(images) / 5)])
    return (images[train], labels[train]), (images[test], labels[test])


# ---- the network


class ExactMLP(MLP):
    """GPT-2's MLP with the exact GELU, not its tanh approximation."""

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class BothWays:
    """Stands in for a KV cache: it keeps nothing, and its mask lets every token attend to every token."""

    def __init__(self, T):
        self.mask = torch.zeros(T, T)  # we add it to the scores in place of the causal mask

    def extend(self, t, n, new):
        return new


class ViT(GPT):
    """Images (B, 8, 8) from -1 to 1 -> logits (B, 10). Blocks, positions and last norm are GPT's. cfg's vocab_size is
    the number of classes, its block_size T = 1 + the number of patches."""

    def __init__(self, cfg, seed=0):
        super().__init__(cfg, init=False)
        del self.embed  # there are no token ids
        self.patches = Linear(PATCH * PATCH, {"patches": cfg.n_embd}, bias=True)
        self.class_token = nn.Embedding(1, cfg.n_embd)
        for block in self.blocks:
            block.mlp = ExactMLP(cfg)
        self.head = Linear(cfg.n_embd, {"head": cfg.vocab_size}, bias=True)
        self.init_weights(seed)

    def forward(self, images):
        # The class token, then the patches, row by row
        grid = images.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH))  # (B, 4, 2, 4, 2)
        patches = grid.transpose(2, 3).flatten(3).flatten(1, 2)  # (B, 16, 4)
        class_token = self.class_token.weight.expand(len(images), 1, -1)  # (B, 1, C)
        x = torch.cat([class_token, self.patches(patches)], dim=1)  # (B, T, C)
        x = x + self.positions.weight
        x = self.through_blocks(x, None, {}, BothWays(x.size(1)))
        return self.head(self.norm(x[:, 0]))


# ---- the experiment


def train(model, split, epochs, seed, bar):
    """Train with AdamW: a linear warmup, then a cosine to 0. The seed alone decides the batches."""
    steps = math.ceil(len(split[1]) / BATCH)  # in an epoch
    optimizer = adamw(model, PEAK, DECAY, (0.9, 0.999), "cpu")
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        for i, (images, labels) in enumerate(batches(split, generator)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(epoch * steps + i, PEAK, 0.0, WARMUP * steps, epochs * steps)
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        bar.update(1)


@torch.inference_mode()
def test(model, split):
    """(accuracy in %, mean loss in nats) on a split."""
    right, nats, n = 0, 0.0, len(split[1])
    for images, labels in batches(split):
        logits = model(images)
        right += (logits.argmax(dim=1) == labels).sum().item()
        nats += F.cross_entropy(logits, labels, reduction="sum").item()
    return 100 * right / n, nats / n


def train_and_test(mode, seed, epochs, splits, bar):
    """The record of one run. Modes share weights and batches, because both follow from the seed."""
    model = ViT(model_config(mode), seed)
    train(model, splits[0], epochs, seed, bar)
    record = dict(value_mode=mode, seed=seed, parameters=sum(p.numel() for p in model.parameters()))
    record["accuracy"], record["loss"] = test(model, splits[1])
    record["train_accuracy"], record["train_loss"] = test(model, splits[0])
    return record


def table(runs, modes):
    """Markdown: means over seeds ± half of a 95 % interval, and the same of differences to the first mode by seed."""
    of_mode = {mode: [r for r in runs if r["value_mode"] == mode] for mode in modes}
    first = of_mode[modes[0]]
    rows = []
    for mode, mine in of_mode.items():
        row = [mode]
        for name, digits in (("accuracy", 2), ("loss", 4), ("train_loss", 4)):
            gaps = [r[name] - other[name] for r, other in zip(mine, first, strict=True)]
            row.append(plus_minus(*mean_interval([r[name] for r in mine]), digits))
            row.append("-" if mine is first else plus_minus(*mean_interval(gaps), digits, sign=True))
        rows.append([*row, f"{mine[0]['parameters']:,}"])
    versus = f"vs {modes[0]}"
    return markdown(["mode", "accuracy, %", versus, "loss", versus, "train loss", versus, "parameters"], rows)


def main(cfg: VitConfig):
    torch.set_num_threads(1)  # such small products are slower on several
    splits = read_digits()
    n_train, n_test = (len(labels) for _, labels in splits)
    record = {"what": "vit", "data": "scikit-learn's digits", "train_images": n_train, "test_images": n_test}
    record |= {"settings": dataclasses.asdict(cfg), **environment(), "runs": []}
    with progress("train", len(cfg.seeds) * len(cfg.value_mode) * cfg.epochs, "epoch") as bar:
        for seed, mode in itertools.product(cfg.seeds, cfg.value_mode):
            record["runs"].append(train_and_test(mode, seed, cfg.epochs, splits, bar))
            write_json(cfg.out_file, record)

    print(table(record["runs"], cfg.value_mode))
    print(f"\nOne of {n_test} images is worth {100 / n_test:.2f} points. Digits say nothing about ImageNet.")


if __name__ == "__main__":
    run(main, __doc__)
