from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, parser

from graphsurgery.data import InputSpec, signature
from graphsurgery.errors import UsageError


def model(text: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')


def with_inputs(*inputs: onnx.ValueInfoProto) -> onnx.ModelProto:
    return helper.make_model(helper.make_graph([], "g", list(inputs), []))


def test_inputs_in_graph_order_with_symbols_and_defaults() -> None:
    found = signature(
        model(
            "g (int64[batch,seq] ids, float16[2,?] x, float[1] scale, bool flag) => (bool y) <float[1] scale = {2}>{}"
        )
    )
    assert found == (
        InputSpec("ids", np.dtype(np.int64), ("batch", "seq"), optional=False),
        InputSpec("x", np.dtype(np.float16), (2, None), optional=False),
        InputSpec("scale", np.dtype(np.float32), (1,), optional=True),
        InputSpec("flag", np.dtype(np.bool_), (), optional=False),
    )
    assert [str(spec) for spec in found] == ["int64[batch,seq]", "float16[2,?]", "float32[1]", "bool[]"]


def test_input_without_a_shape_has_unknown_rank() -> None:
    (found,) = signature(with_inputs(helper.make_tensor_value_info("x", TensorProto.FLOAT, None)))
    assert found.shape is None
    assert found.static_shape is None
    assert str(found) == "float32[...]"


def test_negative_dimension_is_unknown() -> None:
    (found,) = signature(with_inputs(helper.make_tensor_value_info("x", TensorProto.FLOAT, [-1, 0])))
    assert found.shape == (None, 0)


@pytest.mark.parametrize(
    ("code", "name"),
    [(TensorProto.BFLOAT16, "bfloat16"), (TensorProto.FLOAT8E4M3FN, "float8_e4m3fn"), (TensorProto.INT4, "int4")],
)
def test_extension_types(code: int, name: str) -> None:
    (found,) = signature(with_inputs(helper.make_tensor_value_info("x", code, [2])))
    assert found.dtype.name == name
    assert found.static_shape == (2,)


def test_optional_and_sequence_types_are_optional() -> None:
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, [2])
    optional, sequence = signature(
        with_inputs(
            helper.make_value_info("maybe", helper.make_optional_type_proto(tensor)),
            helper.make_value_info("many", helper.make_sequence_type_proto(tensor)),
        )
    )
    assert (optional.optional, optional.is_tensor, optional.shape) == (True, True, (2,))
    assert (sequence.optional, sequence.is_tensor) == (True, False)


def test_refuses_an_input_without_a_type() -> None:
    with pytest.raises(UsageError, match="'x' has no type; export the model again"):
        signature(with_inputs(onnx.ValueInfoProto(name="x")))


def test_refuses_an_unknown_element_type() -> None:
    with pytest.raises(UsageError, match=r"'x' has element type 99, unknown to onnx .*; export the model again"):
        signature(with_inputs(helper.make_tensor_value_info("x", 99, [2])))
