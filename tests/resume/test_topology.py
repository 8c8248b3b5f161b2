"""A run continues at another number of ranks: the same samples, each once, and the same numbers to rounding."""

from __future__ import annotations

import collections

import pytest
import torch

from tests.resume.harness import config, load, read_log, run_to_status

NUM_SAMPLES = 53


def recorded(run_dir, ranks: int, update_freq: int, **sections) -> dict:
    """A run of the task that writes down which samples each update trained on."""
    return config(
        run_dir,
        task={"_target_": "tests.resume.recorder.Recorder", "follow_mean": False},
        optimization={"max_epoch": 2, "lr": 0.01, "clip_norm": 1.0, "update_freq": update_freq},
        dataset={"batch_size": 4, "valid_subset": None},
        **sections,
    )


def samples_by_epoch(run_dir) -> dict[int, collections.Counter]:
    """How often each sample was trained on in each epoch, over all ranks, from the lines that were not cut off."""
    counts: dict[int, collections.Counter] = collections.defaultdict(collections.Counter)
    for line in read_log(run_dir, "samples"):
        counts[line["epoch"]].update(line["indices"])
    return counts


@pytest.mark.parametrize("later_ranks", [1, 3, 4])
def test_two_ranks_continue_as_any_other_number_with_each_sample_once(tmp_path, later_ranks):
    run_to_status(recorded(tmp_path, 2, 2), 75, 2, stop="3:0:1:SIGTERM")
    run_to_status(recorded(tmp_path, later_ranks, 2), 0, later_ranks)
    counts = samples_by_epoch(tmp_path)
    assert sorted(counts) == [1, 2]
    for epoch, count in counts.items():
        assert count == collections.Counter(range(NUM_SAMPLES)), f"epoch {epoch}"


def test_four_micro_batches_are_the_same_update_however_ranks_share_them(tmp_path):
    losses = {}
    for ranks, update_freq in ((1, 4), (2, 2), (4, 1)):
        run_dir = tmp_path / f"{ranks}x{update_freq}"
        run_to_status(recorded(run_dir, ranks, update_freq), 0, ranks)
        losses[ranks] = torch.tensor([line["loss"] for line in read_log(run_dir, "train")], dtype=torch.float64)
    torch.testing.assert_close(losses[2], losses[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(losses[4], losses[1], rtol=1e-5, atol=0)


def test_a_run_that_changes_ranks_and_update_freq_keeps_its_numbers_to_rounding(tmp_path):
    run_to_status(recorded(tmp_path / "through", 1, 4), 0, 1)
    changing = tmp_path / "changing"
    run_to_status(recorded(changing, 2, 2), 75, 2, stop="3:1:0:SIGUSR1")
    run_to_status(recorded(changing, 4, 1), 75, 4, stop="5:0:3:SIGTERM")
    run_to_status(recorded(changing, 1, 4), 0, 1)
    one, other = load(tmp_path / "through"), load(changing)
    # Adam divides by the root of tiny second moments, which turns rounding into something visible: hence 1e-3.
    for name, tensor in one["model"].items():
        torch.testing.assert_close(other["model"][name], tensor, rtol=1e-3, atol=1e-4)
    assert one["extra_state"]["train_iterator"] == other["extra_state"]["train_iterator"]


def test_a_global_batch_size_keeps_the_numbers_whatever_ranks_a_run_is_continued_with(tmp_path):
    """Three ranks of batches of 4 do not divide a global batch of 16: places stay empty, the batch does not change."""

    def with_global_batch(run_dir):
        cfg = recorded(run_dir, 0, 1)
        cfg["optimization"]["global_batch_size"] = 16
        return cfg

    run_to_status(recorded(tmp_path / "through", 1, 4), 0, 1)
    changing = tmp_path / "changing"
    run_to_status(with_global_batch(changing), 75, 3, stop="3:1:0:SIGUSR1")
    run_to_status(with_global_batch(changing), 75, 2, stop="5:0:1:SIGTERM")
    run_to_status(with_global_batch(changing), 0, 4)
    whole, other = read_log(tmp_path / "through", "train"), read_log(changing, "train")
    assert [line["sample_size"] for line in other] == [line["sample_size"] for line in whole]
    losses = [torch.tensor([line["loss"] for line in lines], dtype=torch.float64) for lines in (other, whole)]
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
    assert samples_by_epoch(changing) == samples_by_epoch(tmp_path / "through")
    assert "ranks: saved 3, now 2, with 2 micro-batches" in (changing / "train.log").read_text()
