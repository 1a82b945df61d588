"""What `explain` tells."""

from __future__ import annotations

from pathlib import Path

import pytest
from heliograph.builtin_callbacks.recorder.explain.story import brief, story
from heliograph.builtin_callbacks.recorder.format.records import Counters, Recording
from heliograph.builtin_callbacks.recorder.timeline.page import facts
from heliograph.tests.builtin_callbacks.recorder.explain.factory import Script, killed_and_resumed, recording

STORY = """\
digits: stopped by early_stopping on rank 2
  validation/loss has not improved
  asked for during validation_end, at epoch 1, batch 4, step 12
  epoch 1, batch 6, step 14, 56 samples in 8.90 s of training
  train/loss 0.9, validation/loss 1

attempts
  1  training, begun 2026-01-01 10:00:00 UTC
     from the start
     killed after 6.30 s: epoch 1, batch 3, step 11, 44 samples
  2  training, begun 2026-01-01 12:00:10 UTC, 2 h behind the end of 1
     changed: lr 0.05 (was 0.1)
     resumed from ckpt/step_4.pth at epoch 0, batch 4, step 4; 7 steps (7 batches, 28 samples, 3.60
     s) were lost
     went back to ckpt/step_8.pth at epoch 1, batch 0, step 8; 2 steps (2 batches, 8 samples, 1.10
     s) were lost
     stopped by early_stopping on rank 2 after 7.30 s: epoch 1, batch 6, step 14, 56 samples

what was asked
  log         6 times  log_schedule, step 4 to 12: every 2 steps
  validation  3 times  validation_schedule, step 4 to 12: every 4 steps
  save        twice    save_schedule, step 4 to 8: every 4 steps
  save        once     someone, epoch 1, batch 6, step 14: too late
  skip_step   once     roll_back, during gradients_ready, epoch 1, batch 2, step 10: the loss is nan
  roll_back   once     roll_back, during gradients_ready, epoch 1, batch 2, step 10: the loss is nan
  skip_batch  once     roll_back, during batch_start, epoch 1, batch 0, step 8: its loss was no
                       number when it was last here
  stop        once     early_stopping on rank 2, during validation_end, epoch 1, batch 4, step 12:
                       validation/loss has not improved
  veto_stop   twice    minimum, during should_stop, epoch 1, batch 4, step 12: at least 13 steps

what was decided
  granted: 6 logs, 3 validations, 2 saves and 1 stop
  epoch 1, batch 4, step 12: the stop was put off by minimum, 2 boundaries in a row: at least 13
    steps
  epoch 1, batch 6, step 14: the save that someone asked for (too late) was never served: the run
    ended before

2 checkpoints in ckpt
  step 4  epoch 0  step_4.pth  best so far, pruned at step 8
  step 8  epoch 1  step_8.pth  best so far
  best: step_8.pth
  last: step_8.pth
  asked for by save_schedule
  pruned since keep_last=1

plugins that changed or failed
   step 4  progress was disabled by the caller
  step 12  jsonl_log failed on log, and the run went on: OSError: no space left

time in plugins: about 0.47 s of 7.30 s
  ~0.45 s  6.2 %  checkpoint  mostly on save_point, longest 0.20 s
  20.0 ms  0.3 %  progress    on batch_end, longest 10.0 ms
  ~ an estimate: of the events of every batch, only some were timed
  of attempt 1 no times are recorded

notes
  rolled back at step 10"""


def test_a_story_tells_all_there_is() -> None:
    assert story(killed_and_resumed()) == STORY


def test_five_lines_tell_it_in_short() -> None:
    assert brief(killed_and_resumed()) == [
        "stopped by early_stopping on rank 2 at step 14: validation/loss has not improved",
        "2 attempts, 1 of them killed, rolled back once, 9 steps lost with that, and done again",
        "asked for: 6 logs, 3 validations, 3 saves, 1 skipped step, 1 roll-back, 1 skipped batch, 1 stop and 2 vetoes; "
        "1 never served",
        "2 checkpoints, 1 pruned, best of step 8, last of step 8",
        "plugins took about 0.47 s of 7.30 s: checkpoint 0.45 s, progress 20.0 ms",
    ]


