from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from rewriter_models import BRANCH, CHAIN, FUNCTION, assert_index_true, model, node, order, start

from graphsurgery.model.index import ModelIndex
from graphsurgery.model.rewriter import Place, RewriteError, Rewriter


def test_nothing_asked_for_leaves_every_byte() -> None:
    proto = model()
    before = proto.SerializeToString()
    _, rewriter = start(proto)
    rewriter.commit()
    assert proto.SerializeToString() == before
    assert not rewriter.take_changes().any


def test_a_change_leaves_the_bytes_of_everything_else() -> None:
    proto = model(CHAIN + FUNCTION.partition("\n")[2])
    proto.metadata_props.add(key="origin", value="tests")
    proto.graph.node[0].doc_string = "kept"
    proto.graph.node[0].metadata_props.add(key="k", value="v")
    main, rewriter = start(proto)
    before = [entry.SerializeToString() for entry in (*proto.graph.node, *proto.functions, *proto.graph.value_info)]
    added = rewriter.add(Place(main, node(main, "second")), "Abs", ["a"], "abs")
    rewriter.commit()
    (position,) = [i for i, entry in enumerate(proto.graph.node) if entry.output[0] == added]
    rest = [entry for i, entry in enumerate(proto.graph.node) if i != position]
    after = [entry.SerializeToString() for entry in (*rest, *proto.functions, *proto.graph.value_info)]
    assert after == before
    del proto.graph.node[position]
    clean = model(CHAIN + FUNCTION.partition("\n")[2])
    clean.metadata_props.add(key="origin", value="tests")
    clean.graph.node[0].doc_string = "kept"
    clean.graph.node[0].metadata_props.add(key="k", value="v")
    assert proto.SerializeToString() == clean.SerializeToString()


# -- places


def test_new_nodes_before_and_after_a_node_and_at_the_start() -> None:
    proto = model()
    main, rewriter = start(proto)
    second = node(main, "second")
    rewriter.add(Place(main, second, after=True), "Abs", ["b"], "after_1")
    rewriter.add(Place(main, second), "Abs", ["a"], "before_1")
    rewriter.add(Place(main, None), "Abs", ["x"], "start_1")
    rewriter.add(Place(main, second), "Abs", ["before_1"], "before_2")
    rewriter.add(Place(main, second, after=True), "Abs", ["after_1"], "after_2")
    rewriter.add(Place(main, None), "Abs", ["start_1"], "start_2")
    assert order(proto)[:3] == ["first", "second", "third"], "untouched nodes keep their order until commit too"
    rewriter.commit()
    wanted = ["start_1", "start_2", "first", "before_1", "before_2", "second", "after_1", "after_2", "third"]
    assert order(proto) == wanted
    onnx.checker.check_model(proto)
    assert_index_true(rewriter)


def test_a_new_node_can_be_the_anchor_of_the_next() -> None:
    proto = model()
    main, rewriter = start(proto)
    first = rewriter.add(Place(main, node(main, "second")), "Abs", ["a"], "one")
    rewriter.add(Place(main, main.producers[first], after=True), "Abs", [first], "two")
    rewriter.commit()
    assert order(proto) == ["first", "one", "two", "second", "third"]


def test_places_hold_over_several_commits() -> None:
    proto = model()
    main, rewriter = start(proto)
    one = rewriter.add(Place(main, node(main, "third")), "Abs", ["b"], "one")
    rewriter.commit()
    rewriter.add(Place(main, main.producers[one]), "Abs", ["b"], "two")
    rewriter.commit()
    assert order(proto) == ["first", "second", "two", "one", "third"]
    assert_index_true(rewriter)


def test_a_node_that_two_readers_share_stands_before_both() -> None:
    proto = model()
    main, rewriter = start(proto)
    shared = rewriter.add(Place(main, node(main, "first"), after=True), "Abs", ["a"], "shared")
    for name in ("third", "second"):
        rewriter.set_input(main, node(main, name), 0, shared)
    rewriter.commit()
    assert order(proto) == ["first", "shared", "second", "third"]
    onnx.checker.check_model(proto)


def test_the_anchor_may_be_removed() -> None:
    proto = model()
    main, rewriter = start(proto)
    second = node(main, "second")
    new = rewriter.add(Place(main, second), "Abs", ["a"], "instead")
    rewriter.replace_uses(main, "b", new)
    rewriter.remove(main, second)
    rewriter.commit()
    assert order(proto) == ["first", "instead", "third"]
    onnx.checker.check_model(proto)
    assert_index_true(rewriter)


