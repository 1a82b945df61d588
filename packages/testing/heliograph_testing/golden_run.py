"""Golden runs: record the first steps of a training in a small file; compare later versions of the program with it."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import heliograph as h
import numpy as np
import torch
from heliograph.events import Event
from heliograph.spi import (
    Difference,
    Fact,
    Leaf,
    Tracer,
    TrainerFactory,
    UsageError,
    capture,
    describe_error,
    is_whole_number,
    leaves,
    restore,
    seed_all,
    version,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MakeTrainer = Callable[..., tuple[h.Trainer, Mapping[str, Any]]]
SCHEMA = 3  # of the file
DIGEST = 12  # characters of a digest in the file
NAMES = ("the golden run", "this run")
RATE, MANY = "learning_rate", 8
WHOLE = ("batch", "draws", "gradients")  # one digest for all values, as for more than 8 others: the file stays small
OPERATOR = "operator"
UNWRITTEN = ("empty", "new_empty", "resize")  # operators whose results are uninitialized memory
CAUSES = {
    OPERATOR: "the code that calls this operator: the results of all operators before it are equal",
    "batch": "the order of the samples, their contents or an augmentation",
    "loss": "the forward pass or the loss: the batch and the weights are equal",
    "gradients": "the backward pass, the accumulation or the clipping: the losses are equal",
    RATE: "the scheduler, or the learning rate of the optimizer",
    "modules": "before the first step the model, its initialisation or the seed; later the optimizer",
    "optimizers": "the optimizer, or its options: the weights are equal",
    "draws": "the number of random draws",
    "metrics": "the validation, or a metric: the training is equal up to here",
    "order": "the number of batches in a step, or when the run validates",
}
KINDS = {"modules": "weights", "draws": "random state"}
STATES = ("modules", "optimizers", "plugin")  # of the state of a run
EVENTS = h.TrainStart, h.BatchStart, h.BackwardEnd, h.GradientsReady, h.StepEnd, h.BatchEnd, h.Log, h.ValidationEnd


@dataclass(slots=True)
class GoldenRun:
    """The first steps of a training.

    Attributes:
        steps: the largest number of optimizer steps; a training that ends earlier is recorded to its end.
        every: the number of steps between two comparisons of the weights.
        settings: of the program and the machine, to name the cause of a difference.
        facts: batches, losses, gradients, learning rates, random states and weights, in order.
    """

    steps: int
    every: int
    settings: dict[str, str] = field(default_factory=dict)
    facts: list[Fact] = field(default_factory=list)

    @property
    def recorded_steps(self) -> int:
        """The number of recorded steps."""
        return max((fact.place[2] for fact in self.facts), default=0)

    def save(self, path: str | Path) -> None:
        """Write a JSON file with a line for each fact."""
        kinds = list(dict.fromkeys(leaf.kind for fact in self.facts for leaf in fact.leaves.values()))
        rows = []
        for fact in self.facts:
            values = {path: [kinds.index(leaf.kind), leaf.digest, leaf.sample] for path, leaf in fact.leaves.items()}
            rows.append([fact.what, fact.when.replace(_moment(fact.place), ""), fact.place, values])
        head = {"schema": SCHEMA, "steps": self.steps, "every": self.every, "settings": self.settings, "kinds": kinds}
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        text = json.dumps(head, indent=1).removesuffix("\n}")
        Path(path).write_text(f'{text},\n "facts": [\n{lines}\n]}}\n', encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> GoldenRun:
        """Read a file that `save` wrote.

        Raises:
            UsageError: there is no such file, or it is not a golden run.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["schema"] != SCHEMA:
                raise ValueError(f"it has schema {content['schema']}; this version reads {SCHEMA}")
            kinds, facts = content["kinds"], []
            for what, when, place, values in content["facts"]:
                parts = {path: Leaf(kinds[kind], digest, sample) for path, (kind, digest, sample) in values.items()}
                facts.append(Fact(what, when or _moment(place), tuple(place), parts))
            return cls(int(content["steps"]), int(content["every"]), dict(content["settings"]), facts)
        except OSError as error:
            raise UsageError(f"The golden run {path} cannot be read ({error.strerror}): record it first.") from None
        except (LookupError, TypeError, ValueError) as error:
            raise UsageError(f"{path} is not a golden run ({describe_error(error)}): record it again.") from None


