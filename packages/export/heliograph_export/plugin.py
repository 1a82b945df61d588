"""Export a module of the task when a training has ended well, and check the file."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from heliograph import BatchStart, Lane, NotRecorded, Plugin, Run, RunClosed, TrainStart, on
from heliograph.core.checkpoint.storage.files import prepare_folder, write_whole
from heliograph.core.data.generators import isolated
from heliograph.events import Handle
from heliograph.spi import (
    check_flag,
    check_number,
    check_path,
    describe_error,
    ended_for_good,
    known_names,
    require,
    with_article,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.export import Dim
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

FIXED_BATCH = " If its code depends on the batch size, dynamic=False exports the size of the example."
CALL = "a tensor, a tuple of positional arguments or a dict of keyword arguments"
Tolerance = tuple[float, float]  # relative, absolute
TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: (1e-6, 1e-8),
    torch.float32: (1e-3, 1e-5),
    torch.float16: (1e-2, 1e-3),
    torch.bfloat16: (5e-2, 1e-2),
}
EXACT: Tolerance = (0.0, 0.0)
GIVEN_BY_EXPORT = {"mod", "model", "args", "kwargs", "f", "dynamo", "verbose"}  # arguments of the exporters
LARGEST_ONNX_FILE = 2**31 - 2**24  # bytes: protobuf allows 2 GiB
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Export(Plugin):
    """Write a module of the task to a file when a training has ended well, and check the file.

    `torch.onnx.export(dynamo=True)` writes `model.onnx`, `torch.export` writes `model.pt2`. The weights are those at
    the end of the run: the best ones with `LoadBest`, the average with `EMA(load_at_end=True)`. The module is exported
    on the CPU, in eval mode and without gradients; its own modes and device do not change. The main rank exports.

    The file is read and run with the example and, unless `dynamic=False`, with a larger batch; the outputs must equal
    those of the module. If they differ, the run fails and no file is written. An `example` is tried at the start, on a
    copy of the module. Without ONNX Runtime an ONNX model is not run, and the result warns of it. The file appears when
    it is complete and checked. A training that failed or was preempted (`Preemption`) exports nothing.

    Args:
        path: a file that ends in `.onnx` or `.pt2`.
        example: what the module is called with: a tensor, a tuple of positional arguments, or a dict of keyword
            arguments. The default is the inputs of the first batch, if batches are pairs `(inputs, targets)`.
        module: the name of the module, if the task has several.
        dynamic: True if the first dimension of every input, the batch, may have any size; False to fix all sizes to
            those of the example.
        check: True to run the file and compare the outputs.
        tolerance: the allowed relative and absolute difference. The default is (1e-3, 1e-5) for float32, (1e-6, 1e-8)
            for float64, (1e-2, 1e-3) for float16, (5e-2, 1e-2) for bfloat16, and none for other types.
        overwrite: True to replace a file that exists when the training begins.
        **options: passed to `torch.onnx.export` or `torch.export.export`, for example `opset_version=18`,
            `input_names=["image"]` or `strict=True`. `dynamic_shapes=` replaces `dynamic`.

    Raises:
        ImportError: a package of the extra `onnx` is missing.
        TypeError: an argument has the wrong type, or the exporter has no such option.
        ValueError: the file has another ending, or it is not known which dimension is the batch. At the run's start:
            the file exists, the folder cannot be written, the task has no such module, the module cannot be called with
            the example, or the engine holds shards.
        RuntimeError: at the end, the module cannot be exported, or the exported model differs from it.
        OSError: at the end, the file could not be written.
    """

    affects_training = False
    ranks = "main"

    def __init__(
        self,
        path: str | Path,
        *,
        example: Any = None,
        module: str | None = None,
        dynamic: bool = True,
        check: bool = True,
        tolerance: Tolerance | None = None,
        overwrite: bool = False,
        **options: Any,
    ) -> None:
        check_path("Export(path)", path)
        self.path = Path(path)
        if self.path.suffix not in FORMATS:
            raise ValueError(f"Export(path) is a file that ends in {' or '.join(FORMATS)}, got {str(path)!r}.")
        for name, flag in {"dynamic": dynamic, "check": check, "overwrite": overwrite}.items():
            check_flag(name, flag)
        self.example, self.module, self.dynamic, self.check = example, module, dynamic, check
        self.overwrite, self.options = overwrite, options
        if example is not None:
            self._arguments(example)
        if tolerance is not None:
            if not isinstance(tolerance, Sequence) or len(tolerance) != 2:
                raise TypeError(f"tolerance is (relative, absolute), such as (1e-3, 1e-5); got {tolerance!r}.")
            for number in tolerance:
                check_number("tolerance", number, at_least=0)
        self.tolerance = tolerance
        self._format = FORMATS[self.path.suffix]
        for package in self._format.needs:
            require(package, "Export to ONNX", extra="onnx")
        _check_options(self._format.exporter, options)
        self.exclusive = (f"the exported file {self.path.absolute()}",)
        self._first_inputs: Arguments | None = None
        self._handle: Handle | None = None

    def describe(self, run: Run) -> str:
        """Say what is exported, and where to."""
        return f"exports {self._module_name(run)} to {self.path} at the end"

    def rehearse(self, folder: Path) -> list[Path]:
        """Write to another folder; raise ValueError if the training would refuse the path."""
        self._refuse_existing()
        intended, self.path = self.path, folder / self.path.name
        return [intended.parent]

    @on(TrainStart, lane=Lane.PERSIST)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Refuse what would fail at the end; without an example, wait for the first batch."""
        if run.report.is_replay:
            raise NotRecorded("the weights of the model")
        self.close()
        name = self._module_name(run)
        if any(isinstance(parameter, DTensor) for parameter in run.modules[name].parameters()):
            raise ValueError(
                f"{type(run.engine).__name__} holds shards of the model, which cannot be exported: save it with "
                f"Checkpoint, and export it from one process, after load_weights."
            )
        self._refuse_existing()
        prepare_folder(self.path.parent)
        if self.example is None:
            self._handle = run.bus.on(BatchStart, self._keep_inputs, lane=Lane.REPORT)
        else:
            self._try_example(run, name)

    @on(RunClosed, lane=Lane.PERSIST)
    def end(self, run: Run, event: RunClosed) -> None:
        """Export if the training ended well."""
        first_inputs = self._first_inputs
        self.close()
        if run.optimizer is None or not ended_for_good(run, event.status):
            return
        arguments = first_inputs if self.example is None else self._arguments(self.example)
        if arguments is None:
            run.warn(
                f"Nothing was exported to {self.path}: no batch was read, and no example= was given. A run that has "
                f"nothing left to do exports, too, if it has an example=, such as the inputs of a batch: give it one, "
                f"and start the program again."
            )
            return
        name, outcomes = self._module_name(run), list[str]()

        def write(path: Path) -> None:
            outcomes.append(self._export(run, path, module, arguments))

        try:
            with run.engine.writing(), _for_export(run.modules[name]) as module:
                write_whole(self.path, write)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{name} could not be exported to {self.path}: {error.strerror or error}. Nothing is left of it.",
            ) from error
        run.note(f"exported {name} to {self.path}, {self.path.stat().st_size / 1e6:,.3f} MB{outcomes[0]}")

    def close(self) -> None:
        """Stop waiting for a batch, and drop its inputs."""
        self._first_inputs = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def _has_any_batch_size(self) -> bool:
        return self.dynamic and "dynamic_shapes" not in self.options

    def _arguments(self, example: Any) -> Arguments:
        args, kwargs = as_arguments(example)
        if self._has_any_batch_size:
            batch_size((args, kwargs))  # raises if there is none
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), (args, kwargs))
        return args, kwargs

    def _keep_inputs(self, run: Run, event: BatchStart) -> None:
        if not isinstance(run.batch, tuple | list) or len(run.batch) != 2:
            raise ValueError(
                f"{self.name}: batches are not pairs (inputs, targets), so what the module is called with is not "
                f"known: give example=, {CALL}."
            )
        arguments = self._arguments(run.batch[0])
        self.close()
        self._first_inputs = arguments

    def _try_example(self, run: Run, name: str) -> None:
        """Call a copy of the module as at the end; the random generators are restored."""
        args, kwargs = self._arguments(self.example)
        with isolated(one_thread=False), run.engine.writing():
            try:
                twin = deepcopy(run.modules[name]).cpu()
            except Exception as error:  # noqa: BLE001  # the end may need no copy
                run.note(f"example= is not tried before the end: {name} cannot be copied ({_first_lines(error)})")
                return
            try:
                with _for_export(twin) as module:
                    module(*args, **kwargs)
            except Exception as error:  # code of the user's
                raise ValueError(
                    f"{self.name}: {name} cannot be called with example=: {_first_lines(error)} Give what its forward "
                    f"takes: {CALL}."
                ) from error

    def _refuse_existing(self) -> None:
        if self.path.exists() and not (self.overwrite and self.path.is_file()):
            raise ValueError(
                f"{self.path} is there already: give another path, or overwrite=True, also for a training that is "
                f"continued after its end."
            )

    def _module_name(self, run: Run) -> str:
        names = list(run.modules)
        if self.module is None:
            if len(names) > 1:
                raise ValueError(f"The task has the modules {', '.join(names)}: choose one, module={names[0]!r}.")
            return names[0]
        if self.module not in names:
            raise ValueError(f"The task has no module {self.module!r}.{known_names(self.module, names)}")
        return self.module

    def _export(self, run: Run, path: Path, module: nn.Module, arguments: Arguments) -> str:
        """Write to a path, and compare; return the outcome in words."""
        sizes: Sequence[int | None] = [None]
        options = self.options
        if self._has_any_batch_size:
            size = batch_size(arguments)
            traced = max(2, size)  # the exporters take a size of 1 for one that never changes
            sizes = sorted({size, traced, traced + 1})
            arguments = of_size(arguments, traced)
            options = {**options, "dynamic_shapes": batch_shapes(arguments)}
        with _quiet():
            try:
                self._format.write(path, module, arguments, options)
            except OSError:
                raise
            except Exception as error:  # the exporters raise errors of many kinds
                hint = FIXED_BATCH if self._has_any_batch_size else ""
                raise RuntimeError(
                    f"The module cannot be exported to {self.path}: {_first_lines(error)}{hint}"
                ) from error
            return self._compare(run, path, module, arguments, sizes) if self.check else ""

    def _compare(
        self, run: Run, path: Path, module: nn.Module, arguments: Arguments, sizes: Sequence[int | None]
    ) -> str:
        largest = 0.0
        for size in sizes:
            args, kwargs = inputs = arguments if size is None else of_size(arguments, size)
            expected = tensors_in(module(*args, **kwargs))
            try:
                outputs = self._format.run(path, inputs)
                if outputs is None:
                    run.warn(f"{self.path} was not checked: pip install 'heliograph[onnx]' brings what runs it.")
                    return ""
                largest = max(largest, largest_difference(expected, outputs, self.tolerance))
            except Exception as error:  # the runtimes raise errors of many kinds
                batch, hint = ("", "") if size is None else (f" with a batch of {size}", FIXED_BATCH)
                raise RuntimeError(
                    f"The exported model is not the module{batch}, so {self.path} was not written: "
                    f"{_first_lines(error)}{hint}"
                ) from error
        batches = " with batches of " + " and ".join(", ".join(map(str, sizes)).rsplit(", ", 1))
        return f", checked{batches if sizes != [None] else ''}: it differs by at most {largest:.2g}"


