"""What a resumed run does again is compared with what the killed run had done."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pickle
from datetime import date
from pathlib import Path
from typing import Any

import heliograph as h
import pytest
import torch
from heliograph.builtin_callbacks.checkpoint import verify_resume as module
from heliograph.builtin_callbacks.checkpoint.verify_resume import HIDDEN_STATE, OFFSETS, ROW, SIZE, Owner, Ring
from heliograph.tests import kit
from heliograph.tests.kit import adam, random_batches, saving, sgd
from heliograph.tests.messages import assert_each, assert_facts, has_facts
from heliograph.tests.ranks_pool import Pool
from torch import Tensor, nn

# Real kills.


# Runs that end between two saves stand for killed ones.


def calls() -> dict[str, int]:
    """Return what counts the calls of the task that was made last: in a module of Python, which is never captured."""
    counts: dict[str, int] = vars(json).setdefault("_calls", {})
    return counts


class Counting(h.Supervised):
    """Changes the loss of one of its batches."""

    def __init__(self, model: nn.Module, at: int) -> None:
        super().__init__(model, nn.functional.mse_loss)
        calls().update(calls=0, at=at)

    def training_step(self, run: h.Run, batch: Any) -> Tensor:
        calls()["calls"] += 1
        return super().training_step(run, batch) * (1.5 if calls()["calls"] == calls()["at"] else 1.0)


def fit(
    folder: Path, steps: int, *plugins: Any, at: int = 0, resume: str | None = "auto", seed: int = 0, **options: Any
) -> h.RunResult:
    torch.manual_seed(seed)
    checkpoint_options = {"keep_last": options.pop("keep_last")} if "keep_last" in options else {}
    savers = saving(folder, h.Every(steps=5), resume=resume, **checkpoint_options)
    options = {"train": random_batches(10, 3), "optimizer": adam(), **options}
    return kit.fit(*savers, *plugins, task=Counting(nn.Linear(4, 2), at), steps=steps, **options)


def report(result: h.RunResult) -> tuple[int, str | None]:
    assert result.resume is not None
    return result.resume.verified_steps, result.resume.divergence


def test_a_fresh_run_claims_nothing(tmp_path: Path) -> None:
    result = fit(tmp_path, 7)
    assert report(result) == (0, None)
    assert result.resume is not None
    assert result.resume.reasons == ()
    assert "verified" not in str(result)


def test_a_run_without_anything_to_repeat_claims_nothing(tmp_path: Path) -> None:
    fit(tmp_path, 5)
    assert not (tmp_path / ".run.steps").exists()
    assert_facts(fit(tmp_path, 8).resume, "step 5", "nothing to verify")


def test_what_was_found_equal_is_compared_with_again(tmp_path: Path) -> None:
    fit(tmp_path, 8)
    assert report(fit(tmp_path, 7)) == (2, None)
    result = fit(tmp_path, 12)
    assert report(result) == (3, None)
    assert_facts(result.resume, "step 5", "verified", "3 repeated steps", "identical")


def test_a_resume_quotes_the_newest_earlier_comparison(tmp_path: Path) -> None:
    fit(tmp_path, 9)
    first, second = fit(tmp_path, 8).resume, fit(tmp_path, 7).resume
    assert first is not None
    assert second is not None
    assert first.verified_before is None
    assert second.verified_before == f"{date.today()}, 3 steps"
    assert_facts(second, "verified: 2 repeated", f"verified before: {date.today()}, 3 steps")
    fit(tmp_path, 9)
    different = fit(tmp_path, 9, at=2).resume  # it leaves no line
    assert different is not None
    assert_facts(different, "DIVERGED", f"verified before: {date.today()}, 4 steps")
    lines = [json.loads(line) for line in (tmp_path / ".verified.jsonl").read_text().splitlines()]
    assert [(line["steps"], line["by"]) for line in lines] == [(number, "VerifyResume") for number in (3, 2, 4)]


def test_a_damaged_file_of_comparisons_is_ignored(tmp_path: Path) -> None:
    fit(tmp_path, 9)
    (tmp_path / ".verified.jsonl").write_bytes(b"\xff{")
    result = fit(tmp_path, 9)
    assert result.resume is not None
    assert (result.resume.verified_steps, result.resume.verified_before) == (4, None)


def test_after_a_difference_the_new_way_counts(tmp_path: Path) -> None:
    fit(tmp_path, 9)
    for steps in (9, 12):  # killed before a checkpoint says so, it is found again
        number, difference = report(fit(tmp_path, steps, at=2))
        assert number == 1
        assert_facts(difference, "DIVERGED", "step 7", "loss 3.014", "was 2.01")
    result = fit(tmp_path, 14)
    assert report(result) == (2, None)
    assert result.resume is not None
    assert result.resume.reasons


def test_a_divergence_is_repeated_by_later_resumes(tmp_path: Path) -> None:
    fit(tmp_path, 9)
    fit(tmp_path, 12, at=2)
    result = fit(tmp_path, 14)
    assert result.resume is not None
    assert result.resume.reasons
    assert_each(result.resume.differences, ("DIVERGED", "step 7", "loss 3.014", "was 2.01"))
    assert report(result)[1] is None


def test_a_difference_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, 9)
    with caplog.at_level(logging.WARNING, "heliograph"):
        fit(tmp_path, 9, at=2)
    assert_each(caplog.messages, ("DIVERGED", "step 7", "loss 3.014", "was 2.01", HIDDEN_STATE))


def test_a_difference_is_a_warning_and_equal_steps_are_none(tmp_path: Path) -> None:
    fit(tmp_path, 9)
    assert not [warning for warning in fit(tmp_path, 9).warnings if "DIVERGED" in warning]
    (warning,) = [warning for warning in fit(tmp_path, 9, at=2).warnings if "DIVERGED" in warning]
    assert "DIVERGED at step 7:" in warning
    assert HIDDEN_STATE in warning


def test_a_handler_that_changes_the_rate_in_a_resumed_epoch_is_named(tmp_path: Path) -> None:
    class Restless(h.Plugin):
        @h.on(h.EpochStart)
        def change(self, run: h.Run, event: h.EpochStart) -> None:
            run.optimizer.param_groups[0]["lr"] *= 0.5

    fit(tmp_path, 9, Restless())
    result = fit(tmp_path, 9, Restless())
    assert result.resume is not None
    assert any("handled again by restless" in text for text in result.resume.differences)


def test_stop(tmp_path: Path) -> None:
    fit(tmp_path, 9)
    result = fit(tmp_path, 20, h.VerifyResume("stop"), at=2)
    assert (result.status, result.stopped_by, result.progress.steps) == ("stopped", "verify_resume", 7)
    assert_facts(result.reason, "DIVERGED", "step 7", "loss 3.014", "was 2.01")
    assert h.VerifyResume().asks == ()
    assert h.VerifyResume("stop").asks == ("stop",)


def test_raise_and_raise_again(tmp_path: Path) -> None:
    fit(tmp_path, 9)
    for _ in range(2):
        with pytest.raises(h.ResumeDiffers) as caught:
            fit(tmp_path, 20, h.VerifyResume("raise"), at=2)
    error = caught.value
    assert (error.step, error.batch, error.path, error.causes) == (7, 7, tmp_path / ".run.steps", HIDDEN_STATE)
    assert_facts(
        error, "DIVERGED", "step 7", "loss 3.014", "was 2.01", "batch 7", tmp_path / ".run.steps", HIDDEN_STATE
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert report(fit(tmp_path, 9)) == (4, None)


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="on_difference"):
        h.VerifyResume("halt")  # type: ignore[arg-type]


def test_without_a_checkpoint_nothing_is_kept_or_compared(tmp_path: Path) -> None:
    result = kit.fit(h.VerifyResume("raise"), task=Counting(nn.Linear(4, 2), 0), train=random_batches(3, 3))
    assert_each(result.warnings, ("VerifyResume", "nothing", "Checkpoint(folder)"))
    assert result.notes == ()


def test_a_plugin_of_somebody_else_can_bring_it(tmp_path: Path) -> None:
    class Writer(h.Plugin):
        brings = (h.VerifyResume,)
        folder, file_name, resume = tmp_path, "other", None

        @h.on(h.SavePoint, optional=True)
        def write(self, run: h.Run, event: h.SavePoint) -> None: ...

    kit.fit(Writer(), task=Counting(nn.Linear(4, 2), 0), train=random_batches(3, 3))
    assert (tmp_path / ".other.steps").stat().st_size == SIZE


def test_switched_off_it_keeps_nothing(tmp_path: Path) -> None:
    trainer = h.Trainer(saving(tmp_path, h.Every(steps=2)), device="cpu")
    with trainer.plugins.disabled(h.VerifyResume):
        kit.fit(trainer, task=Counting(nn.Linear(4, 2), 0), train=random_batches(3, 3))
    assert not (tmp_path / ".run.steps").exists()


def test_a_loss_that_is_no_number_equals_itself(tmp_path: Path) -> None:
    infinite: Any = lambda output, target: (output - target).mean() * float("nan")  # noqa: E731

    def run(steps: int) -> h.RunResult:
        torch.manual_seed(0)
        batches = [(torch.ones(2, 4), torch.ones(2, 2))] * 10
        task = h.Supervised(nn.Linear(4, 2), infinite)
        return kit.fit(*saving(tmp_path, h.Every(steps=5), resume="auto"), task=task, train=batches, steps=steps)

    run(8)
    assert report(run(8)) == (3, None)


def test_an_epochs_end_between_the_save_and_the_kill(tmp_path: Path) -> None:
    fit(tmp_path, 14)
    assert report(fit(tmp_path, 20)) == (4, None)
    fit(tmp_path, 23)
    assert report(fit(tmp_path, 30)) == (3, None)


def test_a_killed_run_that_came_further_than_the_file_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from heliograph.builtin_callbacks.checkpoint import verify_resume

    monkeypatch.setattr(verify_resume, "MASK", 3)
    fit(tmp_path, 7, keep_last=None)
    first = tmp_path / "run_epoch_0_iter_5.pth"
    fit(tmp_path, 14, resume=str(first), keep_last=None)
    for path in tmp_path.glob("run_*_iter_10.*"):  # as if it had been killed before this save
        path.unlink()
    result = fit(tmp_path, 18, resume=str(first))
    assert report(result) == (4, None)  # of 6 to 14 the last four: 11 to 14


class Turns(h.Plugin):
    """Goes back once, to the first checkpoint."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.state: Any = None
        self.path: Path | None = None

    @h.on(h.CheckpointSaved)
    def remember(self, run: h.Run, event: h.CheckpointSaved) -> None:
        if self.path is None:
            self.path, self.state = event.path, torch.load(event.path, weights_only=True)

    @h.on(h.CheckpointLoaded)
    def know(self, run: h.Run, event: h.CheckpointLoaded) -> None:
        if self.path is None and event.path is not None:
            self.path, self.state = event.path, torch.load(event.path, weights_only=True)
        elif event.path is not None:
            calls()["at"] = calls()["calls"] + 1  # the path after the return is another one

    @h.on(h.BatchEnd)
    def turn(self, run: h.Run, event: h.BatchEnd) -> None:
        if run.progress.batches == self.at and self.state is not None:
            self.at = -1
            run.roll_back(self.state, self.path)


