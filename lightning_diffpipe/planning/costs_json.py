"""The costs of a pipeline as JSON: one row for each size of microbatch, not for each microbatch."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_diffpipe.planning.pipeline_costs import PipelineCosts, Table
from lightning_diffpipe.planning.reading import Node

TABLES = ("forward_s", "backward_s", "weight_gradient_s", "activation_s", "gradient_s")


def costs_to_json(costs: PipelineCosts) -> dict[str, object]:
    """The JSON form: tables as `{samples: [seconds of each stage]}`."""
    first = {size: costs.sizes.index(size) for size in sorted(set(costs.sizes))}
    tables: dict[str, object] = {
        name: _table_to_json(getattr(costs, name), first) for name in TABLES
    }
    return {
        "sizes": list(costs.sizes),
        **tables,
        "encode_s": list(costs.encode_s),
        "all_reduce_s": list(costs.all_reduce_s),
        "all_gather_s": costs.all_gather_s,
        **({"holds_sender": True} if costs.holds_sender else {}),
        **({"split_s": _table_to_json(costs.split_s, first)} if costs.split_s else {}),
        **({"first_layers": list(costs.first_layers)} if costs.first_layers else {}),
    }


def _table_to_json(table: Table, first: Mapping[int, int]) -> dict[str, list[float]]:
    return {str(size): [row[at] for row in table] for size, at in first.items()}


def costs_from_node(node: Node) -> PipelineCosts:
    """Reads the JSON form back.

    Raises:
        DiffPipeError: Of the node's type; names the bad key.
    """
    keys = ("sizes", *TABLES, "encode_s", "all_reduce_s", "all_gather_s")
    node.check_keys(keys, ("holds_sender", "split_s", "first_layers"))
    sizes = tuple(size.integer(minimum=1) for size in node["sizes"].elements())
    forward, backward, weight, activation, gradient = (
        _read_table(node[name], sizes) for name in TABLES
    )
    return PipelineCosts(
        sizes=sizes,
        forward_s=forward,
        backward_s=backward,
        weight_gradient_s=weight,
        activation_s=activation,
        gradient_s=gradient,
        encode_s=_read_numbers(node["encode_s"]),
        all_reduce_s=_read_numbers(node["all_reduce_s"]),
        all_gather_s=node["all_gather_s"].number(),
        holds_sender="holds_sender" in node and node["holds_sender"].flag(),
        split_s=_read_table(node["split_s"], sizes) if "split_s" in node else (),
        first_layers=_read_first_layers(node),
    )


def _read_first_layers(node: Node) -> tuple[int, ...]:
    if "first_layers" not in node:
        return ()
    return tuple(element.integer() for element in node["first_layers"].elements())


def _read_numbers(node: Node) -> tuple[float, ...]:
    return tuple(element.number() for element in node.elements())


def _read_table(node: Node, sizes: tuple[int, ...]) -> Table:
    node.check_keys(sorted({str(size) for size in sizes}))
    columns = [_read_numbers(node[str(size)]) for size in sizes]
    for size, column in zip(sizes, columns, strict=True):
        if len(column) != len(columns[0]):
            raise node[str(size)].expected(f"{len(columns[0])} numbers, one for each stage")
    return tuple(zip(*columns, strict=True))
