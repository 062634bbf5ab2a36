"""The public names and their signatures are those of `tests/golden/public_api.txt`.

When a change of them is meant, write the file anew with `make golden` and let the
diff show the change to whoever reviews it.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import shoestring

GOLDEN = Path(__file__).parents[1] / "golden" / "public_api.txt"


def describe_public_api() -> str:
    """Write every public name as its source writes it, without bodies."""
    lines = []
    for name in sorted(shoestring.__all__):
        value = getattr(shoestring, name)
        if isinstance(value, str):
            lines.append(f"{name}: str")
        else:
            lines += describe(name, ast.parse(textwrap.dedent(inspect.getsource(value))).body[0])
    return "\n".join(lines) + "\n"


def describe(name: str, node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        yield f"def {name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"
    elif isinstance(node, ast.ClassDef):
        yield from (f"@{ast.unparse(decorator)}" for decorator in node.decorator_list)
        yield f"class {name}({', '.join(map(ast.unparse, node.bases))})"
        for member in node.body:
            yield from (f"    {line}" for line in describe_member(member))


def describe_member(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef) and (node.name == "__init__" or not node.name.startswith("_")):
        yield from (f"@{ast.unparse(decorator)}" for decorator in node.decorator_list)
        yield from describe(node.name, node)
    elif isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
        yield ast.unparse(node)


def test_public_api_is_the_recorded_one():
    assert describe_public_api() == GOLDEN.read_text(), "where this is meant, run `make golden`"


def test_all_is_sorted_and_complete():
    assert shoestring.__all__ == sorted(shoestring.__all__)
    assert set(shoestring.__all__) <= set(dir(shoestring))


if __name__ == "__main__":
    GOLDEN.write_text(describe_public_api())
    print(f"wrote {GOLDEN}")
