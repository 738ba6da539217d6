"""Optimised HLO as text -> the instructions that write memory of their own, and from where they are reached.

What a fusion computes inside stays in registers; its result is one instruction of the computation that calls it. So the
instructions that matter are those of ENTRY and of what it reaches through loops, conditionals and calls, not through fusions.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_ITEM_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64} | {
    f"{kind}{bits}": bits for kind in "su" for bits in (4, 8, 16, 32, 64)
}
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z0-9\-]*)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")
_TARGET = re.compile(r'\bcustom_call_target="([^"]*)"')
_OP_NAME = re.compile(r'\bop_name="([^"]*)"')
_OPERAND = re.compile(r"%([\w.\-]+)")


@dataclass(frozen=True, slots=True)
class Shape:
    """One array: `space` is 0 in device memory, other numbers are memory on the chip."""

    dtype: str
    dims: tuple[int, ...]
    space: int

    @property
    def num_bytes(self) -> int:
        """Without padding."""
        return math.prod(self.dims) * _ITEM_BITS.get(self.dtype, 0) // 8


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # several for a tuple
    called: tuple[str, ...]  # computations
    operands: tuple[str, ...]  # names; of a parameter its number
    is_root: bool
    target: str  # of a custom call
    op_name: str  # what it was made from, in jax's words


@dataclass(frozen=True, slots=True)
class Placed:
    """An instruction that writes memory of its own. `num_loops`: `while`s around it; `optional`: inside a conditional."""

    instruction: Instruction
    num_loops: int
    optional: bool


@dataclass(frozen=True, slots=True)
class Result:
    """One array that an instruction writes: `opcode` makes it, of a fusion the one inside, from `sources`."""

    shape: Shape
    opcode: str
    sources: tuple[Shape, ...] = ()  # of a fusion alone


@dataclass(frozen=True)
class Module:
    """All computations."""

    entry: str
    aliased: frozenset[int]  # numbers of arguments whose memory a result takes over
    computations: dict[str, dict[str, Instruction]]

    @property
    def aliased_bytes(self) -> int:
        """Of the arguments on one device whose memory a result takes over, without padding."""
        arguments = (each for each in self.computations[self.entry].values() if each.opcode == "parameter")
        return sum(each.shapes[0].num_bytes for each in arguments if int(each.operands[0]) in self.aliased)

    def walk(self) -> Iterator[Placed]:
        """Everything reached from ENTRY except through fusions and reductions."""
        todo, seen = [(self.entry, 0, False)], set()
        while todo:
            name, loops, optional = todo.pop()
            if (name, loops, optional) in seen:
                continue
            seen.add((name, loops, optional))
            for instruction in self.computations.get(name, {}).values():
                yield Placed(instruction, loops, optional)
                if instruction.opcode == "while":
                    todo += [(called, loops + 1, optional) for called in instruction.called]
                elif instruction.opcode == "conditional":
                    todo += [(called, loops, True) for called in instruction.called]
                elif instruction.opcode in ("call", "async-start"):
                    todo += [(called, loops, optional) for called in instruction.called]

    def parts(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instruction and, of a fusion, those inside: XLA:GPU puts a sort into a fusion of its own."""
        yield instruction
        if instruction.opcode == "fusion":
            for called in instruction.called:
                yield from self.computations.get(called, {}).values()

    def results(self, instruction: Instruction) -> Iterator[Result]:
        """Arrays that it writes, first ones first: several of a fusion alone, whose roots are seen through bitcasts."""
        inside = (
            self.computations.get(instruction.called[0], {}) if instruction.opcode == "fusion" and instruction.called else {}
        )
        root = next((each for each in inside.values() if each.is_root), None)
        if root is None:
            yield from (Result(shape, instruction.opcode) for shape in instruction.shapes[:1])
            return
        made = [inside[name] for name in root.operands if name in inside] if root.opcode == "tuple" else [root]
        for shape, maker in zip(instruction.shapes, made, strict=False):
            while maker.opcode in ("bitcast", "reshape") and maker.operands and maker.operands[0] in inside:
                maker = inside[maker.operands[0]]
            sources = (inside[name].shapes[:1] for name in maker.operands if name in inside)
            yield Result(shape, maker.opcode, tuple(itertools.chain.from_iterable(sources)))


def parse(text: str) -> Module:
    """Read what `Compiled.as_text()` prints."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    lines = text.splitlines()
    aliased = frozenset(int(number) for number in _ALIAS.findall(lines[0])) if lines else frozenset()
    for line in lines:
        if (head := _HEAD.match(line)) is not None:
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif current is not None and (match := _INSTRUCTION.match(line)) is not None:
            current[match[2]] = _instruction(match)
        elif line.startswith("}"):
            current = None
    assert entry, "no ENTRY in the compiled program's text"
    return Module(entry, aliased, computations)


def _instruction(match: re.Match[str]) -> Instruction:
    arguments, _, attributes = match[5].partition("), ")
    called = _CALLED.findall(attributes)
    for group in _BRANCHES.findall(attributes):
        called += [name.strip().lstrip("%") for name in group.split(",") if name.strip()]
    return Instruction(
        name=match[2],
        opcode=match[4],
        shapes=tuple(_shape(*found) for found in _SHAPE.findall(match[3])),
        called=tuple(called),
        operands=(arguments.partition(")")[0],) if match[4] == "parameter" else tuple(_OPERAND.findall(arguments)),
        is_root=match[1] is not None,
        target=_first(_TARGET, attributes),
        op_name=_first(_OP_NAME, attributes),
    )


def _first(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return "" if found is None else found[1]


def _shape(dtype: str, dims: str, layout: str) -> Shape:
    space = _SPACE.search(layout)
    return Shape(dtype, tuple(int(size) for size in dims.split(",") if size), int(space[1]) if space else 0)
