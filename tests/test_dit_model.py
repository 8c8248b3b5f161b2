"""DiT has the official names, the official start and the official outputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer.errors import ConfigError
from trainer.tasks.dit.model import DiT

FIXTURES = Path(__file__).parent / "fixtures" / "dit"
TINY = dict(input_size=4, patch_size=2, in_channels=1, hidden_size=16, depth=1, num_heads=2, num_classes=3)


@pytest.fixture(scope="module")
def reference():
    return torch.load(FIXTURES / "dit_reference_outputs.pt", weights_only=True)


@pytest.fixture(scope="module")
def loud(reference):
    model = DiT(**reference["config"]).eval()
    model.load_state_dict(reference["loud_state_dict"])
    return model


def assert_equal_to_rounding(ours, official):
    """Within 1e-5 of the largest output: bitwise on one machine, but processors round differently."""
    scale = official.abs().max()
    torch.testing.assert_close(ours / scale, official / scale, rtol=0, atol=1e-5)


def test_official_weights_give_the_official_outputs(reference, loud):
    with torch.no_grad():
        ours = loud(reference["x"], reference["t"], reference["y"])
    assert_equal_to_rounding(ours, reference["loud_output"])


def test_the_released_average_gives_the_official_outputs(reference):
    model = DiT(**reference["config"]).eval()
    model.load_state_dict(torch.load(FIXTURES / "dit_release_ema.pt", weights_only=True))
    with torch.no_grad():
        ours = model(reference["x"], reference["t"], reference["y"])
    torch.testing.assert_close(ours, reference["ema_output"], rtol=1e-5, atol=1e-6)


def test_guidance_of_three_channels_is_the_official_one(reference, loud):
    with torch.no_grad():
        ours = loud.forward_with_cfg(reference["x"], reference["t"], reference["y"], reference["cfg_scale"])
    assert_equal_to_rounding(ours, reference["loud_output_with_cfg"])


def test_guidance_of_all_channels_differs_in_the_fourth_only(reference, loud):
    with torch.no_grad():
        three, all_ = (
            loud.forward_with_cfg(reference["x"], reference["t"], reference["y"], 4.0, channels)
            for channels in (3, None)
        )
    changed = (three != all_).flatten(2).any(2).any(0)
    assert changed.tolist() == [False, False, False, True] + [False] * 4


def test_guidance_never_touches_the_variance_of_images_with_few_channels():
    torch.manual_seed(0)
    model = DiT(**TINY).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p)
    x, t, y = torch.randn(2, 1, 4, 4).repeat(2, 1, 1, 1), torch.zeros(4, dtype=torch.long), torch.tensor([0, 1, 3, 3])
    with torch.no_grad():
        torch.testing.assert_close(model.forward_with_cfg(x, t, y, 4.0)[:, 1:], model(x, t, y)[:, 1:])


def test_twelve_updates_from_the_same_seed_have_the_official_losses(reference):
    from trainer.tasks.dit.criterion import DiffusionCriterion

    torch.manual_seed(0)
    model, criterion = DiT(**reference["config"]), DiffusionCriterion()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    losses = []
    for _ in range(12):
        sample = (torch.randn(8, 4, 8, 8), torch.randint(0, 10, (8,)))
        loss, sample_size, _ = criterion(model, sample)
        optimizer.zero_grad()
        (loss / sample_size).backward()
        optimizer.step()
        losses.append(loss.item() / sample_size)
    assert losses == pytest.approx(reference["train_losses"], rel=1e-5)


def test_a_fresh_model_predicts_zero_and_does_not_train_its_position_embedding():
    model = DiT(**TINY)
    assert model(torch.randn(2, 1, 4, 4), torch.tensor([0, 9]), torch.tensor([0, 1])).abs().max() == 0
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["pos_embed"]


def test_labels_are_dropped_in_training_only_at_the_asked_share():
    embedder = DiT(**TINY, class_dropout_prob=0.25).y_embedder
    labels, no_class = torch.zeros(4000, dtype=torch.long), embedder.embedding_table.weight[3]
    torch.manual_seed(0)
    dropped = (embedder.train()(labels) == no_class).all(1).float().mean().item()
    assert 0.22 < dropped < 0.28
    assert not (embedder.eval()(labels) == no_class).all(1).any()


def test_without_class_dropout_there_is_no_row_for_no_class():
    assert len(DiT(**TINY, class_dropout_prob=0.0).y_embedder.embedding_table.weight) == 3
    assert len(DiT(**TINY).y_embedder.embedding_table.weight) == 4


def test_sizes_that_cannot_be_are_named_together():
    with pytest.raises(ConfigError, match="model.input_size=5(.|\n)*model.num_heads=3"):
        DiT(input_size=5, patch_size=2, hidden_size=16, num_heads=3)
