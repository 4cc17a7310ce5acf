"""The C++ of a class that forwards every method of torch's CUDA allocator, written from the headers of the torch here.

The interface `c10::cuda::CUDACachingAllocator::CUDAAllocator` grows with most versions of torch. A method that an own
list left out would run the base class's version, which warns or does nothing. So the list is read from the headers that
the library is built against, and a declaration that cannot be read ends the build.
"""

from __future__ import annotations

import re
from pathlib import Path

from memfit.system.native import NativeLibraryError

CLASSES = (
    ("c10/core/Allocator.h", "Allocator"),
    ("c10/core/CachingDeviceAllocator.h", "DeviceAllocator"),
    ("c10/cuda/CUDACachingAllocator.h", "CUDAAllocator"),
)
"""The header and the name of each class, from the base on."""

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DEFAULT = re.compile(r"=\s*\{[^{}]*\}")
_METHOD = re.compile(
    r"virtual\s+(?P<result>[^()~;{}]+?)\s*\b(?P<name>\w+)\s*(?P<arguments>\([^;{]*?\))\s*(?P<const>const)?\s*(?:=\s*0\s*)?[;{]"
)
_NAMED = re.compile(r"(?P<type>.*[\w>&*]\s*[\s&*])\b\w+$", re.DOTALL)
_QUALIFIERS = ("const", "volatile", "unsigned", "signed", "long", "short", "struct", "enum")


class UnreadableHeaderError(NativeLibraryError):
    """A header of torch has another form than expected; the message says where."""


def forwarding_methods(include: Path) -> str:
    """Return the methods of the class, each of which calls the same one of `below()`.

    Args:
        include: the folder of torch's headers.

    Raises:
        UnreadableHeaderError: a header, a class or a method is not found, or cannot be read.
    """
    lines: dict[tuple[str, str], str] = {}  # by name and arguments: a class may declare again what its base has
    for header, name in CLASSES:
        try:
            text = _DEFAULT.sub("", _COMMENT.sub(" ", (include / header).read_text()))
        except OSError as error:
            raise UnreadableHeaderError(f"torch's header {header} is not here: {error.strerror}") from error
        body = _body(text, name, header)
        found = list(_METHOD.finditer(body))
        declared = len(re.findall(r"\bvirtual\b(?!\s*~)", body))
        if len(found) != declared:
            raise UnreadableHeaderError(f"{header}: {declared} virtual methods of {name}, {len(found)} of them read")
        for method in found:
            types = [_type_of(each) for each in _split(method["arguments"][1:-1])]
            key = method["name"], ", ".join(types)
            lines[key] = _forwarded(method["result"], method["name"], types, method["const"] or "")
    return "\n".join(lines.values()) + "\n"


def _forwarded(result: str, name: str, types: list[str], const: str) -> str:
    taken = ", ".join(f"{each} a{number}" for number, each in enumerate(types))
    given = ", ".join(f"std::forward<{each}>(a{number})" for number, each in enumerate(types))
    result = " ".join(result.split())
    return f"{result} {name}({taken}) {const} override {{ return below()->{name}({given}); }}"


def _body(text: str, name: str, header: str) -> str:
    """Return what stands between the braces of a class, without the bodies of its methods."""
    head = re.search(rf"\b(?:class|struct)\s+(?:\w+\s+)?{name}\b[^;{{]*\{{", text)
    if head is None:
        raise UnreadableHeaderError(f"{header}: no class {name}")
    depth, at = 1, head.end()
    kept: list[str] = []
    while depth:
        if at >= len(text):
            raise UnreadableHeaderError(f"{header}: class {name} does not end")
        character = text[at]
        depth += (character == "{") - (character == "}")
        if depth == 1 or (depth == 2 and character == "{"):
            kept.append(character)
        at += 1
    return "".join(kept)


def _split(arguments: str) -> list[str]:
    """Return the declarations between commas that stand in no brackets, without default values."""
    parts, depth = [""], 0
    for character in arguments:
        depth += (character in "<({") - (character in ">)}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.split("=", 1)[0].strip() for part in parts if part.strip()]


def _type_of(declaration: str) -> str:
    """Return a declaration without the argument's name, if it has one."""
    text = " ".join(declaration.split())
    named = _NAMED.match(text)
    if named is None or named["type"].strip() in _QUALIFIERS:
        return text
    return named["type"].strip()
