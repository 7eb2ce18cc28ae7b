"""Finds machine code that writes the registers of a product which still runs.

Warpgroup products (wgmma) run asynchronously. Until a wait for them has returned, they read a first operand in
registers, and add to their accumulators. An assembler that gives such registers to other values too soon makes code
whose results are wrong now and then, on a busy GPU first; NVIDIA mended one such error in CUDA 13.3. Sources cannot
prevent that, since they do not name registers, so the machine code of every kernel is followed along all branches.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

Registers = frozenset[int]
NONE: Registers = frozenset()
_PREDICATE = re.compile(r"!?U?P[T\d]")
_REGISTER = re.compile(r"R(\d+)\b(?!\])")
NO_RESULT = ("BAR", "BMOV", "BRX", "CALL", "DEPBAR", "FCHK", "LDGSTS", "R2P", "RET", "WARPSYNC")
"""Instructions whose first register, if they have one, is not a result; comparisons are told by their names."""
OPERAND = 4
"""Registers of a first operand: 64 rows of 32 bytes, divided among 128 threads."""
MOST_GROUPS = 8
"""Groups in flight that are told apart, so that a loop without waits has an end: the oldest become one."""


@dataclass(frozen=True)
class Product:
    """The registers of one product, or of several."""

    operands: Registers = NONE
    accumulators: Registers = NONE

    def __or__(self, other: "Product") -> "Product":
        """The registers of both."""
        return Product(self.operands | other.operands, self.accumulators | other.accumulators)


class Instruction:
    """An instruction of a listing."""

    def __init__(self, address: int, text: str) -> None:
        """Parse the text that stands at an address."""
        found = re.match(r"(?:@(\S+)\s+)?(\S+)\s*(.*)", text)
        assert found is not None, text
        self.address, self.text, self.name = address, text, found[2]
        self.operands = tuple(one.strip() for one in found[3].split(","))
        self.is_product = "GMMA" in self.name
        self.changes_flight = self.is_product or self.name.startswith("WARPGROUP.DEPBAR")
        self.read = frozenset(int(number) for number in re.findall(r"\bR(\d+)\b", found[3]))
        self.written = self._written()
        conditional = bool(found[1]) or any(_PREDICATE.fullmatch(one) for one in self.operands)
        self.may_fall_through = conditional or not self.name.startswith(("EXIT", "BRA", "RET"))

    def _written(self) -> Registers:
        if self.name.startswith(NO_RESULT) or "SETP" in self.name:
            return NONE
        first = next((one for one in self.operands if not _PREDICATE.fullmatch(one)), "")
        found = _REGISTER.match(first)
        return frozenset(range(int(found[1]), int(found[1]) + self._count())) if found else NONE

    def _count(self) -> int:
        """How many registers it writes."""
        name = self.name
        if self.is_product:
            columns = re.search(r"\.64x(\d+)x", name)
            assert columns is not None, self.text
            return int(columns[1]) // 2
        if ".128" in name or name.startswith("HMMA") or re.match(r"LDSM.*\.4$", name):
            return 4
        wide = ".64" in name or "WIDE" in name or re.match(r"LDSM.*\.2$", name)
        return 2 if wide or (name.startswith("CS2R") and ".32" not in name) else 1

    @property
    def product(self) -> Product:
        """The registers of a product."""
        first = _REGISTER.match(self.operands[1])
        return Product(frozenset(range(int(first[1]), int(first[1]) + OPERAND)) if first else NONE, self.written)

    @property
    def target(self) -> int:
        """Where a branch goes."""
        return int(self.operands[-1], 16)


class Flight(NamedTuple):
    """The products in flight: groups that a wait counts, from the oldest on, and those since the last group."""

    groups: tuple[Product, ...] = ()
    open: Product = Product()

    @property
    def all(self) -> Product:
        """The registers of all of them."""
        found = self.open
        for group in self.groups:
            found |= group
        return found

    def after(self, step: Instruction) -> "Flight":
        """What is in flight after a product or a wait."""
        if step.is_product:
            joined = self.open | step.product
            if "gsb0" not in step.operands:
                return Flight(self.groups, joined)
            groups = (*self.groups, joined)
            return Flight(groups if len(groups) <= MOST_GROUPS else (groups[0] | groups[1], *groups[2:]))
        pending = int(step.operands[-1], 16)  # of a wait
        return Flight(self.groups[max(0, len(self.groups) - pending) :], self.open)


def disassembled(tool: Path, cubin: bytes) -> str:
    """The listing of a cubin, by `cuobjdump`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def functions(listing: str) -> Iterator[tuple[str, list[Instruction]]]:
    """The functions of a listing, with their instructions."""
    for part in re.split(r"^\s*Function : ", listing, flags=re.MULTILINE)[1:]:
        lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", part)
        yield part.split(None, 1)[0], [Instruction(int(address, 16), text) for address, text in lines]


def early_uses(code: list[Instruction]) -> list[str]:
    """The instructions that write registers of a product which may still run, or read its accumulators."""
    places = {step.address: place for place, step in enumerate(code)}
    # What is in flight is the same for most instructions, so it gets a number, and its registers are joined once.
    flights, numbers = [Flight()], {Flight(): 0}
    busy = [Product()]
    seen: set[tuple[int, int]] = set()
    found: dict[int, str] = {}
    pending = [(0, 0)] if code else []
    while pending:
        place, number = pending.pop()
        if place >= len(code) or (place, number) in seen:
            continue
        seen.add((place, number))
        step = code[place]
        reason = _conflict(step, busy[number])
        if reason:
            found[step.address] = f"{step.address:#x} {step.text}: {reason}"
        if step.changes_flight:
            after = flights[number].after(step)
            number = numbers.setdefault(after, len(flights))
            if number == len(flights):
                flights.append(after)
                busy.append(after.all)
        if step.may_fall_through:
            pending.append((place + 1, number))
        if step.name.startswith(("BRA", "CALL")):
            pending.append((places[step.target], number))
        elif step.name.startswith(("BRX", "JMX", "JMP")):
            found[step.address] = f"{step.address:#x} {step.text}: a jump that is not followed"
    return [found[address] for address in sorted(found)]


def _conflict(step: Instruction, busy: Product) -> str:
    """Why an instruction must not be issued while products with these registers run; empty if it may."""
    written = step.written
    if written & busy.operands:
        return f"writes R{min(written & busy.operands)}, an operand of a product that may still run"
    if step.is_product:
        # Products add to the same accumulators in order.
        early = step.product.operands & busy.accumulators
    else:
        early = (written | step.read) & busy.accumulators
    return f"uses R{min(early)}, an accumulator of a product that may still run" if early else ""
