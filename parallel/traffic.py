"""Bytes that operations of a compiled program move through a device's memory."""

from flax import nnx

from laneformer_jax.cache import cache_bytes
from parallel import mesh as specs
from parallel.engine import MeshEngine
from parallel.hlo import Operation, Program

SLICES = ("dynamic-slice", "slice", "gather")
IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # operand that is written into operand 0
VIEWS = ("bitcast", "reshape", "copy", "convert", "transpose")
# Operations that launch nothing on a device.
FREE = (
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "add-dependency",
)  # fmt: skip


def is_kernel(op: Operation) -> bool:
    """The operation launches something on the device; the end of an asynchronous one does not."""
    return op.opcode not in FREE and not op.opcode.endswith(("-done", "-update"))


def moved_bytes(program: Program, op: Operation, local: dict[str, Operation]) -> int:
    """Bytes that a kernel reads and writes, each operand once; of a buffer that it slices or updates, only that part.

    Args:
        program: that the operation is part of.
        op: the kernel.
        local: the operations of its computation by name.
    """
    if op.opcode.endswith("-done") and (source := _copied(op, local)):
        return op.bytes * any(source.in_memory) + op.memory_bytes
    if not is_kernel(op) or op.opcode.endswith("-start"):
        return 0
    if op.opcode == "fusion":
        return _fused_bytes({inner.name: inner for name in op.called() for inner in program.computations.get(name, ())})
    read = [local[name].memory_bytes for name in op.operands if name in local]
    if op.opcode in SLICES:
        return min(read[0], op.bytes) + op.memory_bytes
    if op.opcode in IN_PLACE:
        return 2 * min(op.memory_bytes, local[op.operands[IN_PLACE[op.opcode]]].bytes)
    return sum(read) + op.memory_bytes


def _copied(done: Operation, local: dict[str, Operation]) -> Operation | None:
    """What an asynchronous operation copies or slices."""
    start = local[done.operands[0]]
    return local.get(start.operands[0]) if start.operands else None


def _fused_bytes(fused: dict[str, Operation]) -> int:
    users: dict[str, list[Operation]] = {name: [] for name in fused}
    for op in fused.values():
        for name in op.operands:
            if name in users:
                users[name].append(op)

    def read(op: Operation) -> int:
        parts = []
        for user in users[op.name]:
            if user.opcode in VIEWS and user.bytes >= op.bytes:
                parts.append(read(user))
            elif user.opcode in SLICES and user.operands[0] == op.name:
                parts.append(user.bytes)
            elif user.opcode in IN_PLACE and user.operands[0] == op.name:
                parts.append(0)
            else:
                return op.bytes
        return min(op.bytes, sum(parts))

    def written(op: Operation) -> int:
        if op.opcode == "tuple":
            return sum(written(fused[name]) for name in op.operands)
        if op.opcode in VIEWS and op.operands[0] in fused:
            inner = fused[op.operands[0]]
            return written(inner) if inner.opcode in (*VIEWS, *IN_PLACE) else op.memory_bytes
        if op.opcode in IN_PLACE:
            return fused[op.operands[IN_PLACE[op.opcode]]].bytes
        return op.memory_bytes

    inputs = sum(read(op) for op in fused.values() if op.opcode == "parameter" and op.memory_bytes)
    return inputs + sum(written(op) for op in fused.values() if op.root)


def least_bytes(engine: MeshEngine, rows: int, capacity: int) -> tuple[int, int]:
    """Bytes that one device must read for a token: its weights once, and the cache of `capacity` tokens.

    Of the embedding only a row is read, and the device's share of it where it serves as the head.

    Returns:
        the whole token's, and those of one layer on average.
    """
    devices = engine.mesh.shape[specs.LANES]
    config, layers, rest = engine.config, 0, 0
    for path, leaf in nnx.to_flat_state(engine.state):
        size = leaf.size * engine.dtype.itemsize
        held = size // devices if specs.LANES in specs.parameter_spec(leaf, engine.mesh) else size
        if path[0] == "blocks":
            layers += held
        elif path[0] == "embedding":
            rest += rows * size // config.vocab_size + (size // devices if config.tie_embeddings else 0)
        else:
            rest += held
    layers += cache_bytes(config, rows, capacity, engine.dtype) // devices
    return layers + rest, layers // config.num_layers
