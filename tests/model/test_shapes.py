from __future__ import annotations

import pytest
from onnx import ModelProto, TensorProto, helper, parser

from graphsurgery.model.index import ModelIndex, Scope
from graphsurgery.model.shapes import Shape, Shapes

HEADER = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n'
DATA = "float[B, 4, S, 16] a, float[2, 4, 8, 16] c, float[4, 1, 16] r, float[8, 6] m, int64 i, int64[3] n, float w"


def scope(body: str, inputs: str = DATA, opset: int = 18, extra: str = "") -> Scope:
    text = f"{HEADER.format(opset=opset)} agraph ({inputs}) => (float y) <{extra}> {{ {body} }}"
    return ModelIndex(parser.parse_model(text)).main


def shape(body: str, opset: int = 18, inputs: str = DATA, value: str = "v") -> Shape | None:
    return Shapes().shape(scope(body, inputs, opset), value)


CASES: dict[str, tuple[str, Shape | None]] = {
    "elementwise": ("v = Tanh(a)", ("B", 4, "S", 16)),
    "cast": ("v = Cast<to = 10>(a)", ("B", 4, "S", 16)),
    "softmax": ("v = Softmax(c)", (2, 4, 8, 16)),
    "add": ("v = Add(a, r)", ("B", 4, "S", 16)),
    "add_of_equal_names": ("v = Add(a, a)", ("B", 4, "S", 16)),
    "a_number_wins": ("v = Add(a, c)", (2, 4, 8, 16)),
    "scalar": ("k = Constant<value_float = 1.0>()  v = Mul(k, c)", (2, 4, 8, 16)),
    "where": ("t = IsNaN(a)  k = Constant<value_float = 0.0>()  v = Where(t, k, r)", ("B", 4, "S", 16)),
    "constant": ("v = Constant<value = float[2, 3] {1, 2, 3, 4, 5, 6}>()", (2, 3)),
    "constant_list": ("v = Constant<value_ints = [1, 2]>()", (2,)),
    "matmul": ("t = Transpose<perm = [0, 1, 3, 2]>(a)  v = MatMul(a, t)", ("B", 4, "S", "S")),
    "matmul_broadcasts": ("v = MatMul(c, m)", (2, 4, 8, 6)),
    "gemm": ("v = Gemm<transA = 1, transB = 1>(m, m)", (6, 8)),
    "gemm_plain": ("t = Transpose(m)  v = Gemm(m, t)", (8, 8)),
    "transpose": ("v = Transpose<perm = [0, 2, 1, 3]>(a)", ("B", "S", 4, 16)),
    "transpose_reverses": ("v = Transpose(m)", (6, 8)),
    "reshape": ("s = Constant<value_ints = [64, 16]>()  v = Reshape(c, s)", (64, 16)),
    "reshape_rest": ("s = Constant<value_ints = [2, -1, 16]>()  v = Reshape(c, s)", (2, 32, 16)),
    "reshape_kept": ("s = Constant<value_ints = [0, 0, -1]>()  v = Reshape(c, s)", (2, 4, 128)),
    "reshape_symbol_kept": ("s = Constant<value_ints = [0, 64, 0]>()  v = Reshape(a, s)", ("B", 64, "S")),
    "reshape_symbol_rest": ("s = Constant<value_ints = [0, -1, 64]>()  v = Reshape(a, s)", ("B", None, 64)),
    "reshape_computed": ("s = Abs(n)  v = Reshape(a, s)", (None, None, None)),
    "reshape_of_shape": ("s = Shape(a)  v = Reshape(c, s)", (None, 4, None, 16)),
    "unsqueeze": ("k = Constant<value_ints = [0, -1]>()  v = Unsqueeze(m, k)", (1, 8, 6, 1)),
    "squeeze": ("k = Constant<value_ints = [-2]>()  v = Squeeze(r, k)", (4, 16)),
    "squeeze_of_unknown_axes": ("v = Squeeze(r)", None),
    "concat": ("v = Concat<axis = -1>(c, c)", (2, 4, 8, 32)),
    "concat_of_a_name": ("v = Concat<axis = 2>(a, c)", (2, 4, None, 16)),
    "slice": ("k = Constant<value_ints = [-2]>()  v = Slice(c, k, k, k)", (2, 4, None, 16)),
    "slice_of_unknown_axes": ("k = Constant<value_ints = [1]>()  v = Slice(c, k, k)", (None, None, None, None)),
    "gather": ("k = Constant<value_int = 1>()  v = Gather<axis = 1>(c, k)", (2, 8, 16)),
    "gather_rows": ("v = Gather(m, n)", (3, 6)),
    "expand": ("s = Constant<value_ints = [2, 4, 8, 16]>()  v = Expand(r, s)", (2, 4, 8, 16)),
    "expand_computed": ("s = Abs(n)  v = Expand(r, s)", (4, None, 16)),
    "einsum": ('v = Einsum<equation = "bhqd, bhkd -> bhqk">(a, c)', ("B", 4, "S", 8)),
    "einsum_ellipsis": ('v = Einsum<equation = "...qd,...kd->...qk">(a, c)', None),
    "constant_of_shape": ("s = Constant<value_ints = [2, 5]>()  v = ConstantOfShape(s)", (2, 5)),
    "reduce": ("k = Constant<value_ints = [-1]>()  v = ReduceSum(c, k)", (2, 4, 8, 1)),
    "reduce_drops": ("k = Constant<value_ints = [1, -1]>()  v = ReduceMax<keepdims = 0>(c, k)", (2, 8)),
    "other_domain": ("v = com.microsoft.MatMul(c, c)", None),
    "no_rule": ("v = TfIdfVectorizer(c)", None),
}


