"""Golden runs: record the first steps of a training in a small file; compare later versions of the program with it."""

from __future__ import annotations

import json
import math
import platform
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import groupby, zip_longest
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
    check_flag,
    check_number,
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

WHEN = "in epoch {}, batch {}, step {}"
MakeTrainer = Callable[..., tuple[h.Trainer, Mapping[str, Any]]]
SCHEMA = 2  # of the file
DIGEST = 6  # bytes of a digest in the file
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
    "modules": "the optimizer: the gradients and the learning rates are equal",
    "optimizers": "the optimizer, or its options: the weights are equal",
    "draws": "the number of random draws",
    "metrics": "the validation, or a metric: the training is equal up to here",
    "order": "the number of batches in a step, or when the run validates",
}
STATES = ("modules", "optimizers", "plugin")  # of the state of a run
INITIAL = "before the first step"
EVENTS = h.TrainStart, h.BatchStart, h.BackwardEnd, h.GradientsReady, h.StepEnd, h.BatchEnd, h.Log, h.ValidationEnd
AT_FIRST = "the initialisation, the seed, the dtype or the model"


@dataclass(slots=True)
class GoldenRun:
    """The first steps of a training.

    Attributes:
        steps: the largest number of optimizer steps; a training that ends earlier is recorded to its end.
        every: the number of steps between two comparisons of the weights.
        program: settings of the program by place, to name the cause of a difference.
        environment: versions and properties of the machine.
        facts: batches, losses, gradients, learning rates, random states and weights, in order.
    """

    steps: int
    every: int
    program: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    facts: list[Fact] = field(default_factory=list)

    @property
    def recorded_steps(self) -> int:
        """The number of recorded steps."""
        return max((fact.place[2] for fact in self.facts), default=0)

    def save(self, path: str | Path) -> None:
        """Write a JSON file with a line for each batch."""
        head: dict[str, Any] = {"schema": SCHEMA, "steps": self.steps, "every": self.every}
        head |= {"environment": self.environment, "program": self.program}
        kinds: dict[tuple[str, str], str] = {}
        lines = [
            [place, *(_row(fact, kinds) for fact in facts)]
            for place, facts in groupby(self.facts, lambda fact: fact.place)
        ]
        rows = ",\n".join(json.dumps(line, separators=(",", ":")) for line in lines)
        text = json.dumps(head, indent=1).removesuffix("\n}")
        Path(path).write_text(f'{text},\n "facts": [\n{rows}\n]}}\n', encoding="utf-8")

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
            _check_counts(steps=content["steps"], every=content["every"])
            for name in ("program", "environment"):
                if not isinstance(content[name], dict):
                    raise TypeError(f"{name} must be an object, got {content[name]!r:.80}")
            kinds: dict[tuple[str, str], str] = {}
            facts = [_fact(row, tuple(place), kinds) for place, *rows in content["facts"] for row in rows]
            return cls(content["steps"], content["every"], content["program"], content["environment"], facts)
        except FileNotFoundError:
            raise UsageError(f"There is no golden run {path}: record it first.") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}.") from None
        except (LookupError, TypeError, ValueError) as error:
            raise UsageError(f"{path} is not a golden run ({describe_error(error)}): record it again.") from None


