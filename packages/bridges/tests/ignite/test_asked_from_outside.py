"""A training of Ignite that people ask from outside."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import heliograph as h
import heliograph_recorder
import torch
from heliograph.packages.tests.facts import assert_facts
from heliograph.tests.kit import class_batches
from heliograph_bridges.ignite import attach
from heliograph_recorder import Remote, RemoteAnswer
from ignite.engine import create_supervised_trainer
from torch import nn


def test_it_stops_and_refuses_what_its_loop_cannot_do(tmp_path: Path) -> None:
    answers: list[RemoteAnswer] = []

    def talk() -> None:
        run = heliograph_recorder.attach(tmp_path)
        answers.append(run.set_learning_rate(0.5, "faster"))
        answers.append(run.save("keep it"))
        answers.append(run.stop("enough", wait=True))

    class Somebody(h.Plugin):
        def __init__(self) -> None:
            self.thread = Thread(target=talk)

        @h.on(h.BatchEnd, when=h.At(steps=2))
        def begin(self, run: h.Run, event: h.BatchEnd) -> None:
            self.thread.start()

    model, somebody = nn.Linear(4, 2), Somebody()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy)
    attached: Any = attach(engine, [Remote(tmp_path), somebody], model=model, optimizer=optimizer)
    engine.run(class_batches(50), max_epochs=10_000)
    somebody.thread.join()
    assert [each.state for each in answers] == ["refused", "refused", "served"]
    assert_facts(answers[0].text, "control.set_learning_rate", "not supported in Ignite")
    assert attached.result.reason == "enough"