@pytest.mark.parametrize("name", CASES)
def test_rules(name: str) -> None:
    body, expected = CASES[name]
    assert shape(body) == expected


OLD: dict[str, tuple[str, Shape | None]] = {
    "unsqueeze": ("v = Unsqueeze<axes = [0]>(m)", (1, 8, 6)),
    "squeeze": ("v = Squeeze<axes = [1]>(r)", (4, 16)),
    "reduce": ("v = ReduceMean<axes = [-1], keepdims = 0>(m)", (8,)),
    "reshape": ("v = Reshape<shape = [4, -1]>(m)", (4, 12)),
    "dropout": ("v, mask = Dropout(m)", (8, 6)),
}


@pytest.mark.parametrize("name", OLD)
def test_rules_of_old_operators(name: str) -> None:
    body, expected = OLD[name]
    assert shape(body, opset=9) == expected


@pytest.mark.parametrize(
    ("body", "first", "second"),
    [
        ("v, o = Split<axis = 1>(c)", (2, 2, 8, 16), (2, 2, 8, 16)),
        ("k = Constant<value_ints = [1, 3]>()  v, o = Split<axis = -3>(c, k)", (2, 1, 8, 16), (2, 3, 8, 16)),
        ("v, o, u = Split<axis = 1, num_outputs = 3>(c)", (2, None, 8, 16), (2, None, 8, 16)),
        ("v, o = Split<axis = 0>(a)", (None, 4, "S", 16), (None, 4, "S", 16)),
        ("v, o = Split<axis = -1, split = [10, 6]>(a)", ("B", 4, "S", 10), ("B", 4, "S", 6)),
    ],
)
def test_split_gives_each_output_its_size(body: str, first: Shape, second: Shape) -> None:
    home = scope(body)
    assert [Shapes().shape(home, name) for name in ("v", "o")] == [first, second]


def test_reduce_over_an_empty_list_of_axes() -> None:
    assert shape("k = Constant<value = int64[0] {}>()  v = ReduceSum(c, k)") in ((1, 1, 1, 1), None)


def test_reshape_that_allows_zero() -> None:
    body = "s = Constant<value_ints = [0, 4]>()  v = Reshape<allowzero = 1>(e, s)"
    assert shape(body, inputs="float[4, 0] e") in ((0, 4), (None, 4))