def test_a_run_that_did_next_to_nothing_is_told_without_filler() -> None:
    script = Script()
    script.start()
    script.batches(1)
    script.end_epoch()
    script.happen("train_end", asked=[])
    script.close("completed", "1 epochs done")
    told = story(recording(script))
    assert told == (
        "digits: completed\n"
        "  1 epochs done\n"
        "  epoch 1, batch 0, step 1, 4 samples in 0.60 s of training\n"
        "\n"
        "attempts\n"
        "  1  training, begun 2026-01-01 10:00:00 UTC\n"
        "     from the start\n"
        "     completed after 0.60 s: epoch 1, batch 0, step 1, 4 samples\n"
        "\n"
        "what was asked\n"
        "  nobody asked for anything"
    )
    assert brief(recording(script)) == [
        "completed at step 1: 1 epochs done",
        "1 attempt, no step was done twice",
        "asked for: nothing",
        "0 checkpoints",
        "no plugin's time is recorded",
    ]


def test_a_failure_names_the_plugin_the_event_and_the_phase() -> None:
    script = Script()
    script.start()
    script.batches(3)
    asked = script.ask("save", "save_schedule", "every 3 steps")
    script.happen("save_point", asked=[asked])
    script.ask("log", "late", "never")
    script.happen(
        "run_failed", error="OSError", text="disk full", phase="train", plugin="checkpoint", event="save_point"
    )
    script.close("failed", "OSError: disk full")
    lines = story(recording(script)).splitlines()
    assert lines[:3] == [
        "digits: failed",
        "  OSError: disk full",
        "  raised in checkpoint on save_point, in phase train",
    ]
    assert "  epoch 0, batch 3, step 3: the log that late asked for (never) was never served: the run failed" in lines


def test_a_run_that_may_go_on_is_not_called_dead() -> None:
    script = Script()
    script.start()
    script.batches(2)
    script.ask("log", "log_schedule", "every 2 steps")
    told = story(recording(script))
    assert told.startswith(
        "digits: killed, or still going on\n  epoch 0, batch 2, step 2, 8 samples in 1.10 s of training"
    )
    assert "never served" not in told
    assert brief(recording(script))[0] == "killed, or still going on at step 2"


def test_a_resume_without_lost_work_says_so() -> None:
    first, second = Script(), Script()
    first.start()
    first.batches(4)
    second.load(None, first.counters)
    second.epoch(resumed=True)
    second.batches(1)
    told = story(recording(first, second))
    assert "resumed from a state without a file at epoch 0, batch 4, step 4; no work was lost" in told


def test_one_of_everything_is_singular() -> None:
    first, second = Script(), Script()
    first.start()
    first.batches(1)
    place = first.counters
    first.batches(1)
    second.load("a.pth", place)
    second.epoch(resumed=True)
    told = story(recording(first, second))
    assert "1 step (1 batch, 4 samples, 0.50 s) was lost" in told


def test_a_test_of_its_own_does_not_hide_how_the_training_ended() -> None:
    fit, test = Script(), Script(phase="test", world_size=2)
    fit.start()
    fit.batches(2)
    fit.happen("train_end", asked=[])
    fit.close("completed", "1 epochs done")
    test.happen("test_start", batches=1)
    test.counters = Counters(evaluated=1)
    test.happen("test_end", 0.5, metrics={"test/loss": 1.0}, batches=[["", 1]])
    test.close("completed", "1 batches evaluated", metrics={"test/loss": 1.0})
    told = story(recording(fit, test))
    assert told.startswith("digits: completed\n  1 epochs done\n")
    assert "  2  test on 2 processes, begun 2026-01-01 10:00:00 UTC, 0 µs behind the end of 1\n" in told
    assert "     completed after 0.50 s: 1 batch evaluated" in told


def test_what_others_asked_cuts_validations_and_ends_epochs() -> None:
    script = Script()
    script.start()
    script.batches(2)
    number = script.ask("validation", "validation_schedule", "every 2 steps")
    script.happen("validation_start", asked=[number], batches=3)
    script.ask("cut_validation", "preemption", "SIGTERM was received", "validation_batch_end")
    script.happen("validation_cut", reason="SIGTERM was received")
    end = script.ask("end_epoch", "someone", "enough", "batch_end")
    script.end_epoch(end)
    script.happen("train_end", asked=[])
    script.close("completed", "done")
    told = story(recording(script))
    assert "  granted: 1 early end of an epoch\n" in told
    assert "  epoch 0, batch 2, step 2: the validation was cut short, and put off, by preemption: SIGTERM was" in told
    assert "never served" not in told