@dataclass(frozen=True, slots=True)
class GoldenCheck:
    """The comparison with a golden run; `str` returns a report.

    Attributes:
        steps: the compared steps.
        difference: the first difference; None if all recorded values are equal.
        cause: the probable cause, from the kind of the first difference.
        later: the kinds of values that differ after it.
        changes: the settings of the program and the machine that changed.
    """

    steps: int
    difference: Difference | None = None
    cause: str = ""
    later: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether all recorded values are equal."""
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is None:
            return f"equal: {self.steps} steps"
        lines = [f"first difference: {self.difference.text}", f"probable cause: {self.cause}"]
        lines += [f"from there: {', '.join(self.later)}"] if self.later else []
        lines += [f"changed: {change}" for change in self.changes]
        return "\n".join(lines)


def record_golden(
    make_trainer: MakeTrainer, path: str | Path, *, steps: int = 50, every: int = 10, operators: bool = False
) -> GoldenRun:
    """Train the first steps, and record them in a file.

    Args:
        make_trainer: returns a trainer and the keywords of its `fit`, all created by the call. Torch, NumPy and Python
            are seeded before it is called.
        path: the file to write; about 25 kB for a small model. Commit it beside the test.
        steps: the largest number of optimizer steps; a training that ends earlier is recorded to its end.
        every: the number of steps after which the weights and the states of optimizer and plugins are recorded.
        operators: also record the result of each operator of torch, so that a difference names the first one. The
            training is slower and the file several times as large.

    Returns:
        The recorded run.

    Raises:
        UsageError: an argument is wrong, the file cannot be written, or the training is not deterministic: two
            recordings differ.
    """
    if not all(is_whole_number(number) and number >= 1 for number in (steps, every)):
        raise UsageError(f"steps and every must be whole numbers of at least 1, got {steps!r} and {every!r}.")
    if Path(path).is_dir() or not Path(path).parent.is_dir():  # before the trainings
        raise UsageError(f"{path} cannot be written: it must be a file in an existing folder.")
    golden, again = (_train(make_trainer, steps, every, operators) for _ in range(2))
    check = compare_golden(golden, again)
    if not check.is_equal:
        raise UsageError(
            f"The training is not deterministic, so it cannot be recorded. Seed what draws, and see "
            f"torch.use_deterministic_algorithms. {check}"
        )
    golden.save(path)
    return golden


def check_golden(make_trainer: MakeTrainer, path: str | Path, *, rtol: float = 0.0) -> GoldenCheck:
    """Train the same steps again, and compare them with a recorded file.

    Args:
        make_trainer: as for `record_golden`.
        path: the file that `record_golden` wrote.
        rtol: the largest relative difference of losses, learning rates, metrics and norms of gradients and weights;
            0 compares all bits. Use it if the file was recorded on other hardware. Batches are compared by their norm,
            and random states and operators are not compared then.

    Returns:
        The comparison; `print` shows the first difference and its probable cause.

    Raises:
        UsageError: rtol is negative, there is no such file, or it is not a golden run.
    """
    if not rtol >= 0:
        raise UsageError(f"rtol must be at least 0, got {rtol!r}.")
    golden = GoldenRun.load(path)
    operators = any(fact.what == OPERATOR for fact in golden.facts)
    return compare_golden(golden, _train(make_trainer, golden.steps, golden.every, operators), rtol=rtol)


def compare_golden(golden: GoldenRun, found: GoldenRun, *, rtol: float = 0.0) -> GoldenCheck:
    """Return the first difference between two recorded runs, and what changed in the program.

    Args:
        golden: the run that should be repeated.
        found: the repetition.
        rtol: see `check_golden`.
    """
    shared = {fact.what for fact in golden.facts} & {fact.what for fact in found.facts}  # not a new plugin
    shared -= {OPERATOR, "draws"} if rtol else set()
    expected, facts = ([fact for fact in run.facts if fact.what in shared] for run in (golden, found))
    if rtol:
        within = [_within(*pair, rtol) for pair in zip(expected, facts, strict=False)]
        facts = within + facts[len(within) :]
    differences = list(Difference.between(expected, facts, names=NAMES))
    if not differences:
        return GoldenCheck(golden.recorded_steps)
    difference = differences[0]
    later = dict.fromkeys(KINDS.get(entry.what, entry.what) for entry in differences if entry.what != difference.what)
    cause = CAUSES.get(difference.what, f"the {difference.what}, or its options")
    before, now = golden.settings, found.settings
    changes = [
        f"{name} was {before.get(name, 'not there')} and is {now.get(name, 'not there')}"
        for name in {**before, **now}
        if before.get(name) != now.get(name)
    ]
    return GoldenCheck(golden.recorded_steps, difference, cause, tuple(later), tuple(changes))


class _Operators(TorchDispatchMode):
    """Records the result of each operator by its number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: dict[str, Leaf] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        if not str(func).partition(".")[2].startswith(UNWRITTEN):
            for leaf in leaves(tensors).values():
                self.results[str(len(self.results) + 1)] = Leaf(f"{func}, {leaf.kind}", leaf.digest, None)
        return result


