from __future__ import annotations

from onnx import ModelProto, helper, parser

from graphsurgery.model.index import Capture, ModelIndex, Scope, is_standard

HEADER = '<ir_version: 10, opset_import: ["" : 17, "local" : 1, "com.microsoft" : 1]>\n'


def model(text: str) -> ModelProto:
    return parser.parse_model(HEADER + text)


def scope(index: ModelIndex, name: str) -> Scope:
    return next(entry for entry in index.scopes if entry.id == name)


def names(nodes: list) -> list[str]:
    return [node.name for node in nodes]


def captured(captures: list[Capture]) -> list[tuple[str, str | None]]:
    return [(entry.scope.id, entry.node.name if entry.node is not None else None) for entry in captures]


BRANCHES = """agraph (bool c, float[2] x) => (float[2] y) {
  [outer] a = Relu(x)
  [inside] b = Neg(a)
  [choose] y = If(c) <then_branch = yes () => (float[2] t) {
      [t_add] t = Add(a, x)
    }, else_branch = no () => (float[2] e) {
      [deep] e = If(c) <then_branch = deep_yes () => (float[2] a) {
      }, else_branch = deep_no () => (float[2] f) {
        [f_mul] f = Mul(a, b)
      }>
  }>
}"""


def test_producers_and_readers_of_the_main_graph() -> None:
    index = ModelIndex(model("agraph (float[2] x) => (float[2] y) { [a] h = Relu(x)  [b] y = Add(h, h) }"))
    main = index.main
    assert {name: node.name for name, node in main.producers.items()} == {"h": "a", "y": "b"}
    assert names(main.readers("h")) == ["b", "b"], "a node stands once for each operand"
    assert main.readers("y") == [] and main.readers("no such value") == []
    assert main.read_elsewhere("y") and not main.read_elsewhere("h")
    assert (main.inputs, main.outputs) == (frozenset("x"), frozenset("y"))
    assert main.producer("x") is None and main.home("x") is main and main.home("z") is None


def test_asking_for_readers_adds_no_value() -> None:
    index = ModelIndex(model("agraph (float[2] x) => (float[2] y) { y = Relu(x) }"))
    assert index.main.readers("y") == [] and index.main.home("nothing") is None
    assert sorted(index.main.uses) == ["x"]


def test_scopes_are_named_by_their_path() -> None:
    index = ModelIndex(model(BRANCHES))
    assert [entry.id for entry in index.scopes] == [
        "main",
        "main/choose.then_branch",
        "main/choose.else_branch",
        "main/choose.else_branch/deep.then_branch",
        "main/choose.else_branch/deep.else_branch",
    ]
    assert all(entry.root is index.main for entry in index.scopes)


def test_scopes_of_unnamed_nodes_have_the_position_in_their_name() -> None:
    text = BRANCHES.replace("[choose]", "").replace("[deep]", "")
    assert [entry.id for entry in ModelIndex(model(text)).scopes][1:4] == [
        "main/If_2.then_branch",
        "main/If_2.else_branch",
        "main/If_2.else_branch/If_0.then_branch",
    ]


def test_captures_are_kept_where_the_value_is_defined() -> None:
    index = ModelIndex(model(BRANCHES))
    captures = index.main.captures
    deep = "main/choose.else_branch/deep"
    assert sorted(captures) == ["a", "b", "c", "x"]
    assert captured(captures["a"]) == [
        ("main/choose.then_branch", "t_add"),
        (f"{deep}.then_branch", None),
        (f"{deep}.else_branch", "f_mul"),
    ]
    assert captured(captures["x"]) == [("main/choose.then_branch", "t_add")]
    assert captured(captures["b"]) == [(f"{deep}.else_branch", "f_mul")]
    assert captured(captures["c"]) == [("main/choose.else_branch", "deep")]
    assert not any(scope(index, name).captures for name in ("main/choose.then_branch", "main/choose.else_branch"))
    assert index.main.read_elsewhere("b") and names(index.main.readers("b")) == []


def test_a_captured_value_is_found_from_the_inside() -> None:
    index = ModelIndex(model(BRANCHES))
    inner = scope(index, "main/choose.else_branch/deep.else_branch")
    assert inner.home("a") is index.main
    producer = inner.producer("a")
    assert producer is not None and producer.name == "outer"
    assert inner.producer("x") is None and inner.home("x") is index.main
    assert inner.home("t") is None, "a value of another branch is not visible"
    assert index.main.home("f") is None, "a value of a branch is not visible outside"


