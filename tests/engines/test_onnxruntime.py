from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

from graphsurgery.engines import ENGINES, EngineError, engine
from graphsurgery.engines.onnxruntime import OnnxRuntime
from graphsurgery.errors import UsageError

HEADER = '<ir_version: 10, opset_import: ["" : 21]>\n'


def model(text: str) -> onnx.ModelProto:
    return parser.parse_model(HEADER + text)


ADD = model(
    "g (float[N] x, float[N] w) => (float[N] y, float[N] z) <float[2] w = {1, 2}> { y = Add(x, w) z = Mul(x, w) }"
)
X = np.array([1, 2], np.float32)


def external(folder: Path) -> onnx.ModelProto:
    proto = model("g (float[2] x) => (float[2] y) { y = Add(x, w) }")
    tensor = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "w.bin"), ("offset", "0"), ("length", "8")):
        tensor.external_data.add(key=key, value=value)
    proto.graph.initializer.append(tensor)
    folder.mkdir(exist_ok=True)
    np.array([10, 20], np.float32).tofile(folder / "w.bin")
    return proto


def error(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(EngineError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert "onnxruntime_src" not in message
    assert isinstance(caught.value, UsageError)
    assert caught.value.exit_status == 2
    return message


def test_names_and_all_outputs() -> None:
    session = engine("onnxruntime").open(ADD.SerializeToString())
    assert session.inputs == ("x",)
    assert session.outputs == ("y", "z")
    got = session.run({"x": X})
    assert list(got) == ["y", "z"]
    np.testing.assert_array_equal(got["y"], np.array([2, 4], np.float32), strict=True)


def test_some_outputs_and_an_overridden_default() -> None:
    session = OnnxRuntime(threads=1).open(ADD.SerializeToString())
    got = session.run({"x": X, "w": X * 10}, ["z"])
    assert list(got) == ["z"]
    np.testing.assert_array_equal(got["z"], np.array([10, 40], np.float32), strict=True)
    assert session.run({"x": X}, []) == {}


def test_opens_a_file(tmp_path: Path) -> None:
    onnx.save(ADD, tmp_path / "m.onnx")
    assert OnnxRuntime().open(tmp_path / "m.onnx").outputs == ("y", "z")


def test_external_data_beside_the_file_or_in_a_folder(tmp_path: Path) -> None:
    proto = external(tmp_path / "data")
    (tmp_path / "data" / "m.onnx").write_bytes(proto.SerializeToString())
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    folder = tmp_path / "data"
    sessions = [
        OnnxRuntime().open(folder / "m.onnx"),
        OnnxRuntime().open(proto.SerializeToString(), external_folder=folder),
        OnnxRuntime().open(tmp_path / "m.onnx", external_folder=folder),
    ]
    for session in sessions:
        np.testing.assert_array_equal(session.run({"x": X})["y"], np.array([11, 22], np.float32), strict=True)


def test_missing_external_data_without_a_folder_of_ours_in_the_message(tmp_path: Path) -> None:
    proto = external(tmp_path / "data")
    (tmp_path / "data" / "w.bin").unlink()
    message = error(OnnxRuntime().open, proto.SerializeToString(), external_folder=tmp_path / "data")
    assert message.startswith("onnxruntime cannot load the model: ")
    assert "w.bin" in message
    assert str(tmp_path) not in message


def test_optimisations_are_off(tmp_path: Path) -> None:
    """A constant subgraph is folded at the lowest level of optimisation already; its node must still be run."""
    import onnxruntime

    seen: list[Any] = []
    original = onnxruntime.InferenceSession

    def spy(source: Any, options: Any, **kwargs: Any) -> Any:
        seen.append(options)
        options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
        return original(source, options, **kwargs)

    folded = model("g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { a = Neg(w) b = Identity(x) y = Add(a, b) }")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "InferenceSession", spy)
        OnnxRuntime(threads=1).open(folded.SerializeToString())
    run = onnx.load(tmp_path / "optimized.onnx")
    assert [node.op_type for node in run.graph.node] == ["Neg", "Identity", "Add"]
    (options,) = seen
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (1, 1)
    assert options.use_deterministic_compute is True


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(2, 2), (), (0, 3)])
def test_extension_types_go_in_and_out(name: str, shape: tuple[int, ...]) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    code = helper.np_dtype_to_tensor_dtype(dtype)
    inputs = [
        helper.make_tensor_value_info("x", code, shape),
        helper.make_tensor_value_info("f", TensorProto.FLOAT, [2]),
    ]
    outputs = [
        helper.make_tensor_value_info("y", code, shape),
        helper.make_tensor_value_info("g", TensorProto.FLOAT, [2]),
    ]
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Neg", ["f"], ["g"])]
    proto = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    session = OnnxRuntime().open(proto.SerializeToString())
    x = np.random.default_rng(0).standard_normal(shape)
    x = np.asarray(x).astype(dtype)
    got = session.run({"x": x, "f": X})
    np.testing.assert_array_equal(got["y"], x, strict=True)
    np.testing.assert_array_equal(got["g"], -X, strict=True)
    assert "Unexpected input data type" in error(session.run, {"x": np.zeros(shape, np.float32), "f": X})


