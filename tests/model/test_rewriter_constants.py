from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from rewriter_models import BRANCH, CHAIN, FUNCTION, assert_index_true, model, node, order, start

from graphsurgery.model.rewriter import Place, RewriteError


def test_constants_are_shared_by_bytes_and_shape() -> None:
    proto = model()
    main, rewriter = start(proto)
    one = rewriter.constant(main, np.array([1, 2], np.float32), "pair")
    assert rewriter.constant(main, np.array([1, 2], np.float32), "other") == one == "pair"
    assert rewriter.constant(main, np.array([[1, 2]], np.float32), "pair") == "pair_2"
    assert rewriter.constant(main, np.array([2, 1], np.float32), "pair") == "pair_3"
    assert [tensor.name for tensor in proto.graph.initializer] == ["pair", "pair_2", "pair_3"]
    assert main.is_constant("pair") and not rewriter.take_changes().added


EQUAL_BYTES = [
    (np.int8, ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    (np.float16, np.int16, ml_dtypes.bfloat16),
    (np.float32, np.int32, np.uint32),
]


@pytest.mark.parametrize("dtypes", EQUAL_BYTES, ids=lambda dtypes: np.dtype(dtypes[0]).name)
def test_equal_bytes_of_different_types_are_different_constants(dtypes: tuple[type, ...]) -> None:
    proto = model()
    main, rewriter = start(proto)
    arrays = [np.zeros(2, dtype) for dtype in dtypes]
    assert len({array.tobytes() for array in arrays}) == 1
    names = [rewriter.constant(main, array, "zero") for array in arrays]
    assert len(set(names)) == len(names)
    for tensor, array in zip(proto.graph.initializer, arrays, strict=True):
        assert numpy_helper.to_array(tensor).dtype == array.dtype


@pytest.mark.parametrize("name", ["FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE"])
def test_scalars_of_a_type(name: str) -> None:
    proto = model()
    main, rewriter = start(proto)
    elem_type = TensorProto.DataType.Value(name)
    names = [rewriter.scalar(main, value, elem_type, "half") for value in (0.5, 0.25, 0.5)]
    assert names == ["half", "half_2", "half"]
    for tensor, value in zip(proto.graph.initializer, (0.5, 0.25), strict=True):
        array = numpy_helper.to_array(tensor)
        assert (tensor.data_type, array.shape, float(array)) == (elem_type, (), value)


def test_scalars_of_different_types_are_not_shared() -> None:
    main, rewriter = start(model())
    types = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
    assert len({rewriter.scalar(main, 1.0, elem_type, "one") for elem_type in types}) == 3


def test_scalars_of_different_scopes_are_not_shared() -> None:
    main, rewriter = start(model(FUNCTION))
    function = rewriter.index.scopes[1]
    names = [rewriter.scalar(scope, 1.0, TensorProto.FLOAT, "one") for scope in (main, function, function)]
    assert names == ["one", "one_2", "one_2"]


def test_the_sign_of_zero_is_kept() -> None:
    main, rewriter = start(model())
    zero, negative = (rewriter.scalar(main, value, TensorProto.FLOAT, "zero") for value in (0.0, -0.0))
    assert zero != negative


def test_lists_of_integers() -> None:
    proto = model()
    main, rewriter = start(proto)
    assert [rewriter.ints(main, values, "axes") for values in ((-1,), (0, -1), (-1,))] == ["axes", "axes_2", "axes"]
    arrays = [numpy_helper.to_array(tensor) for tensor in proto.graph.initializer]
    assert [(array.dtype, array.tolist()) for array in arrays] == [(np.int64, [-1]), (np.int64, [0, -1])]


def test_a_constant_in_a_branch_is_one_of_the_main_graph() -> None:
    proto = model(BRANCH)
    _, rewriter = start(proto)
    inner = rewriter.index.scopes[1]
    name = rewriter.constant(inner, np.ones(2, np.float32), "ones")
    assert [tensor.name for tensor in proto.graph.initializer] == [name]
    home = inner.home(name)
    assert home is rewriter.index.main and not inner.initializers


def test_a_constant_in_a_function_is_a_node_at_its_start() -> None:
    proto = model(FUNCTION)
    main, rewriter = start(proto)
    function = rewriter.index.scopes[1]
    name = rewriter.constant(function, np.ones(2, np.float32), "ones")
    assert rewriter.constant(function, np.ones(2, np.float32), "ones") == name
    assert rewriter.constant(main, np.ones(2, np.float32), "ones") != name, "the main graph cannot see it"
    rewriter.set_input(function, function.nodes[0], 0, name)
    rewriter.commit()
    made = proto.functions[0].node[0]
    assert (made.op_type, made.output[0]) == ("Constant", name)
    assert [entry.value for entry in made.metadata_props] == ["test", "main/site"]
    assert rewriter.take_changes().added == {"Constant": 1}
    onnx.checker.check_model(proto)


@pytest.mark.parametrize(("ir", "nodes"), [(3, 1), (4, 0)])
def test_constants_of_old_models_are_nodes(ir: int, nodes: int) -> None:
    proto = model(ir=ir)
    main, rewriter = start(proto)
    name = rewriter.constant(main, np.ones(2, np.float32), "ones")
    rewriter.set_input(main, node(main, "second"), 0, name)
    rewriter.commit()
    assert order(proto)[0] == ("ones_constant" if nodes else "first")
    assert (len(proto.graph.initializer), rewriter.take_changes().added) == (
        1 - nodes,
        {"Constant": 1} if nodes else {},
    )
    assert main.is_constant(name)
    onnx.checker.check_model(proto)


def test_a_constant_node_of_this_very_scope() -> None:
    proto = model(BRANCH)
    _, rewriter = start(proto)
    inner = rewriter.index.scopes[1]
    name = rewriter.constant_node(inner, np.zeros(0, np.float32), "empty")
    rewriter.commit()
    assert inner.body.node[0].op_type == "Constant" and name in inner.producers
    assert not proto.graph.initializer


def test_constants_come_before_other_nodes_at_the_start() -> None:
    proto = model(ir=3)
    main, rewriter = start(proto)
    rewriter.add(Place(main, None), "Add", ["x", rewriter.fresh("dummy")], "sum")
    name = rewriter.constant(main, np.ones(2, np.float32), "ones")
    rewriter.set_input(main, main.producers["sum"], 1, name)
    rewriter.commit()
    assert order(proto)[:2] == ["ones_constant", "sum"]
    onnx.checker.check_model(proto)


UNUSED = CHAIN.replace("<float[2] a", "<float[1] w = {1}, float[1] v = {2}, float[2] a").replace(
    "[third] y = Exp(b)", "[k] k = Constant<value = float[1] {3}>()  [third] y = Add(b, v)"
)


def test_remove_unused_constant() -> None:
    proto = model(UNUSED)
    main, rewriter = start(proto)
    for name in ("w", "v", "k", "b", "x", "none"):
        rewriter.remove_unused_constant(main, name)
    rewriter.commit()
    assert [tensor.name for tensor in proto.graph.initializer] == ["v"], "what is read stays"
    assert order(proto) == ["first", "second", "third"]
    assert_index_true(rewriter)


def test_an_unused_constant_that_a_caller_can_override_stays() -> None:
    proto = model(UNUSED.replace("(float[2] x)", "(float[2] x, float[1] w)"))
    main, rewriter = start(proto)
    rewriter.remove_unused_constant(main, "w")
    assert len(proto.graph.initializer) == 2 and not rewriter.take_changes().any


def test_a_constant_that_a_branch_reads_stays() -> None:
    proto = model(BRANCH.replace("{\n  [outer]", "<float[2] w = {1, 2}> {\n  [outer]").replace("Neg(a)", "Add(a, w)"))
    main, rewriter = start(proto)
    rewriter.remove_unused_constant(main, "w")
    assert [tensor.name for tensor in proto.graph.initializer] == ["w"]


def test_a_removed_constant_is_made_again() -> None:
    main, rewriter = start(model())
    name = rewriter.constant(main, np.ones(2, np.float32), "ones")
    rewriter.remove_unused_constant(main, name)
    again = rewriter.constant(main, np.ones(2, np.float32), "ones")
    assert again in main.initializers


def test_what_a_new_node_of_a_branch_reads_cannot_be_removed() -> None:
    proto = model(BRANCH.replace("[choose]", "[only_new] z = Exp(x)  [choose]"))
    main, rewriter = start(proto)
    inner = rewriter.index.scopes[1]
    rewriter.set_input(inner, inner.nodes[0], 0, "z")
    with pytest.raises(RewriteError, match="'z' is still read"):
        rewriter.remove(main, node(main, "only_new"))


def test_what_a_branch_reads_no_more_can_be_removed() -> None:
    proto = model(BRANCH.replace("[choose]", "[only] z = Exp(x)  [choose]").replace("t = Neg(a)", "t = Neg(z)"))
    main, rewriter = start(proto)
    inner = rewriter.index.scopes[1]
    rewriter.set_input(inner, inner.nodes[0], 0, "a")
    rewriter.remove(main, node(main, "only"))
