"""What `make gpu` found, for the README and the page docs/gpu.md: from the file of a device, and nothing without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from _measure import GIB, MIB
from _record import FOLDER, RESULTS, load

NAME = "gpu"
PAGE = "gpu.md"
MODELS = {
    "gpt2-medium": "GPT-2 medium, 8 x 1,024 tokens",
    "llama-1b": "Llama of 1B, 2 x 4,096 tokens",
    "resnet50": "ResNet-50, batch 256",
    "vit-large": "ViT-L, batch 64",
}
"""The children of the first table, with words for their models; all compute in bfloat16 and update with fused AdamW."""
COLUMNS = {
    "eager": ("eager",),
    "checkpoints": ("checkpoints",),
    "torch's budget": ("torch's budget 0.5",),
    "memfit at the checkpoints' bytes": ("memfit at their bytes",),
    "memfit, less": ("memfit at 50%", "memfit at 60%"),
}
"""Columns of the first table, with the names of the ways that stand there."""
NAV_LINE = f"  - On a GPU: {PAGE}\n"
_NAV_BEFORE = "  - Memory on CUDA: cuda-memory.md\n"
_WIDTH, _HEIGHT, _PAD = 520, 260, 46  # of a picture, in pixels

Document = dict[str, Any]


def documents(results: Path = RESULTS) -> list[Document]:
    """Return the files of devices, the newest first; one of a rehearsal is none."""
    found = [load(path) for path in results.glob(f"*/{NAME}.json")]
    return sorted(
        (each for each in found if not each["payload"].get("rehearsal")),
        key=lambda each: each["machine"]["date"],
        reverse=True,
    )


def first_table(found: Sequence[Document]) -> str:
    """Return the README's first table, of the newest file; empty without one."""
    if not found:
        return ""
    children = found[0]["payload"]["children"]
    rows = [
        [words, *(_cell(children[name]["answer"]["ways"], ways) for ways in COLUMNS.values())]
        for name, words in MODELS.items()
        if children.get(name, {}).get("answer", {}).get("ways")
    ]
    if not rows:
        return ""
    note = "GiB that a whole step reserves, update included, and its time over eager's; the ways took turns."
    return _lines(["model", *COLUMNS], rows) + f"\n{note} {_where(found[0])}\n"


def page(found: Sequence[Document], folder: Path) -> str:
    """Return the page, and write its pictures beside it."""
    parts = [
        "# On a GPU\n",
        "What `make gpu` measured; `python benchmarks/tables.py --gpu-page` writes this page from what it stored. "
        "[Numbers to beat](numbers-to-beat.md) says what others publish.\n",
    ]
    for document in found:
        parts += _of_device(document, folder)
    return "\n".join(parts)


def write_page(docs: Path, navigation: Path, results: Path = RESULTS) -> bool:
    """Write docs/gpu.md and its line of the navigation, or remove both where no device has a file; whether it is there.

    Args:
        docs: folder of the pages.
        navigation: mkdocs.yml.
        results: folder of the machines.
    """
    found = documents(results)
    text = navigation.read_text().replace(NAV_LINE, "")
    for picture in docs.glob("gpu_*.svg"):
        picture.unlink()
    if found:
        (docs / PAGE).write_text(page(found, docs))
        text = text.replace(_NAV_BEFORE, _NAV_BEFORE + NAV_LINE)
    else:
        (docs / PAGE).unlink(missing_ok=True)
    navigation.write_text(text)
    return bool(found)


