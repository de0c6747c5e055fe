"""examples/vit.py: equations, transformers' ViT, DeiT-B's size, shared weights and batches, runs, bad input."""

import json
import math
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, in_process, refused, script

from examples import classify, vit
from examples.classify import Data, Split
from oldconfig import UserError, load_settings
from value_modes import VALUE_MODES

SMALL = dict(image_size=8, patch=4, n_layer=3, n_head=2, n_embd=8)  # 4 patches and the class token
TINY = ["--n_layer=2", "--n_head=2", "--n_embd=8", "--epochs=1", "--warmup_epochs=0"]


def small(mode, channels=3, n_classes=5):
    """A float64 ViT with large random weights, so that nothing hides in rounding or at its initial value."""
    cfg = vit.VitConfig(value_mode=(mode,), **SMALL).model_config(mode, n_classes)
    model = vit.ViT(cfg, SMALL["patch"], channels).double().eval()
    torch.manual_seed(1)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return model


def pixels(n=2, channels=3, size=8):
    generator = torch.Generator().manual_seed(2)
    return torch.rand(n, size, size, channels, generator=generator, dtype=torch.float64) * 2 - 1


# ---- a second description of the equations: one image, one head at a time, none of our modules


def norm(x, weights, name):
    centred = x - x.mean(dim=-1, keepdim=True)
    scaled = centred / torch.sqrt((centred**2).mean(dim=-1, keepdim=True) + 1e-6)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(x, weights, name):
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def mixed_attention(mode, A, V, V_1):
    """U of one head of layers 2, 3, …"""
    if mode == "vanilla":
        return A @ V
    if mode == "neutreno":
        return A @ V + 0.4 * (V_1 - V)
    if mode == "resformer":
        return A @ (V / 2 + V_1 / 2)
    assert mode == "svformer"
    return A @ V_1


def naive_attention(x, weights, name, mode, first):
    """x (T, C) -> the heads' outputs side by side, and their values. first: those of layer 1, or None there."""
    size = 4  # of a head
    rows = linear(x, weights, f"{name}.proj").split(8, dim=1)  # q, k, v, (T, C) each; svformer has no v above layer 1
    outputs, values = [], []
    for head in range(2):
        columns = slice(head * size, (head + 1) * size)
        q, k = rows[0][:, columns], rows[1][:, columns]
        A = torch.softmax(q @ k.T / math.sqrt(size), dim=1)  # no mask
        V = rows[2][:, columns] if len(rows) == 3 else None
        outputs.append(A @ V if first is None else mixed_attention(mode, A, V, first[head]))
        values.append(V)
    return torch.cat(outputs, dim=1), values


def naive(image, weights, mode):
    """The logits of an image (S, S, channels), from a state dict."""
    rows = [weights["class_token.weight"][0]]
    for top in (0, 4):
        for left in (0, 4):
            patch = image[top : top + 4, left : left + 4].reshape(-1)  # (4 * 4 * channels)
            rows.append(linear(patch, weights, "patches"))
    x, first = torch.stack(rows) + weights["positions.weight"], None
    for n in range(SMALL["n_layer"]):
        name = f"blocks.{n}"
        y, values = naive_attention(norm(x, weights, f"{name}.norm1"), weights, f"{name}.attn", mode, first)
        first = first or values
        x = x + linear(y, weights, f"{name}.attn.out")
        z = linear(norm(x, weights, f"{name}.norm2"), weights, f"{name}.mlp.up")
        z = z * (1 + torch.erf(z / math.sqrt(2))) / 2
        x = x + linear(z, weights, f"{name}.mlp.down")
    return linear(norm(x, weights, "norm")[0], weights, "head")


@pytest.mark.parametrize("mode", vit.MODES)
def test_equations(mode):
    model, images = small(mode), pixels()
    logits = model(images).detach()
    expected = torch.stack([naive(image, model.state_dict(), mode) for image in images])
    assert logits.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


LOOK_UP = {name for name, mode in VALUE_MODES.items() if any(r.source == "token" for r in mode.residuals)}


@pytest.mark.parametrize("mode", sorted(VALUE_MODES.keys() - LOOK_UP))
def test_in_every_other_row_tokens_read_all_tokens(mode):
    shape = SMALL | dict(n_layer=8, n_head=4, n_embd=16)
    cfg = vit.VitConfig(value_mode=(mode,), **shape).model_config(mode, 3)
    model = vit.ViT(cfg, 4, 1).double()
    images = pixels(channels=1).requires_grad_()
    model(images)[0].sum().backward()
    assert (images.grad[0] != 0).all() and not images.grad[1].any()


# ---- others' ViT


def test_vanilla_is_transformers_vit():
    transformers = pytest.importorskip("transformers")
    ours = small("vanilla").float()
    shape = dict(hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32, layer_norm_eps=1e-6)
    about = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=5, **shape)
    theirs = transformers.ViTForImageClassification(about).eval()
    theirs.load_state_dict(as_transformers(ours.state_dict(), theirs.state_dict()))
    images = pixels().float()
    expected = theirs(images.permute(0, 3, 1, 2)).logits  # (B, channels, S, S)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(images), expected, rtol=0, atol=1e-5)


