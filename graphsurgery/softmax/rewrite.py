"""Writes a planned site: Softmax becomes Exp(Clip(s - φ)), and the division follows the value product.

    before   MatMul > ... > Add(mask) > Softmax > ... > MatMul
    after    MatMul > ... > Add(mask - φ) > Clip > Exp > ... > MatMul > Div
                                                     \\-> ReduceSum ------^

exp(s - φ) / Σ exp(s - φ) is softmax(s) for any φ (FlashDecoding++, arXiv 2311.01282); the guard `exact` takes the row
maximum for φ.  The products stay as they are, apart from the name of the tensor between them: a tensor that is no
longer what its name said gets a new name, and the normalised output keeps the old one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from onnx import NodeProto

from graphsurgery.attention.operands import einsum_labels
from graphsurgery.attention.site import Link, Site
from graphsurgery.model.emit import Emitter, lowest
from graphsurgery.model.rewriter import REWRITTEN, Place, Rewriter
from graphsurgery.softmax.denominator import guard_denominator, row_sum
from graphsurgery.softmax.online import online_exponentials
from graphsurgery.softmax.outside import NativeTwin, choose_branch, count_outside, flag_rows
from graphsurgery.softmax.plan import Denominator, SitePlan

__all__ = ["SoftmaxRewriter"]

_CLEAN_UP = frozenset("Constant ConstantOfShape CastLike Cast Expand ReduceMax Sub".split())


@dataclass
class SoftmaxRewriter:
    """Writes sites one after the other; what sites share (a mask less φ) is written once."""

    rewriter: Rewriter
    _masks: dict[tuple[int, str, float, int], str] = field(default_factory=dict[tuple[int, str, float, int], str])
    _counts: list[str] = field(default_factory=list[str])

    def write(self, plan: SitePlan) -> None:
        """Rewrite one site.

        Adds standard operators only, at no higher rank than the scores.  Inside the window the result is that of
        Softmax up to rounding; outside it is finite.
        """
        site = plan.site
        self.rewriter.start(REWRITTEN, site.id)
        twin = NativeTwin(self.rewriter, site) if plan.guard == "if" else None
        emit = Emitter(self.rewriter, Place(site.scope, site.softmax), _base(site), site.dtype)
        exponentials, total = self._exponentials(emit, plan)
        if _hidden_rows_are_uniform(plan) and not _mean_of_values(site):
            exponentials, total = self._uniform(emit, plan, exponentials), ""
        if site.late_division:
            self._divide_product(emit, plan, exponentials, total, twin)
        else:
            self._divide_probabilities(emit, plan, exponentials, total, twin)
        self._clean_up(site)

    def finish(self) -> None:
        """Write what is written once for all sites."""
        if self._counts:
            flag_rows(self.rewriter, self._counts)

    # -- s - φ

    def _exponentials(self, emit: Emitter, plan: SitePlan) -> tuple[str, str]:
        """exp(s - φ), and its row sums where the form has them already."""
        if plan.denominator.form == "online" and plan.denominator.chunks > 1:
            return online_exponentials(emit, plan)
        shifted = self._row_shifted(emit, plan) if plan.phi is None else self._phi_shifted(emit, plan, plan.phi)
        return emit.op("Exp", emit.clip(shifted, *plan.window.clip, "clip"), what="exp"), ""

    def _row_shifted(self, emit: Emitter, plan: SitePlan) -> str:
        """Subtract the row maximum; a row of -inf alone subtracts the lowest number, as -inf - -inf is NaN."""
        site = plan.site
        top = emit.reduce("ReduceMax", site.scores, -1, "row_max")
        if plan.window.sum_limits is not None or site.mask_fills & {"inf", "unknown"}:
            top = emit.op("Max", top, emit.scalar(lowest(emit.dtype), "lowest"), what="row_max_finite")
        if plan.offset:
            top = emit.op("Add", top, emit.scalar(plan.offset, "row_max_offset"), what="row_max_raised")
        return emit.op("Sub", site.scores, top, what="shift")

    def _phi_shifted(self, emit: Emitter, plan: SitePlan, phi: float | tuple[float, ...]) -> str:
        site = plan.site
        heads = plan.heads_array(emit.dtype)
        if heads is not None:
            return emit.op("Sub", site.scores, emit.array(heads, "phi_heads"), what="shift")
        if isinstance(phi, tuple) or phi == 0:
            return site.scores
        # The branch that recomputes reads the scores as they were.
        mask = None if plan.guard == "if" else self._foldable_mask(site)
        if mask is None:
            return emit.op("Sub", site.scores, emit.scalar(phi, "phi"), what="shift")
        return self._fold(emit, site, phi, mask)

    def _foldable_mask(self, site: Site) -> int | None:
        """The position in `before` of a last Add whose sum only this site reads."""
        if site.scores != site.softmax.input[0]:
            return None
        for position in range(len(site.before) - 1, -1, -1):
            link = site.before[position]
            output = link.node.output[0]
            if len(site.scope.readers(output)) != 1 or site.scope.read_elsewhere(output):
                return None
            if site.scope.producers.get(output) is not link.node:
                return None
            if link.kind == "mask" and link.node.op_type == "Add":
                return position
            if link.kind != "same" or link.node.op_type == "Concat":
                return None
        return None

    def _fold(self, emit: Emitter, site: Site, phi: float, position: int) -> str:
        """s + (mask - φ): the mask is smaller than the scores, and one difference serves all sites that share it."""
        links = site.before[position:]
        add, operand = links[0].node, 1 - links[0].operand
        mask = add.input[operand]
        key = (id(site.scope), mask, phi, site.dtype)
        if key not in self._masks:
            above = site.scope.producers.get(mask)
            at = emit.at(Place(site.scope, above, after=above is not None), base=mask)
            self._masks[key] = at.op("Sub", mask, at.scalar(phi, "phi"), what="minus_phi")
        self.rewriter.set_input(site.scope, add, operand, self._masks[key])
        value = ""
        for link in links:
            if value:
                self.rewriter.set_input(site.scope, link.node, link.operand, value)
            value = self._renamed(site, link.node, f"{link.node.output[0]}_shifted")
        return value

    def _renamed(self, site: Site, node: NodeProto, hint: str) -> str:
        return self.rewriter.rename_output(site.scope, node, 0, hint)

    # -- the division

    def _divide_probabilities(
        self, emit: Emitter, plan: SitePlan, exponentials: str, total: str, twin: NativeTwin | None
    ) -> None:
        """Divide where Softmax stood: its output keeps its name and meaning for whoever reads it."""
        site = plan.site
        total, outside = self._sum(emit, plan, exponentials, total)
        probabilities = site.softmax.output[0]
        self.rewriter.rename_output(site.scope, site.softmax, 0, f"{probabilities}_replaced")
        if twin is not None:
            choose_branch(emit, plan, twin, outside, (exponentials, total), probabilities)
        else:
            emit.op("Div", exponentials, total, what="normalise", output=probabilities)
        self.rewriter.remove(site.scope, site.softmax)

    def _divide_product(
        self, emit: Emitter, plan: SitePlan, exponentials: str, total: str, twin: NativeTwin | None
    ) -> None:
        """Divide the output of the value product, [..., Q, D], by the sums, [..., Q, 1]."""
        site = plan.site
        outside = ""
        if site.sum_after == 0:
            total, outside = self._sum(emit, plan, exponentials, total)
        self.rewriter.replace_uses(site.scope, site.softmax.output[0], exponentials)
        self.rewriter.remove(site.scope, site.softmax)
        for position, link in enumerate(site.after, start=1):
            value = self._pass_through(site, link, keep=twin is not None)
            if position == site.sum_after:
                total, outside = self._sum(emit.at(Place(site.scope, link.node, after=True)), plan, value)
        old = site.pv.output[0]
        product = self._renamed(site, site.pv, f"{old}_unnormalised")
        behind = emit.at(Place(site.scope, site.pv, after=True), elem_type=site.product_dtype)
        if site.product_dtype != site.dtype:
            total = behind.cast(total, site.product_dtype, "sum_cast")
        total = _align(behind, site, total)
        if twin is not None:
            choose_branch(behind, plan, twin, outside, (product, total), old)
            return
        if plan.window.sum_limits is not None:
            greatest = plan.window.sum_limits[1]
            product = behind.clip(product, -greatest, greatest, "product_finite")
        if not (_hidden_rows_are_uniform(plan) and _mean_of_values(site)):
            behind.op("Div", product, total, what="normalise", output=old)
            return
        quotient = behind.op("Div", product, total, what="normalise")
        limit = behind.scalar(plan.window.masked_below, "masked_below")
        hidden = behind.op("Less", total, limit, what="hidden_row")
        mean = behind.reduce("ReduceMean", site.values, -2, "mean_value")
        behind.op("Where", hidden, mean, quotient, what="hidden_row_mean", output=old)

    def _uniform(self, emit: Emitter, plan: SitePlan, exponentials: str) -> str:
        """Put 1 in place of every exponential of a hidden row."""
        total = row_sum(emit, exponentials, Denominator(), plan.site.sum_rank)
        limit = emit.scalar(plan.window.masked_below, "masked_below")
        hidden = emit.op("Less", total, limit, what="hidden_row")
        return emit.op("Where", hidden, emit.scalar(1.0, "one"), exponentials, what="exp_or_one")

    def _sum(self, emit: Emitter, plan: SitePlan, value: str, total: str = "") -> tuple[str, str]:
        """The denominators and, for the guards that watch them, how many lie outside the window."""
        total = total or row_sum(emit, value, plan.denominator, plan.site.sum_rank)
        if plan.guard == "if":
            return total, count_outside(emit, plan, total)
        if plan.guard == "flag":
            self._counts.append(count_outside(emit, plan, total))
        return guard_denominator(emit, total, plan), ""

    def _pass_through(self, site: Site, link: Link, *, keep: bool) -> str:
        """Let the exponentials through one link behind Softmax; an IsNaN guard goes, the others get a new output."""
        scope, node = site.scope, link.node
        if link.kind != "guard":
            old = node.output[0]
            new = self._renamed(site, node, f"{old}_unnormalised")
            self.rewriter.replace_uses(scope, old, new)
            return new
        value, test = node.input[link.operand], scope.producers.get(node.input[0])
        self.rewriter.replace_uses(scope, node.output[0], value)
        zero = next(name for name in node.input[1:] if name != value)
        self.rewriter.remove(scope, node)
        inner = scope.producers.get(test.input[0]) if test is not None and test.op_type == "Not" else None
        self.rewriter.remove_dead(scope, [found for found in (test, inner) if found is not None])
        if not keep:
            self._remove_constant(site, zero)
        return value

    # -- what is left over

    def _clean_up(self, site: Site) -> None:
        """Remove a subtraction of the row maximum that only served this Softmax."""
        for link in site.before:
            if link.kind == "row-max" and site.scope.producers.get(link.node.output[0]) is link.node:
                top = site.scope.producers.get(link.node.input[1])
                self.rewriter.remove_dead(site.scope, [link.node, *([top] if top is not None else [])])

    def _remove_constant(self, site: Site, name: str) -> None:
        """Remove the constant of a removed guard, with the casts and shapes it came through."""
        scope = site.scope
        for _ in range(4):
            node = scope.producers.get(name)
            if node is None or node.op_type == "Constant":
                self.rewriter.remove_unused_constant(scope, name)
                return
            if node.op_type not in _CLEAN_UP or scope.readers(name) or scope.read_elsewhere(name):
                return
            above = node.input[0]
            self.rewriter.remove(scope, node)
            name = above


def _hidden_rows_are_uniform(plan: SitePlan) -> bool:
    """Whether rows hidden by a finite mask must come out uniform although their exponentials are all 0 (float16)."""
    if plan.window.sum_limits is None or plan.phi is None or plan.guard == "if":
        return False
    return bool(plan.site.mask_fills & {"lowest", "large", "unknown"}) and not plan.zero_hidden


def _mean_of_values(site: Site) -> bool:
    """Whether a uniform row is the mean of the values, [..., K, D], put in behind the product."""
    return site.late_division and site.pv.op_type == "MatMul"


def _base(site: Site) -> str:
    return site.softmax.name or "Softmax"


def _align(emit: Emitter, site: Site, total: str) -> str:
    """Turn the sums to the axis order of an Einsum's output."""
    labels = einsum_labels(site.pv) if site.pv.op_type == "Einsum" else None
    if labels is None:
        return total
    probabilities, values, out = labels[site.operand], labels[1 - site.operand], labels[2]
    free = next(label for label in values if label not in probabilities)
    rows = probabilities[:-1] + free
    perm = [rows.index(label) for label in out]
    return total if perm == sorted(perm) else emit.transpose(total, perm, "sum_turned")