def test_a_path_that_was_given_up_is_not_compared(tmp_path: Path) -> None:
    fit(tmp_path, 8, Turns(7))  # 6, 7, and then 6, 7, 8 on another path
    result = fit(tmp_path, 9, Turns(-1))
    assert report(result) == (0, None)
    assert "other" not in str(result)


def test_after_a_return_a_new_path_is_compared(tmp_path: Path) -> None:
    fit(tmp_path, 14, Turns(7))  # saved at 5, back to 5, saved at 10 after the return
    assert report(fit(tmp_path, 14)) == (4, None)


def test_a_return_ends_the_comparison(tmp_path: Path) -> None:
    fit(tmp_path, 9)
    assert report(fit(tmp_path, 9, Turns(7))) == (2, None)
    assert report(fit(tmp_path, 9)) == (0, None)


# The file.


def test_a_corrupted_file_is_not_believed(tmp_path: Path) -> None:
    for name, content in {"short": b"x" * 1000, "random": os.urandom(SIZE)}.items():
        fit(tmp_path / name, 8)
        (tmp_path / name / ".run.steps").write_bytes(content)
        assert report(fit(tmp_path / name, 8)) == (0, None)
        assert report(fit(tmp_path / name, 8)) == (3, None)


def test_rows_of_another_training_are_not_compared(tmp_path: Path) -> None:
    fit(tmp_path, 8)
    fit(tmp_path, 8, name="other", seed=1)
    (tmp_path / ".other.steps").replace(tmp_path / ".run.steps")
    assert report(fit(tmp_path, 8)) == (0, None)