@contextmanager
def _for_export(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module, or a copy on the CPU, in eval mode and without gradients."""
    devices = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}
    exported = module if devices <= {"cpu"} else deepcopy(module).cpu()
    modes = {part: part.training for part in exported.modules()}
    exported.eval()
    try:
        with torch.no_grad():
            yield exported
    finally:
        for part, mode in modes.items():
            part.training = mode


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in describe_error(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500].rstrip(" .:") + "."


def largest_difference(expected: Sequence[Tensor], outputs: Sequence[Tensor], tolerance: Tolerance | None) -> float:
    if len(expected) != len(outputs):
        raise ValueError(f"it returns {len(outputs)} tensors, the module {len(expected)}")
    largest = 0.0
    for number, (output, target) in enumerate(zip(outputs, expected, strict=True)):
        relative, absolute = tolerance or TOLERANCES.get(target.dtype, EXACT)
        torch.testing.assert_close(
            output, target, rtol=relative, atol=absolute, equal_nan=True, msg=f"output {number}: {{}}".format
        )
        if target.numel():
            largest = max(largest, float((output.double() - target.double()).abs().nan_to_num(nan=0.0).max()))
    return largest


def _check_options(exporter: Callable[..., Any], options: Iterable[str]) -> None:
    known = signature(exporter).parameters.keys() - GIVEN_BY_EXPORT
    for name in options:
        if name not in known:
            raise TypeError(
                f"Export has no option {name!r}, and passes none of that name to "
                f"{exporter.__module__}.{exporter.__name__}.{known_names(name, known)}"
            )


class Pt2:
    """An `ExportedProgram` of torch."""

    needs: tuple[str, ...] = ()
    exporter: Callable[..., Any] = staticmethod(torch.export.export)

    def write(self, path: Path, module: nn.Module, arguments: Arguments, options: dict[str, Any]) -> None:
        torch.export.save(torch.export.export(module, *arguments, **options), path)

    def run(self, path: Path, arguments: Arguments) -> list[Tensor] | None:
        args, kwargs = arguments
        return tensors_in(torch.export.load(path).module()(*args, **kwargs))


class Onnx:
    """An ONNX model; a large one has its weights in a second file, `<name>.onnx.data`."""

    needs: tuple[str, ...] = ("onnx", "onnxscript")
    exporter: Callable[..., Any] = staticmethod(torch.onnx.export)

    def write(self, path: Path, module: nn.Module, arguments: Arguments, options: dict[str, Any]) -> None:
        args, kwargs = arguments
        program = torch.onnx.export(module, args, kwargs=kwargs, dynamo=True, verbose=False, **options)
        assert program is not None
        size = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
        program.save(path, external_data=size > LARGEST_ONNX_FILE)
        require("onnx", "Export to ONNX", extra="onnx").checker.check_model(path)

    def run(self, path: Path, arguments: Arguments) -> list[Tensor] | None:
        """Run it in ONNX Runtime on the CPU; return None if that is not installed."""
        try:
            runtime = require("onnxruntime", "Checking an ONNX model", extra="onnx")
        except ImportError:
            return None
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        inputs = zip(session.get_inputs(), tensors_in(arguments), strict=True)
        outputs = session.run(None, {slot.name: tensor.numpy() for slot, tensor in inputs})
        return [torch.from_numpy(output) for output in outputs]


FORMATS: dict[str, Onnx | Pt2] = {".onnx": Onnx(), ".pt2": Pt2()}


def batch_shapes(arguments: Arguments) -> Any:
    """Return `dynamic_shapes` for inputs whose first dimension is the batch."""
    batch = Dim("batch")
    args, kwargs = tree_map(lambda leaf: {0: batch} if isinstance(leaf, Tensor) and leaf.ndim else None, arguments)
    return kwargs or args


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what torch's exporters log and warn about their own code."""
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


def as_arguments(example: Any) -> Arguments:
    if isinstance(example, Tensor):
        return (example,), {}
    if type(example) is tuple:
        return example, {}
    if isinstance(example, Mapping):
        return (), dict(example)
    raise TypeError(f"example= is what the module is called with: {CALL}; got {with_article(type(example).__name__)}.")


def batch_size(arguments: Arguments) -> int:
    """Return the first dimension that all tensors of the inputs have."""
    sizes = {tensor.shape[0] for tensor in tensors_in(arguments) if tensor.ndim}
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(
            f"The inputs have the first dimensions {sorted(sizes)}, so which one is the batch is not known: "
            f"dynamic=False exports these shapes, dynamic_shapes=... says which dimensions may change."
        )
    return sizes.pop()


def of_size(arguments: Arguments, size: int) -> Arguments:
    """Return inputs of another batch size, made of the same samples, repeated."""

    def resized(tensor: Tensor) -> Tensor:
        return tensor[torch.arange(size) % len(tensor)] if tensor.ndim else tensor

    args, kwargs = tree_map_only(Tensor, resized, arguments)
    return args, kwargs
