"""The formats of exported models: how each is written, and how it is run again."""

from __future__ import annotations

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from ...core.system.extras import require
from ...events.checks import known_names
from .inputs import Arguments, mapped

OURS = frozenset({"mod", "model", "args", "kwargs", "f", "dynamo", "verbose"})  # arguments that Export gives itself
LARGEST = 2**31 - 2**24  # bytes of an ONNX model in one file: protobuf allows 2 GiB


class Format(ABC):
    """A format of files.

    Attributes:
        suffix: the ending of its files.
    """

    suffix: str

    @property
    @abstractmethod
    def exporter(self) -> Callable[..., Any]:
        """The function of torch that takes the options."""

    def check_options(self, names: Iterable[str]) -> None:
        """Raise TypeError for an option that the exporter does not take, or that `Export` gives it itself."""
        taken = signature(self.exporter).parameters.values()
        known = {each.name for each in taken if each.kind is not Parameter.VAR_KEYWORD} - OURS
        for name in names:
            if name not in known:
                exporter = f"{self.exporter.__module__}.{self.exporter.__name__}"
                raise TypeError(
                    f"Export has no option {name!r}, and passes none of that name to {exporter}."
                    f"{known_names(name, known)}"
                )

    @abstractmethod
    def check_installed(self) -> None:
        """Raise ImportError, with the command that installs it, where a package is missing that writes the format."""

    @abstractmethod
    def write(self, path: Path, module: nn.Module, arguments: Arguments, options: dict[str, Any]) -> None:
        """Trace a module and write it.

        Args:
            path: the file.
            module: in eval mode, on the CPU.
            arguments: what it is called with.
            options: of the exporter.
        """

    @abstractmethod
    def run(self, path: Path, arguments: Arguments) -> list[Tensor] | None:
        """Return the tensors that a file's model returns; None where nothing that runs it is installed."""


class Pt2(Format):
    """An `ExportedProgram` of torch."""

    suffix = ".pt2"

    @property
    def exporter(self) -> Callable[..., Any]:
        """`torch.export.export`."""
        return torch.export.export

    def check_installed(self) -> None:
        """Do nothing: torch writes it."""

    def write(self, path: Path, module: nn.Module, arguments: Arguments, options: dict[str, Any]) -> None:
        """Write it with `torch.export`."""
        torch.export.save(torch.export.export(module, *arguments, **options), path)

    def run(self, path: Path, arguments: Arguments) -> list[Tensor] | None:
        """Run it in torch."""
        args, kwargs = arguments
        return tensors_in(torch.export.load(path).module()(*args, **kwargs))


class Onnx(Format):
    """An ONNX model; a large one has its weights in a second file, `<name>.onnx.data`."""

    suffix = ".onnx"

    @property
    def exporter(self) -> Callable[..., Any]:
        """`torch.onnx.export`."""
        return torch.onnx.export

    def check_installed(self) -> None:
        """Look for onnx and onnxscript."""
        for name in ("onnx", "onnxscript"):
            require(name, "Export to ONNX", extra="onnx")

    def write(self, path: Path, module: nn.Module, arguments: Arguments, options: dict[str, Any]) -> None:
        """Write it with `torch.onnx.export(dynamo=True)`, and let ONNX check its structure."""
        args, kwargs = arguments
        program = torch.onnx.export(module, args, kwargs=kwargs, dynamo=True, verbose=False, **options)
        assert program is not None
        size = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
        program.save(path, external_data=size > LARGEST)
        require("onnx", "Export to ONNX", extra="onnx").checker.check_model(path)

    def run(self, path: Path, arguments: Arguments) -> list[Tensor] | None:
        """Run it in ONNX Runtime on the CPU, where that is installed."""
        try:
            runtime = require("onnxruntime", "Checking an ONNX model", extra="onnx")
        except ImportError:
            return None
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        given = tensors_in(arguments)
        named = zip(session.get_inputs(), given, strict=True)
        outputs = session.run(None, {each.name: value.numpy() for each, value in named})
        return [torch.from_numpy(each) for each in outputs]


FORMATS: dict[str, Format] = {each.suffix: each for each in (Onnx(), Pt2())}


def batch_shapes(arguments: Arguments) -> Any:
    """Return `dynamic_shapes` for inputs whose first dimension is the batch."""
    batch = Dim("batch")
    args, kwargs = mapped(arguments, lambda tensor: {0: batch} if tensor.ndim else None)
    return kwargs or args


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested outputs, such as tuples, dicts and the outputs of transformers, in their order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for each in value for tensor in tensors_in(each)] if isinstance(value, tuple | list) else []


@contextmanager
def quiet() -> Iterator[None]:
    """Return a context without what torch's exporters say about their own code."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            warnings.filterwarnings("ignore", "# The axis name", UserWarning)  # all inputs have the same batch
            yield
    finally:
        logger.setLevel(level)