def test_a_row_that_is_not_whole_is_not_compared(tmp_path: Path) -> None:
    fit(tmp_path, 9)
    path = tmp_path / ".run.steps"
    content = bytearray(path.read_bytes())
    content[OFFSETS[8] + ROW.size - 8 : OFFSETS[8] + ROW.size] = bytes(8)
    path.write_bytes(content)
    assert report(fit(tmp_path, 9)) == (3, None)


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_is_no_file_of_ours_is_replaced_but_never_written_to(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / ".run.steps", tmp_path / "other"
    other.write_text("mine")
    path.symlink_to(other) if kind == "link" else os.mkfifo(path)
    assert report(fit(tmp_path, 8)) == (0, None)
    assert report(fit(tmp_path, 8)) == (3, None)
    assert other.read_text() == "mine"


def test_a_folder_of_that_name_switches_the_comparison_off(tmp_path: Path) -> None:
    (tmp_path / ".run.steps").mkdir()
    for _ in range(2):
        result = fit(tmp_path, 8)
        assert any(has_facts(note, "replayed steps", "[Errno", tmp_path / ".run.steps") for note in result.notes)
        assert report(result) == (0, None)


def test_a_full_disk_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, owner: Owner) -> Ring:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Ring, "new", refuse)
    result = fit(tmp_path, 12)
    assert result.status == "completed"
    assert any("recorded: [Errno 28]" in line for line in result.notes)


