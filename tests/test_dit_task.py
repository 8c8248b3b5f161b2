"""Folders of images and the digits: what is read, what must agree, what is drawn."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from trainer.errors import ConfigError
from trainer.randomness import seed_all
from trainer.tasks.dit.digits import Digits, DigitsClassifier, load_split
from trainer.tasks.dit.images import FolderDataset, SampleFileError, centre_crop, list_files, list_split
from trainer.tasks.dit.pictures import grid_image
from trainer.tasks.dit.task import ClassConditionalImages

TINY = {"patch_size": 4, "hidden_size": 16, "depth": 1, "num_heads": 2}


@pytest.fixture
def folder(tmp_path):
    """Three classes of four images each, all of another size."""
    rng = np.random.default_rng(0)
    for c, name in enumerate(("ant", "bee", "cat")):
        for i in range(4):
            path = tmp_path / "data" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (20 + 5 * i, 40 - 3 * c, 3), dtype=np.uint8)).save(path)
    return tmp_path / "data"


def config(tmp_path, task, model=None, **sections):
    return {
        "task": task,
        "model": {
            "_target_": "trainer.tasks.dit.model.DiT",
            "input_size": None,
            "in_channels": None,
            "num_classes": None,
            **TINY,
            **(model or {}),
        },
        "criterion": {"_target_": "trainer.tasks.dit.criterion.DiffusionCriterion", "diffusion_steps": 40},
        "optimizer": {"_target_": "torch.optim.AdamW"},
        "lr_scheduler": {"_target_": "trainer.lr_scheduler.Fixed"},
        "common": {"cpu": True, "num_threads": 1},
        "dataset": {"batch_size": 4},
        "optimization": {"max_update": 2},
        "run_dir": str(tmp_path / "run"),
        **sections,
    }


def images_config(tmp_path, folder, model=None, **task):
    target = "trainer.tasks.dit.task.ClassConditionalImages"
    defaults = {"data": str(folder), "image_size": 8, "sample_steps": 2}
    return config(tmp_path, {"_target_": target, **defaults, **task}, model)


def digits_config(tmp_path, model=None, **task):
    sizes = {"input_size": 8, "in_channels": 1, "num_classes": 10, **(model or {})}
    target = "trainer.tasks.dit.digits.Digits"
    defaults = {"sample_steps": 2, "samples_per_class": 2, "pictured_per_class": 1}
    return config(tmp_path, {"_target_": target, **defaults, **task}, sizes)


# ---- files ----


def test_classes_are_numbered_by_name_and_other_files_are_passed_over(folder):
    (folder / "bee" / "notes.txt").write_text("no image")
    (folder / "bee" / ".hidden.png").write_text("no image")
    (folder / "ant" / "more").mkdir()
    (folder / "ant" / "0.png").rename(folder / "ant" / "more" / "0.PNG")
    listing = list_files(str(folder))
    assert listing.classes == ["ant", "bee", "cat"]
    assert listing.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert listing.names[:2] == ["ant/1.png", "ant/2.png"] and "ant/more/0.PNG" in listing.names


def test_the_held_out_share_is_of_every_class_and_never_trained_on(folder):
    train, valid = (list_split(str(folder), split, 0.25, seed=1) for split in ("train", "valid"))
    assert sorted(valid.labels) == [0, 1, 2]
    assert not set(train.names) & set(valid.names) and len(train.names) + len(valid.names) == 12
    assert list_split(str(folder), "valid", 0.0, seed=1) is None


def test_a_folder_named_val_is_the_validation_set(folder):
    (folder / "val").mkdir()
    (folder / "bee").rename(folder / "val" / "cat")
    train, valid = (list_split(str(folder), split, 0.5, seed=1) for split in ("train", "valid"))
    assert train.classes == valid.classes == ["ant", "cat"] and len(train.names) == 8
    assert valid.labels.tolist() == [1] * 4


def test_classes_that_training_lacks_are_refused_in_the_validation_set(folder):
    (folder / "val").mkdir()
    (folder / "bee").rename(folder / "val" / "bee")
    with pytest.raises(ConfigError, match="training has not: bee"):
        list_split(str(folder), "valid", 0.0, seed=1)


@pytest.mark.parametrize(
    "break_it, message",
    [
        (lambda folder: (folder / "dog").mkdir(), "class folder .*dog holds no image"),
        (lambda folder: np.save(folder / "ant" / "x.npy", np.zeros(1)), "mixes images .* with latents .*x.npy"),
    ],
)
def test_folders_that_cannot_be_meant_are_refused_by_name(folder, break_it, message):
    break_it(folder)
    with pytest.raises(ConfigError, match=message):
        list_files(str(folder))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="task.data=.*nowhere is no folder"):
        list_split(str(tmp_path / "nowhere"), "train", 0.0, seed=1)


def test_the_fingerprint_follows_names_and_sizes(folder):
    before = FolderDataset(list_files(str(folder)), 8, 3).fingerprint
    assert FolderDataset(list_files(str(folder)), 16, 1).fingerprint == before
    (folder / "cat" / "3.png").rename(folder / "cat" / "4.png")
    assert FolderDataset(list_files(str(folder)), 8, 3).fingerprint != before


# ---- images and latents ----


@pytest.mark.parametrize("channels", [1, 3])
def test_images_come_as_squares_between_minus_one_and_one(folder, channels):
    dataset = FolderDataset(list_files(str(folder)), 8, channels)
    for index in (0, 11):
        values, label = dataset[index]
        assert (
            values.shape == (channels, 8, 8)
            and values.dtype == torch.float32
            and -1 <= values.min() < values.max() <= 1
        )
    assert label == 2 and dataset.path(11).endswith("cat/3.png")


def test_the_crop_is_the_centre_of_the_longer_side():
    pixels = np.zeros((10, 30, 3), dtype=np.uint8)
    pixels[:, 10:20] = 255
    assert centre_crop(Image.fromarray(pixels), 10).min() == 255


def test_extremes_of_grey_are_exactly_minus_one_and_one(tmp_path):
    (tmp_path / "a").mkdir()
    Image.fromarray(np.array([[0, 255], [255, 0]], dtype=np.uint8)).save(tmp_path / "a" / "x.png")
    assert FolderDataset(list_files(str(tmp_path)), 2, 1)[0][0].tolist() == [[[-1, 1], [1, -1]]]


def test_half_of_the_training_images_are_mirrored_by_the_seed_of_the_sample(folder):
    plain, augmented = (FolderDataset(list_files(str(folder)), 8, 3, augment=flag) for flag in (False, True))
    image, seen = plain[0][0], []
    for seed in range(40):
        seed_all(seed)
        drawn = augmented[0][0]
        seen.append(torch.equal(drawn, image.flip(-1)))
        assert seen[-1] or torch.equal(drawn, image)
    assert 10 < sum(seen) < 30 and augmented.uses_rng and not plain.uses_rng


@pytest.mark.parametrize("content", [b"", b"not an image", None])
def test_a_damaged_image_is_named(folder, content):
    path = folder / "ant" / "0.png"
    path.write_bytes(path.read_bytes()[:100] if content is None else content)
    with pytest.raises(SampleFileError, match="ant/0.png: not a readable image"):
        FolderDataset(list_files(str(folder)), 8, 3)[0]


def test_latents_are_taken_as_stored_times_the_scale_and_their_variants_drawn(tmp_path):
    (tmp_path / "a").mkdir()
    variants = np.stack([np.full((4, 2, 2), v, dtype=np.float16) for v in (1, 2)])
    np.save(tmp_path / "a" / "0.npy", variants)
    torch.save(torch.full((4, 2, 2), 3.0), tmp_path / "a" / "1.pt")
    listing = list_files(str(tmp_path))
    plain, augmented = (FolderDataset(listing, 2, 4, augment=flag, latent_scale=0.5) for flag in (False, True))
    assert plain[0][0].unique().tolist() == [0.5] and plain[1][0].unique().tolist() == [1.5]
    assert {augmented[0][0].max().item() for _ in range(40)} == {0.5, 1.0}


def test_a_latent_of_another_shape_or_that_would_run_code_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    np.save(tmp_path / "a" / "0.npy", np.zeros((4, 4, 4), dtype=np.float32))
    torch.save(print, tmp_path / "a" / "1.pt")
    dataset = FolderDataset(list_files(str(tmp_path)), 2, 4)
    with pytest.raises(SampleFileError, match=r"a/0.npy: latent of shape \(4, 4, 4\), the model takes \(4, 2, 2\)"):
        dataset[0]
    with pytest.raises(SampleFileError, match="a/1.pt: not a readable latent"):
        dataset[1]


# ---- the task ----


def test_the_model_takes_its_sizes_from_the_data(tmp_path, folder):
    trainer = ClassConditionalImages(images_config(tmp_path, folder))
    assert (trainer.model.input_size, trainer.model.in_channels, trainer.model.num_classes) == (8, 3, 3)
    saved = trainer.state_dict()["cfg"]["model"]
    assert (saved["input_size"], saved["in_channels"], saved["num_classes"]) == (8, 3, 3)


def test_the_model_takes_its_sizes_from_latents(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        np.save(tmp_path / "data" / name / "0.npy", np.zeros((4, 8, 8), dtype=np.float32))
    model = ClassConditionalImages(images_config(tmp_path, tmp_path / "data", image_size=None)).model
    assert (model.input_size, model.in_channels, model.num_classes) == (8, 4, 2)
    with pytest.raises(ConfigError, match="task.image_size=null"):
        ClassConditionalImages(images_config(tmp_path, tmp_path / "data", image_size=16))


def test_sizes_that_do_not_agree_are_told_together_with_the_overrides(tmp_path, folder):
    wrong = {"input_size": 32, "in_channels": 4, "num_classes": 1000}
    with pytest.raises(ConfigError) as caught:
        ClassConditionalImages(images_config(tmp_path, folder, wrong))
    for override in ("set model.input_size=8", "set model.in_channels=3", "set model.num_classes=3"):
        assert override in str(caught.value)


def test_impossible_settings_are_told_together(tmp_path):
    with pytest.raises(
        ConfigError, match="task.data is not given.*task.valid_fraction is 1.5.*task.sample_steps is 41"
    ):
        ClassConditionalImages(images_config(tmp_path, "", valid_fraction=1.5, sample_steps=41))


def test_a_validation_leaves_a_picture_and_the_weights_as_they_were(tmp_path, folder):
    trainer = ClassConditionalImages(
        {**images_config(tmp_path, folder, valid_fraction=0.25), "ema": {"store_ema": True}}
    )
    trainer.train_step([next(iter(trainer.get_train_iterator(1).next_epoch_itr()))[0]])
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    assert trainer.validate("valid")["loss"] > 0
    trainer.after_validate({})
    assert Image.open(tmp_path / "run" / "samples" / "update_1.png").size[0] > 100
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.model.training


def test_drawing_is_a_function_of_the_position(tmp_path):
    trainer = Digits(digits_config(tmp_path))
    for parameter in trainer.model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    first = trainer.draw([1, 2], 3, 2.0, clip=True)
    torch.rand(17)
    assert torch.equal(trainer.draw([1, 2], 3, 2.0, clip=True), first)
    trainer.set_num_updates(1)
    assert not torch.equal(trainer.draw([1, 2], 3, 2.0, clip=True), first)


# ---- digits ----


def test_digits_are_split_once_and_for_all():
    (train, _), (valid, labels) = load_split("train", 0.1, 1), load_split("valid", 0.1, 1)
    assert (len(train), len(valid)) == (1617, 180) and len(np.unique(labels)) == 10
    assert not {image.tobytes() for image in valid} <= {image.tobytes() for image in train}


def test_the_classifier_knows_real_digits_and_not_noise():
    classifier = DigitsClassifier(*load_split("train", 0.1, 1))
    images, labels = load_split("valid", 0.1, 1)
    assert classifier.accuracy(images, labels) > 0.97
    noise = np.random.default_rng(0).integers(0, 17, images.shape).astype(np.float32)
    assert classifier.accuracy(noise, labels) < 0.3


def test_the_run_of_the_digits_ends_with_a_picture_and_its_quality(tmp_path, caplog):
    class Log:
        lines = []

        def event(self, name, **fields):
            self.lines.append(json.loads(json.dumps({"event": name, **fields})))

    trainer = Digits(digits_config(tmp_path))
    trainer.log = Log()
    with caplog.at_level("INFO"):
        trainer.after_train()
    (event,) = trainer.log.lines
    assert event["event"] == "sample" and 0 <= event["accuracy"] <= 1 and event["real_accuracy"] > 0.97
    width, height = Image.open(event["path"]).size
    assert height > 9 * width
    assert f"picture: {event['path']}" in caplog.text


def test_a_model_of_another_size_is_refused_with_the_override(tmp_path):
    with pytest.raises(ConfigError, match="model.input_size is 16, but the digits need model.input_size=8"):
        Digits(digits_config(tmp_path, {"input_size": 16}))


# ---- pictures ----


def test_the_grid_shows_images_row_by_row_enlarged_between_white_lines():
    images = torch.stack([torch.full((1, 2, 2), v) for v in (-1.0, 0.0, 1.0, 7.0)])
    picture = grid_image(images, columns=2)
    assert picture.shape == (99, 99, 3)
    assert [int(picture[y, x, 0]) for y, x in ((10, 10), (10, 60), (60, 10), (60, 60), (0, 0), (49, 10))] == [
        0,
        128,
        255,
        255,
        255,
        255,
    ]
