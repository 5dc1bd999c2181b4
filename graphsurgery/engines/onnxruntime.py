"""onnxruntime on the CPU, as a reference: no graph optimisation, no fusion, fixed threads."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx.helper import tensor_dtype_to_np_dtype

from graphsurgery.data.signature import is_extension_dtype
from graphsurgery.engines import EngineError

__all__ = ["OnnxRuntime", "OnnxRuntimeSession"]

# The runtime ships without types.
_runtime: Any = onnxruntime
_state: dict[str, Any] = vars(import_module("onnxruntime.capi.onnxruntime_pybind11_state"))

# Its errors have no common base; the binding itself raises RuntimeError and ValueError.
_ERRORS: tuple[type[Exception], ...] = (
    *(kind for kind in _state.values() if isinstance(kind, type) and issubclass(kind, Exception)),
    RuntimeError,
    ValueError,
)

# Types that numpy does not have and that take whole bytes; 4-bit types are packed and stay out.
_EXTENSION_TYPES = {
    f"tensor({name.lower()})": onnx.TensorProto.DataType.Value(name)
    for name in ("BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ")
}

_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
_SOURCE_LINE = re.compile(r"/onnxruntime_src/\S+:\d+ (?:[^/]*?\) )?")


class OnnxRuntime:
    """Opens models with `threads` intra-operator threads."""

    name = "onnxruntime"

    def __init__(self, *, threads: int = 2) -> None:
        self._threads = threads

    def open(self, model: Path | bytes, *, external_folder: Path | None = None) -> OnnxRuntimeSession:
        """Loads a file or a serialized model.

        External data is looked for beside the file, or in `external_folder`. Raises EngineError with the first line
        of the runtime's message.
        """
        options = _runtime.SessionOptions()
        options.graph_optimization_level = _runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        options.use_deterministic_compute = True
        shown = "the model" if isinstance(model, bytes) else f"'{model}'"
        folder = external_folder
        with _engine_errors(f"cannot load {shown}", model, external_folder):
            if folder is not None:
                options.add_session_config_entry(
                    "session.model_external_initializers_file_folder_path", str(folder.resolve())
                )
            # Only a model in memory takes its external data from a folder of its own.
            source = model.read_bytes() if isinstance(model, Path) and folder is not None else model
            given = str(source) if isinstance(source, Path) else source
            session = _runtime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
        return OnnxRuntimeSession(session)


class OnnxRuntimeSession:
    """A loaded model; bfloat16 and float8 go in and out as arrays of ml_dtypes."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._inputs: dict[str, str] = {value.name: value.type for value in session.get_inputs()}
        self._defaults = {value.name: str(value.type) for value in session.get_overridable_initializers()}
        self._outputs: dict[str, str] = {value.name: value.type for value in session.get_outputs()}
        types = [*self._inputs.values(), *self._defaults.values(), *self._outputs.values()]
        self._extended = any(kind in _EXTENSION_TYPES for kind in types)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the graph inputs in order, without those that have a default value."""
        return tuple(self._inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph outputs in order."""
        return tuple(self._outputs)

    def run(self, feed: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> dict[str, NDArray[Any]]:
        """The named outputs (default: all) for one sample; raises EngineError, also for outputs that are no tensors."""
        names = list(self.outputs if outputs is None else outputs)
        self._check_names(feed, names)
        if not names:
            return {}
        with _engine_errors("cannot run the model"):
            if self._extended:
                values = {name: self._value(name, array) for name, array in feed.items()}
                results = [_from_value(result) for result in self._session.run_with_ort_values(names, values)]
            else:
                results = self._session.run(names, dict(feed))
        for name, result in zip(names, results, strict=True):
            if not isinstance(result, np.ndarray):
                kind = self._outputs[name]
                raise EngineError(
                    f"onnxruntime: output '{name}' is {kind}, only tensors are read; ask for other outputs"
                )
        return dict(zip(names, results, strict=True))

    def _check_names(self, feed: Mapping[str, NDArray[Any]], names: Sequence[str]) -> None:
        for name in self._inputs:
            if name not in feed and not self._inputs[name].startswith("optional("):
                raise EngineError(f"onnxruntime: input '{name}' is missing; add it to the sample")
        for name in feed:
            if name not in self._inputs and name not in self._defaults:
                raise EngineError(
                    f"onnxruntime: '{name}' is not an input of the model; inputs are {list(self._inputs)}"
                )
        for name in names:
            if name not in self._outputs:
                raise EngineError(
                    f"onnxruntime: '{name}' is not an output of the model; outputs are {list(self.outputs)}"
                )

    def _value(self, name: str, array: NDArray[Any]) -> Any:
        contiguous = np.asarray(array, order="C")
        kind = self._inputs.get(name) or self._defaults[name]
        if kind in _EXTENSION_TYPES and is_extension_dtype(array.dtype):
            return _runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(contiguous, _EXTENSION_TYPES[kind])
        return _runtime.OrtValue.ortvalue_from_numpy(contiguous)


def _from_value(value: Any) -> Any:
    """The array of a tensor; bfloat16 has no way out of the runtime but its memory."""
    if value is None or not value.is_tensor():
        return None
    code = _EXTENSION_TYPES.get(value.data_type())
    if code is None:
        return value.numpy()
    shape = tuple(value.shape())
    dtype: np.dtype[Any] = np.dtype(tensor_dtype_to_np_dtype(code))
    count = int(np.prod(shape, dtype=np.int64))
    memory = ctypes.string_at(value.data_ptr(), count * dtype.itemsize) if count else b""
    return np.frombuffer(memory, dtype=dtype).reshape(shape).copy()


@contextmanager
def _engine_errors(
    action: str, model: Path | bytes | None = None, external_folder: Path | None = None
) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise EngineError(f"onnxruntime {action}: {error.strerror}; check the path") from None
    except _ERRORS as error:
        parent = model.parent if isinstance(model, Path) else None
        known = [folder for folder in (external_folder, parent, Path()) if folder is not None]
        raise EngineError(f"onnxruntime {action}: {_one_line(str(error), known)}") from None


def _one_line(message: str, folders: Sequence[Path]) -> str:
    """The first line without the runtime's own source paths and without the absolute paths of known folders."""
    line = message.strip().splitlines()[0] if message.strip() else "no reason given"
    line = _SOURCE_LINE.sub("", _PREFIX.sub("", line))
    for folder in folders:
        line = line.replace(f"{folder.resolve()}/", "")
    return line.strip()
