"""Export the model at the end of a run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, cat, nn
from torch.export import Dim
from torch.utils._pytree import tree_map

from ..core.checkpoint.storage.files import prepare_folder, write_whole
from ..core.data.draws.rng import kept
from ..core.engines.sharded.states import ShardingEngine
from ..core.evaluation import eval_mode
from ..core.host import ended_for_good
from ..core.outputs.parts import mapped, on_cpu
from ..core.system.errors import NotRecorded
from ..core.system.extras import kind_of, require
from ..events import BatchStart, Handle, Lane, Run, RunClosed, TrainStart
from ..events.checks import check_flag, check_number, check_path, known_names
from ..events.errors import describe_error
from ..plugins import Plugin, on

FIXED = " If its code goes by the size of the batch, dynamic=False exports the size of the example."
Tolerance = tuple[float, float]  # relative, absolute
TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: (1e-6, 1e-8),
    torch.float32: (1e-3, 1e-5),
    torch.float16: (1e-2, 1e-3),
    torch.bfloat16: (5e-2, 1e-2),
}
EXACT: Tolerance = (0.0, 0.0)
OURS = frozenset({"mod", "model", "args", "kwargs", "f", "dynamo", "verbose"})  # arguments that Export gives itself
LARGEST = 2**31 - 2**24  # bytes of an ONNX model in one file: protobuf allows 2 GiB
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Export(Plugin):
    """Write a module of the task for others when a training has ended well, and check what was written.

    `model.onnx` is written by `torch.onnx.export(dynamo=True)`, `model.pt2` by `torch.export`. The weights are those
    that the training leaves: the best ones with `LoadBest`, the average with
    `EMA(load_at_end=True)`. The module is exported on the CPU, in eval mode and without gradients; it keeps its modes
    and its device. On several ranks the main one exports.

    The file is read again and run with the example and, where the batch dimension may change, with larger batches; the
    outputs must be those of the module. A difference is an error, and then no file is written. An `example` is tried at
    the start, on a copy of the module. Without ONNX Runtime an ONNX model is not run, and the result warns of it. The
    file appears when it is complete and checked. A training that failed, or that is to be resumed elsewhere
    (`Preemption`), exports nothing.

    Args:
        path: a file that ends in `.onnx` or `.pt2`.
        example: what the module is called with: a tensor, a tuple of positional arguments, or a dict of keyword
            arguments. By default the inputs of the first batch, where batches are pairs `(inputs, targets)`.
        module: the name of the module, where the task has several.
        dynamic: whether the first dimension of every input, the batch, may be of any size; otherwise all sizes are
            those of the example.
        check: whether what was written is run and compared.
        tolerance: the relative and the absolute difference that is allowed; by default (1e-3, 1e-5) for float32,
            (1e-6, 1e-8) for float64, (1e-2, 1e-3) for float16, (5e-2, 1e-2) for bfloat16, and none for other types.
        overwrite: whether a file that is there when the training begins may be replaced.
        **options: of `torch.onnx.export` or `torch.export.export`, such as `opset_version=18`,
            `input_names=["image"]` or `strict=True`. `dynamic_shapes=` replaces `dynamic`.

    Raises:
        ImportError: a package of the extra `onnx` is missing.
        TypeError: the example is not such a call, another argument has another type, or the exporter lacks an option.
        ValueError: the ending is another one, or it is not known which dimension is the batch; at the run's start, the
            file is there already, the folder cannot be written, the task has no such module, the module cannot be
            called with the example, or the engine holds shards.
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
            self._check_inputs(example)
        if tolerance is not None:
            if not isinstance(tolerance, Sequence) or len(tolerance) != 2:
                raise TypeError(f"tolerance is (relative, absolute), such as (1e-3, 1e-5); got {tolerance!r}.")
            relative, absolute = tolerance
            tolerance = (
                check_number("tolerance[0]", relative, at_least=0),
                check_number("tolerance[1]", absolute, at_least=0),
            )
        self._format = FORMATS[self.path.suffix]
        self._format.check_installed()
        check_options(self._format.exporter, options)
        self.exclusive = (f"the exported file {self.path.absolute()}",)
        self.tolerance = tolerance
        self._seen: Any = None
        self._handle: Handle | None = None

    def describe(self, run: Run) -> str:
        """Say what is exported, and where to."""
        return f"exports {self._chosen(run)} to {self.path} at the end"

    def rehearse(self, folder: Path) -> list[Path]:
        """Write elsewhere; raise ValueError where the training would not write."""
        self._refuse_former()
        former, self.path = self.path, folder / self.path.name
        return [former.parent]

    @on(TrainStart, lane=Lane.PERSIST)
    def begin(self, run: Run, event: TrainStart) -> None:
        """Refuse what would fail at the end; wait for the first batch where no example was given."""
        if run.report.is_replay:
            raise NotRecorded("the weights of the model")
        self.close()
        name = self._chosen(run)
        if isinstance(run.engine, ShardingEngine):
            raise ValueError(
                f"{type(run.engine).__name__} holds shards of the model, which cannot be exported: save it with "
                f"Checkpoint, and export it from one process, after load_weights."
            )
        self._refuse_former()
        prepare_folder(self.path.parent)
        if self.example is None:
            self._handle = run.bus.on(BatchStart, self._keep_example, lane=Lane.REPORT)
        else:
            self._try_example(run, name)

    @on(RunClosed, lane=Lane.PERSIST)
    def end(self, run: Run, event: RunClosed) -> None:
        """Export, if the training ended well."""
        example = self._seen if self.example is None else self.example
        self.close()
        if run.optimizer is None or not ended_for_good(run, event.status):
            return
        if example is None:
            run.warn(
                f"Nothing was exported to {self.path}: no batch was read, and no example= was given. A run that has "
                f"nothing left to do exports, too, if it has an example=, such as the inputs of a batch: give it one, "
                f"and start the program again."
            )
            return
        name = self._chosen(run)
        with run.engine.writing(), _as_exported(run.modules[name]) as module:
            arguments = on_cpu(as_arguments(example))
            self._write(run, name, module, arguments)

    def close(self) -> None:
        """Wait for no batch, and let go of the example."""
        self._seen = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _keep_example(self, run: Run, event: BatchStart) -> None:
        if not isinstance(run.batch, tuple | list) or len(run.batch) != 2:
            raise ValueError(
                f"{self.name}: batches are not pairs (inputs, targets), so what the module is called with is not "
                f"known: give example=, a tensor, a tuple of positional arguments or a dict of keyword arguments."
            )
        self._check_inputs(run.batch[0])
        self._seen = on_cpu(run.batch[0])
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @property
    def _fits_any_batch(self) -> bool:
        """Whether the first dimension of every input may be of any size."""
        return self.dynamic and "dynamic_shapes" not in self.options

    def _check_inputs(self, example: Any) -> None:
        arguments = as_arguments(example)
        if self._fits_any_batch:
            batch_size(arguments)

    def _try_example(self, run: Run, name: str) -> None:
        """Call a copy of the module, as at the end: its attributes and the random generators stay as they were."""
        args, kwargs = on_cpu(as_arguments(self.example))
        with kept(), run.engine.writing():
            try:
                twin = deepcopy(run.modules[name]).cpu()
            except Exception as error:  # noqa: BLE001  # the end may do without a copy
                run.note(f"example= is not tried before the end: {name} cannot be copied ({_first_lines(error)})")
                return
            try:
                with _as_exported(twin) as module:
                    module(*args, **kwargs)
            except Exception as error:  # code of the user's
                raise ValueError(
                    f"{self.name}: {name} cannot be called with example=: {_first_lines(error)} Give what its forward "
                    f"takes: a tensor, a tuple of positional arguments or a dict of keyword arguments."
                ) from error

    def _refuse_former(self) -> None:
        if self.path.exists() and not (self.overwrite and self.path.is_file()):
            raise ValueError(
                f"{self.path} is there already: give another path, or overwrite=True, also for a training that is "
                f"continued after its end."
            )

    def _chosen(self, run: Run) -> str:
        names = list(run.modules)
        if self.module is None and len(names) == 1:
            return names[0]
        if self.module is None:
            raise ValueError(f"The task has the modules {', '.join(names)}: choose one, module={names[0]!r}.")
        if self.module not in names:
            raise ValueError(f"The task has no module {self.module!r}.{known_names(self.module, names)}")
        return self.module

    def _write(self, run: Run, name: str, module: nn.Module, arguments: Arguments) -> None:
        found: list[str] = []

        def write(path: Path) -> None:
            found.append(self._export(run, path, module, arguments))

        try:
            write_whole(self.path, write)
        except OSError as error:
            raise OSError(
                error.errno,
                f"{name} could not be exported to {self.path}: {error.strerror or error}. Nothing is left of it.",
            ) from error
        size = self.path.stat().st_size / 1e6
        run.note(f"exported {name} to {self.path}, {size:,.3f} MB{found[0]}")

    def _export(self, run: Run, path: Path, module: nn.Module, arguments: Arguments) -> str:
        """Write to a path, and compare; return what came out, in words."""
        sizes: Sequence[int | None] = [None]
        options = self.options
        if self._fits_any_batch:
            size = max(2, own := batch_size(arguments))  # the exporters take a size of 1 for one that never changes
            arguments, sizes = of_size(arguments, size), sorted({own, size, size + 1})
            options = {**options, "dynamic_shapes": batch_shapes(arguments)}
        with quiet():
            try:
                self._format.write(path, module, arguments, options)
            except OSError:
                raise
            except Exception as error:  # the exporters raise errors of many kinds
                mend = FIXED if self._fits_any_batch else ""
                raise RuntimeError(
                    f"The module cannot be exported to {self.path}: {_first_lines(error)}{mend}"
                ) from error
            return self._compare(run, path, module, arguments, sizes) if self.check else ""

    def _compare(
        self, run: Run, path: Path, module: nn.Module, arguments: Arguments, sizes: Sequence[int | None]
    ) -> str:
        largest = 0.0
        for size in sizes:
            given = arguments if size is None else of_size(arguments, size)
            expected = tensors_in(module(*given[0], **given[1]))
            try:
                outputs = self._format.run(path, given)
                if outputs is None:
                    run.warn(f"{self.path} was not checked: pip install 'heliograph[onnx]' brings what runs it.")
                    return ""
                largest = max(largest, largest_difference(expected, outputs, self.tolerance))
            except Exception as error:  # the runtimes raise errors of many kinds
                batch = "" if size is None else f" with a batch of {size}"
                raise RuntimeError(
                    f"The exported model is not the module{batch}, so {self.path} was not written: "
                    f"{_first_lines(error)}" + FIXED * (size is not None and size != max(2, sizes[0] or 0))
                ) from error
        batches = " and ".join(", ".join(map(str, sizes)).rsplit(", ", 1)) * (sizes != [None])
        return f", checked{f' with batches of {batches}' if batches else ''}: it differs by at most {largest:.2g}"


