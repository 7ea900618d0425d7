"""The API reference, from signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

from components import QUICK

PACKAGES = ("moments",) if QUICK else ("moments", "moments.torch")
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Warns", "Yields", "Source")


FIRST = ("predict", "check", "solve", "compare", "Transformer", "Weights", "Prediction")
"""Names that lead the page of a package."""


def navigation() -> list[Any]:
    """Entries of the section."""
    return [*({package: _path(package)} for package in PACKAGES), {"JSON": "json.md"}]


def _path(package: str) -> str:
    return "api/index.md" if package == "moments" else f"api/{package}.md"


def pages() -> dict[str, str | bytes]:
    """A page per package."""
    return {_path(name): package_page(name) for name in PACKAGES}


def package_page(name: str) -> str:
    """Markdown of everything public in a package."""
    package = importlib.import_module(name) if name == "moments" else _torch()
    lines = [f"# {name}", ""]
    if package is None:
        return "\n".join([*lines, "Install the extra `torch` to build this page.", ""])
    lines += [_text(inspect.getdoc(package) or ""), ""]
    public = [n for n in package.__all__ if not n.startswith("__")]
    for public_name in sorted(public, key=lambda n: (n not in FIRST, (*FIRST, n).index(n))):
        lines += _entry(name, public_name, getattr(package, public_name))
    return "\n".join(lines)


def _torch() -> Any:
    try:
        return importlib.import_module("moments.torch")
    except ImportError:
        return None


def _entry(package: str, name: str, value: Any) -> list[str]:
    lines = [f"## {name}", ""]
    if callable(value):
        lines += ["```python", _signature(name, value), "```", ""]
    lines += [documented(value), ""]
    if inspect.isclass(value):
        for own, member in vars(value).items():
            if own.startswith("_") or not _is_method(member):
                continue
            lines += _method(name, own, getattr(value, own, member), member)
    return lines


def _is_method(member: Any) -> bool:
    inner = getattr(member, "__func__", getattr(member, "fget", getattr(member, "func", member)))
    return inspect.isfunction(inner) and bool(inspect.getdoc(inner))


def _method(owner: str, name: str, value: Any, raw: Any) -> list[str]:
    head = f"### {owner}.{name}"
    if isinstance(raw, property) or not callable(value):
        inner = getattr(raw, "fget", None) or getattr(raw, "func", raw)
        return [head, "", documented(inner), ""]
    return [head, "", "```python", _signature(name, value), "```", "", documented(value), ""]


def _signature(name: str, value: Any) -> str:
    try:
        found = str(inspect.signature(value))
    except (TypeError, ValueError):
        return f"{name}(...)"
    found = re.sub(r"\bmoments\.[\w.]+\.(\w+)", r"\1", found).replace("'", "")
    line = f"{name}{found}"
    if len(line) <= 88:
        return line
    inside, _, after = line[len(name) + 1 :].rpartition(")")
    return f"{name}(\n    " + ",\n    ".join(_arguments(inside)) + f",\n){after}"


def _arguments(inside: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for letter in inside:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += letter
    return [*parts, current.strip()] if current.strip() else parts


def documented(value: Any) -> str:
    """A docstring as Markdown, its sections as definition lists."""
    return _text(inspect.getdoc(value) or "")


def _text(doc: str) -> str:
    blocks, section = [], ""
    found: list[str] = []
    for line in doc.splitlines():
        if line.rstrip(":") in SECTIONS and line.endswith(":"):
            blocks.append((section, found))
            section, found = line[:-1], []
        else:
            found.append(line)
    blocks.append((section, found))
    return "\n".join(_block(name, lines) for name, lines in blocks)


def _block(section: str, lines: list[str]) -> str:
    if not section:
        return _prose(lines)
    entries: list[list[str]] = []
    for line in lines:
        own = line[4:] if line.startswith("    ") else line
        if own and not own.startswith(" ") and re.match(r"[\w, *]+(?: \(.*\))?:", own):
            entries.append([own])
        elif entries:
            entries[-1].append(own.strip())
        else:
            entries.append([own])
    out = [f"**{section}**", ""]
    for entry in entries:
        text = " ".join(entry).strip()
        if not text:
            continue
        name, colon, rest = text.partition(":")
        named = colon and re.fullmatch(r"[\w, *]+(?: \(.*\))?", name)
        out.append(f"* `{name}`: {_safe(rest.strip())}" if named else f"* {_safe(text)}")
    return "\n".join([*out, ""])


def _prose(lines: list[str]) -> str:
    """Paragraphs; what is indented or a doctest stays as typed."""
    out: list[str] = []
    code = False
    for line in lines:
        typed = line.startswith(("    ", ">>>", "..."))
        if typed and not code:
            out += ["", "```text"]
        if code and not typed and line:
            out += ["```", ""]
            code = False
        code = code or typed
        out.append(line if code else _safe(line))
    return "\n".join([*out, "```"] if code else out)


def _safe(text: str) -> str:
    r"""Outside code, nothing that Markdown would read: underscores, stars, brackets and $."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        p if p.startswith("`") else re.sub(r"([\\*_<>\[\]$|])", r"\\\1", p) for p in parts
    )
