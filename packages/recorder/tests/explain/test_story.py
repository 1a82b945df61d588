"""What `explain` prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from heliograph.packages.recorder.tests.explain.factory import Script, killed_and_resumed, recording
from heliograph.packages.tests.facts import assert_each, assert_facts, has_facts
from heliograph_recorder.explain.story import story
from heliograph_recorder.format.records import Counters, Recording
from heliograph_recorder.timeline.page import facts

STORY = """\
digits: stopped by early_stopping on rank 2
  validation/loss has not improved
  requested during validation_end, at epoch 1, batch 4, step 12
  epoch 1, batch 6, step 14, 56 samples in 8.90 s of training
  train/loss 0.9, validation/loss 1

attempts
  1  training, started 2026-01-01 10:00:00 UTC
     from the start
     killed after 6.30 s: epoch 1, batch 3, step 11, 44 samples
  2  training, started 2026-01-01 12:00:10 UTC, 2 h after the end of attempt 1
     changed: lr 0.05 (was 0.1)
     resumed from ckpt/step_4.pth at epoch 0, batch 4, step 4; 7 steps (7 batches, 28 samples, 3.60
     s) were lost
     rolled back to ckpt/step_8.pth at epoch 1, batch 0, step 8; 2 steps (2 batches, 8 samples, 1.10
     s) were lost
     stopped by early_stopping on rank 2 after 7.30 s: epoch 1, batch 6, step 14, 56 samples

requests
  log         6 times  log_schedule, step 4 to 12: every 2 steps
  validation  3 times  validation_schedule, step 4 to 12: every 4 steps
  save        twice    save_schedule, step 4 to 8: every 4 steps
  save        once     someone, epoch 1, batch 6, step 14: too late
  skip_step   once     roll_back, during gradients_ready, epoch 1, batch 2, step 10: the loss is nan
  roll_back   once     roll_back, during gradients_ready, epoch 1, batch 2, step 10: the loss is nan
  skip_batch  once     roll_back, during batch_start, epoch 1, batch 0, step 8: its loss was NaN
                       before the roll-back
  stop        once     early_stopping on rank 2, during validation_end, epoch 1, batch 4, step 12:
                       validation/loss has not improved
  veto_stop   twice    minimum, during should_stop, epoch 1, batch 4, step 12: at least 13 steps

decisions
  granted: 6 logs, 3 validations, 2 saves and 1 stop; lost in the kill: 2 logs
  epoch 1, batch 4, step 12: the stop was postponed by minimum at 2 boundaries in a row: at least 13
    steps
  epoch 1, batch 6, step 14: the save that someone requested (too late) was never served: the run
    ended first

2 checkpoints in ckpt
  step 4  epoch 0  step_4.pth  best so far, for save_schedule, pruned at step 8 (keep_last=1)
  step 8  epoch 1  step_8.pth  best so far, for save_schedule
  best: step_8.pth
  last: step_8.pth

plugins that changed or failed
   step 4  progress was disabled by the caller
  step 12  jsonl_log failed on log, and the run continued: OSError: no space left

where the time went: goodput 0.1 %
  7.20 s   0.1 %  useful training
  4.60 s   0.1 %  repeated later
  1.20 s   0.0 %  validations
  0.40 s   0.0 %  saves
  0.20 s   0.0 %  starting
     2 h  99.8 %  between attempts
  waits for data, slow ranks and memory were not measured: add Verdicts to the plugins

time in plugins: about 0.47 s of 7.30 s
  ~0.45 s  6.2 %  checkpoint  mostly on save_point, longest 0.20 s
  20.0 ms  0.3 %  progress    on batch_end, longest 10.0 ms
  ~ estimated: the events of every batch were timed in some batches only
  no times are recorded for attempt 1

