"""A compiled, scheduled XLA program as data: computations of operations, in the order in which they are issued.

Reads the text that `jax.stages.Compiled.as_text()` gives, as JAX 0.10.2 to 0.12.0 print it for GPUs and TPUs.
"""

import math
import re
from dataclasses import dataclass

BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "f8e4m3fn": 8, "f8e5m2": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b(\w+)\[([\d,]*)\](\{[^{}]*\})?")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply)=%?([\w.\-]+)")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclass(frozen=True)
class Operation:
    """One instruction.

    Attributes:
        name: unique in its computation.
        opcode: as XLA prints it, such as "fusion" or "all-reduce-start".
        sizes: bytes of each array of the result, in order.
        in_memory: of each, whether it lies in the device's main memory rather than on the chip (TPU: "S(1)").
        operands: names of the operands.
        attributes: the rest of the line.
        root: it is the result of its computation.
    """

    name: str
    opcode: str
    sizes: tuple[int, ...]
    in_memory: tuple[bool, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @property
    def bytes(self) -> int:
        return sum(self.sizes)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the result's arrays that lie in main memory."""
        return sum(size for size, there in zip(self.sizes, self.in_memory, strict=True) if there)

    @property
    def scope(self) -> str:
        """Where in the source the operation comes from, as named scopes."""
        found = _SCOPE.search(self.attributes)
        return found[1] if found else ""

    def called(self) -> list[str]:
        """Names of the computations that it runs."""
        return _CALLED.findall(self.attributes)


@dataclass(frozen=True)
class Program:
    """Computations by name, each in scheduled order; `entry` is where the program begins."""

    computations: dict[str, tuple[Operation, ...]]
    entry: str

    def loop_body(self) -> tuple[Operation, ...]:
        """The body of the largest loop that the entry runs, or the entry itself if it has none."""
        bodies = [
            self.computations[found[1]]
            for op in self.computations[self.entry]
            if op.opcode == "while" and (found := re.search(r"body=%?([\w.\-]+)", op.attributes))
        ]
        return max(bodies, key=len, default=self.computations[self.entry])

    def collective(self, op: Operation) -> str | None:
        """The kind of collective that the operation runs or begins, also through an asynchronous wrapper; else None."""
        if op.opcode.endswith("-done"):
            return None
        kind = op.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            return kind
        if kind in ("async", "fusion"):
            kinds = (self.collective(inner) for name in op.called() for inner in self.computations.get(name, ()))
            return next((kind for kind in kinds if kind), None)
        return None


def parse(text: str) -> Program:
    """The program that the text of a compiled module describes.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, tuple[Operation, ...]] = {}
    entry, name, operations = None, "", []
    for line in _COMMENT.sub("", text).splitlines():
        if header := _COMPUTATION.match(line):
            name, operations = header[2], []
            entry = name if header[1] else entry
        elif line.startswith("}"):
            computations[name] = tuple(operations)
        elif found := _OPERATION.match(line):
            operations.append(_operation(found, line[found.end() :]))
    if entry is None:
        raise ValueError("the text has no ENTRY computation: it is not a compiled XLA program")
    return Program(computations, entry)


def _operation(found: re.Match[str], rest: str) -> Operation:
    opcode = _OPCODE.search(" " + rest)
    assert opcode is not None, rest
    shape, inside = rest[: opcode.start()], rest[opcode.end() - 1 :]
    end = _closing(inside)
    operands = tuple(re.findall(r"%([\w.\-]+)", inside[:end]))
    arrays = [array for array in _ARRAY.findall(shape) if array[0] in BITS]
    return Operation(
        name=found[2],
        opcode=opcode[1],
        sizes=tuple(
            BITS[dtype] * math.prod(int(d) for d in dimensions.split(",") if d) // 8 for dtype, dimensions, _ in arrays
        ),
        in_memory=tuple("S(1)" not in layout for _, _, layout in arrays),
        operands=operands,
        attributes=inside[end:],
        root=bool(found[1]),
    )


def _closing(text: str) -> int:
    """Where the bracket ends inside which `text` begins."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i
    return len(text)
