from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from heliograph import events
from heliograph.events import CATALOGUE, BatchEnd, CheckpointSaved, EpochEnd, Event, Log, RunFailed


class EmbeddingsReady(Event):
    """A third party's event, without a decorator."""

    path: str
    count: int = 3


def test_the_catalogue_is_a_frozen_surface_in_the_order_of_emission() -> None:
    assert [kind.__name__ for kind in CATALOGUE] == [
        "TrainStart",
        "CheckpointLoaded",
        "EpochStart",
        "Replay",
        "BatchStart",
        "ForwardEnd",
        "BackwardEnd",
        "GradientsReady",
        "StepEnd",
        "BatchEnd",
        "ResumeVerified",
        "ChangeServed",
        "Log",
        "ValidationStart",
        "ValidationBatchStart",
        "ValidationBatchEnd",
        "ValidationEnd",
        "ValidationCut",
        "SavePoint",
        "CheckpointSaved",
        "CheckpointPruned",
        "ShouldStop",
        "EpochEnd",
        "LastBoundary",
        "TrainEnd",
        "TestStart",
        "TestBatchStart",
        "TestBatchEnd",
        "TestEnd",
        "PredictStart",
        "PredictBatchStart",
        "PredictBatchEnd",
        "PredictEnd",
        "PluginChanged",
        "PluginFailed",
        "Verdict",
        "LateResult",
        "RunFailed",
        "RunClosed",
    ]


def test_the_fields_are_a_frozen_surface() -> None:
    fields = {kind.name: [field.name for field in dataclasses.fields(kind)] for kind in CATALOGUE}
    assert {name: names for name, names in fields.items() if names} == {
        "checkpoint_loaded": ["path"],
        "epoch_start": ["epoch", "resumed"],
        "replay": ["done", "batches"],
        "resume_verified": ["steps", "difference"],
        "change_served": ["verb", "target", "value", "by", "reason", "refusal", "changed"],
        "log": ["metrics", "weights"],
        "validation_batch_start": ["dataset"],
        "validation_batch_end": ["dataset"],
        "validation_end": ["metrics"],
        "validation_cut": ["reason"],
        "checkpoint_saved": ["path", "is_best"],
        "checkpoint_pruned": ["path", "reason"],
        "epoch_end": ["epoch"],
        "test_batch_start": ["dataset"],
        "test_batch_end": ["dataset"],
        "test_end": ["metrics"],
        "predict_batch_start": ["dataset"],
        "predict_batch_end": ["dataset"],
        "predict_end": ["metrics"],
        "plugin_changed": ["plugin", "change", "by"],
        "plugin_failed": ["plugin", "event", "error"],
        "verdict": ["kind", "holds", "value", "text"],
        "late_result": ["path", "steps", "metrics"],
        "run_failed": ["error", "phase", "plugin", "event"],
        "run_closed": ["status"],
    }


def test_names_are_the_class_names_in_snake_case() -> None:
    assert BatchEnd.name == "batch_end"
    assert BatchEnd().name == "batch_end"
    assert [kind.name for kind in CATALOGUE[:3]] == ["train_start", "checkpoint_loaded", "epoch_start"]
    assert EmbeddingsReady.name == "embeddings_ready"
    assert Event.name == "event"
    assert len({kind.name for kind in CATALOGUE}) == len(CATALOGUE)


def test_every_event_is_exported_by_the_room() -> None:
    assert set(events.__all__) >= {kind.__name__ for kind in CATALOGUE}
    assert [getattr(events, kind.__name__) for kind in CATALOGUE] == list(CATALOGUE)
    assert sorted(events.__all__) == sorted(set(events.__all__))
    assert all(hasattr(events, name) for name in events.__all__)


@pytest.mark.parametrize("kind", [Event, *CATALOGUE], ids=lambda kind: kind.__name__)
def test_every_event_has_a_docstring_of_its_own(kind: type[Event]) -> None:
    text = vars(kind).get("__doc__")
    assert isinstance(text, str)
    assert not text.startswith(f"{kind.__name__}(")  # what dataclass writes where nobody wrote anything
    assert text.split("\n")[0].endswith(".")


@pytest.mark.parametrize(
    ("event", "field"), [(EpochEnd(2), "epoch"), (Log({}), "metrics"), (BatchEnd(), "anything"), (BatchEnd(), "name")]
)
def test_events_are_immutable(event: Event, field: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match=field):
        setattr(event, field, 1)
    with pytest.raises(dataclasses.FrozenInstanceError, match=field):
        delattr(event, field)


def test_events_compare_by_their_facts() -> None:
    assert EpochEnd(2) == EpochEnd(epoch=2)
    assert EpochEnd(2) != EpochEnd(3)
    assert CheckpointSaved(Path("a.pth"), is_best=True).path == Path("a.pth")
    assert repr(EpochEnd(2)) == "EpochEnd(epoch=2)"
    failed = RunFailed(ValueError("x"), "train", "checkpoint", "save_point")
    assert (failed.phase, failed.plugin, failed.event) == ("train", "checkpoint", "save_point")


def test_a_missing_or_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="epoch"):
        EpochEnd()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="speed"):
        EpochEnd(epoch=1, speed=2)  # type: ignore[call-arg]


def test_a_third_partys_subclass_needs_no_decorator() -> None:
    event = EmbeddingsReady("a")
    assert [field.name for field in dataclasses.fields(EmbeddingsReady)] == ["path", "count"]
    assert event == EmbeddingsReady(path="a", count=3)
    assert hash(event) == hash(EmbeddingsReady("a"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.path = "b"  # type: ignore[misc]
    assert EmbeddingsReady not in CATALOGUE


def test_a_subclass_of_an_event_adds_to_its_fields() -> None:
    class EmbeddingsReadyTwice(EmbeddingsReady):
        """Adds a field."""

        again: bool = False

    event = EmbeddingsReadyTwice("a", 1, again=True)
    assert (event.path, event.count, event.again, event.name) == ("a", 1, True, "embeddings_ready_twice")
    assert EmbeddingsReady.name == "embeddings_ready"