def test_strings() -> None:
    session = OnnxRuntime().open(model("g (string[2] x) => (string[2] y) { y = Identity(x) }").SerializeToString())
    assert session.run({"x": np.array(["a", "b"], object)})["y"].tolist() == ["a", "b"]


def test_read_only_and_strided_feeds() -> None:
    session = OnnxRuntime().open(ADD.SerializeToString())
    strided = np.array([1, 9, 2, 9], np.float32)[::2]
    strided.flags.writeable = False
    np.testing.assert_array_equal(session.run({"x": strided})["y"], np.array([2, 4], np.float32), strict=True)


@pytest.mark.parametrize("data", [b"", b"junk", ADD.SerializeToString()[:-9]], ids=["empty", "junk", "cut"])
def test_refuses_what_is_no_model(tmp_path: Path, data: bytes) -> None:
    assert error(OnnxRuntime().open, data).startswith("onnxruntime cannot load the model: ")
    (tmp_path / "m.onnx").write_bytes(data)
    assert error(OnnxRuntime().open, tmp_path / "m.onnx").startswith(f"onnxruntime cannot load '{tmp_path}/m.onnx': ")


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        message = error(OnnxRuntime().open, tmp_path / "no.onnx", external_folder=folder)
        assert message.startswith(f"onnxruntime cannot load '{tmp_path}/no.onnx': ")


def test_names_a_version_that_is_too_new() -> None:
    proto = model("g (float[2] x) => (float[2] y) { y = Identity(x) }")
    proto.ir_version = 99
    message = error(OnnxRuntime().open, proto.SerializeToString())
    assert message.startswith("onnxruntime cannot load the model: ")
    assert "Unsupported model IR version: 99, max supported" in message


def test_names_a_node_that_has_no_kernel() -> None:
    proto = model('g (float[2] x) => (float[2] y) { ["/layer/odd"] y = com.acme.Odd(x) }')
    proto.opset_import.add(domain="com.acme", version=1)
    assert "Odd" in error(OnnxRuntime().open, proto.SerializeToString())


def test_names_missing_and_unknown_inputs_and_outputs() -> None:
    session = OnnxRuntime().open(ADD.SerializeToString())
    assert error(session.run, {}) == "onnxruntime: input 'x' is missing; add it to the sample"
    assert error(session.run, {"x": X, "q": X}) == "onnxruntime: 'q' is not an input of the model; inputs are ['x']"
    assert error(session.run, {"x": X}, ["q"]).startswith("onnxruntime: 'q' is not an output of the model; outputs are")


def test_failing_node_is_named_in_one_line() -> None:
    proto = model('g (float[N] x) => (float[N] y) <float[2] w = {1, 2}> { ["/layers.0/attn/add"] y = Add(x, w) }')
    session = OnnxRuntime().open(proto.SerializeToString())
    message = error(session.run, {"x": np.ones(3, np.float32)})
    assert message.startswith("onnxruntime cannot run the model: ")
    assert "'/layers.0/attn/add'" in message
    assert "2 by 3" in message


def test_sequence_outputs_are_refused() -> None:
    proto = model("g (float[2] x) => (float[2] y, seq(float[2]) s) { y = Identity(x) s = SequenceConstruct(x) }")
    session = OnnxRuntime().open(proto.SerializeToString())
    assert "output 's' is seq(tensor(float)), only tensors are read" in error(session.run, {"x": X})
    assert list(session.run({"x": X}, ["y"])) == ["y"]


def test_unknown_engine() -> None:
    assert ENGINES == ("onnxruntime",)
    with pytest.raises(UsageError, match="there is no engine 'tvm'; choose one of: onnxruntime"):
        engine("tvm")