def as_transformers(ours, theirs):
    """A state dict of our vanilla ViT under the names of transformers' ViTForImageClassification, in its shapes."""
    layer = {"norm1": "layernorm_before", "norm2": "layernorm_after", "attn.out": "attention.o_proj"}
    layer |= {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
    kernel = ours["patches.weight"].unflatten(1, (4, 4, 3)).permute(0, 3, 1, 2)  # (C, channels, patch, patch)
    found = {"vit.embeddings.patch_embeddings.projection.weight": kernel}
    found["vit.embeddings.patch_embeddings.projection.bias"] = ours["patches.bias"]
    found["vit.embeddings.cls_token"] = ours["class_token.weight"][None]
    found["vit.embeddings.position_embeddings"] = ours["positions.weight"][None]
    for kind in ("weight", "bias"):
        found[f"vit.layernorm.{kind}"], found[f"classifier.{kind}"] = ours[f"norm.{kind}"], ours[f"head.{kind}"]
        for n in range(SMALL["n_layer"]):
            for name, peer in layer.items():
                found[f"vit.layers.{n}.{peer}.{kind}"] = ours[f"blocks.{n}.{name}.{kind}"]
            for t, rows in zip("qkv", ours[f"blocks.{n}.attn.proj.{kind}"].split(8), strict=True):
                found[f"vit.layers.{n}.attention.{t}_proj.{kind}"] = rows
    assert found.keys() == theirs.keys()
    return found


def test_deit_b_has_its_published_size():
    cfg = load_settings(vit.VitConfig, [str(ROOT / "examples/deit_b.py"), "--data_dir=imagenet"])
    sizes = {}
    for mode in vit.MODES:
        with torch.device("meta"):
            model = vit.ViT(cfg.model_config(mode, 1000), cfg.patch, channels=3)
        sizes[mode] = sum(p.numel() for p in model.parameters())
    no_values = 11 * (768 * 768 + 768)
    assert sizes == dict.fromkeys(vit.MODES[:3], 86_567_656) | {"svformer": 86_567_656 - no_values}


# ---- training


def data(n=24):
    """Images that are lighter above or below, by class."""
    labels = torch.arange(n) % 2
    images = pixels(n, channels=1).float() / 4
    images[labels == 0, :4] += 0.7
    images[labels == 1, 4:] += 0.7
    split = Split(images, labels, 8)
    return Data("made up", 2, 1, split, split)


def run(mode, seed, **settings):
    cfg = vit.VitConfig(**dict(value_mode=(mode,), epochs=2, warmup_epochs=1, batch_size=10) | SMALL | settings)
    return vit.run(mode, seed, cfg, data(), torch.device("cpu"), SimpleNamespace(update=lambda n: None))


def test_same_seed_same_result():
    assert run("resformer", 3) == run("resformer", 3)
    assert run("resformer", 3)["loss"] != run("resformer", 4)["loss"]


def test_it_learns():
    assert run("svformer", 0, epochs=15, learning_rate=1e-2)["accuracy"] == 100


def test_modes_share_weights_and_batches(monkeypatch):
    states, batches = {}, {}
    for mode in vit.MODES:
        seen = batches[mode] = []
        cfg = vit.VitConfig(value_mode=(mode,), **SMALL)
        model = vit.ViT(cfg.model_config(mode, 2), cfg.patch, 1, seed=7)
        states[mode] = {name: p.clone() for name, p in model.state_dict().items()}
        model.register_forward_hook(lambda model, inputs, output, seen=seen: seen.append(inputs[0].clone()))
        for _ in classify.train(model, data(), cfg, 7, torch.device("cpu")):
            pass
    for mode in vit.MODES:
        assert len(batches[mode]) == 20 and all(map(torch.equal, batches[mode], batches["vanilla"]))
        for name, p in states[mode].items():
            assert torch.equal(p, states["vanilla"][name][: len(p)]), name  # svformer has no rows of values
    assert not torch.equal(batches["vanilla"][0], batches["vanilla"][1])


def test_the_table():
    runs = []
    for seed, (a, b) in enumerate(((90.0, 91.0), (92.0, 94.0))):
        for mode, accuracy in (("vanilla", a), ("svformer", b)):
            losses = dict(loss=1 - accuracy / 100, train_loss=0.5)
            runs.append(dict(value_mode=mode, seed=seed, accuracy=accuracy, parameters=1234, **losses))
    lines = vit.table(runs, ("vanilla", "svformer")).splitlines()
    assert lines[2] == "| vanilla | 91.00 ± 1.41 | - | 0.0900 ± 0.0141 | - | 0.5000 ± 0.0000 | - | 1,234 |"
    assert lines[3].startswith("| svformer | 92.50 ± 2.12 | +1.50 ± 0.71 | 0.0750 ± 0.0212 | -0.0150 ± 0.0071 |")


def make_folder(folder, n=6):
    """train/ and val/ with two classes of small pictures."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            (folder / split / name).mkdir(parents=True)
            for i in range(n):
                array = rng.integers(0, 100, (10, 14, 3), np.uint8) + 100 * np.uint8(label)
                Image.fromarray(array).save(folder / split / name / f"{i}.{'png' if i % 2 else 'JPEG'}")
            (folder / split / name / "notes.txt").write_text("no image")
    return folder


def test_a_folder_end_to_end(tmp_path):
    folder = make_folder(tmp_path / "images")
    shape = "--image_size=8 --patch=4 --seeds=1,2 --value_mode=vanilla,svformer".split()
    words = [*TINY, f"--data_dir={folder}", *shape]
    result = in_process(vit, *words, "--out_file=out.json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    table, _, about = result.stdout.partition("\n\n")
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == ["| vanilla", "| svformer"]
    assert "12 images to train on, 12 held out" in about and "ImageNet" not in about
    record = json.loads((tmp_path / "out.json").read_text())
    assert {"commit", "machine", "torch"} <= record.keys() and record["settings"]["n_embd"] == 8
    assert [(r["value_mode"], r["seed"]) for r in record["runs"]] == [
        ("vanilla", 1), ("svformer", 1), ("vanilla", 2), ("svformer", 2)
    ]  # fmt: skip


def test_images_of_a_folder(tmp_path):
    found = classify.read_folder(make_folder(tmp_path / "images"), 8)
    images, labels = next(found.train.batches(100))
    assert images.shape == (12, 8, 8, 3) and images.dtype == torch.float32 and labels.tolist() == [0] * 6 + [1] * 6
    assert -1 <= images.min() and images.max() <= 1
    assert images[labels == 0].mean() < -0.4 < images[labels == 1].mean()  # 0 to 99, 100 to 199


def test_digits_end_to_end(tmp_path):
    pytest.importorskip("sklearn.datasets")
    result = in_process(vit, *TINY, "--seeds=1", "--value_mode=vanilla,resformer", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "1,437 images to train on, 360 held out" in result.stdout and "nothing about ImageNet" in result.stdout
    assert (tmp_path / "out/vit.json").exists()


def test_digits_are_split_once():
    pytest.importorskip("sklearn.datasets")
    digits = classify.read_digits()
    everything = torch.cat([digits.train.images, digits.test.images])
    assert everything.shape == (1797, 8, 8, 1) and everything.min() == -1 and everything.max() == 1
    assert torch.bincount(digits.test.labels).min() >= 25
    assert torch.equal(digits.test.images, classify.read_digits().test.images)


# ---- bad input


@pytest.mark.parametrize(
    "words, fragment",
    [
        (["--value_mode=resfromer"], "did you mean 'resformer'?"),
        (["--value_mode=vanilla,vanilla"], "none twice"),
        (["--value_mode=value_embed"], "images have none"),
        (["--seeds=()"], "at least one"),
        (["--patch=3"], "image_size=8 is not a multiple of patch=3"),
        (["--image_size=16"], "set data_dir"),
        (["--n_head=5"], "must be a multiple of n_head=5"),
        (["--data_dir=nowhere"], "nowhere/train is no folder"),
    ],
)
def test_bad_settings(words, fragment, tmp_path):
    refused(in_process(vit, *words, cwd=tmp_path), fragment)


def test_bad_folders(tmp_path):
    def result():
        return in_process(vit, *TINY, f"--data_dir={folder}", f"--out_file={tmp_path / 'out.json'}")

    folder = make_folder(tmp_path / "images", n=2)
    (folder / "train/dog/0.JPEG").write_bytes(b"no picture")
    refused(result(), "dog/0.JPEG cannot be read as an image")
    cut = (folder / "train/cat/1.png").read_bytes()[:100]
    (folder / "train/dog/0.JPEG").write_bytes(cut)
    refused(result(), "dog/0.JPEG cannot be read as an image")
    for file in (folder / "val/dog").glob("*.*"):
        file.rename(file.with_suffix(".txt"))
    refused(result(), "val/dog has no image")
    shutil.rmtree(folder / "val/dog")
    refused(result(), "val has not the subfolders")
    shutil.rmtree(folder / "train/dog")
    refused(result(), "has 1 subfolders")


def test_a_loss_that_is_not_finite_is_told():
    with pytest.raises(UserError, match="vanilla, seed 0: the loss is not finite"):
        run("vanilla", 0, learning_rate=1e6, weight_decay=1e6)


def test_without_scikit_learn(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    refused(in_process(vit, cwd=tmp_path), "run `pip install scikit-learn`")


def test_as_a_script(tmp_path):
    result = script("examples/vit.py", "--help", cwd=tmp_path)
    assert result.returncode == 0 and "--value_mode" in result.stdout and not any(tmp_path.iterdir())
