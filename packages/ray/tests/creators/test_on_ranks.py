"""Passes on several ranks: one global batch, shared data, weighted means, lost ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.packages.ray.tests.creators import creators
from heliograph.packages.ray.tests.creators.creators import HELD_OUT, SAMPLES, make, weights
from heliograph_ray.creators import LocalLauncher
from heliograph_ray.creators.trainer import is_lost_rank

STEPPED: dict[str, Any] = {"scheduler_creator": creators.scheduler, "scheduler_step_freq": "epoch"}
MEASURED: dict[str, Any] = {"metrics": {"accuracy": h.accuracy}}


def test_three_calls_equal_one_of_three_passes(two: Any) -> None:
    options = {**STEPPED, **MEASURED, "config": {"dropout": 0.2}, "launcher": two}
    one_by_one, at_once = make(**options), make(**options)
    returned = [one_by_one.train() for _ in range(3)]
    assert at_once.train(passes=3) == returned[2]
    assert torch.equal(weights(one_by_one), weights(at_once))


def test_ranks_share_the_batch_of_one_process_and_its_validation(two: Any) -> None:
    alone, together = make(**STEPPED, **MEASURED), make(**STEPPED, **MEASURED, launcher=two)
    expected, returned = alone.train(passes=2), together.train(passes=2)
    torch.testing.assert_close(weights(together), weights(alone))
    assert returned == pytest.approx(expected, rel=1e-5)
    assert together.validate() == pytest.approx(alone.validate(), rel=1e-5)
    assert together.result is not None
    assert together.result.progress.samples == HELD_OUT


@pytest.mark.parametrize("function", [creators.train_as_usual, creators.train_through_the_loop])
def test_functions_equal_the_default_training_and_validation(two: Any, function: Any) -> None:
    usual = make(**STEPPED, **MEASURED, launcher=two)
    own = make(**STEPPED, train_function=function, validation_function=creators.validate_as_usual, launcher=two)
    expected, returned = usual.train(passes=2), own.train(passes=2)
    assert torch.equal(weights(own), weights(usual))
    if function is creators.train_as_usual:
        assert returned["train/own_loss"] == pytest.approx(expected["train/loss"])
        assert returned["train/accuracy"] == pytest.approx(expected["train/accuracy"])
    assert own.result is not None
    assert (own.result.progress.steps, own.result.progress.samples) == (8, 2 * SAMPLES)

    expected, returned = usual.validate(), own.validate()
    assert returned["validation/loss"] == pytest.approx(expected["validation/loss"])
    assert returned["validation/accuracy"] == pytest.approx(expected["validation/accuracy"])
    batches = [4, 4, 3]  # distributed in turn: 7 samples to one rank, 4 to the other
    shares = [sum(batches[::2]), sum(batches[1::2])]
    assert returned["validation/share"] == pytest.approx(sum(share**2 for share in shares) / HELD_OUT)
    assert own.result.progress.samples == HELD_OUT


@pytest.mark.parametrize("to_none", [True, False])
def test_a_function_clips_the_gradients_of_all_ranks(two: Any, to_none: bool) -> None:
    options: dict[str, Any] = {"train_function": creators.train_and_clip, "config": {"to_none": to_none}}
    alone, together = make(**options), make(**options, launcher=two)
    expected, returned = alone.train(passes=2), together.train(passes=2)
    assert expected["train/norm"] > 0.1  # so each step is clipped
    assert returned == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(weights(together), weights(alone), rtol=0, atol=1e-6)


def test_several_models_are_trained_alike(two: Any) -> None:
    options: dict[str, Any] = {
        "model_creator": creators.pair,
        "optimizer_creator": creators.pair_of_optimizers,
        "train_function": creators.train_pair,
    }
    alone, together = make(**options), make(**options, launcher=two)
    alone.train(passes=2)
    together.train(passes=2)
    torch.testing.assert_close(weights(together), weights(alone))


def test_a_state_continues_with_another_number_of_ranks(two: Any, tmp_path: Path) -> None:
    whole, first, second = make(**STEPPED), make(**STEPPED, launcher=two), make(**STEPPED)
    whole.train(passes=3)
    first.train(passes=2)
    second.restore(first.save(tmp_path / "of_two.pth"))
    second.train()
    torch.testing.assert_close(weights(second), weights(whole))


def test_a_batch_that_cannot_be_shared_equally_is_refused(three: Any) -> None:
    for call in (make(launcher=three).train, make(launcher=three).validate):
        with pytest.raises(ValueError, match="3, such as 9"):
            call()


def test_one_of_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    trainer = make()
    for call in (trainer.train, trainer.validate):
        with pytest.raises(RuntimeError, match="one of 2 ranks"):
            call()


def test_a_rank_without_a_validation_batch_is_not_called(three: Any) -> None:
    options: dict[str, Any] = {"batch_size": 24, "launcher": three, "validation_function": creators.validate_as_usual}
    trainer = make(**options)
    assert trainer.validate()["validation/share"] == pytest.approx((8 * 8 + 3 * 3) / HELD_OUT)
    assert trainer.result is not None
    assert trainer.result.progress.samples == HELD_OUT


@pytest.fixture(name="lossy")
def make_lossy(tmp_path: Path) -> tuple[Any, Path]:
    """Return a trainer that loses rank 1 in step 6 if a file exists, and the file."""
    config = {"dropout": 0.2, "file": tmp_path / "trouble", "step": 6, "what": "die"}
    return make(config=config, plugin_creator=creators.trouble, launcher=LocalLauncher(2)), tmp_path / "trouble"


@pytest.mark.whole
def test_a_pass_with_a_lost_rank_is_repeated(two: Any, lossy: tuple[Any, Path]) -> None:
    (trainer, trouble), whole = lossy, make(config={"dropout": 0.2}, launcher=two)
    trouble.touch()
    returned = trainer.train(max_retries=1, passes=2)
    assert trainer.messages == [(0, 1)]  # of the second attempt, which begins after the first pass
    assert returned == whole.train(passes=2)
    assert torch.equal(weights(trainer), weights(whole))


@pytest.mark.whole
def test_a_call_without_a_retry_left_keeps_the_passes_before(two: Any, lossy: tuple[Any, Path]) -> None:
    (trainer, trouble), whole = lossy, make(config={"dropout": 0.2}, launcher=two)
    trouble.touch()
    with pytest.raises(h.RankFailed, match="rank 1 died") as caught:
        trainer.train(passes=3)
    assert any("heliograph: pass 1 failed" in line for line in caught.value.__notes__)
    whole.train()
    assert torch.equal(weights(trainer), weights(whole))
    assert trainer.train(passes=2) == whole.train(passes=2)
    assert torch.equal(weights(trainer), weights(whole))


@pytest.mark.whole
def test_an_error_of_ones_own_is_not_retried(tmp_path: Path) -> None:
    (tmp_path / "trouble").touch()
    config = {"file": tmp_path / "trouble", "step": 2, "what": "raise"}
    trainer = make(config=config, plugin_creator=creators.trouble, launcher=LocalLauncher(2))
    with pytest.raises(creators.OwnError) as caught:
        trainer.train(max_retries=3)
    assert vars(caught.value)["heliograph_rank"] == 1
    assert trainer.messages == [(0, 0)]  # the one attempt


def test_is_lost_rank() -> None:
    def wrapped(error: Exception) -> Exception:
        training = h.TrainingError("a run failed")
        training.__cause__ = error
        return training

    assert is_lost_rank(wrapped(h.RankFailed(1, "hung", "", "")))
    assert not is_lost_rank(h.RankFailed(1, "KeyError", "", ""))
    assert not is_lost_rank(wrapped(KeyError()))