def test_new_nodes_in_a_branch_and_a_function() -> None:
    for text, path in ((BRANCH, 1), (FUNCTION, 1)):
        proto = model(text)
        _, rewriter = start(proto)
        scope = rewriter.index.scopes[path]
        old = scope.nodes[0]
        new = rewriter.add(Place(scope, old), "Abs", [old.input[0]], "new")
        rewriter.set_input(scope, old, 0, new)
        rewriter.commit()
        assert [entry.op_type for entry in scope.body.node] == ["Abs", "Neg"]
        onnx.checker.check_model(proto)


# -- verbs


def test_add_names_origin_attributes_and_outputs() -> None:
    proto = model()
    main, rewriter = start(proto)
    first = rewriter.add(Place(main, None), "Split", ["x"], "cut", outputs=2, axis=0)
    cut = main.producers[first]
    assert list(cut.output) == ["cut_output_0", "cut_output_1"] and cut.name == "cut"
    assert {entry.key: entry.value for entry in cut.metadata_props} == {
        "graphsurgery.pass": "test",
        "graphsurgery.site": "main/site",
    }
    rewriter.start("other")
    made = rewriter.add(Place(main, None), "Op", ["x"], "op", f=0.5, s="text", ints=[1, 2], i=3)
    op = main.producers[made]
    assert [entry.value for entry in op.metadata_props] == ["other"], "no site, no site entry"
    attributes = {entry.name: onnx.helper.get_attribute_value(entry) for entry in op.attribute}
    assert attributes == {"f": 0.5, "s": b"text", "ints": [1, 2], "i": 3}
    types = {entry.name: entry.type for entry in op.attribute}
    assert types["f"] == onnx.AttributeProto.FLOAT and types["i"] == onnx.AttributeProto.INT
    assert rewriter.take_changes().added == {"Split": 1, "Op": 1}
    assert not rewriter.take_changes().any, "taken once"


def test_add_refuses_a_name_that_has_a_producer() -> None:
    main, rewriter = start(model())
    with pytest.raises(RewriteError, match="'b' already has a producer in main"):
        rewriter.add(Place(main, None), "Abs", ["x"], "new", outputs=["b"])


def test_left_out_operands_of_new_nodes_are_no_uses() -> None:
    main, rewriter = start(model())
    rewriter.add(Place(main, None), "Clip", ["x", "", "x"], "clip")
    assert "" not in main.uses and [entry.name for entry in main.readers("x")] == ["first", "clip", "clip"]


def test_remove_refuses_and_names_who_reads() -> None:
    main, rewriter = start(model())
    with pytest.raises(RewriteError, match="cannot remove first: 'a' is still read by second"):
        rewriter.remove(main, node(main, "first"))
    with pytest.raises(RewriteError, match="cannot remove third: 'y' is still read by a graph output or a subgraph"):
        rewriter.remove(main, node(main, "third"))
    assert not rewriter.take_changes().any
    main, rewriter = start(model(BRANCH))
    with pytest.raises(RewriteError, match="'a' is still read by a graph output or a subgraph"):
        rewriter.remove(main, node(main, "outer"))


def test_a_value_that_a_new_node_of_a_branch_reads_is_not_removed() -> None:
    main, rewriter = start(model(BRANCH.replace("[choose]", "[only] z = Exp(x)  [choose]")))
    inner = rewriter.index.scopes[1]
    rewriter.add(Place(inner, None), "Abs", ["z"], "reader")
    with pytest.raises(RewriteError, match="'z' is still read"):
        rewriter.remove(main, node(main, "only"))
    rewriter.remove(inner, inner.producers["reader"])
    rewriter.remove(main, node(main, "only"))


def test_remove_dead_takes_readers_first_and_stops_at_what_is_read() -> None:
    proto = model(CHAIN.replace("[third] y = Exp(b)", "[third] d = Exp(b)  [fourth] e = Add(d, a)  [end] y = Abs(x)"))
    main, rewriter = start(proto)
    rewriter.remove_dead(main, [node(main, name) for name in ("second", "third", "fourth", "end")])
    rewriter.commit()
    assert order(proto) == ["first", "end"]
    assert rewriter.take_changes().removed == {"Neg": 1, "Exp": 1, "Add": 1}
    assert_index_true(rewriter)


def test_remove_dead_leaves_what_a_living_node_reads() -> None:
    proto = model()
    main, rewriter = start(proto)
    rewriter.remove_dead(main, [node(main, "first"), node(main, "second")])
    assert not rewriter.take_changes().any
    rewriter.commit()
    assert order(proto) == ["first", "second", "third"]


def test_set_input_moves_one_use_only() -> None:
    proto = model(CHAIN.replace("Neg(a)", "Add(a, a)"))
    main, rewriter = start(proto)
    second = node(main, "second")
    rewriter.set_input(main, second, 0, "x")
    assert list(second.input) == ["x", "a"]
    assert [entry.name for entry in main.readers("a")] == ["second"]
    rewriter.set_input(main, second, 0, "x")
    assert rewriter.take_changes().rewired == 1, "the same value again is no change"
    rewriter.commit()
    assert_index_true(rewriter)


