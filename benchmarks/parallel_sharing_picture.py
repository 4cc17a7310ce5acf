"""The picture of parallel-safe sharing in the docs: one small graph, and its arena under each way of sharing.

python benchmarks/parallel_sharing_picture.py [--output docs/parallel_sharing.svg]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.packing.check_parallel import check_parallel
from memfit.packing.parallel import WAYS, pack_parallel, serial_blocks
from memfit.system.files import write_atomically

SIZE = 1 << 20
CHAINS, LENGTH = "ab", 3
COLOURS = {"a": ("#4c78a8", "#72a0c8", "#9fc1de"), "b": ("#e0913c", "#f2bd80", "#f7d7ae")}
TITLES = {
    "ancestors": "ancestors: where the graph orders ops",
    "paths": "paths: along the two longest paths",
    "series": "series: as in the graph's own order",
}
PANEL, GAP, STEP, ROW, TOP = 272, 24, 34, 30, 150
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1c2126}.s{font-size:11px;fill:#57606a}"
    "rect.b{stroke:#fff;stroke-width:1.5}.l{stroke:#57606a;stroke-width:1.2;fill:none}"
)


def chains() -> Graph:
    """Return x -> a1 a2 a3 and x -> b1 b2 b3 -> the sum of both ends."""
    storages = [Storage(id=0, name="x", bytes=SIZE, role=Role.INPUT)]
    ops: list[Op] = []
    ends: list[int] = []

    def add(name: str, reads: tuple[int, ...], role: Role = Role.ACTIVATION) -> int:
        written = len(storages)
        storages.append(Storage(id=written, name=name, bytes=SIZE, role=role))
        ops.append(Op(id=len(ops), name=name, phase=Phase.FORWARD, reads=reads, writes=(written,), seconds=1e-3))
        return written

    for chain in CHAINS:
        last = 0
        for place in range(LENGTH):
            last = add(f"{chain}{place + 1}", (last,))
        ends.append(last)
    add("sum", tuple(ends), Role.OUTPUT)
    return Graph.build(name="two chains", storages=storages, ops=ops)


def colour(name: str) -> str:
    """Return the colour of a storage of a chain."""
    return COLOURS[name[0]][int(name[1]) - 1]


def draw_graph(graph: Graph) -> list[str]:
    """Return the graph as SVG elements: a row for each chain."""
    places = {"x": (40, 62), "sum": (430, 62)}
    for chain, y in zip(CHAINS, (38, 86), strict=True):
        places.update({f"{chain}{place + 1}": (140 + 95 * place, y) for place in range(LENGTH)})
    lines: list[str] = []
    for op in graph.ops:
        for read in op.reads:
            (x0, y0), (x1, y1) = places[graph.storages[read].name], places[op.name]
            lines.append(f'<path class="l" d="M{x0 + 20} {y0} L{x1 - 22} {y1}" marker-end="url(#arrow)"/>')
    for name, (x, y) in places.items():
        fill = colour(name) if name[0] in CHAINS else "#eceff2"
        lines.append(f'<rect x="{x - 20}" y="{y - 14}" width="40" height="28" rx="6" fill="{fill}"/>')
        lines.append(f'<text x="{x}" y="{y + 5}" text-anchor="middle">{name}</text>')
    lines.append('<text class="s" x="490" y="58">ops of the two chains may run at the same time;</text>')
    lines.append('<text class="s" x="490" y="74">the colour is that of the storage that an op writes</text>')
    return lines


def draw_arena(graph: Graph, way: str, left: int) -> list[str]:
    """Return the arena of one way as SVG elements: ops in the graph's order to the right, addresses upwards."""
    layout = pack_parallel(graph, way, paths=2, seconds=0.2)
    check_parallel(graph, layout)
    blocks = serial_blocks(graph, list(layout.offsets_bytes))
    floor, units = TOP + 24 + 5 * ROW, layout.height_bytes // SIZE
    added = f"{len(layout.dependences)} more dependences" if layout.dependences else "no more dependences"
    lines = [f'<text x="{left}" y="{TOP}">{TITLES[way]}</text>']
    for block in blocks:
        name, base = graph.storages[int(block.id)].name, layout.offsets_bytes[int(block.id)] // SIZE
        x, y = left + STEP * block.start, floor - ROW * (base + 1)
        width = STEP * (block.end - block.start)
        lines.append(f'<rect class="b" x="{x}" y="{y}" width="{width}" height="{ROW}" fill="{colour(name)}"/>')
        lines.append(f'<text x="{x + width / 2}" y="{y + 20}" text-anchor="middle">{name}</text>')
    lines.append(f'<path class="l" d="M{left} {floor} H{left + STEP * len(graph.ops)}"/>')
    for op in graph.ops:
        lines.append(f'<text class="s" x="{left + STEP * op.id + 8}" y="{floor + 16}">{op.name}</text>')
    lines.append(f'<text class="s" x="{left}" y="{floor + 36}">{units} MiB, {added}</text>')
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parents[1] / "docs" / "parallel_sharing.svg"
    parser.add_argument("--output", type=Path, default=default)
    output: Path = parser.parse_args().output
    graph = chains()
    elements = draw_graph(graph)
    for number, way in enumerate(WAYS):
        elements += draw_arena(graph, way, 20 + number * (PANEL + GAP))
    width, height = 20 + len(WAYS) * (PANEL + GAP), TOP + 24 + 5 * ROW + 52
    arrow = (
        '<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#57606a"/></marker>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    title = "<title>Two chains of ops, and the arena that each way of parallel-safe sharing gives</title>"
    paper = '<rect width="100%" height="100%" fill="#fff"/>'
    parts = [head, title, f"<style>{STYLE}</style><defs>{arrow}</defs>", paper, *elements, "</svg>", ""]
    write_atomically(output, "\n".join(parts).encode())
    print(output)


if __name__ == "__main__":
    main()
