from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from graphsurgery.model.index import ModelIndex, Scope
from graphsurgery.model.values import attribute, constant_tensor, constant_value, int_attribute, ints_attribute

TEXT = """<ir_version: 10, opset_import: ["" : 17]>
agraph (float[2] x, float[1] given) => (float[2] y) <float[1] given = {1}, float[2] stored = {2, 3}> {
  made = Constant<value = float[2] {4, 5}>()
  one = Constant<value_float = 0.5>()
  many = Constant<value_floats = [1.0, 2.0]>()
  count = Constant<value_int = 7>()
  counts = Constant<value_ints = [7, 8]>()
  word = Constant<value_string = "text">()
  y = Add(x, made)
}"""


def scope(text: str = TEXT) -> Scope:
    return ModelIndex(parser.parse_model(text)).main


def with_initializer(tensor: TensorProto) -> Scope:
    proto: ModelProto = parser.parse_model(TEXT)
    proto.graph.initializer.add().CopyFrom(tensor)
    return ModelIndex(proto).main


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("stored", np.array([2, 3], np.float32)),
        ("made", np.array([4, 5], np.float32)),
        ("one", np.array(0.5, np.float32)),
        ("many", np.array([1, 2], np.float32)),
        ("count", np.array(7, np.int64)),
        ("counts", np.array([7, 8], np.int64)),
    ],
)
def test_values_of_constants(name: str, expected: np.ndarray) -> None:
    found = constant_value(scope(), name)
    assert found is not None
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["x", "given", "y", "word", "no such value", ""])
def test_what_is_no_constant_number_has_no_value(name: str) -> None:
    assert constant_value(scope(), name) is None


def test_the_tensor_of_an_initializer_that_a_caller_can_override() -> None:
    tensor = constant_tensor(scope(), "given")
    assert tensor is not None and list(tensor.dims) == [1]
    assert constant_tensor(scope(), "x") is None and constant_tensor(scope(), "y") is None


def test_the_tensor_of_a_constant_node() -> None:
    tensor = constant_tensor(scope(), "made")
    assert tensor is not None and numpy_helper.to_array(tensor).tolist() == [4, 5]
    assert constant_tensor(scope(), "one") is None, "a literal attribute has no tensor"


@pytest.mark.parametrize(("largest", "known"), [(1, False), (2, True)])
def test_only_small_constants_are_read(largest: int, known: bool) -> None:
    assert (constant_value(scope(), "stored", largest) is not None) is known
    assert (constant_value(scope(), "made", largest) is not None) is known


def test_weights_in_external_data_are_not_read() -> None:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="nowhere.bin")
    found = with_initializer(tensor)
    assert constant_value(found, "w") is None
    assert constant_tensor(found, "w") == tensor


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4])
def test_types_that_numpy_does_not_have(dtype: type) -> None:
    array = np.array([1, 2], dtype)
    found = constant_value(with_initializer(numpy_helper.from_array(array, "w")), "w")
    assert found is not None and found.dtype == array.dtype and found.tolist() == array.tolist()


def test_a_constant_of_an_outer_scope() -> None:
    text = """<ir_version: 10, opset_import: ["" : 17]>
    agraph (bool c) => (float[1] y) <float[1] w = {1}> {
      k = Constant<value = float[1] {2}>()
      y = If(c) <then_branch = yes () => (float[1] t) { t = Add(w, k) }, else_branch = no () => (float[1] w) { }>
    }"""
    inner = scope(text).children[0]
    for name, expected in (("w", 1), ("k", 2)):
        found = constant_value(inner, name)
        assert found is not None and found.tolist() == [expected]
    assert constant_value(inner, "c") is None


def test_attributes_by_type() -> None:
    node = helper.make_node("Op", [], [], i=3, f=0.5, s="text", ints=[1, 2], t=numpy_helper.from_array(np.zeros(1)))
    assert [attribute(node, name) for name in ("i", "f", "s", "none")] == [3, 0.5, "text", None]
    whole = attribute(node, "t")
    assert getattr(whole, "name", None) == "t"


def test_integer_attributes_fall_back_to_the_default() -> None:
    node = helper.make_node("Op", [], [], i=0, f=0.5, ints=[1, 2])
    assert (int_attribute(node, "i", 7), int_attribute(node, "none", 7), int_attribute(node, "f", 7)) == (0, 7, 7)
    assert (ints_attribute(node, "ints"), ints_attribute(node, "none")) == ((1, 2), None)
