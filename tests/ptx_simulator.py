# SPDX-License-Identifier: Apache-2.0
"""Runs the PTX of a kernel on the CPU, all threads of a cluster in NumPy: what the emitted words do, without a GPU.

It knows the integer instructions that the words of `pallas_kernels/indexed.py` and `digits.py` compile to: loads,
stores and atomics in global and shared memory, also of other blocks of the cluster, votes, shuffles and barriers. It
knows no tensor cores, copy engine or floating point. Memory is sequentially consistent; warps run in a random order, a
random part of them at a time, so that a missing barrier shows. Shared memory begins with random bytes; accesses out of
bounds, misaligned ones, and different values stored to one place at once are errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

U32 = np.uint64(0xFFFFFFFF)
U64 = np.uint64(0xFFFFFFFFFFFFFFFF)
SHARED_BYTES = 227 * 1024
RUNNING, AT_BARRIER, AT_CLUSTER_BARRIER, ENDED, AT_WARP = range(5)
_FIRST_ADDRESS = 4096  # of global memory


def _signed(values: np.ndarray, bits: int) -> np.ndarray:
    return values.astype(np.uint32).view(np.int32).astype(np.int64) if bits == 32 else values.view(np.int64)


def _unsigned(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int64).view(np.uint64)


class Program:
    """A kernel's instructions, from the text of one entry function.

    Attributes:
      instructions: (operation, arguments, None or (predicate, negated)).
      labels: number of the instruction behind each.
      blocks, threads: of a cluster, and of a block.
    """

    def __init__(self, ptx: str) -> None:
        cluster = re.search(r"\.reqnctapercluster (\d+)", ptx)
        threads = re.search(r"\.maxntid (\d+)", ptx)
        assert threads
        self.blocks, self.threads = int(cluster[1]) if cluster else 1, int(threads[1])
        self.instructions: list[tuple[str, list[str], tuple[str, bool] | None]] = []
        self.labels: dict[str, int] = {}
        body = re.sub(r"//[^\n]*", "", ptx[ptx.index("{\n", threads.end()) :])
        for line in re.split(r"(?<=;)|\n", body.split(".section")[0]):
            line = line.strip()
            if label := re.fullmatch(r"(\$?\w+):", line):
                self.labels[label[1]] = len(self.instructions)
            elif line.endswith(";") and not line.startswith("."):
                found = re.fullmatch(r"(?:@(!?)(%p\d+)\s+)?(\S+?)(?:\s+(.*))?;", line)
                assert found, line
                args = [a.strip() for a in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", found[4] or "")]
                self.instructions.append((found[3], args, (found[2], found[1] == "!") if found[2] else None))

    def run(self, operands: Sequence[np.ndarray], clusters: int, seed: int = 0) -> None:
        """Runs all clusters, one after the other; `operands`, in the order of the PTX's, are changed in place."""
        starts, size = [], _FIRST_ADDRESS
        for operand in operands:
            starts.append(size)
            size += -(-operand.nbytes // 256) * 256 + 256
        memory, valid = np.zeros(size, np.uint8), np.zeros(size, bool)
        for start, operand in zip(starts, operands, strict=True):
            memory[start : start + operand.nbytes] = operand.reshape(-1).view(np.uint8)
            valid[start : start + operand.nbytes] = True
        for number in range(clusters):
            _Cluster(self, number, memory, valid, starts, np.random.default_rng([seed, number])).run()
        for start, operand in zip(starts, operands, strict=True):
            operand.reshape(-1).view(np.uint8)[:] = memory[start : start + operand.nbytes]


class _Cluster:
    """The threads of one cluster: registers by name, an instruction number and a state each."""

    def __init__(self, program: Program, number: int, memory: Any, valid: Any, starts: Any, rng: Any) -> None:
        self.program, self.memory, self.valid, self.starts, self.rng = program, memory, valid, starts, rng
        count = self.count = program.blocks * program.threads
        self.block = np.arange(count) // program.threads
        self.special = {
            "%tid.x": np.arange(count) % program.threads,
            "%ctaid.x": number * program.blocks + self.block,
            "%cluster_ctaid.x": self.block,
            "%lanemask_lt": (np.uint64(1) << (np.arange(self.count, dtype=np.uint64) % np.uint64(32))) - np.uint64(1),
        }
        self.shared = rng.integers(0, 256, program.blocks * SHARED_BYTES).astype(np.uint8)
        self.registers: dict[str, np.ndarray] = {}
        self.at, self.state = np.zeros(count, np.int64), np.zeros(count, np.int8)
        self.arrived, self.waited = np.zeros(count, np.int64), np.zeros(count, np.int64)

    def run(self) -> None:
        left, some = 0, np.ones(self.count, bool)
        while True:
            running = self.state == RUNNING
            if not running.any():
                if (self.state == ENDED).all():
                    return
                self._release()
                continue
            left -= 1
            while left <= 0 or not (running & some).any():
                left = int(self.rng.integers(1, 400))
                some = np.repeat(self.rng.random(self.count // 32) < self.rng.choice([0.05, 0.3, 0.6]), 32)
                left = left if (running & some).any() else 0
            self._step(running & some)

    def _release(self) -> None:
        """Lets threads pass the barriers at which all have arrived."""
        passed = False
        for block in range(self.program.blocks):
            alive = (self.block == block) & (self.state != ENDED)
            if alive.any() and (self.state[alive] == AT_BARRIER).all():
                self.state[alive], passed = RUNNING, True
        waiting = self.state == AT_CLUSTER_BARRIER
        if waiting.any() and (self.arrived >= self.waited[waiting].max()).all():
            self.state[waiting], passed = RUNNING, True
        assert passed, f"deadlock, threads by state: {np.bincount(self.state)}"

    def _step(self, running: np.ndarray) -> None:
        """One instruction of the threads that are furthest behind."""
        number = self.at[running].min()
        operation, args, predicate = self.program.instructions[number]
        kind = operation.split(".")
        who = np.nonzero(running & (self.at == number))[0]
        if kind[0] in ("shfl", "vote", "redux", "elect", "bar", "barrier"):  # need the whole warp
            assert predicate is None
            who = np.nonzero((running | (self.state == AT_WARP)) & (self.at == number))[0]
            whole = np.bincount(who // 32, minlength=self.count // 32)[who // 32] == 32
            self.state[who[~whole]] = AT_WARP
            who = who[whole]
            self.state[who] = RUNNING
        self.at[who] += 1
        if predicate is not None:
            who = who[self.registers[predicate[0]][who] ^ predicate[1]]
        if not who.size:
            return
        if kind[0] == "bra":
            self.at[who] = self.program.labels[args[0]]
        elif kind[0] == "ret":
            self.state[who] = ENDED
        elif kind[0] == "bar":
            self.state[who] = AT_BARRIER
        elif kind[:3] == ["barrier", "cluster", "arrive"]:
            self.arrived[who] += 1
        elif kind[:3] == ["barrier", "cluster", "wait"]:
            self.waited[who] += 1
            self.state[who] = AT_CLUSTER_BARRIER
        elif kind[0] in ("ld", "st", "atom"):
            self._access(operation, args, who)
        elif kind[0] != "fence":
            self._compute(kind, args, who)

    def _get(self, name: str, who: np.ndarray) -> np.ndarray:
        if name in self.special:
            return self.special[name][who].astype(np.uint64)
        if name.startswith("%"):
            return self.registers[name][who]
        return np.full(who.size, 0 if name.startswith("__dynamic_shmem__") else int(name, 0) & int(U64), np.uint64)

    def _put(self, name: str, who: np.ndarray, value: Any) -> None:
        if name not in self.registers:
            self.registers[name] = np.zeros(self.count, bool if name.startswith("%p") else np.uint64)
        self.registers[name][who] = value

    def _access(self, operation: str, args: list[str], who: np.ndarray) -> None:
        store = operation.startswith("st")
        place, data = (args[0], args[1]) if store else (args[1], args[0])
        if operation.startswith("ld.param"):
            number = re.search(r"_param_(\d+)", place)
            assert number
            self._put(data, who, self.starts[int(number[1])])
            return
        names = [n.strip() for n in data.strip("{}").split(",")]
        assert operation.endswith(("32", "16")), operation
        one = 2 if operation.endswith("16") else 4  # bytes
        size = one * len(names)
        found = re.fullmatch(r"\[([^+\]]+)(?:\+(-?\d+))?\]", place)
        assert found, place
        address = self._get(found[1], who).astype(np.int64) + int(found[2] or 0)
        if "shared" in operation:
            block, address = (
                (address >> 32, address & 0xFFFFFFFF) if "cluster" in operation else (self.block[who], address)
            )
            assert ((address >= 0) & (address + size <= SHARED_BYTES)).all(), f"{operation} {args}: out of bounds"
            ended = (self.state.reshape(self.program.blocks, -1) == ENDED).all(1)
            assert not ended[block].any(), "shared memory of a block that has ended"
            memory, address = self.shared, address + block * SHARED_BYTES
        else:
            inside = np.clip(address, 0, self.valid.size - size)
            assert (inside == address).all() and self.valid[address].all() and self.valid[address + size - 1].all(), (
                f"{operation} {args}: out of bounds"
            )
            memory = self.memory
        assert not (address % size).any(), f"{operation} {args}: misaligned"
        words, word = memory.view(np.uint16 if one == 2 else np.uint32), address // one
        if operation.startswith("atom"):
            assert operation.endswith((".add.u32", ".or.b32"))
            change = np.add if operation.endswith("add.u32") else np.bitwise_or
            change.at(words, word, self._get(args[2], who).astype(np.uint32))
            return
        for i, name in enumerate(names):
            if not store:
                loaded = words[word + i]
                if operation.endswith("s16"):
                    loaded = loaded.view(np.int16).astype(np.int32).view(np.uint32)
                self._put(name, who, loaded.astype(np.uint64))
                continue
            value = self._get(name, who).astype(words.dtype)
            words[word + i] = value
            assert (words[word + i] == value).all(), f"{operation} {args}: several values for one place"

    def _compute(self, kind: list[str], args: list[str], who: np.ndarray) -> None:
        name, typed = kind[0], kind[-1]
        bits = 64 if typed.endswith("64") else 32
        if name == "elect":
            self._put(args[0].split("|")[1], who, who % 32 == 0)
            return
        values = [self._get(a, who) for a in args[1:]]
        if bits == 32 and typed != "pred":
            values = [v if v.dtype == bool else v & U32 for v in values]
        if name in ("shfl", "redux", "vote"):
            self._put(args[0], who, _WARP[name](kind, [v.reshape(-1, 32) for v in values]).reshape(-1))
        elif name == "mapa":
            self._put(args[0], who, values[0] | (values[1] << np.uint64(32)))
        elif name == "setp":
            left, right = (_signed(v, bits) if typed[0] == "s" else v for v in values)
            self._put(args[0], who, getattr(np, _COMPARE[kind[1]])(left, right))
        elif typed == "pred":
            values = [v.astype(bool) for v in values]
            self._put(args[0], who, {"or": np.logical_or, "and": np.logical_and, "not": np.logical_not}[name](*values))
        elif name == "selp":
            self._put(args[0], who, np.where(values[2], values[0], values[1]) & (U32 if bits == 32 else U64))
        else:
            wide = bits == 64 or kind[1] == "wide" or (name == "cvt" and kind[1].endswith("64"))
            self._put(args[0], who, _ARITHMETIC[name](kind, bits, values) & (U64 if wide else U32))


_COMPARE = {"eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal"}


def _shuffle(kind: list[str], values: list[np.ndarray]) -> np.ndarray:
    lane, by = np.arange(32), values[1].astype(np.int64)
    source = {"up": lane - by, "bfly": lane ^ by, "idx": by & 31}[kind[2]]
    return np.take_along_axis(values[0], np.where((source < 0) | (source > 31), lane, source), 1)


def _redux(kind: list[str], values: list[np.ndarray]) -> np.ndarray:
    assert kind[2] == "add"
    return np.repeat(values[0].sum(1, keepdims=True, dtype=np.uint64) & U32, 32, 1)


def _vote(kind: list[str], values: list[np.ndarray]) -> np.ndarray:
    assert kind[2] == "ballot"
    return np.repeat((values[0].astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1, keepdims=True), 32, 1)


_WARP: dict[str, Callable[[list[str], list[np.ndarray]], np.ndarray]] = {
    "shfl": _shuffle,
    "redux": _redux,
    "vote": _vote,
}


def _signed_of(kind: list[str], bits: int, values: list[np.ndarray], function: Any) -> np.ndarray:
    """A function of signed or unsigned numbers, as the type says."""
    return _unsigned(function(*(_signed(v, bits) for v in values))) if kind[-1][0] == "s" else function(*values)


def _multiply(kind: list[str], bits: int, values: list[np.ndarray]) -> np.ndarray:
    if kind[1] == "wide":
        return _signed_of(kind, 32, [v & U32 for v in values], lambda a, b: a * b)
    if kind[1] == "hi":
        assert kind[2] == "u32"
        return values[0] * values[1] >> np.uint64(32)
    return values[0] * values[1]


def _shift_right(kind: list[str], bits: int, values: list[np.ndarray]) -> np.ndarray:
    by = np.minimum(values[1] & U32, np.uint64(63))
    if kind[-1][0] == "s":
        return _unsigned(_signed(values[0], bits) >> by.astype(np.int64))
    return np.where(by < bits, values[0] >> by, 0)


def _shift_left(kind: list[str], bits: int, values: list[np.ndarray]) -> np.ndarray:
    by = np.minimum(values[1] & U32, np.uint64(63))
    return np.where(by < bits, values[0] << by, 0)


def _convert(kind: list[str], bits: int, values: list[np.ndarray]) -> np.ndarray:
    return _unsigned(_signed(values[0], 32)) if kind[2] == "s32" else values[0] & (U32 if kind[2] == "u32" else U64)


def _field(kind: list[str], bits: int, values: list[np.ndarray]) -> np.ndarray:
    assert kind[1] == "u32"
    return (values[0] >> values[1]) & ((np.uint64(1) << values[2]) - np.uint64(1))


_ARITHMETIC: dict[str, Callable[[list[str], int, list[np.ndarray]], np.ndarray]] = {
    "mov": lambda kind, bits, v: v[0],
    "cvta": lambda kind, bits, v: v[0],
    "add": lambda kind, bits, v: v[0] + v[1],
    "sub": lambda kind, bits, v: v[0] - v[1],
    "mad": lambda kind, bits, v: v[0] * v[1] + v[2],
    "and": lambda kind, bits, v: v[0] & v[1],
    "or": lambda kind, bits, v: v[0] | v[1],
    "xor": lambda kind, bits, v: v[0] ^ v[1],
    "not": lambda kind, bits, v: ~v[0],
    "popc": lambda kind, bits, v: np.bitwise_count(v[0]).astype(np.uint64),
    "min": lambda kind, bits, v: _signed_of(kind, bits, v, np.minimum),
    "max": lambda kind, bits, v: _signed_of(kind, bits, v, np.maximum),
    "mul": _multiply,
    "shl": _shift_left,
    "shr": _shift_right,
    "cvt": _convert,
    "bfe": _field,
    "clz": lambda kind, bits, v: np.array([bits - int(x).bit_length() for x in v[0]], np.uint64),
    "brev": lambda kind, bits, v: np.array([int(f"{int(x):032b}"[::-1], 2) for x in v[0]], np.uint64),
}