class _Recorder:
    """Records the facts of a run, after all other handlers."""

    def __init__(self, golden: GoldenRun, records_operators: bool) -> None:
        self._golden, self._records_operators, self._operators = golden, records_operators, _Operators()
        self.recording = ExitStack()  # of the operators
        self._tracer = Tracer(lambda fact: None if fact.what == "loss" else self._add(fact))

    def handle(self, run: h.Run, event: Event) -> None:
        golden, steps = self._golden, run.progress.steps
        self.recording.close()
        if self._operators.results:
            self._record(run, OPERATOR, self._operators.results)
            self._operators = _Operators()
        if isinstance(event, h.TrainStart):
            golden.settings = dict(_describe(run))
            self._tracer.state(run, "before the first step")
        elif isinstance(event, h.BackwardEnd):
            self._record(run, "loss", leaves(run.loss))
        elif isinstance(event, h.GradientsReady):
            groups = run.optimizer.param_groups
            gradients = [parameter.grad for group in groups for parameter in group["params"]]
            self._record(run, "gradients", leaves(gradients))
            rates = [float(group["lr"]) for group in groups]
            self._record(run, RATE, leaves(rates[0] if len(rates) == 1 else rates))
        elif isinstance(event, h.StepEnd):
            weights = leaves({name: dict(module.named_parameters()) for name, module in run.modules.items()})
            self._record(run, "modules", {"": _combined(map(_short, weights.values()))}, f"after step {steps}")
            if steps % golden.every == 0:
                self._tracer.state(run, f"at the end of step {steps}")
            if steps >= golden.steps:
                run.control.stop(f"{steps} steps are recorded", by="the golden run")
        else:
            self._tracer.record(run, event)
        if self._records_operators and isinstance(event, h.BatchStart | h.BackwardEnd | h.GradientsReady):
            self.recording.enter_context(self._operators)  # until the next event

    def _record(self, run: h.Run, what: str, values: Mapping[str, Leaf], when: str = "") -> None:
        place = run.progress.epoch, run.progress.batch + 1, run.progress.steps
        self._add(Fact(what, when or _moment(place), place, values))

    def _add(self, fact: Fact) -> None:
        is_state = fact.when.startswith(("before", "at the end"))
        if (is_state and fact.what.split()[0] not in STATES) or self._golden.steps < fact.place[2]:
            return
        values = {path: _short(leaf) for path, leaf in fact.leaves.items() if "param_groups" not in path}
        if fact.what in WHOLE or (fact.what not in ("modules", OPERATOR) and len(values) > MANY):
            values = {"": _combined(values.values())}
        self._golden.facts.append(replace(fact, leaves=values))


def _moment(place: Sequence[int]) -> str:
    return "in epoch {}, batch {}, step {}".format(*place)