@dataclass(frozen=True, slots=True)
class GoldenCheck:
    """The comparison with a golden run; `str` returns a report.

    Attributes:
        steps: the compared steps.
        difference: the first difference; None if all recorded values are equal.
        cause: the probable cause, from the kind of the first difference.
        later: the kinds of values that differ after the first difference.
        program: the settings of the program that changed.
        environment: the versions and machine properties that changed.
    """

    steps: int
    difference: Difference | None = None
    cause: str = ""
    later: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether all recorded values are equal."""
        return self.difference is None

    def __str__(self) -> str:
        if self.difference is None:
            return f"equal: {self.steps} steps"
        lines = [f"first difference: {self.difference.text}", f"probable cause: {self.cause}"]
        lines += [f"from there: {', '.join(self.later)}"] if self.later else []
        lines += [f"changed in the program: {text}" for text in self.program]
        lines += [f"changed in the environment: {text}" for text in self.environment]
        return "\n".join(lines)


def record_golden(
    make_trainer: MakeTrainer, path: str | Path, *, steps: int = 50, every: int = 10, operators: bool = False
) -> GoldenRun:
    """Train the first steps, and record them in a file.

    Args:
        make_trainer: returns a trainer and the keywords of its `fit`, all created by the call. Torch, NumPy and Python
            are seeded before it is called.
        path: the file to write; about 20 kB for a small model. Commit it beside the test.
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
    _check_counts(steps=steps, every=every)
    check_flag("operators", operators)
    if Path(path).is_dir() or not Path(path).parent.is_dir():  # before the trainings
        raise UsageError(f"{path} cannot be written: it must be a file in an existing folder.")
    golden, again = (_train(make_trainer, steps, every, operators) for _ in range(2))
    check = compare_golden(golden, again, names=("the first recording", "the second"))
    if not check.is_equal:
        raise UsageError(
            f"The training is not deterministic, so it cannot be recorded. Seed what draws, and see "
            f"torch.use_deterministic_algorithms. {check}"
        )
    try:
        golden.save(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None
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
    try:
        check_number("rtol", rtol, at_least=0)
    except ValueError as error:
        raise UsageError(str(error)) from None
    golden = GoldenRun.load(path)
    operators = any(fact.what == OPERATOR for fact in golden.facts)
    return compare_golden(golden, _train(make_trainer, golden.steps, golden.every, operators), rtol=rtol)


def compare_golden(
    golden: GoldenRun, found: GoldenRun, *, rtol: float = 0.0, names: tuple[str, str] = NAMES
) -> GoldenCheck:
    """Return the first difference between two recorded runs, and what changed in the program.

    Args:
        golden: the run that should be repeated.
        found: the repetition.
        rtol: see `check_golden`.
        names: the names of both in the report.
    """
    shared = {fact.what for fact in golden.facts} & {fact.what for fact in found.facts}  # not a new plugin
    shared -= {OPERATOR} if rtol else set()
    expected, facts = ([fact for fact in run.facts if fact.what in shared] for run in (golden, found))
    facts = facts if rtol == 0.0 else list(_within(expected, facts, rtol))
    differences = list(Difference.between(expected, facts, names=names))
    if not differences:
        return GoldenCheck(golden.recorded_steps)
    first = differences[0]
    cause = CAUSES.get(first.what, f"the {first.what}, or its options")
    if first.what == "modules" and INITIAL in first.text:
        cause = AT_FIRST
    later = dict.fromkeys(_name(difference.what) for difference in differences[1:] if difference.what != first.what)
    return GoldenCheck(
        golden.recorded_steps,
        first,
        cause,
        tuple(later),
        tuple(_changes(golden.program, found.program)),
        tuple(_changes(golden.environment, found.environment)),
    )


class _Operators(TorchDispatchMode):
    """Records the result of each operator by its number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: dict[str, Leaf] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        if tensors and not str(func).partition(".")[2].startswith(UNWRITTEN):
            parts = [*leaves(tensors).values()]
            leaf = parts[0] if len(parts) == 1 else _combined(parts)
            self.results[str(len(self.results) + 1)] = Leaf(f"{func}, {leaf.kind}", leaf.digest, None)
        return result


class _Recorder:
    """Records the facts of a run, after all other handlers."""

    def __init__(self, golden: GoldenRun, folder: Path, records_operators: bool) -> None:
        self._golden, self._folder = golden, folder
        self._records_operators, self._operators = records_operators, _Operators()
        self._recording = ExitStack()
        self._tracer = Tracer(self._add)

    def subscribe(self, trainer: h.Trainer) -> None:
        for event in EVENTS:
            trainer.bus.on(event, self._handle, lane=h.Lane.REPORT)

    def _handle(self, run: h.Run, event: Event) -> None:
        golden = self._golden
        place = run.progress.epoch, run.progress.batch + 1, run.progress.steps
        when = WHEN.format(*place)
        self.close()
        if self._operators.results:
            self._add(Fact(OPERATOR, when, place, self._operators.results))
            self._operators = _Operators()
        if isinstance(event, h.TrainStart):
            golden.program = {name: text.replace(str(self._folder), "") for name, text in _describe(run)}
            self._tracer.state(run, INITIAL)
        elif isinstance(event, h.BackwardEnd):
            self._add(Fact("loss", when, place, leaves(run.loss)))
        elif isinstance(event, h.GradientsReady):
            groups = run.optimizer.param_groups
            gradients = [parameter.grad for group in groups for parameter in group["params"]]
            self._add(Fact("gradients", when, place, leaves(gradients)))
            rates = [float(group["lr"]) for group in groups]
            self._add(Fact(RATE, when, place, leaves(rates[0] if len(rates) == 1 else rates)))
        elif isinstance(event, h.StepEnd):
            steps = run.progress.steps
            weights = leaves({name: dict(module.named_parameters()) for name, module in run.modules.items()})
            self._add(Fact("modules", f"after step {steps}", place, {"": _combined(map(_short, weights.values()))}))
            if steps % golden.every == 0:
                self._tracer.state(run, f"at the end of step {steps}")
            if steps >= golden.steps:
                run.control.stop(f"{steps} steps are recorded", by="the golden run")
        elif isinstance(event, h.BatchEnd):
            draws = {path: replace(leaf, sample=None) for path, leaf in leaves(capture()).items()}
            self._add(Fact("draws", when, place, draws))
        else:
            self._tracer.record(run, event)
        if self._records_operators and isinstance(event, h.BatchStart | h.BackwardEnd | h.GradientsReady):
            self._recording.enter_context(self._operators)  # until the next event

    def close(self) -> None:
        self._recording.close()

    def _add(self, fact: Fact) -> None:
        is_state = fact.when.startswith(("before", "at the end"))
        if (is_state and fact.what.split()[0] not in STATES) or self._golden.steps < fact.place[2]:
            return
        values = {path: _short(leaf) for path, leaf in fact.leaves.items() if "param_groups" not in path}
        if fact.what in WHOLE or (fact.what not in ("modules", OPERATOR) and len(values) > MANY):
            values = {"": _combined(values.values())}
        self._golden.facts.append(replace(fact, leaves=values))


def _train(make_trainer: MakeTrainer, steps: int, every: int, operators: bool) -> GoldenRun:
    golden, before = GoldenRun(steps, every, environment=_environment()), capture()
    try:
        seed_all(0)
        with TemporaryDirectory() as folder:
            trainer, options = TrainerFactory(make_trainer)(Path(folder))
            recorder = _Recorder(golden, Path(folder), operators)
            recorder.subscribe(trainer)
            with closing(recorder):
                trainer.fit(**{**options, "on_interrupt": "raise"})
    finally:
        restore(before)
    return golden


def _check_counts(**counts: object) -> None:
    for name, number in counts.items():
        if not is_whole_number(number) or number < 1:
            raise UsageError(f"{name} must be a whole number of at least 1, got {number!r}.")


def _short(leaf: Leaf) -> Leaf:
    sample = leaf.sample
    if isinstance(sample, np.ndarray):
        with np.errstate(over="ignore", invalid="ignore"):
            sample = float(np.sqrt(np.sum(np.square(sample))))
    if isinstance(sample, float):
        sample = float(f"{sample:.9g}")  # to show; the digest has all bits
    return Leaf(leaf.kind, _shortened(leaf.digest), sample if isinstance(sample, bool | int | float | str) else None)


def _combined(values: Iterable[Leaf]) -> Leaf:
    parts = list(values)
    digest = _shortened("".join(f"{part.kind} {part.digest} " for part in parts))
    norms = [float(part.sample) for part in parts if isinstance(part.sample, int | float)]
    return Leaf(f"{len(parts)} values", digest, float(f"{math.hypot(*norms):.9g}") if norms else None)


def _shortened(text: str) -> str:
    return urlsafe_b64encode(sha256(text.encode()).digest()[:DIGEST]).decode()


def _row(fact: Fact, kinds: dict[tuple[str, str], str]) -> list[Any]:
    """Return a fact of the file; a kind is written when it changes."""
    when = "" if fact.when == WHEN.format(*fact.place) else fact.when
    values = {}
    for path, leaf in fact.leaves.items():
        is_known = kinds.get((fact.what, path)) == leaf.kind
        values[path] = [leaf.digest, leaf.sample, leaf.kind]
        if is_known:
            del values[path][1 if leaf.sample is None else 2 :]
        kinds[fact.what, path] = leaf.kind
    return [fact.what, when, values[""] if [*values] == [""] else values]


def _fact(row: list[Any], place: tuple[int, int, int], kinds: dict[tuple[str, str], str]) -> Fact:
    what, when, values = row
    leaves = {}
    for path, parts in (values if isinstance(values, dict) else {"": values}).items():
        digest, sample, kind = [*parts, *(None, None, None)][:3]
        kinds[what, path] = kind or kinds[what, path]
        leaves[path] = Leaf(kinds[what, path], digest, sample)
    return Fact(what, when or WHEN.format(*place), place, leaves)


def _within(golden: Iterable[Fact], found: Iterable[Fact], rtol: float) -> Iterator[Fact]:
    """Yield the found facts; a value within the tolerance has the digest of the golden one."""
    for expected, fact in zip_longest(golden, found):
        if fact is None:
            return
        if expected is None:
            yield fact
            continue
        values = dict(fact.leaves)
        for path, leaf in expected.leaves.items():
            value = values.get(path)
            if value is not None and (fact.what == "draws" or _is_close(leaf, value, rtol)):
                values[path] = leaf
        yield replace(fact, leaves=values)


def _is_close(first: Leaf, second: Leaf, rtol: float) -> bool:
    numbers = [leaf.sample for leaf in (first, second) if isinstance(leaf.sample, int | float)]
    return first.kind == second.kind and len(numbers) == 2 and math.isclose(*numbers, rel_tol=rtol, abs_tol=rtol)


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in {**before, **now}:
        was, value = before.get(name), now.get(name)
        if was != value:
            yield f"{name} was {was or 'not there'} and is {value or 'not there'}"


def _name(what: str) -> str:
    return {"modules": "weights", "draws": "random state"}.get(what, what)


def _environment() -> dict[str, str]:
    return {
        "heliograph": version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "Python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
    }


def _describe(run: h.Run) -> Iterator[tuple[str, str]]:
    """Yield the settings of the program by place: modules, optimizers, schedulers, plugins, loader."""
    yield "task", repr(run.task) if not isinstance(run.task, torch.nn.Module) else type(run.task).__name__
    for name, module in run.modules.items():
        for path, part in module.named_modules(prefix=name):
            yield path, f"{type(part).__name__}({part.extra_repr()})"
    for name, optimizer in run.optimizers.items():
        for number, group in enumerate(optimizer.param_groups):
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            place = name if len(optimizer.param_groups) == 1 else f"group {number} of {name}"
            yield place, f"{type(optimizer).__name__} of {len(group['params'])} parameters"
            yield from ((f"{key} of {place}", repr(value)) for key, value in options.items())
    for name, scheduler in run.schedulers.items():
        yield f"scheduler of {name}", type(scheduler).__name__
        for key, value in vars(scheduler).items():
            if key[0] != "_" and isinstance(value, bool | int | float | str | list):
                yield f"{key} of the scheduler of {name}", f"{value!r:.80}"
    for name, plugin in zip(run.plugins.names(), run.plugins, strict=True):
        yield f"plugin {name!r}", repr(plugin)
    loader = run.data.train_loader
    yield "train", f"{type(loader).__name__}, batches of {run.data.batch_size}"
    for name in ("dataset", "sampler", "collate_fn"):
        part = getattr(loader, name, None)
        yield name, getattr(part, "__qualname__", type(part).__name__)
        yield f"transform of {name}", f"{getattr(part, 'transform', None)!r:.200}"
    yield "seed of the data", str(run.data.seed)
    yield "engine", f"{run.engine!r}, default dtype {torch.get_default_dtype()}"