LOOP = """agraph (int64 n, bool c, float[2] x) => (float[2] y, float[K, 2] all) {
  [scale] s = Relu(x)
  [loop] y, all = Loop(n, c, x) <body = b (int64 i, bool go, float[2] state) => (bool on, float[2] next, float[2] out)
  {
    [keep] on = Identity(go)
    [step] next = Add(state, s)
    [tell] out = Neg(next)
  }>
}"""


def test_loop_bodies_have_inputs_of_their_own() -> None:
    index = ModelIndex(model(LOOP))
    body = scope(index, "main/loop.body")
    assert body.inputs == {"i", "go", "state"} and body.outputs == {"on", "next", "out"}
    assert captured(index.main.captures["s"]) == [("main/loop.body", "step")]
    assert sorted(index.main.captures) == ["s"], "an input of the body is no capture"
    assert body.read_elsewhere("next") and names(body.readers("next")) == ["tell"]


def test_a_name_that_is_shadowed_belongs_to_the_nearest_scope() -> None:
    index = ModelIndex(model(LOOP.replace("(int64 i, bool go, float[2] state)", "(int64 i, bool go, float[2] s)")))
    body = scope(index, "main/loop.body")
    assert body.home("s") is body and body.producer("s") is None
    assert "s" not in index.main.captures and not index.main.read_elsewhere("s")
    shadow = model(LOOP.replace("next = Add(state, s)", "next = Add(state, x)  [own] s = Relu(next)"))
    inner = scope(ModelIndex(shadow), "main/loop.body")
    own = inner.producer("s")
    assert own is not None and own.name == "own"


def test_initializers_of_branches_are_no_captures() -> None:
    text = """agraph (bool c) => (float[1] y) <float[1] w = {1}, float[1] v = {3}> {
      y = If(c) <then_branch = yes () => (float[1] t) <float[1] w = {2}> { t = Add(w, v) },
                 else_branch = no () => (float[1] w) { }>
    }"""
    index = ModelIndex(model(text))
    inner = scope(index, "main/If_0.then_branch")
    assert inner.home("w") is inner and inner.home("v") is index.main
    assert captured(index.main.captures["w"]) == [("main/If_0.else_branch", None)]
    assert len(index.main.captures["v"]) == 1 and inner.is_constant("w") and inner.is_constant("v")


def test_left_out_operands_are_no_values() -> None:
    index = ModelIndex(model('agraph (float[2] x) => (float[2] y) { [clip] y = Clip(x, "", x) }'))
    assert names(index.main.readers("x")) == ["clip", "clip"] and "" not in index.main.uses
    model_ = model("agraph (float[2] x) => (float[2] y) { y = Dropout(x) }")
    model_.graph.node[0].output.append("")
    assert "" not in ModelIndex(model_).main.producers


def test_constants_are_told_from_inputs_with_a_default() -> None:
    text = "agraph (float[2] x, float[1] w) => (float[2] y) <float[1] w = {1}, float[1] v = {2}> {"
    index = ModelIndex(model(text + " k = Constant<value_int = 1>()  a = Add(x, w)  b = Add(a, v)  y = Add(b, k) }"))
    assert [name for name in ("x", "w", "v", "k", "a", "none") if index.main.is_constant(name)] == ["v", "k"]


FUNCTIONS = """agraph (float[2] x) => (float[2] y) {
  [one] a = local.outer(x)
  [two] b = local.outer(a)
  [three] c = local.inner(b)
  [none] y = Relu(c)
}
<domain: "local", opset_import: ["" : 13, "local" : 1]>
outer (p) => (q) { [call] h = local.inner(p)  [neg] q = Neg(h) }
<domain: "local", opset_import: ["" : 13]>
inner (p) => (q) { [exp] q = Exp(p) }
"""


def test_functions_are_scopes_with_an_opset_of_their_own() -> None:
    index = ModelIndex(model(FUNCTIONS))
    assert [(entry.id, entry.kind, entry.opset) for entry in index.scopes] == [
        ("main", "main", 17),
        ("outer", "function", 13),
        ("inner", "function", 13),
    ]
    inner = index.functions["local", "inner", ""]
    assert inner.parent is None and inner.root is inner and inner.inputs == {"p"} and inner.outputs == {"q"}
    assert inner.home("x") is None, "a function sees nothing of its caller"


def test_calls_of_a_function_from_anywhere() -> None:
    index = ModelIndex(model(FUNCTIONS))
    found = {key[1]: [(s.id, n.name) for s, n in index.calls(entry)] for key, entry in index.functions.items()}
    assert found == {"outer": [("main", "one"), ("main", "two")], "inner": [("main", "three"), ("outer", "call")]}


