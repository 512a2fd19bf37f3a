"""Rewrites a chat template's syntax tree so that its work is metered as it runs.

The rewriting wraps nodes in filters of the sandbox; the meaning of the template does not change.
"""

from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

# The space makes these names impossible to write in a template.
CHARGE, CHARGE_ITEMS, CONCATENATE = " weigh", " pace", " concatenate"


class MeterInserter(NodeTransformer):
    """Wraps loops, outputs and every expression that builds a value in budget filters."""

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _wrap_in_filter(node.iter, CHARGE_ITEMS)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _wrap_in_filter(nodes.List(node.nodes, lineno=node.lineno), CONCATENATE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._charge_value(node) if node.ctx == "load" else self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        return (
            self._charge_value(node)
            if isinstance(node.arg, nodes.Slice)
            else self.generic_visit(node)
        )

    def _charge_value(self, node: Any) -> nodes.Node:
        return _wrap_in_filter(self.generic_visit(node), CHARGE)

    visit_List = visit_Dict = visit_Compare = visit_Test = visit_Filter = _charge_value


class GenerationTag(Extension):
    """`{% generation %}`: marks the model's answers for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _wrap_in_filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
