"""`python -m heliograph fit config.yaml`, and `validate`, `test` and `predict` of the same file."""

from __future__ import annotations

import sys
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from heliograph import Checkpoint, PredictStart, TestStart, ValidationStart, WeightsCheckpoint, launch
from heliograph.core.checkpoint.storage.files import prepare_folder
from heliograph.spi import check_whole_number, printable

from .config_file import ConfigFile, flat_values
from .errors import ConfigurationError, is_refusal, sentence
from .objects import DATA, Objects, fit_options, make
from .parser import Verb, make_parser, parse

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

VERBS: tuple[Verb, ...] = get_args(Verb)


def main(arguments: Sequence[str]) -> int:
    """Run a command; return its exit status. What a training raises leaves it.

    Args:
        arguments: the verb, files, options.
    """
    verb, words = cast("Verb", arguments[0]), list(arguments[1:])
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # the user's modules lie in the current folder
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
    """Train as a configuration file says: heliograph fit config.yaml --epochs=3."""
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
    """Be one of several ranks that `launch` has started."""
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
    """Do what a command says, in this process."""
    objects = make(parser, config, verb)
    begun = list[bool]()
    try:
        result = _fit(parser, config, objects, begun) if verb == "fit" else _evaluate(objects, verb, begun)
    except Exception as error:
        if begun or not is_refusal(error):
            raise
        raise ConfigurationError(str(error)) from error
    if objects.trainer.engine.is_main:
        print(result)


def _fit(parser: ArgumentParser, config: Namespace, objects: Objects, begun: list[bool]) -> Any:
    """Train, and save the configuration beside the checkpoints."""
    import yaml

    written = config.clone()
    for key in ("config", "folder", "ranks"):  # where and how this command was given, not what it trains
        written.pop(key, None)
    text = parser.dump(written, format="yaml")
    values, trainer = flat_values(yaml.safe_load(text)), objects.trainer
    folders = [
        config.folder,
        *(each.folder for each in trainer.plugins if isinstance(each, Checkpoint | WeightsCheckpoint)),
    ]
    folder = next((Path(each) for each in folders if each is not None), None)
    if folder is not None and trainer.engine.is_main:
        prepare_folder(folder)
    trainer.plugins.register(
        ConfigFile(text, values, folder, lambda former: flat_values(yaml.safe_load(former)), begun)
    )
    options = fit_options(objects.values)
    options["hyper_parameters"] = {**values, **(options.get("hyper_parameters") or {})}
    data = objects.values.get("data", objects.values.get("train"))
    return trainer.fit(objects.values["task"], data, **options)


def _evaluate(objects: Objects, verb: Verb, begun: list[bool]) -> Any:
    """Validate, test or predict."""
    values, trainer = objects.values, objects.trainer
    for event in (ValidationStart, TestStart, PredictStart):
        trainer.bus.on(event, lambda run, event: begun.append(True))  # noqa: ARG005  # the form of handlers
    data = values.get("data", values.get(DATA[verb]))
    shared: dict[str, Any] = {
        key: values[key] for key in ("loader_params", "name", "weights", "limit") if key in values
    }
    if verb == "predict":
        shared["gather"] = False
    return getattr(trainer, verb)(values["task"], data, **shared)