notes
  attempt 2: rolled back at step 10"""


def test_a_whole_story() -> None:
    assert story(killed_and_resumed()) == STORY


def test_warnings_are_in_the_story() -> None:
    script = Script()
    script.start()
    script.close("completed", "done", warnings=["Nothing was saved.", "Nothing was validated."])
    text = story(recording(script))
    assert "\n\nwarnings\n  Nothing was saved.\n  Nothing was validated.\n\nattempts\n" in text


def test_notes_of_several_attempts_say_of_which_they_are() -> None:
    first, second = Script(), Script(began="2026-01-01T12:00:10+00:00", name="a2")
    first.start()
    first.close("interrupted", "interrupted", notes=["starts fresh", "newest checkpoint: step 5"])
    second.start()
    second.close("completed", "done", notes=["resumed"])
    assert_facts(story(recording(first)), "\n\nnotes\n", "starts fresh\n", "newest checkpoint: step 5")
    assert_facts(
        story(recording(first, second)),
        "\n\nnotes\n",
        "attempt 1: starts fresh\n",
        "attempt 1: newest checkpoint",
        "attempt 2: resumed",
    )


def test_the_story_of_a_run_that_did_next_to_nothing_is_short() -> None:
    script = Script()
    script.start()
    script.batches(1)
    script.end_epoch()
    script.emit("train_end", asked=[])
    script.close("completed", "1 epochs done")
    text = story(recording(script))
    assert text == (
        "digits: completed\n"
        "  1 epochs done\n"
        "  epoch 1, batch 0, step 1, 4 samples in 0.60 s of training\n"
        "\n"
        "attempts\n"
        "  1  training, started 2026-01-01 10:00:00 UTC\n"
        "     from the start\n"
        "     completed after 0.60 s: epoch 1, batch 0, step 1, 4 samples\n"
        "\n"
        "requests\n"
        "  none\n"
        "\n"
        "where the time went: goodput 83.3 %\n"
        "  0.50 s  83.3 %  useful training\n"
        "  0.10 s  16.7 %  starting\n"
        "  waits for data, slow ranks and memory were not measured: add Verdicts to the plugins"
    )


def test_a_failure_names_the_plugin_the_event_and_the_phase() -> None:
    script = Script()
    script.start()
    script.batches(3)
    asked = script.request("save", "save_schedule", "every 3 steps")
    script.emit("save_point", asked=[asked])
    script.request("log", "late", "never")
    script.emit("run_failed", error="OSError", text="disk full", phase="train", plugin="checkpoint", event="save_point")
    script.close("failed", "OSError: disk full")
    lines = story(recording(script)).splitlines()
    assert_each(lines[:3], ("digits: failed",), ("OSError: disk full",), ("checkpoint on save_point", "phase train"))
    assert any(
        has_facts(line, "epoch 0, batch 3", "step 3", "log", "late", "(never)", "the run failed") for line in lines
    )


def test_a_run_that_may_still_be_running_is_not_called_killed() -> None:
    script = Script()
    script.start()
    script.batches(2)
    script.request("log", "log_schedule", "every 2 steps")
    text = story(recording(script))
    assert_facts(text, "digits: killed, or still", "epoch 0, batch 2", "step 2", "8 samples", "1.10 s")
    assert "never served" not in text


def test_a_resume_without_lost_work_says_so() -> None:
    first, second = Script(), Script()
    first.start()
    first.batches(4)
    second.load(None, first.counters)
    second.epoch(resumed=True)
    second.batches(1)
    text = story(recording(first, second))
    assert "epoch 0, batch 4," in text


def test_one_of_everything_is_singular() -> None:
    first, second = Script(), Script()
    first.start()
    first.batches(1)
    counters = first.counters
    first.batches(1)
    second.load("a.pth", counters)
    second.epoch(resumed=True)
    text = story(recording(first, second))
    assert "(1 batch, 4 samples," in text


def test_no_time_is_said_of_lost_work_where_none_is_known() -> None:
    first, second = Script(), Script()
    first.start()
    first.batches(1)
    counters = first.counters
    first.batches(1)
    second.load("a.pth", replace(counters, seconds=first.counters.seconds))
    assert "(1 batch, 4 samples)" in story(recording(first, second))


def test_a_later_test_does_not_hide_how_the_training_ended() -> None:
    fit, test = Script(), Script(phase="test", world_size=2)
    fit.start()
    fit.batches(2)
    fit.emit("train_end", asked=[])
    fit.close("completed", "1 epochs done")
    test.emit("test_start", batches=1)
    test.counters = Counters(evaluated=1)
    test.emit("test_end", 0.5, metrics={"test/loss": 1.0}, batches=[["", 1]])
    test.close("completed", "1 batches evaluated", metrics={"test/loss": 1.0})
    text = story(recording(fit, test))
    assert_facts(text, "digits: completed\n", "1 epochs done\n")
    assert_facts(text, "2  test", "2 processes", "2026-01-01 10:00:00 UTC", "0 µs", "attempt 1\n")
    assert_facts(text, "completed after 0.50 s", "1 batch")


def test_requests_that_cut_validations_and_end_epochs() -> None:
    script = Script()
    script.start()
    script.batches(2)
    number = script.request("validation", "validation_schedule", "every 2 steps")
    script.emit("validation_start", asked=[number], batches=3)
    script.request("cut_validation", "preemption", "SIGTERM was received", "validation_batch_end")
    script.emit("validation_cut", reason="SIGTERM was received")
    end = script.request("end_epoch", "someone", "enough", "batch_end")
    script.end_epoch(end)
    script.emit("train_end", asked=[])
    script.close("completed", "done")
    text = story(recording(script))
    assert_facts(text, "granted: 1", "end of an epoch\n")
    assert_facts(text, "epoch 0, batch 2", "step 2", "validation", "cut short", "preemption: SIGTERM")
    assert "never served" not in text


def test_the_positions_of_a_request_are_listed_up_to_a_limit() -> None:
    script = Script()
    script.start()
    for _ in range(45):
        script.request("skip_step", "nan_guard", "the loss is nan", "gradients_ready")
        script.batches(1)
    text = " ".join(story(recording(script)).split())
    assert "skip_step 45 times nan_guard," in text
    assert "epoch 0, batch 39," in text


def test_rules_that_differ_are_shown_with_their_checkpoints() -> None:
    script = Script()
    script.start()
    for number, folder in enumerate(("a", "b", "c"), 1):
        script.batches(1)
        script.save(f"{folder}/step_{number}.pth")
    script.emit("checkpoint_pruned", path="a/step_1.pth", reason="keep_last=2")
    script.emit("checkpoint_pruned", path="b/step_2.pth", reason="a user")
    lines = story(recording(script)).splitlines()
    start = lines.index("3 checkpoints")
    assert lines[start + 1 : start + 5] == [
        "  step 1  epoch 0  a/step_1.pth  for save_schedule, pruned at step 3 (keep_last=2)",
        "  step 2  epoch 0  b/step_2.pth  for save_schedule, pruned at step 3 (a user)",
        "  step 3  epoch 0  c/step_3.pth  for save_schedule",
        "  last: c/step_3.pth",
    ]


def test_while_a_resumed_run_trains_the_newest_checkpoint_is_the_last() -> None:
    first, second = Script(), Script(began="2026-01-01T12:00:10+00:00", name="a2")
    first.start()
    first.batches(2)
    first.save("c/step_2.pth", best=True)
    first.close("interrupted", "interrupted", best="c/step_2.pth", last="c/step_2.pth")
    second.emit("train_start")
    second.load("c/step_2.pth", first.counters)
    second.epoch(resumed=True)
    second.batches(2)
    second.save("c/step_4.pth")
    resumed = recording(first, second)
    assert "  best: step_2.pth\n  last: step_4.pth\n" in story(resumed)
    assert [each[3] for each in facts(resumed)["checkpoints"]] == ["best", "last"]


def test_a_background_save_belongs_to_the_step_of_its_save_point() -> None:
    script = Script()
    script.start()
    for number in (1, 2):
        script.batches(1)
        asked = script.request("save", "save_schedule", f"save {number}")
        script.emit("save_point", asked=[asked])
        if number == 2:
            script.emit("checkpoint_saved", path="1.pth", is_best=False)
    script.batches(1)
    script.emit("checkpoint_saved", path="2.pth", is_best=False)
    lines = story(recording(script)).splitlines()
    assert "  step 1  epoch 0  1.pth  for save_schedule" in lines
    assert "  step 2  epoch 0  2.pth  for save_schedule" in lines


def test_custom_events_and_damage_are_listed() -> None:
    script = Script(damage=("line 7: cut short",), began="", run="")
    script.start()
    for _ in range(3):
        script.batches(1)
        script.emit("rule_fired", rule="loss > 2")
    script.emit("sampled", emission=1_032)
    text = story(recording(script))
    assert_facts(text, "unreadable name: killed")
    assert_facts(text, "custom events\n", "rule_fired", "3 times", "step 1 to 3", "sampled", "1,032 times", "step 3\n")
    assert_facts(text, "could not be read", "attempt 1", "line 7", "cut short")
    assert_facts(text, "1  training, started", "unreadable time\n")


def test_much_damage_is_shortened() -> None:
    script = Script(damage=tuple(f"line {number}: it is damaged" for number in range(2, 40)))
    script.start()
    text = story(recording(script))
    assert_facts(text, "attempt 1: line 11", "it is damaged", "attempt 1", "28 more")
    assert_each(
        facts(recording(script))["damage"][9:], ("attempt 1: line 11", "it is damaged"), ("attempt 1", "28 more")
    )


def test_a_recording_without_an_attempt_is_refused() -> None:
    with pytest.raises(ValueError, match="has no attempt"):
        story(Recording(Path("empty.recording"), ()))


def test_control_characters_in_a_name_are_escaped() -> None:
    script = Script(run="a\x1b]0;owned\x07\nb")
    script.start()
    assert_facts(story(recording(script)).splitlines()[0], "a\\x1b]0;owned\\x07 b: killed")


def test_a_test_without_a_training_has_no_duplicate_line() -> None:
    test = Script(phase="test")
    test.emit("test_start", batches=3)
    test.counters = Counters(evaluated=3)
    test.emit("test_end", 0.5, metrics={"test/loss": 1.0}, batches={"": 3})
    test.close("completed", "3 batches evaluated", metrics={"test/loss": 1.0})
    head, *_ = story(recording(test)).split("\n\n")
    assert_each(head.splitlines(), ("digits: completed",), ("3 batches",), ("test/loss 1",))


def test_of_very_many_metrics_the_first_are_shown() -> None:
    script = Script()
    script.start()
    script.emit("train_end", asked=[])
    script.close("completed", "1 epoch done", metrics={f"metric_{number:04}": 1.0 for number in range(1_500)})
    head = " ".join(story(recording(script)).split("\n\n")[0].split())
    assert_facts(head, "metric_0039 1", "1,460 more")