def test_what_is_declared_wins_and_what_follows_fills_it() -> None:
    body = "v = Add(a, c)"
    assert Shapes().shape(scope(body, extra="float[X, 4, 8, Z] v"), "v") == (2, 4, 8, 16)
    assert Shapes().shape(scope(body, extra="float[2, 4, 8, 16] v"), "v") == (2, 4, 8, 16)
    assert Shapes().shape(scope("v = Tanh(a)", extra="float[X, Y, 8, Z] v"), "v") == ("X", 4, 8, 16)
    assert Shapes().shape(scope("v = NonZero(a)", extra="int64[4, N] v"), "v") == (4, "N")


def test_rank() -> None:
    home, shapes = scope("v = Add(a, r)"), Shapes()
    assert [shapes.rank(home, name) for name in ("v", "m", "w", "none")] == [4, 2, 0, None]


def test_no_shape_information_at_all() -> None:
    """Some exports keep the rank only in the Transpose next to the attention."""
    body = "q = Transpose<perm = [0, 2, 1, 3]>(p)  k = Transpose<perm = [0, 2, 3, 1]>(p)  v = MatMul(q, k)"
    proto = parser.parse_model(f"{HEADER.format(opset=17)} agraph (float p) => (float y) {{ {body} }}")
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.ClearField("shape")
    home, shapes = ModelIndex(proto).main, Shapes()
    assert shapes.shape(home, "p") is None and shapes.rank(home, "p") is None
    assert shapes.shape(home, "v") == (None,) * 4 and shapes.rank(home, "q") == 4


def test_rank_from_a_reshape_to_a_computed_shape() -> None:
    body = """b = Shape(p)  zero = Constant<value_int = 0>()  one = Constant<value_ints = [0]>()
      d = Gather(b, zero)  e = Unsqueeze(d, one)  f = Constant<value_ints = [-1, 4, 16]>()
      s = Concat<axis = 0>(e, f)  v = Reshape(p, s)"""
    proto = parser.parse_model(f"{HEADER.format(opset=17)} agraph (float p) => (float y) {{ {body} }}")
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    home, shapes = ModelIndex(proto).main, Shapes()
    assert shapes.ints(home, "s") == (None, -1, 4, 16)
    assert shapes.shape(home, "v") == (None, None, 4, 16)


INTS = {
    "values": ("v = Constant<value_ints = [1, -1]>()", (1, -1)),
    "floats": ("v = Constant<value_floats = [1.0]>()", None),
    "scalar": ("v = Constant<value_int = 3>()", (3,)),
    "shape": ("v = Shape(a)", (None, 4, None, 16)),
    "part_of_a_shape": ("v = Shape<start = 1>(a)", None),
    "cast": ("s = Shape(c)  v = Cast<to = 6>(s)", (2, 4, 8, 16)),
    "unsqueeze_of_a_number": ("k = Constant<value_ints = [0]>()  j = Abs(i)  v = Unsqueeze(j, k)", (None,)),
    "computed": ("v = Abs(n)", (None, None, None)),
    "concat": ("k = Constant<value_ints = [7]>()  v = Concat<axis = 0>(n, k)", (None, None, None, 7)),
    "input": ("v = Identity(n)", (None, None, None)),
    "unknown": ("v = NonZero(m)", None),
}


@pytest.mark.parametrize("name", INTS)
def test_entries_of_a_list_of_integers(name: str) -> None:
    body, expected = INTS[name]
    assert Shapes().ints(scope(body), "v") == expected