def test_a_call_needs_the_domain_of_the_function() -> None:
    other = model(FUNCTIONS.replace("[three] c = local.inner(b)", "[three] c = com.microsoft.inner(b)"))
    index = ModelIndex(other)
    assert [node.name for _, node in index.calls(index.functions["local", "inner", ""])] == ["call"]


def test_calls_of_each_overload_of_a_function() -> None:
    proto = model(FUNCTIONS)
    proto.functions.add().CopyFrom(proto.functions[1])
    proto.functions[1].overload, proto.functions[2].overload = "first", "second"
    proto.graph.node[2].overload = "second"
    proto.functions[0].node[0].overload = "first"
    index = ModelIndex(proto)
    inner = [entry for entry in index.scopes if entry.id.startswith(("inner", "local.inner"))]
    assert [[node.name for _, node in index.calls(entry)] for entry in inner] == [["call"], ["three"]]


def test_functions_of_one_name_have_different_scope_names() -> None:
    proto = model(FUNCTIONS.replace("outer", "main"))
    proto.functions.add().CopyFrom(proto.functions[1])
    proto.functions[2].domain = "other"
    index = ModelIndex(proto)
    assert [entry.id for entry in index.scopes] == ["main", "local.main", "inner", "other.inner"]


def test_a_subgraph_of_a_function_sees_the_function() -> None:
    text = """agraph (bool c, float[2] x) => (float[2] y) { y = local.f(c, x) }
    <domain: "local", opset_import: ["" : 17]>
    f (c, x) => (y) {
      [h] a = Relu(x)
      [if] y = If(c) <then_branch = yes () => (float[2] t) { t = Neg(a) }, else_branch = no () => (float[2] x) { }>
    }"""
    index = ModelIndex(model(text))
    function = index.functions["local", "f", ""]
    branch = scope(index, "f/if.then_branch")
    assert branch.root is function and branch.home("a") is function and branch.opset == 17
    assert sorted(function.captures) == ["a", "x"] and index.main.captures == {}


def test_node_counts_of_the_standard_operators() -> None:
    proto = parser.parse_model('<ir_version: 10, opset_import: ["" : 17]>' + BRANCHES)
    counts = ModelIndex(proto).node_counts()
    assert counts == {"Add": 1, "If": 2, "Mul": 1, "Neg": 1, "Relu": 1}
    assert list(counts) == sorted(counts)


def test_node_counts_name_other_domains() -> None:
    text = "agraph (float[2] x) => (float[2] y) { a = com.microsoft.Gelu(x)  b = Gelu(a)  c = local.f(b)  y = f(c) }"
    proto = model(text)
    proto.graph.node[3].domain = "ai.onnx"
    assert ModelIndex(proto).node_counts() == {"Gelu": 1, "com.microsoft::Gelu": 1, "f": 1, "local::f": 1}


def test_standard_operators_have_two_spellings_of_their_domain() -> None:
    assert is_standard(helper.make_node("Relu", ["x"], ["y"]))
    assert is_standard(helper.make_node("Relu", ["x"], ["y"], domain="ai.onnx"))
    assert not is_standard(helper.make_node("Relu", ["x"], ["y"], domain="ai.onnx.ml"))


def test_declared_types_of_inputs_outputs_and_inner_values() -> None:
    index = ModelIndex(model("agraph (float[2] x) => (float[3] y) <float[4] h> { h = Relu(x)  y = Relu(h) }"))
    found = {name: index.main.value_info(name) for name in ("x", "y", "h", "w")}
    sizes = {name: info and info.type.tensor_type.shape.dim[0].dim_value for name, info in found.items()}
    assert sizes == {"x": 2, "y": 3, "h": 4, "w": None}


def test_dropping_declared_types_leaves_those_of_values_that_are_produced() -> None:
    text = "agraph (float[2] x) => (float[2] y) <float[2] g, float[2] h, float[2] k> { h = Relu(x)  y = Relu(h) }"
    proto = model(text)
    index = ModelIndex(proto)
    assert index.main.value_info("g") is not None
    index.main.drop_value_info({"g", "h", "never declared"})
    assert [info.name for info in proto.graph.value_info] == ["h", "k"]
    assert index.main.value_info("g") is None and index.main.value_info("h") is not None


def test_the_index_holds_the_nodes_of_the_model_and_changes_nothing() -> None:
    proto = model(BRANCHES)
    before = proto.SerializeToString()
    index = ModelIndex(proto)
    assert all(mine is theirs for mine, theirs in zip(index.main.nodes, proto.graph.node, strict=True))
    assert [(s.id, n.op_type) for s, n in index.walk()][:4] == [
        ("main", "Relu"),
        ("main", "Neg"),
        ("main", "If"),
        ("main/choose.then_branch", "Add"),
    ]
    assert proto.SerializeToString() == before