def _of_device(document: Document, folder: Path) -> Iterator[str]:
    payload, machine = document["payload"], document["machine"]
    children, titles = payload["children"], payload["titles"]
    yield f"## {machine['gpu']}\n"
    yield first_table([document])
    for name, words in MODELS.items():
        ways = children.get(name, {}).get("answer", {}).get("ways", {})
        timed = {way: got for way, got in ways.items() if "time_ratio" in got}
        if timed:
            file = f"gpu_{machine['folder']}_{name}.svg"
            (folder / file).write_text(picture(words, timed))
            yield f"![{words}: bytes and time of each way]({file})\n"
    doors = [_door(name, got) for name, got in children.items() if "1" in got["rows"]]
    if doors:
        yield "### Doors\n"
        yield _lines(["door", "budget, MiB", "most reserved, MiB", "held"], doors)
    yield "### All rows\n"
    rows = [
        [", ".join(got["rows"]), name, _said(got), "; ".join(got["failures"]) or "none"]
        for name, got in children.items()
        if "1" not in got["rows"]
    ]
    yield _lines(["row", "what", "found", "failures"], rows)
    yield "\n".join(f"- {number}: {title}" for number, title in titles.items()) + "\n"


def picture(title: str, ways: dict[str, dict[str, Any]]) -> str:
    """Return an SVG: each way's reserved bytes to the right, its time over eager's upwards."""
    most_bytes = max(got["reserved_bytes"] for got in ways.values())
    most, least = max(got["time_ratio"] for got in ways.values()), min(got["time_ratio"] for got in ways.values())
    low, high = min(1.0, least) - 0.05, max(1.0, most) + 0.05

    def at(got: dict[str, Any]) -> tuple[float, float]:
        right = _PAD + (_WIDTH - 3 * _PAD) * got["reserved_bytes"] / most_bytes
        return right, _HEIGHT - _PAD - (_HEIGHT - 2 * _PAD) * (got["time_ratio"] - low) / (high - low)

    drawn = [
        f'<text x="{_PAD}" y="20" font-weight="bold">{escape(title)}</text>',
        f'<path d="M{_PAD},{_PAD} V{_HEIGHT - _PAD} H{_WIDTH - _PAD}" fill="none" stroke="#888"/>',
        f'<text x="{_PAD}" y="{_HEIGHT - 14}">GiB reserved, up to {most_bytes / GIB:.1f}</text>',
        f'<text x="4" y="{_PAD - 8}">time over eager\'s, {low:.2f} to {high:.2f}</text>',
    ]
    for name, got in ways.items():
        right, up = at(got)
        color = "#c0392b" if name.startswith("memfit") else "#2c3e50"
        words = f"{escape(name)} ({got['reserved_bytes'] / GIB:.1f}, {got['time_ratio']:.2f})"
        drawn.append(f'<circle cx="{right:.1f}" cy="{up:.1f}" r="4" fill="{color}"/>')
        drawn.append(f'<text x="{right:.1f}" y="{up - 7:.1f}" text-anchor="middle" fill="{color}">{words}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif"'
    return f'{head} font-size="11"><rect width="100%" height="100%" fill="#fff"/>' + "".join(drawn) + "</svg>\n"


def _cell(ways: dict[str, Any], names: Sequence[str]) -> str:
    got = next((ways[name] for name in names if name in ways), None)
    if got is None or "reserved_bytes" not in got:
        return "" if got is None or "not_there" in got else "failed"
    ratio = f", {got['time_ratio']:.2f}" if "time_ratio" in got else ""
    return f"{got['reserved_bytes'] / GIB:.1f}{ratio}"


def _door(name: str, record: dict[str, Any]) -> list[str]:
    answer = record["answer"]
    most = max((step["reserved_bytes"] for step in answer.get("steps", ())), default=0)
    held = "yes" if not record["failures"] else f"**no**: {record['failures'][0]}"
    return [name, f"{answer.get('budget_bytes', 0) / MIB:,.0f}", f"{most / MIB:,.0f}", held]


def _said(record: dict[str, Any]) -> str:
    answer = record["answer"]
    said = [answer.get("line", ""), answer.get("hard", {}).get("line", "")]
    return "; ".join(filter(None, said)).replace("|", "·")


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rows))


def _where(document: Document) -> str:
    machine = document["machine"]
    return f"({machine['gpu']}; torch {machine['torch']}; {machine['date'][:10]})"


DOCS, NAVIGATION = FOLDER.parent / "docs", FOLDER.parent / "mkdocs.yml"