def _train(make_trainer: MakeTrainer, steps: int, every: int, operators: bool) -> GoldenRun:
    golden, before = GoldenRun(steps, every), capture()
    try:
        seed_all(0)
        with TemporaryDirectory() as folder:
            trainer, options = TrainerFactory(make_trainer)(Path(folder))
            recorder = _Recorder(golden, operators)
            with recorder.recording:
                for event in EVENTS:
                    trainer.bus.on(event, recorder.handle, lane=h.Lane.REPORT)
                trainer.fit(**{**options, "on_interrupt": "raise"})
            golden.settings = {name: text.replace(folder, "") for name, text in golden.settings.items()}
    finally:
        restore(before)
    return golden


def _short(leaf: Leaf) -> Leaf:
    sample = leaf.sample
    if isinstance(sample, np.ndarray):
        with np.errstate(over="ignore", invalid="ignore"):
            sample = float(np.sqrt(np.sum(np.square(sample))))
    if isinstance(sample, float):
        sample = float(f"{sample:.9g}")  # to show; the digest has all bits
    return Leaf(leaf.kind, leaf.digest[:DIGEST], sample if isinstance(sample, bool | int | float | str) else None)


def _combined(values: Iterable[Leaf]) -> Leaf:
    parts = list(values)
    digest = sha256("".join(f"{part.kind} {part.digest} " for part in parts).encode()).hexdigest()[:DIGEST]
    norms = [float(part.sample) for part in parts if isinstance(part.sample, int | float)]
    return Leaf(f"{len(parts)} values", digest, float(f"{math.hypot(*norms):.9g}") if norms else None)


def _within(expected: Fact, fact: Fact, rtol: float) -> Fact:
    """Return a fact with the expected values instead of those within the tolerance."""
    values = dict(fact.leaves)
    for path in values.keys() & expected.leaves.keys():
        leaf, other = values[path], expected.leaves[path]
        numbers = [part.sample for part in (leaf, other) if isinstance(part.sample, int | float)]
        if leaf.kind == other.kind and len(numbers) == 2 and math.isclose(*numbers, rel_tol=rtol, abs_tol=rtol):
            values[path] = other
    return replace(fact, leaves=values)


def _describe(run: h.Run) -> Iterator[tuple[str, str]]:
    """Yield the settings of the program and of the machine, with their names."""
    yield "task", type(run.task).__name__ if isinstance(run.task, torch.nn.Module) else repr(run.task)
    for name, module in run.modules.items():
        for path, part in module.named_modules(prefix=name):
            yield path, f"{type(part).__name__}({part.extra_repr()})"
    for name, optimizer in run.optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            place = name if len(optimizer.param_groups) == 1 else f"group {number} of {name}"
            yield place, f"{type(optimizer).__name__} of {len(group['params'])} parameters"
            yield from ((f"{key} of {place}", repr(value)) for key, value in group.items() if "param" not in key)
    for name, scheduler in run.schedulers.items():
        yield f"scheduler of {name}", type(scheduler).__name__
        options = {key: value for key, value in scheduler.state_dict().items() if key[0] != "_"}
        yield from ((f"{key} of the scheduler of {name}", f"{value!r:.80}") for key, value in options.items())
    for name, plugin in zip(run.plugins.names(), run.plugins, strict=True):
        yield f"plugin {name!r}", repr(plugin)
    loader = run.data.train_loader
    yield "train", f"{type(loader).__name__}, batches of {run.data.batch_size}, seed {run.data.seed}"
    for name in ("dataset", "sampler", "collate_fn"):
        part = getattr(loader, name, None)
        yield name, getattr(part, "__qualname__", type(part).__name__)
        yield f"transform of {name}", f"{getattr(part, 'transform', None)!r:.200}"
    yield "engine", f"{run.engine!r}, default dtype {torch.get_default_dtype()}"
    yield "versions", f"heliograph {version()}, torch {torch.__version__}, numpy {np.__version__}"
    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    yield "machine", f"{platform.system()} {platform.machine()}, {capability}, {threads} threads"
