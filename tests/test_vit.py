"""examples/vit.py: equations, DeiT-B's size, shared weights, runs, bad input."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, in_process, refused

from configurator import UserError, load_settings
from examples import vit
from examples.vit import Data, Split
from value_modes import VALUE_MODES

SMALL = dict(image_size=8, patch=4, n_layer=3, n_head=2, n_embd=8)  # 4 patches and the class token
TINY = ["--n_layer=2", "--n_head=2", "--n_embd=8", "--epochs=1", "--warmup_epochs=0"]


def small(mode, channels=3, n_classes=5, **shape):
    """A float64 ViT with large random weights, so that nothing hides in rounding or at its initial value."""
    cfg = vit.VitConfig(value_mode=(mode,), **SMALL | shape).model_config(mode, n_classes)
    model = vit.ViT(cfg, SMALL["patch"], channels).double().eval()
    torch.manual_seed(1)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return model


def pixels(n=2, channels=3, size=8):
    generator = torch.Generator().manual_seed(2)
    return torch.rand(n, size, size, channels, generator=generator, dtype=torch.float64) * 2 - 1


def naive(image, w, mode):
    """The logits of one image (8, 8, channels), written from the paper's equations. w: a state dict."""

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x, name):
        x = x - x.mean(dim=-1, keepdim=True)
        return x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    corners = [image[top : top + 4, left : left + 4].reshape(-1) for top in (0, 4) for left in (0, 4)]
    x = torch.stack([w["class_token.weight"][0], *(linear(patch, "patches") for patch in corners)])
    x, v_1 = x + w["positions.weight"], None
    for n in range(3):
        of_head = [t.split(4, dim=1) for t in linear(norm(x, f"blocks.{n}.norm1"), f"blocks.{n}.attn.proj").split(8, 1)]
        v_1 = v_1 or of_head[2]
        heads = []
        for h in range(2):
            A = torch.softmax(of_head[0][h] @ of_head[1][h].T / math.sqrt(4), dim=1)  # no mask
            V = v_1[h] if mode == "svformer" else of_head[2][h]
            if mode == "resformer" and n > 0:
                V = V / 2 + v_1[h] / 2
            heads.append(A @ V + (0.4 * (v_1[h] - V) if mode == "neutreno" else 0))
        x = x + linear(torch.cat(heads, dim=1), f"blocks.{n}.attn.out")
        z = linear(norm(x, f"blocks.{n}.norm2"), f"blocks.{n}.mlp.up")
        x = x + linear(z * (1 + torch.erf(z / math.sqrt(2))) / 2, f"blocks.{n}.mlp.down")
    return linear(norm(x, "norm")[0], "head")


@pytest.mark.parametrize("mode", vit.MODES)
def test_equations(mode):
    model, images = small(mode), pixels()
    expected = torch.stack([naive(image, model.state_dict(), mode) for image in images])
    assert expected.std() > 0.1
    torch.testing.assert_close(model(images).detach(), expected, rtol=0, atol=1e-10)


LOOK_UP = {name for name, mode in VALUE_MODES.items() if any(r.source == "token" for r in mode.residuals)}


@pytest.mark.parametrize("mode", sorted(VALUE_MODES.keys() - LOOK_UP))
def test_tokens_read_all_tokens(mode):
    images = pixels(channels=1).requires_grad_()
    small(mode, 1, 3, n_layer=8, n_head=4, n_embd=16)(images)[0].sum().backward()
    assert (images.grad[0] != 0).all() and not images.grad[1].any()


def test_deit_b_has_its_published_size():
    cfg = load_settings(vit.VitConfig, [str(ROOT / "examples/deit_b.py"), "--data_dir=imagenet"])
    sizes = {}
    for mode in vit.MODES:
        with torch.device("meta"):
            model = vit.ViT(cfg.model_config(mode, 1000), cfg.patch, channels=3)
        sizes[mode] = sum(p.numel() for p in model.parameters())
    no_values = 11 * (768 * 768 + 768)
    assert sizes == dict.fromkeys(vit.MODES[:3], 86_567_656) | {"svformer": 86_567_656 - no_values}


def lighter_above_or_below(n=24):
    """Images that are lighter above or below, by class."""
    labels = torch.arange(n) % 2
    images = pixels(n, channels=1).float() / 4
    images[labels == 0, :4] += 0.7
    images[labels == 1, 4:] += 0.7
    split = Split(images.__getitem__, labels)
    return Data("made up", 2, 1, split, split)


def train(mode, seed, **settings):
    cfg = vit.VitConfig(**dict(value_mode=(mode,), epochs=2, warmup_epochs=1, batch_size=10) | SMALL | settings)
    bar = SimpleNamespace(update=lambda n: None)
    return vit.train_and_test(mode, seed, cfg, lighter_above_or_below(), torch.device("cpu"), bar)


def test_it_learns_and_the_seed_decides():
    assert train("svformer", 0, epochs=15, learning_rate=1e-2)["accuracy"] == 100
    assert train("resformer", 3) == train("resformer", 3) != train("resformer", 4)
    with pytest.raises(UserError, match="vanilla, seed 0: the loss is not finite"):
        train("vanilla", 0, learning_rate=1e6, weight_decay=1e6)


def test_a_folder(tmp_path):
    from PIL import Image

    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(6):
                array = rng.integers(0, 100, (10, 14, 3), np.uint8) + 100 * np.uint8(label)
                Image.fromarray(array).save(tmp_path / split / name / f"{i}.{'png' if i % 2 else 'JPEG'}")
    images, labels = next(vit.read_folder(tmp_path, 8).train.batches(100))
    assert images.shape == (12, 8, 8, 3) and images.dtype == torch.float32 and labels.tolist() == [0] * 6 + [1] * 6
    assert -1 <= images[labels == 0].mean() < -0.4 < images[labels == 1].mean() <= 1  # 0 to 99, 100 to 199

    words = [*TINY, f"--data_dir={tmp_path}", "--patch=4", "--seeds=1,2", f"--out_file={tmp_path / 'out.json'}"]
    result = in_process(vit, *words, "--value_mode=vanilla,svformer")
    assert result.returncode == 0 and "12 images to train on, 12 held out" in result.stdout, result.stderr
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [(r["value_mode"], r["seed"]) for r in runs] == [(m, s) for s in (1, 2) for m in ("vanilla", "svformer")]

    (tmp_path / "train/dog/0.JPEG").write_bytes((tmp_path / "train/cat/1.png").read_bytes()[:100])
    refused(in_process(vit, *words), "dog/0.JPEG is damaged or not an image")
    (tmp_path / "val/dog").rename(tmp_path / "val/wolf")
    refused(in_process(vit, *words), "not a folder of images train/<class>/* and val/<class>/*", "'wolf'")


def test_digits(tmp_path):
    pytest.importorskip("sklearn.datasets")
    digits = vit.read_digits()
    images = torch.stack([digits.train.read(i) for i in range(len(digits.train.labels))])
    assert images.shape == (1437, 8, 8, 1) and images.min() == -1 and images.max() == 1
    result = in_process(vit, *TINY, "--seeds=1", "--value_mode=vanilla,resformer", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "1,437 images to train on, 360 held out" in result.stdout and "nothing about ImageNet" in result.stdout
    assert (tmp_path / "out/vit.json").exists()


BAD = {"--value_mode=vanilla,vanilla": "no mode twice", "--value_mode=value_embed": "images have none"}


@pytest.mark.parametrize("word", [*BAD, "--patch=3", "--image_size=16"])
def test_bad_settings(word):
    refused(in_process(vit, word), BAD.get(word, "image_size="))
