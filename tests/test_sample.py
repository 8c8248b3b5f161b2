"""fairtrain-sample: from a checkpoint to a picture or a text, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from trainer.errors import ConfigError
from trainer.tasks.dit.diffusion import build_diffusion, sample_classes
from trainer.tasks.dit.model import DiT
from trainer.tasks.sample import main, parse_classes

SIZES = dict(input_size=4, patch_size=2, in_channels=1, hidden_size=16, depth=1, num_heads=2, num_classes=3)


def random_model(seed, **sizes):
    torch.manual_seed(seed)
    model = DiT(**{**SIZES, **sizes}).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def checkpoint(model, average=None, target="trainer.tasks.dit.model.DiT", **sizes):
    return {
        "format_version": 1,
        "cfg": {"model": {"_target_": target, **SIZES, **sizes}, "criterion": {"diffusion_steps": 40}},
        "model": dict(model.state_dict()),
        "extra_state": {"ema": dict(average.state_dict())} if average else {},
    }


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    torch.save(checkpoint(random_model(0), random_model(1)), path)
    return str(path)


def draw(saved, tmp_path, *options):
    path = tmp_path / "out.npy"
    assert main([saved, "-o", str(path), "--steps", "3", "-n", "2", "--device", "cpu", *options]) == 0
    return np.load(path)


def test_the_picture_has_a_row_for_each_class(saved, tmp_path):
    path = tmp_path / "new folder" / "out.png"
    assert main([saved, "-o", str(path), "--steps", "2", "-n", "5", "--class", "0,2", "--device", "cpu"]) == 0
    width, height = Image.open(path).size
    assert (width - 1) * 2 == (height - 1) * 5


def test_samples_are_those_of_the_average_unless_told_otherwise(saved, tmp_path):
    labels, process = torch.tensor([1, 1]), build_diffusion(40, sampling_steps=3)
    for options, seed_of_weights in (((), 1), (("--no-ema",), 0)):
        model = random_model(seed_of_weights)
        torch.manual_seed(7)
        expected = sample_classes(model, process, labels, 3.0, clip=True)
        ours = draw(saved, tmp_path, "--class", "1", "--cfg-scale", "3", "--seed", "7", *options)
        np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_the_same_seed_draws_the_same_and_another_something_else(saved, tmp_path):
    first, again, other = (draw(saved, tmp_path, "--seed", seed) for seed in ("1", "1", "2"))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_ddim_takes_its_freedom_from_eta_alone(saved, tmp_path):
    plain, noisy = (draw(saved, tmp_path, "--ddim", "--steps", "5", "--eta", eta) for eta in ("0", "1"))
    assert not np.array_equal(plain, noisy)


@pytest.mark.parametrize("text, classes", [(None, [0, 1, 2]), ("2", [2]), ("0-1,2,0", [0, 1, 2, 0])])
def test_classes_are_numbers_and_ranges(text, classes):
    assert parse_classes(text, 3) == classes


@pytest.mark.parametrize("text", ["3", "0-3", "a", "", "-1", "2-1"])
def test_classes_that_do_not_exist_are_refused(text):
    with pytest.raises(ConfigError, match="--class"):
        parse_classes(text, 3)


@pytest.mark.parametrize(
    "options, message",
    [
        (["-o", "x.txt"], "draws images"),
        (["-o", "x.png", "--steps", "41"], "41 sampling steps"),
        (["-o", "x.png", "-n", "0"], "-n 0"),
        (["-o", "x.png", "--cfg-channels", "none"], "--cfg-channels none"),
        (["-o", "x.png", "--device", "abacus"], "--device abacus"),
    ],
)
def test_bad_options_give_status_2_and_a_sentence(saved, capsys, options, message):
    assert main([saved, *options]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_file_and_one_of_another_program_give_status_2(tmp_path, capsys):
    assert main([str(tmp_path / "none.pt"), "-o", "x.png"]) == 2
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pt")
    assert main([str(tmp_path / "other.pt"), "-o", "x.png"]) == 2
    assert "does not name a model that can be sampled from" in capsys.readouterr().err


def test_a_class_named_by_the_file_is_never_imported(tmp_path, capsys):
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    torch.save(checkpoint(random_model(0), target="evil.Model"), tmp_path / "c.pt")
    assert main([str(tmp_path / "c.pt"), "-o", "x.png"]) == 2
    assert "holds a evil.Model" in capsys.readouterr().err


def test_a_model_without_class_dropout_can_be_drawn_from_without_guidance_only(tmp_path, capsys):
    torch.save(checkpoint(random_model(0, class_dropout_prob=0.0), class_dropout_prob=0.0), tmp_path / "c.pt")
    options = [str(tmp_path / "c.pt"), "-o", str(tmp_path / "x.png"), "--steps", "2", "--device", "cpu"]
    assert main([*options, "--cfg-scale", "2"]) == 2
    assert main([*options, "--cfg-scale", "1"]) == 0


def test_latents_are_pictured_with_a_word_on_what_is_shown(tmp_path, capsys):
    torch.save(checkpoint(random_model(0, in_channels=4), in_channels=4), tmp_path / "c.pt")
    assert main([str(tmp_path / "c.pt"), "-o", str(tmp_path / "x.png"), "--steps", "2", "--device", "cpu"]) == 0
    assert "latents" in capsys.readouterr().err


def test_a_language_model_writes_text(tmp_path, capsys):
    from trainer.tasks.language_modeling.model import TransformerLM

    sizes = dict(vocab_size=256, dim=16, num_layers=1, num_heads=2, max_length=16)
    target = "trainer.tasks.language_modeling.model.TransformerLM"
    state = {
        "format_version": 1,
        "cfg": {"model": {"_target_": target, **sizes}},
        "model": dict(TransformerLM(**sizes).state_dict()),
        "extra_state": {},
    }
    torch.save(state, tmp_path / "c.pt")
    options = [str(tmp_path / "c.pt"), "--prompt", "def ", "--length", "8", "--device", "cpu"]
    assert main([*options, "-o", str(tmp_path / "x.txt")]) == 0
    assert (tmp_path / "x.txt").read_text(errors="replace").startswith("def ")
    assert main([*options, "-o", "x.png"]) == 2
    capsys.readouterr()
    assert main(options) == 0, "without -o to stdout"
    assert capsys.readouterr().out.rstrip("\n") == (tmp_path / "x.txt").read_text(errors="replace").rstrip("\n")


def test_images_need_a_place_to_go(saved, capsys):
    assert main([saved]) == 2
    assert "-o samples.png" in capsys.readouterr().err