def test_replace_uses_keeps_graph_outputs_and_captures() -> None:
    proto = model(BRANCH.replace("[choose]", "[same] s = Add(a, a)  [choose]"))
    main, rewriter = start(proto)
    rewriter.replace_uses(main, "a", "x")
    assert list(node(main, "same").input) == ["x", "x"]
    assert main.read_elsewhere("a") and main.readers("a") == []
    rewriter.commit()
    assert_index_true(rewriter)


def test_rename_output_frees_the_name_for_another_producer() -> None:
    proto = model()
    main, rewriter = start(proto)
    second = node(main, "second")
    new = rewriter.rename_output(main, second, 0, "b_old")
    assert (new, second.output[0]) == ("b_old", "b_old") and main.producer("b") is None
    rewriter.add(Place(main, second, after=True), "Abs", [new], "abs", outputs=["b"])
    rewriter.commit()
    assert order(proto) == ["first", "second", "abs", "third"] and node(main, "third").input[0] == "b"
    assert "b" in [info.name for info in proto.graph.value_info], "the name still has a producer"
    onnx.checker.check_model(proto)
    assert_index_true(rewriter)


def test_a_name_that_nobody_takes_over_loses_its_declared_type() -> None:
    proto = model()
    main, rewriter = start(proto)
    new = rewriter.rename_output(main, node(main, "second"), 0, "b_new")
    rewriter.set_input(main, node(main, "third"), 0, new)
    rewriter.commit()
    assert [info.name for info in proto.graph.value_info] == ["a", "unused_info"]


def test_declared_types_go_with_their_tensors() -> None:
    proto = model()
    kept = {info.name: info.SerializeToString() for info in proto.graph.value_info}
    main, rewriter = start(proto)
    rewriter.set_input(main, node(main, "third"), 0, "x")
    rewriter.remove_dead(main, [node(main, "first"), node(main, "second")])
    assert len(proto.graph.value_info) == 3, "until commit"
    rewriter.commit()
    assert {info.name: info.SerializeToString() for info in proto.graph.value_info} == {
        "unused_info": kept["unused_info"]
    }


def test_new_outputs_of_nodes_and_graphs() -> None:
    proto = model()
    main, rewriter = start(proto)
    name = rewriter.add_output(main, node(main, "first"), "more")
    rewriter.add_graph_output(main, name, TensorProto.FLOAT16)
    assert name in main.outputs and main.read_elsewhere(name)
    assert [value.name for value in proto.graph.output] == ["y", "more"]
    assert proto.graph.output[1].type.tensor_type.elem_type == TensorProto.FLOAT16
    assert main.producer(name) is node(main, "first") and rewriter.take_changes().rewired == 2
    proto = model(FUNCTION)
    _, rewriter = start(proto)
    rewriter.add_graph_output(rewriter.index.scopes[1], "p", TensorProto.FLOAT)
    assert list(proto.functions[0].output) == ["q", "p"]


# -- names


@pytest.mark.parametrize("text", [BRANCH, FUNCTION, CHAIN])
def test_fresh_names_clash_with_nothing_of_any_scope(text: str) -> None:
    proto = model(text)
    index = ModelIndex(proto)
    rewriter = Rewriter(index)
    taken: set[str] = set()
    for scope in index.scopes:
        taken.update(scope.producers, scope.uses, scope.inputs, scope.outputs, scope.initializers)
        taken.update(entry.name for entry in scope.nodes)
    fresh = [rewriter.fresh(name) for name in sorted(taken) for _ in range(2)]
    assert not taken & set(fresh) and len(set(fresh)) == len(fresh)
    assert rewriter.fresh("free") == "free" and rewriter.fresh("free") == "free_2"


def test_fresh_names_count_past_names_that_exist() -> None:
    main, rewriter = start(model(CHAIN.replace("[third] y = Exp(b)", "[third] a_2 = Exp(b)  [a_3] y = Abs(a_2)")))
    assert rewriter.fresh("a") == "a_4"
    new = rewriter.add(Place(main, None), "Abs", ["x"], "a")
    assert new == "a_5" and rewriter.fresh("a") == "a_6"


def test_fresh_names_clash_with_no_sparse_initializer() -> None:
    proto = model()
    sparse = proto.graph.sparse_initializer.add(dims=[2])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "weight"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.zeros(1, np.int64), "weight_indices"))
    assert Rewriter(ModelIndex(proto)).fresh("weight") != "weight"