DTYPES = {
    "declared": ("v = Identity(a)", TensorProto.FLOAT),
    "cast": ("v = Cast<to = 10>(a)", TensorProto.FLOAT16),
    "through": ("h = Cast<to = 16>(a)  t = Tanh(h)  v = Add(t, h)", TensorProto.BFLOAT16),
    "comparison": ("v = Less(a, c)", TensorProto.BOOL),
    "where": ("t = IsNaN(a)  h = Cast<to = 10>(a)  v = Where(t, h, h)", TensorProto.FLOAT16),
    "cast_like": ("h = Cast<to = 10>(m)  v = CastLike(c, h)", TensorProto.FLOAT16),
    "shape": ("v = Shape(a)", TensorProto.INT64),
    "constant": ("v = Constant<value = float16[1] {1}>()", TensorProto.FLOAT16),
    "literal": ("v = Constant<value_int = 1>()", TensorProto.INT64),
    "dequantised": ("q, s, z = DynamicQuantizeLinear(m)  v = DequantizeLinear(q, s, z)", TensorProto.FLOAT),
    "quantised": (
        "s = Constant<value_float = 1.0>()  z = Constant<value = int8[1] {0}>()  v = QuantizeLinear(m, s, z)",
        TensorProto.INT8,
    ),
    "fill": ("v = ConstantOfShape(n)", TensorProto.FLOAT),
    "other_domain": ("v = com.microsoft.Gelu(a)", None),
    "left_out": ("s = Constant<value_float = 1.0>()  v = QuantizeLinear(m, s)", None),
}


@pytest.mark.parametrize("name", DTYPES)
def test_element_types(name: str) -> None:
    body, expected = DTYPES[name]
    assert Shapes().dtype(scope(body), "v") == expected


@pytest.mark.parametrize(
    "body", ["v, s, z = DynamicQuantizeLinear(m)", "t, s, z = DynamicQuantizeLinear(m)  v = MatMulInteger(t, t)"]
)
def test_operators_that_change_the_type(body: str) -> None:
    assert Shapes().dtype(scope(body), "v") in (TensorProto.UINT8, TensorProto.INT32, None)


def chain(length: int) -> Scope:
    nodes = [helper.make_node("Tanh", [f"v{i}"], [f"v{i + 1}"]) for i in range(length)]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [info("v0", TensorProto.FLOAT, [2, 3])], [])
    proto: ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    return ModelIndex(proto).main


@pytest.mark.parametrize("length", [50, 5000])
def test_chains_of_any_length_end(length: int) -> None:
    home, shapes = chain(length), Shapes()
    found = shapes.shape(home, f"v{length}"), shapes.dtype(home, f"v{length}")
    assert found in ([((2, 3), TensorProto.FLOAT)] if length == 50 else [((2, 3), TensorProto.FLOAT), (None, None)])


def test_an_answer_does_not_depend_on_earlier_questions() -> None:
    home, fresh, used = chain(200), Shapes(), Shapes()
    used.shape(home, "v200")
    assert used.shape(home, "v100") == fresh.shape(home, "v100") == (2, 3)


def test_values_of_an_outer_scope() -> None:
    text = """agraph (bool c, float[2, 3] x) => (float[2, 3] y) {
      a = Relu(x)
      y = If(c) <then_branch = yes () => (float[2, T] t) { t = Exp(a) },
                         else_branch = no () => (float[2, 3] e) { e = Exp(x) }>
    }"""
    inner = ModelIndex(parser.parse_model(HEADER.format(opset=17) + text)).main.children[0]
    shapes = Shapes()
    assert shapes.shape(inner, "a") == (2, 3) and shapes.dtype(inner, "a") == TensorProto.FLOAT
    assert shapes.shape(inner, "t") == (2, 3)


def test_functions_declare_nothing() -> None:
    text = """agraph (float[2, 3] x) => (float[2, 3] y) { y = local.f(x) }
    <domain: "local", opset_import: ["" : 17]>
    f (p) => (q) { h = Transpose<perm = [1, 0]>(p)  q = Relu(h) }"""
    proto = parser.parse_model('<ir_version: 10, opset_import: ["" : 17, "local" : 1]>' + text)
    function = ModelIndex(proto).scopes[1]
    shapes = Shapes()
    assert shapes.shape(function, "q") == (None, None) and shapes.dtype(function, "q") is None