def test_switched_off_and_on_again(tmp_path: Path) -> None:
    class Switch(h.Plugin):
        @h.on(h.BatchEnd)
        def switch(self, run: h.Run, event: h.BatchEnd) -> None:
            plugins = run.plugins
            if run.progress.batches == 3:
                plugins.disable("checkpoint")
            elif run.progress.batches == 4:
                plugins.enable("checkpoint")

    fit(tmp_path, 8, Switch())
    assert report(fit(tmp_path, 8)) == (3, None)


def test_other_batches_are_not_compared_and_that_is_said(tmp_path: Path) -> None:
    fit(tmp_path, 8)
    result = fit(tmp_path, 12, h.GradientAccumulation(2))
    assert report(result) == (0, None)
    assert any("batch_size 1 x accumulation" in line for line in result.notes)


# A device that takes its time, and a loop that keeps its losses.


def test_losses_that_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from heliograph.builtin_callbacks.checkpoint import verify_resume

    class Arrival:
        def __init__(self, losses: Tensor) -> None:
            self.losses, self.asked = losses, 0

        @property
        def is_there(self) -> bool:
            self.asked += 1
            return self.asked > 1

        def read(self) -> Any:
            return self.losses.tolist()

    monkeypatch.setattr(verify_resume, "on_host", lambda losses: False)
    monkeypatch.setattr(module, "is_plain", lambda run: False)
    monkeypatch.setattr(verify_resume, "Fetched", Arrival)
    monkeypatch.setattr(verify_resume, "CHUNK", 2)
    fit(tmp_path, 9)
    assert report(fit(tmp_path, 9)) == (4, None)
    number, difference = report(fit(tmp_path, 9, at=3))
    assert number == 2
    assert_facts(difference, "DIVERGED", "step 8", "loss 1.901", "was 1.267")


# Where it is reported.


def test_the_progress_bar_reports(tmp_path: Path) -> None:
    fit(tmp_path, 9)
    file = io.StringIO()
    fit(tmp_path, 9, h.ProgressBar(plain=True, file=file, show_plan=False))
    assert_each(file.getvalue().splitlines()[:2], ("run", "step 5"), ("run", "verified", "4 repeated steps"))
    file = io.StringIO()
    fit(tmp_path, 9, h.ProgressBar(plain=False, file=file, interval=0.0, show_plan=False), at=2)
    lines = file.getvalue().replace("\r", "\n").splitlines()
    for facts in (
        ("resumed", "step 5"),
        ("verified", "1 repeated step "),
        ("DIVERGED", "step 7", "loss 3.014", "was 2.01"),
    ):
        assert any(has_facts(line, "run  ", *facts) for line in lines)


def test_the_progress_bar_reports_a_return(tmp_path: Path) -> None:
    file = io.StringIO()
    fit(tmp_path, 8, Turns(7), h.ProgressBar(plain=True, file=file, show_plan=False))
    assert_facts(next(line for line in file.getvalue().splitlines() if "step 5" in line), "run", "went back")


# Several ranks.


