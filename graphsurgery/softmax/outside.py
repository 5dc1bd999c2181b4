"""What is done about rows outside the window while the model runs: count them, or take the original softmax.

Both read the denominators only, a tensor of one number a row: inside the window exp(lower) <= Σ <= exp(upper).
"""

from __future__ import annotations

import math

from onnx import GraphProto, NodeProto, TensorProto, helper

from graphsurgery.attention.site import Site
from graphsurgery.model.emit import Emitter
from graphsurgery.model.rewriter import REWRITTEN, Place, Rewriter
from graphsurgery.softmax.plan import SitePlan

__all__ = ["FLAG_OUTPUT", "NativeTwin", "choose_branch", "count_outside", "flag_rows"]

FLAG_OUTPUT = "graphsurgery_rows_outside"
"""Name of the graph output that counts rows outside their windows (guard `flag`), int64, rank 0."""


def count_outside(emit: Emitter, plan: SitePlan, total: str) -> str:
    """How many denominators lie outside the window, NaN among them: a number of rank 0 in the dtype of the site."""
    least = math.exp(plan.window.lower)
    greatest = math.exp(plan.window.upper) / max(1.0, plan.largest_value)
    above = emit.op("Greater", total, emit.scalar(least, "least_sum"), what="sum_not_low")
    below = emit.op("Less", total, emit.scalar(greatest, "greatest_sum"), what="sum_not_high")
    inside = emit.op("And", above, below, what="row_inside")
    outside = emit.cast(emit.op("Not", inside, what="row_outside"), TensorProto.FLOAT, "row_outside_number")
    return emit.rewriter.add(emit.place, "ReduceSum", [outside], f"{emit.base}_rows_outside", keepdims=0)


def flag_rows(rewriter: Rewriter, counts: list[str]) -> None:
    """Add up the counts of all sites and make them an output of the main graph."""
    main = rewriter.index.main
    last = main.nodes[-1]
    total = counts[0]
    rewriter.start(REWRITTEN)
    emit = Emitter(rewriter, Place(main, last, after=True), FLAG_OUTPUT, TensorProto.FLOAT)
    for count in counts[1:]:
        total = emit.op("Add", total, count, what="sum")
    rewriter.add(emit.place, "Cast", [total], FLAG_OUTPUT, outputs=[FLAG_OUTPUT], to=TensorProto.INT64)
    rewriter.add_graph_output(main, FLAG_OUTPUT, TensorProto.INT64, rank=0)


class NativeTwin:
    """The original nodes of a site, copied before it is rewritten, for the branch that recomputes it.

    The branch reads the scores, the values and what the links read from the graph around it, and is complete:
    Softmax, the links behind it with their guard, and the value product.
    """

    def __init__(self, rewriter: Rewriter, site: Site) -> None:
        self.rewriter, self.site = rewriter, site
        self.late = site.late_division
        self.result = site.output if self.late else site.softmax.output[0]
        self.nodes = [_copy(node) for node in self._originals()]
        self.nodes[0].input[0] = site.scores

    def _originals(self) -> list[NodeProto]:
        site = self.site
        if not self.late:
            return [site.softmax]
        nodes = [site.softmax]
        for link in site.after:
            if link.kind == "guard":
                test = site.scope.producers[link.node.input[0]]
                if test.op_type == "Not":
                    nodes.append(site.scope.producers[test.input[0]])
                nodes.append(test)
            nodes.append(link.node)
        return [*nodes, site.pv]

    def branch(self) -> GraphProto:
        """The graph of the branch, with fresh names for its nodes and values."""
        names: dict[str, str] = {}
        for node in self.nodes:
            node.name = self.rewriter.fresh(f"{node.name or node.op_type}_native")
            for position, value in enumerate(node.input):
                node.input[position] = names.get(value, value)
            for position, value in enumerate(node.output):
                if value:
                    names[value] = node.output[position] = self.rewriter.fresh(f"{value}_native")
        output = helper.make_tensor_value_info(names[self.result], self._type(), None)
        return helper.make_graph(self.nodes, f"{self.nodes[0].name}_branch", [], [output])

    def _type(self) -> int:
        return self.site.product_dtype if self.late else self.site.dtype


def _copy(node: NodeProto) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    return copy


def choose_branch(
    emit: Emitter, plan: SitePlan, twin: NativeTwin, outside: str, parts: tuple[str, str], output: str
) -> None:
    """`output` = the quotient of `parts` where no row is outside, else the original softmax (If-1 and later).

    The recomputation of FlashDecoding++ (arXiv 2311.01282), for engines that have control flow.
    """
    rewriter = emit.rewriter
    zero = rewriter.scalar(emit.place.scope, 0.0, TensorProto.FLOAT, "none")
    condition = emit.op("Greater", outside, zero, what="any_row_outside")
    quotient = rewriter.fresh(f"{output}_unified")
    divide = helper.make_node("Div", list(parts), [quotient], name=rewriter.fresh(f"{emit.base}_normalise"))
    kind = plan.site.product_dtype if twin.late else plan.site.dtype
    unified = helper.make_graph(
        [divide], f"{emit.base}_unified", [], [helper.make_tensor_value_info(quotient, kind, None)]
    )
    rewriter.add_choice(emit.place, condition, twin.branch(), unified, f"{emit.base}_choose", output)