@contextmanager
def _as_exported(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module in eval mode on the CPU, without gradients; the module itself keeps its modes and its device."""
    devices = {each.device.type for each in (*module.parameters(), *module.buffers())}
    made = module if devices <= {"cpu"} else deepcopy(module).cpu()
    with eval_mode({"": made}), torch.no_grad():
        yield made


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in describe_error(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:500].rstrip(" .:") + "."


def largest_difference(expected: Sequence[Tensor], found: Sequence[Tensor], tolerance: Tolerance | None) -> float:
    """Return the largest absolute difference between outputs.

    Args:
        expected: of the module.
        found: of the exported model.
        tolerance: relative and absolute; by default by the type of each output, whole numbers and bools exactly.

    Raises:
        ValueError: another number of outputs, other shapes or types, or a difference beyond the tolerance.
    """
    if len(expected) != len(found):
        raise ValueError(f"it returns {len(found)} tensors, the module {len(expected)}")
    largest = 0.0
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise ValueError(
                f"its output {number} is {other.dtype} of shape {list(other.shape)}, the module's {one.dtype} of "
                f"{list(one.shape)}"
            )
        relative, absolute = tolerance or TOLERANCES.get(one.dtype, EXACT)
        if not torch.allclose(other, one, rtol=relative, atol=absolute, equal_nan=True):
            raise ValueError(
                f"its output {number} differs by up to {_difference(one, other):.3g} from the module's, beyond "
                f"{relative:g} of the value plus {absolute:g}"
            )
        largest = max(largest, _difference(one, other))
    return largest


def _difference(one: Tensor, other: Tensor) -> float:
    difference = (one.double() - other.double()).abs()
    return float(difference.nan_to_num(nan=0.0, posinf=float("inf")).max()) if difference.numel() else 0.0


def check_options(exporter: Callable[..., Any], names: Iterable[str]) -> None:
    """Raise TypeError for an option that the exporter does not take, or that `Export` gives it itself."""
    taken = signature(exporter).parameters.values()
    known = {each.name for each in taken if each.kind is not Parameter.VAR_KEYWORD} - OURS
    for name in names:
        if name not in known:
            called = f"{exporter.__module__}.{exporter.__name__}"
            raise TypeError(
                f"Export has no option {name!r}, and passes none of that name to {called}.{known_names(name, known)}"
            )


class Pt2:
    """An `ExportedProgram` of torch."""

    suffix = ".pt2"
    exporter: Callable[..., Any] = staticmethod(torch.export.export)

    def check_installed(self) -> None:
        """Do nothing: torch writes it."""

    def write(self, path: Path, module: nn.Module, arguments: Arguments, options: dict[str, Any]) -> None:
        """Write it with `torch.export`."""
        torch.export.save(torch.export.export(module, *arguments, **options), path)

    def run(self, path: Path, arguments: Arguments) -> list[Tensor] | None:
        """Run it in torch."""
        args, kwargs = arguments
        return tensors_in(torch.export.load(path).module()(*args, **kwargs))


class Onnx:
    """An ONNX model; a large one has its weights in a second file, `<name>.onnx.data`."""

    suffix = ".onnx"
    exporter: Callable[..., Any] = staticmethod(torch.onnx.export)

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


FORMATS: dict[str, Onnx | Pt2] = {each.suffix: each for each in (Onnx(), Pt2())}


def batch_shapes(arguments: Arguments) -> Any:
    """Return `dynamic_shapes` for inputs whose first dimension is the batch."""
    batch = Dim("batch")
    args, kwargs = tree_map(lambda leaf: {0: batch} if isinstance(leaf, Tensor) and leaf.ndim else None, arguments)
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


def as_arguments(example: Any) -> Arguments:
    """Return the positional and the keyword arguments of a call.

    Args:
        example: a tensor, a tuple of positional arguments, or a dict of keyword arguments.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(example, Tensor):
        return (example,), {}
    if type(example) is tuple:
        return example, {}
    if isinstance(example, Mapping):
        return (), dict(example)
    raise TypeError(
        f"example= is what the module is called with: a tensor, a tuple of positional arguments or a dict of keyword "
        f"arguments; got {kind_of(example)}."
    )


def batch_size(arguments: Arguments) -> int:
    """Return the first dimension that all tensors of the inputs have.

    Raises:
        ValueError: there is none, or they differ.
    """
    sizes = {tensor.shape[0] for tensor in tensors_in(arguments) if tensor.ndim}
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(
            f"The inputs have the first dimensions {sorted(sizes)}, so which one is the batch is not known: "
            f"dynamic=False exports these shapes, dynamic_shapes=... says which dimensions may change."
        )
    return sizes.pop()


def of_size(arguments: Arguments, size: int) -> Arguments:
    """Return inputs of another batch size, made of the same samples, again and again."""

    def fit(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        return cat([tensor] * (size // len(tensor) + 1))[:size].contiguous()

    args, kwargs = mapped(arguments, fit)
    return args, kwargs
