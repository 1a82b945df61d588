"""The commands `heliograph fit`, `validate`, `test` and `predict` of a configuration file."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from heliograph import Checkpoint, Lane, Plugin, Run, Trainer, WeightsCheckpoint, launch, on
from heliograph import events as ev
from heliograph.core.checkpoint.storage.files import prepare_folder, write_whole
from heliograph.core.settings import FitOptions
from heliograph.core.system.numbered_files import find_numbered, make_numbered
from heliograph.spi import check_whole_number, on_main, printable, seed_all

from .errors import ConfigurationError, is_refusal, sentence
from .names import OBJECTS
from .parser import Verb, make_parser, parse

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

END = ".config.yaml"
OWNER = re.compile(r"\A# training ([0-9a-f]+)")


class ConfigFile(Plugin):
    """Saves the configuration of a run as `<run>.config.yaml`, which can be used again.

    A resumed run finds its own file and notes the changes. The file of another training is kept; the configuration is
    then saved as `<run>-2.config.yaml`.
    """

    affects_training = False
    rehearses = False

    def __init__(
        self, text: str, values: Mapping[str, Any], folder: Path | None, load: Any, started: list[bool]
    ) -> None:
        self.text, self.values, self.folder, self._load, self._started = text, values, folder, load, started

    @on(ev.TrainStart, lane=Lane.REPORT)
    def save(self, run: Run, event: ev.TrainStart) -> None:
        self._started.append(True)
        folder = self.folder
        if folder is None:
            run.note("the configuration is not saved: pass --folder=..., or add the plugin checkpoint")
            return
        for note in on_main(run.engine, lambda: list(self._save(folder, run.name, run.checkpoints.training_id))):
            run.note(note)

    def _save(self, folder: Path, name: str, training_id: str) -> Iterator[str]:
        path, previous = _find_or_reserve(folder, name, training_id)
        text = f"# training {training_id}\n{self.text}"
        if text == previous:
            return
        if previous is not None:
            changes = "; ".join(differences(self._load(previous), self.values))
            yield f"the configuration has changed since the start of this training: {changes or 'only its comments'}"
        write_whole(path, lambda temporary: _write(temporary, text))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _find_or_reserve(folder: Path, name: str, training_id: str) -> tuple[Path, str | None]:
    # An empty file reserves a new name.
    first = folder / f"{name}{END}"
    for path in find_numbered(first, END):
        text = path.read_text(encoding="utf-8", errors="replace")
        owner = OWNER.match(text)
        if owner is not None and owner[1] == training_id:
            return path, text
    return make_numbered(first, END), None


def flat_values(config: Any, key: str = "") -> dict[str, Any]:
    # {optimizer: {class_path: SGD, init_args: {lr: 0.1}}} becomes {optimizer: SGD, optimizer.lr: 0.1}.
    if isinstance(config, dict) and "class_path" in config:
        arguments = {**config.get("init_args", {}), **config.get("dict_kwargs", {})}
        return {key: config["class_path"], **flat_values(arguments, key)}
    if isinstance(config, dict):
        items = list(config.items())
    elif isinstance(config, list) and any(isinstance(item, dict) for item in config):
        items = list(enumerate(config))
    else:
        return {key: config}
    values: dict[str, Any] = {}
    for name, value in items:
        values |= flat_values(value, f"{key}.{name}" if key else str(name))
    return values


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} {_shown(old, key)} -> {_shown(new, key)}"
        for key in sorted({*old, *new})
        if key not in old or key not in new or old[key] != new[key]
    ]


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "(none)"


NEEDED: dict[Verb, tuple[str, ...]] = {
    "fit": ("task", "data", "train", "validation", "optimizer", "scheduler"),
    "validate": ("task", "data", "validation"),
    "test": ("task", "data", "test"),
    "predict": ("task", "data", "predict"),
}
DATA: dict[Verb, str] = {"fit": "train", "validate": "validation", "test": "test", "predict": "predict"}
FITTED = ("optimizer", "scheduler")  # created by fit
NULLS = FitOptions.__annotations__.keys() - set(OBJECTS)  # passed even if they are null


def make(parser: ArgumentParser, config: Namespace, verb: Verb) -> tuple[Trainer, dict[str, Any]]:
    # The trainer and the other objects of a configuration; missing keys are omitted.
    wanted = config.clone()
    for key in set(OBJECTS) - set(NEEDED[verb]):
        wanted.pop(key, None)
    _check(wanted, verb)
    if config.seed is not None:
        seed_all(config.seed)
    with refusals("the configuration"):
        created = parser.instantiate(wanted, instantiate_groups=False).as_dict()
    options = created.pop("trainer")
    plugins = [plugin for entry in options.pop("plugins") or () for plugin in _flat(_create(entry, "trainer.plugins"))]
    options["engine"] = _create(options["engine"], "trainer.engine")
    with refusals("trainer"):
        trainer = Trainer(plugins, **options)
    values = {key: value for key, value in created.items() if value is not None or key in NULLS}
    for key in values.keys() & set(NEEDED[verb]) - set(FITTED):
        values[key] = _create(values[key], key)
    return trainer, values


def _check(config: Namespace, verb: Verb) -> None:
    name = DATA[verb]
    if config.get("task") is None:
        raise ConfigurationError("The configuration has no task: set a class path, task: my_module.MyTask.")
    if (config.get("data") is None) == (config.get(name) is None):
        raise ConfigurationError(f"{verb} needs either {name}: or a DataModule as data:.")


def _create(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _create(item, f"{key}.{name}") for name, item in value.items()}
    if not isinstance(value, partial):
        return value
    with refusals(key):
        return value()


def _flat(entry: Any) -> list[Any]:
    return [plugin for item in entry for plugin in _flat(item)] if isinstance(entry, list | tuple) else [entry]


@contextmanager
def refusals(title: str) -> Iterator[None]:
    # Errors of Heliograph's own checks are configuration errors; other errors get a note.
    try:
        yield
    except Exception as error:
        root = error
        while root.__cause__ is not None and isinstance(root.__cause__, Exception):
            root = root.__cause__
        if is_refusal(root):
            raise ConfigurationError(f"{title}: {root}") from error
        root.add_note(f"heliograph: while creating {title}")
        raise root from None


def main(arguments: Sequence[str]) -> int:
    verb, words = cast("Verb", arguments[0]), list(arguments[1:])
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # for the user's modules
    try:
        parser, config = _parse(verb, words)
        if config.ranks is None:
            _run(verb, parser, config)
        else:
            launch(_run_rank, verb, words, nprocs=config.ranks)
    except ConfigurationError as error:
        print(f"heliograph {verb}: {printable(error)}", file=sys.stderr)
        return 2
    return 0


def fit(arguments: Sequence[str]) -> int:
    """Train from a configuration file: heliograph fit config.yaml --epochs=3."""
    return main(["fit", *arguments])


def validate(arguments: Sequence[str]) -> int:
    """Validate the task of a configuration file."""
    return main(["validate", *arguments])


def test(arguments: Sequence[str]) -> int:
    """Test the task of a configuration file."""
    return main(["test", *arguments])


def predict(arguments: Sequence[str]) -> int:
    """Predict with the task of a configuration file."""
    return main(["predict", *arguments])


def _run_rank(verb: Verb, words: Sequence[str]) -> None:
    _run(verb, *_parse(verb, words))


def _parse(verb: Verb, words: Sequence[str]) -> tuple[ArgumentParser, Namespace]:
    try:
        parser = make_parser(verb)
    except ImportError as error:
        raise ConfigurationError(str(error)) from error
    try:
        config = parse(parser, words)
        if config.ranks is not None:
            check_whole_number("ranks", config.ranks, at_least=1, or_else="null for this process alone")
    except ArgumentError as error:
        raise ConfigurationError(sentence(error, parser)) from error
    except (LookupError, ValueError) as error:
        if not is_refusal(error):
            raise
        raise ConfigurationError(str(error)) from error
    return parser, config


def _run(verb: Verb, parser: ArgumentParser, config: Namespace) -> None:
    trainer, values = make(parser, config, verb)
    started = list[bool]()
    try:
        if verb == "fit":
            result = _fit(parser, config, trainer, values, started)
        else:
            result = _evaluate(trainer, values, verb, started)
    except Exception as error:
        if started or not is_refusal(error):
            raise
        raise ConfigurationError(str(error)) from error
    if trainer.engine.is_main:
        print(result)


def _fit(
    parser: ArgumentParser, config: Namespace, trainer: Trainer, objects: dict[str, Any], started: list[bool]
) -> Any:
    import yaml

    written = config.clone()
    for key in ("config", "folder", "ranks"):  # not part of the training
        written.pop(key, None)
    text = parser.dump(written, format="yaml")
    values = flat_values(yaml.safe_load(text))
    folders = [
        config.folder,
        *(plugin.folder for plugin in trainer.plugins if isinstance(plugin, Checkpoint | WeightsCheckpoint)),
    ]
    folder = next((Path(path) for path in folders if path is not None), None)
    if folder is not None and trainer.engine.is_main:
        prepare_folder(folder)
    trainer.plugins.register(ConfigFile(text, values, folder, lambda text: flat_values(yaml.safe_load(text)), started))
    options = {key: objects[key] for key in objects if key in FitOptions.__annotations__ or key == "on_interrupt"}
    options["hyper_parameters"] = {**values, **(options.get("hyper_parameters") or {})}
    return trainer.fit(objects["task"], objects.get("data", objects.get("train")), **options)


def _evaluate(trainer: Trainer, values: dict[str, Any], verb: Verb, started: list[bool]) -> Any:
    for event in (ev.ValidationStart, ev.TestStart, ev.PredictStart):
        trainer.bus.on(event, lambda run, event: started.append(True))  # noqa: ARG005  # the form of handlers
    data = values.get("data", values.get(DATA[verb]))
    shared: dict[str, Any] = {
        key: values[key] for key in ("loader_params", "name", "weights", "limit") if key in values
    }
    if verb == "predict":
        shared["gather"] = False
    return getattr(trainer, verb)(values["task"], data, **shared)