def test_places_of_the_same_request_are_told_one_by_one_but_not_without_end() -> None:
    script = Script()
    script.start()
    for _ in range(45):
        script.ask("skip_step", "nan_guard", "the loss is nan", "gradients_ready")
        script.batches(1)
    told = " ".join(story(recording(script)).split())
    assert (
        "skip_step 45 times nan_guard, during gradients_ready, epoch 0, batch 0, step 0; epoch 0, batch 1, step 1;"
        in told
    )
    assert "epoch 0, batch 39, step 39 and 5 more, the last at epoch 0, batch 44, step 44: the loss is nan" in told


def test_rules_that_differ_are_told_with_their_checkpoints() -> None:
    script = Script()
    script.start()
    for number, folder in enumerate(("a", "b", "c"), 1):
        script.batches(1)
        script.save(f"{folder}/step_{number}.pth")
    script.happen("checkpoint_pruned", path="a/step_1.pth", reason="keep_last=2")
    script.happen("checkpoint_pruned", path="b/step_2.pth", reason="by hand")
    lines = story(recording(script)).splitlines()
    place = lines.index("3 checkpoints")
    assert lines[place + 1 : place + 5] == [
        "  step 1  epoch 0  a/step_1.pth  pruned at step 3 (keep_last=2)",
        "  step 2  epoch 0  b/step_2.pth  pruned at step 3 (by hand)",
        "  step 3  epoch 0  c/step_3.pth",
        "  last: c/step_3.pth",
    ]


def test_a_save_beside_the_loop_belongs_to_the_step_at_which_it_was_asked_for() -> None:
    script = Script()
    script.start()
    for number in (1, 2):
        script.batches(1)
        asked = script.ask("save", "save_schedule", f"save {number}")
        script.happen("save_point", asked=[asked])
        if number == 2:
            script.happen("checkpoint_saved", path="1.pth", is_best=False)
    script.batches(1)
    script.happen("checkpoint_saved", path="2.pth", is_best=False)
    lines = story(recording(script)).splitlines()
    assert "  step 1  epoch 0  1.pth  for save_schedule" not in lines
    assert "  step 1  epoch 0  1.pth" in lines
    assert "  step 2  epoch 0  2.pth" in lines


def test_events_of_others_and_damage_are_told() -> None:
    script = Script(damage=("line 7: cut short",), began="", run="")
    script.start()
    for _ in range(3):
        script.batches(1)
        script.happen("rule_fired", rule="loss > 2")
    script.happen("sampled", emission=1_032)
    told = story(recording(script))
    assert told.startswith("a run whose name could not be read: killed, or still going on\n")
    assert "events of others\n  rule_fired  3 times      step 1 to 3\n  sampled     1,032 times  step 3\n" in told
    assert "what could not be read\n  attempt 1: line 7: cut short" in told
    assert "  1  training, begun at a time that could not be read\n" in told


def test_much_damage_is_told_in_short() -> None:
    script = Script(damage=tuple(f"line {number}: it is damaged" for number in range(2, 40)))
    script.start()
    told = story(recording(script))
    assert told.endswith("\n  attempt 1: line 11: it is damaged\n  attempt 1: and 28 more")
    assert facts(recording(script))["damage"][9:] == ["attempt 1: line 11: it is damaged", "attempt 1: and 28 more"]


def test_a_recording_without_an_attempt_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no attempt: the run was killed before anything was recorded"):
        story(Recording(Path("empty.recording"), ()))


def test_a_hostile_name_stays_a_text_in_one_line() -> None:
    script = Script(run="a\x1b]0;owned\x07\nb")
    script.start()
    assert story(recording(script)).splitlines()[0] == "a\\x1b]0;owned\\x07 b: killed, or still going on"


def test_a_test_alone_says_once_what_it_did() -> None:
    test = Script(phase="test")
    test.happen("test_start", batches=3)
    test.counters = Counters(evaluated=3)
    test.happen("test_end", 0.5, metrics={"test/loss": 1.0}, batches={"": 3})
    test.close("completed", "3 batches evaluated", metrics={"test/loss": 1.0})
    head, *_ = story(recording(test)).split("\n\n")
    assert head == "digits: completed\n  3 batches evaluated\n  test/loss 1"


def test_of_very_many_metrics_the_first_are_told() -> None:
    script = Script()
    script.start()
    script.happen("train_end", asked=[])
    script.close("completed", "1 epoch done", metrics={f"metric_{number:04}": 1.0 for number in range(1_500)})
    head = " ".join(story(recording(script)).split("\n\n")[0].split())
    assert head.endswith("metric_0039 1, and 1,460 more")
