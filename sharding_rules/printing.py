"""What a plan says of itself: sentences, tables, and the facts in which two plans can differ."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sharding_rules.costs import FAIR, dtype_of
from sharding_rules.rules import BATCH, describe_mesh, describe_shape
from sharding_rules.strategies import AUTO
from sharding_rules.tables import Table

if TYPE_CHECKING:
    from sharding_rules.plan import Candidate, Decision, Plan


def header(plan: "Plan") -> list[str]:
    """What was asked about, and what was decided."""
    devices = f"{plan.mesh.size} device{'s' * (plan.mesh.size > 1)}"
    return [
        f"{plan.encoder} on {devices}, mesh ({describe_shape(plan.given_mesh)})",
        f"Strategy: {plan.strategy}, {plan.reason}",
    ]


def first_word(line: str) -> tuple[str, str]:
    """A line in two, after the colon that its first words end with."""
    start, colon, rest = line.partition(":")
    return start + colon, rest


def totals(plan: "Plan") -> list[str]:
    """What the plan costs, in sentences."""
    cost, parts = plan.cost, plan.rows_parts
    lines = [
        f"Work of the busiest device: {_si(cost.flops_per_device)}FLOP, {cost.flops_ratio:.2f} times an equal share "
        f"(the flops ratio; {FAIR:.2f} is fair). Parameters: {_si(cost.param_bytes_per_device)}B on each device.",
        f"Batch: {plan.batch_layout}, over {parts} part{'s' * (parts > 1)}; once all parts are as long as the fullest, "
        f"{cost.padding_ratio:.2f} times the tokens (the padding ratio).",
        f"Collectives: {cost.collectives_per_layer} a layer, {_si(cost.collective_bytes)}B sent by each device in all. "
        f"Predicted on {plan.profile.name}: {cost.seconds * 1e3:.3g} ms, of which an equal share of the work "
        f"{plan.profile.compute_seconds(cost.flops_ideal, dtype_of(plan.parameters)) * 1e3:.3g} ms.",
    ]
    fastest = min((c for c in plan.candidates if c.cost and c.strategy in AUTO), key=_seconds, default=None)
    if fastest and not fastest.chosen and 1.2 * _seconds(fastest) < cost.seconds:
        lines.append(
            f"Faster: {fastest.strategy!r}, predicted {_seconds(fastest) * 1e3:.3g} ms with "
            f"{_si(fastest.cost.param_bytes_per_device if fastest.cost else 0)}B of parameters on each device. "
            "Given a memory limit that it fits, auto takes it."
        )
    return lines


def _seconds(candidate: "Candidate") -> float:
    return candidate.cost.seconds if candidate.cost else math.inf


def tables(plan: "Plan") -> list[Table]:
    """The decisions, axis by axis, and the candidates."""
    decisions = [
        (
            decision.group,
            decision.axis,
            _size(decision),
            ", ".join(decision.mesh_axes) or "-",
            f"{decision.parts}",
            decision.per_device,
            decision.action,
            decision.reason,
        )
        for decision in plan.decisions
    ]
    candidates = []
    for candidate in plan.candidates:
        cost, cells = candidate.cost, ("-", "-", "-", "-", "-")
        if cost:
            megabytes, milliseconds = f"{cost.param_bytes_per_device / 1e6:,.1f}", f"{cost.seconds * 1e3:.3g}"
            ratio, collectives = f"{cost.flops_ratio:.2f}", f"{cost.collectives_per_layer}"
            cells = candidate.batch_layout or "-", ratio, megabytes, collectives, milliseconds
        parts = f"{candidate.weight_parts} x {candidate.batch_parts}"
        candidates.append((candidate.strategy, parts, *cells, candidate.reason))
    return [
        Table(
            "Decisions", ("group", "axis", ">size", "mesh axes", ">parts", ">per device", "action", "why"), decisions
        ),
        Table(
            "Candidates (weights x batch: into how many parts; "
            "flops ratio: work of the busiest device over an equal share)",
            (
                "strategy",
                "weights x batch",
                "batch layout",
                ">flops ratio",
                ">MB/device",
                ">collectives",
                ">ms",
                "why",
            ),
            candidates,
            marked=[candidate.chosen for candidate in plan.candidates].index(True),
        ),
    ]


def _size(decision: "Decision") -> str:
    if decision.size is None:
        return "-"
    padding = (decision.padded_size or 0) - decision.size
    return f"{decision.size} + {padding}" if padding > 0 else f"{decision.size}"


def _si(value: float) -> str:
    """`517 G`."""
    power = min(5, int(math.log10(max(value, 1)) // 3))
    return f"{value / 1000**power:.4g} {' kMGTP'[power].strip()}"


@dataclass(frozen=True)
class Fact:
    """One thing that `diff` compares, in words; with its number where it has one."""

    text: str
    number: float = 0

    def __str__(self) -> str:
        return self.text

    def times(self, before: "Fact") -> str:
        """`, 0.27 times`, where both have a number."""
        return f", {self.number / before.number:.3g} times" if self.number and before.number else ""


def facts(plan: "Plan") -> dict[str, Fact]:
    """What `diff` compares."""
    cost = plan.cost
    numbers = {
        "work of the busiest device": (f"{_si(cost.flops_per_device)}FLOP", cost.flops_per_device),
        "parameters on each device": (f"{_si(cost.param_bytes_per_device)}B", cost.param_bytes_per_device),
        "sent by each device": (f"{_si(cost.collective_bytes)}B", cost.collective_bytes),
        f"predicted time on {plan.profile.name}": (f"{cost.seconds * 1e3:.3g} ms", cost.seconds),
    }
    words = {
        "encoder": plan.encoder,
        "devices": f"{plan.mesh.size}",
        "mesh": describe_shape(plan.given_mesh),
        "mesh once split": describe_mesh(plan.mesh) if dict(plan.mesh.shape) != dict(plan.given_mesh) else "-",
        "strategy": plan.strategy,
        **{f"{each.group}: {each.axis}": _held(each) for each in plan.decisions if each.group != BATCH},
        "batch layout": plan.batch_layout,
        "parts of the batch": f"{plan.rows_parts}",
        "items or windows": f"{len(plan.batching.whole[0]) + len(plan.batching.spread)}",
        "flops ratio": f"{plan.flops_ratio:.2f}",
        "padding ratio": f"{plan.padding_ratio:.2f}",
        "collectives a layer": f"{plan.collectives_per_layer}",
    }
    return {key: Fact(text) for key, text in words.items()} | {key: Fact(*pair) for key, pair in numbers.items()}


def _held(decision: "Decision") -> str:
    """`5 on each of 4 (model)`."""
    if decision.parts == 1:
        return "whole"
    padding = f", {_size(decision)} of zeros" if decision.action == "padded and sharded" else ""
    return f"{decision.per_device} on each of {decision.parts} ({', '.join(decision.mesh_axes)}){padding}"