def fit_on_ranks(folder: Path, differs_on: int | None = None, on_difference: Any = "note") -> list[Any]:
    """Train twice, as two processes; return what each resume says, and what was reported."""
    found = []
    for steps, at in ((8, 0), (12, 2)):
        torch.manual_seed(0)
        engine = h.DDPEngine(device="cpu")
        reported: list[Any] = []
        plugins = [*saving(folder, h.Every(steps=5), resume="auto"), h.VerifyResume(on_difference)]
        trainer = h.Trainer(plugins, engine=engine)
        trainer.bus.on(h.ResumeVerified, lambda run, event, to=reported: to.append((run.progress.steps, event)))
        task = Counting(nn.Linear(4, 2), at if engine.rank == differs_on else 0)
        batches = random_batches(20, 3)
        result = trainer.fit(task, batches, optimizer=sgd(0.01), steps=steps)
        texts = (*result.notes, *result.warnings)
        found.append((report(result), result.resume, reported, texts, result.status, result.progress.steps))
    return found


def test_each_rank_compares_its_own(ranks: Pool, tmp_path: Path) -> None:
    for rank, (first, second) in enumerate(ranks(2).run(fit_on_ranks, tmp_path)):
        assert first[0] == (0, None)
        assert second[0] == (3, None)
        assert_facts(second[1], "verified", "3 repeated steps", "identical")
        assert second[2] == [(10, h.ResumeVerified(3, None))]
        assert (tmp_path / (".run.steps.1" if rank else ".run.steps")).exists()


def test_a_difference_on_one_rank_is_reported_on_all(ranks: Pool, tmp_path: Path) -> None:
    for _, second in ranks(2).run(fit_on_ranks, tmp_path, 1):
        (steps, difference), resume, reported, texts, *_ = second
        assert steps == 1
        assert any(text.startswith(f"The resumed run {difference}.") for text in texts)
        assert difference is not None
        assert_facts(difference, "DIVERGED", "step 7", "loss")
        assert difference.endswith(" (rank 1)")
        assert resume.divergence == difference
        assert reported == [(10, h.ResumeVerified(1, difference))]


def test_a_stop_for_a_difference_on_one_rank_is_agreed_upon(ranks: Pool, tmp_path: Path) -> None:
    for _, second in ranks(2).run(fit_on_ranks, tmp_path, 1, on_difference="stop"):
        assert second[4:] == ("stopped", 8)  # a step after the one rank found it
        assert second[0][1].endswith(" (rank 1)")


def raise_on_ranks(folder: Path) -> str:
    try:
        fit_on_ranks(folder, 1, on_difference="raise")
    except (h.ResumeDiffers, h.RankFailed) as error:
        return type(error).__name__ + str(error)
    return ""


def test_a_difference_on_one_rank_fails_all(ranks: Pool, tmp_path: Path) -> None:
    main, other = ranks(2).run(raise_on_ranks, tmp_path)
    assert_facts(main, "RankFailed", "rank 1", "ResumeDiffers")
    assert_facts(other, "ResumeDiffers", "DIVERGED", "step 7", "loss")


def fit_without_a_folder(folder: Path) -> list[Any]:
    """Rank 1 cannot write beside the checkpoints."""
    if os.environ["RANK"] == "1":
        real = Ring.new

        def refuse(path: Path, owner: Any) -> Ring:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

        Ring.new = refuse  # type: ignore[method-assign]
        try:
            return fit_on_ranks(folder)
        finally:
            Ring.new = real  # type: ignore[method-assign]
    return fit_on_ranks(folder)


def test_a_rank_that_does_not_see_the_folder_says_so(ranks: Pool, tmp_path: Path) -> None:
    facts = ("rank 1", "replayed steps", "[Errno 2]", tmp_path / ".run.steps.1")
    for _, second in ranks(2).run(fit_without_a_folder, tmp_path):
        assert second[0] == (0, None)
        assert any(has_facts(note, *facts) for note in second[3])


def test_another_number_of_ranks_is_not_compared_and_that_is_said(ranks: Pool, tmp_path: Path) -> None:
    ranks(2).run(fit_on_ranks, tmp_path)
    torch.manual_seed(0)
    batches = random_batches(20, 3)
    plugins = [*saving(tmp_path, h.Every(steps=5), resume="auto"), h.GradientAccumulation(2)]
    task = Counting(nn.Linear(4, 2), 0)
    result = kit.fit(*plugins, task=task, train=batches, optimizer=sgd(0.01), steps=12)
    assert report(result) == (0, None)
    assert result.resume is not None
    assert_facts(result.resume.unverified, "not verified", "world size", "2 to 1")
    assert "nothing to verify" not in str(result)
    assert str(result).count("not verified") == 1
