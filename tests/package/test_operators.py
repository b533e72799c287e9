"""attention_ext.operators: the operators themselves, and a stub that says of each what its schema says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
import typed_use

from attention_ext import operators

STUB = Path(operators.__file__).with_suffix(".pyi").read_text()  # beside the module that is imported
FUNCTIONS = {node.name: node for node in ast.parse(STUB).body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
ASKED = {
    "build_info",
    "kernels",
    "limits",
    "batch_dims_merge",
    "plan",
    "linear_plan",
    "sdpa_plan",
    "sdpa_backward_plan",
}  # no tensors
TYPES = {"Tensor": "Tensor", "float": "float", "bool": "bool", "int": "int", "str": "str"}


def schema_of(name: str) -> str:
    return str(getattr(torch.ops.attention_ext, name).default._schema)


def said_by_stub(function: ast.FunctionDef) -> tuple[list[tuple[str, str, object, bool]], int]:
    """Of each argument: name, type, default (... where it has none), whether by keyword only; and how many results."""
    arguments = function.args
    plain = list(zip(arguments.args, [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults, strict=True))
    both = [(*pair, False) for pair in plain] + [
        (*pair, True) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    found = [(a.arg, ast.unparse(a.annotation), ... if d is None else ast.literal_eval(d), keyword) for a, d, keyword in both]
    return found, max(1, ast.unparse(function.returns).count("Tensor"))


def said_by_schema(name: str) -> tuple[list[tuple[str, str, object, bool]], int]:
    schema = getattr(torch.ops.attention_ext, name).default._schema
    text, found = schema_of(name), []
    for argument in schema.arguments:
        kind = re.search(rf"(\w+)(\??) {argument.name}\b", text)
        annotation = TYPES[kind[1]] + " | None" * bool(kind[2])
        default = argument.default_value if argument.has_default_value() else ...
        found.append((argument.name, annotation, default, argument.kwarg_only))
    return found, len(schema.returns)


@pytest.mark.parametrize("name", operators.__all__)
def test_the_stub_says_what_the_schema_says(name: str) -> None:
    function = FUNCTIONS[name]
    assert said_by_stub(function) == said_by_schema(name)
    assert [ast.unparse(decorator) for decorator in function.decorator_list] == ["_operator"] and ast.get_docstring(function)


def test_all_operators_are_there() -> None:
    names = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("attention_ext::")
    }
    public = {name for name in names if not name.startswith("_")} - ASKED
    assert set(operators.__all__) == set(FUNCTIONS) == public and names >= ASKED
    assert all(getattr(operators, name) is getattr(torch.ops.attention_ext, name) for name in public)


def test_a_stub_that_differs_is_found() -> None:
    def changed(old: str, new: str) -> tuple[list[tuple[str, str, object, bool]], int]:
        text = ast.unparse(FUNCTIONS["sdpa"])
        assert old in text
        return said_by_stub(ast.parse(text.replace(old, new)).body[0])

    want = said_by_schema("sdpa")
    for old, new in (("key:", "keys:"), ("float=0.0", "float=0.1"), ("Tensor | None=None", "Tensor=None"), ("*, ", "")):
        assert changed(old, new) != want
    assert changed("-> Tensor", "-> tuple[Tensor, Tensor]") != want


def test_as_typed_code_uses_them() -> None:
    query = torch.randn(1, 2, 3, 4)
    torch.testing.assert_close(typed_use.right(query), operators.sdpa(query, query, query))
    with pytest.raises(RuntimeError, match="causal"):
        typed_use.wrong(query)
