"""
Placement of many probes in one module. Each instruction gets the first plan whose bytes and addresses are free.

Sites are planned from the highest address downwards. So a punned jump, which shares bytes with the following code, sees
the final jumps in that code. Each jump is decoded at its address before it is accepted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dprobes.platform.x86.patches.displaced_code import displaced, jump
from dprobes.platform.x86.patches.patch_plans import (
    JUMP_SIZE,
    SHORT_JUMP_SIZE,
    Method,
    Plan,
    Reach,
    Refusal,
    Site,
    look_at,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from dprobes.platform.x86.patches.branch_targets import CodeBytes, ModuleCode
    from dprobes.platform.x86.patches.trampoline_space import AddressSpace

__all__ = ["MANY", "Placement", "Placer", "Shared", "Write", "leads_to", "writes_of"]

_PREFIX = b"\x2e"
"""A segment prefix, which has no effect on a jump (Intel SDM volume 1, 3.3.4)."""
_SHORT_JUMP = b"\xeb"


class Write(NamedTuple):
    """Bytes of code to be written at an address of the process."""

    address: int
    data: bytes


def writes_of(plan: Plan, reach: Reach, trampoline: int) -> tuple[Write, ...]:
    """
    Return the writes that insert a planned jump to ``trampoline``, in order.

    ``reach`` is the reach of the plan that contains the trampoline. The last write makes the others reachable.
    """
    if plan.padding is None:
        code = _PREFIX * reach.prefixes + jump(plan.start + reach.prefixes, trampoline)
        return (Write(plan.start, code[: plan.written]),)
    distance = plan.padding - plan.start - SHORT_JUMP_SIZE
    code = _SHORT_JUMP + distance.to_bytes(1, "little", signed=True)
    return Write(plan.padding, jump(plan.padding, trampoline)), Write(plan.start, code[: plan.written])


def leads_to(code: CodeBytes, address: int) -> int | None:
    """
    Return the target of the ``jmp rel32`` at an address, or at the target of a short jump at that address.

    Return None if there is no jump.
    """
    from iced_x86 import Code, Decoder

    place = address - code.start
    decoder = Decoder(64, bytes(code.current[place : place + 4 + JUMP_SIZE]), ip=address)
    instruction = decoder.decode()
    if instruction.code == Code.JMP_REL8_64:
        place = instruction.near_branch_target - code.start
        if not 0 <= place < len(code.current):
            return None
        decoder = Decoder(64, bytes(code.current[place : place + JUMP_SIZE]), ip=code.start + place)
        instruction = decoder.decode()
    return instruction.near_branch_target if instruction.code == Code.JMP_REL32_64 else None


MANY = 2000
"""Number of sites above which windows are tried before punned jumps, which need a page each."""


class Placement(NamedTuple):
    """
    Plan with an address for its trampoline of ``room`` bytes, and its writes, in order.

    The code up to the address ``relied_on`` (excluded) must not change. If ``traps`` is False, no thread may reach the
    middle of the jump (``Plan.landings``).
    """

    plan: Plan
    trampoline: int
    writes: tuple[Write, ...]
    relied_on: int
    room: int = 0
    traps: bool = True


class Shared(NamedTuple):
    """Instruction at ``site`` that ``placement`` has displaced: its handler is in the same trampoline."""

    site: int
    placement: Placement


class Placer:
    """
    Placer of jumps and trampolines for sites of a module. A trampoline has ``room`` bytes by default.

    If the instruction at a site is displaced for another site's jump, both share a trampoline. This is avoided where
    possible.
    """

    def __init__(self, module: ModuleCode, space: AddressSpace, room: int) -> None:
        self._module = module
        self._space = space
        self._room = room
        self._displaced: dict[int, Placement] = {}

    def place(
        self,
        sites: Iterable[int],
        *,
        windows_first: bool | None = None,
        room: int | None = None,
        others: Collection[int] = (),
    ) -> Iterator[Placement | Shared | Refusal]:
        """
        Iterate over the results for sites, from the highest address downwards.

        Windows are tried before punned jumps if ``windows_first`` is True, or if it is None and there are more than
        ``MANY`` sites. Jumps avoid ``others``. These are sites that may get a breakpoint instead of a jump, which
        changes a byte.
        """
        wanted = sorted(set(sites), reverse=True)
        if windows_first is None:
            windows_first = len(wanted) > MANY
        if not (isinstance(others, frozenset) and others.issuperset(wanted)):
            others = frozenset((*wanted, *others))
        room = self._room if room is None else room
        for address in wanted:
            placed = self._displaced.get(address)
            yield (
                Shared(address, placed)
                if placed is not None
                else self._placed(address, room, others, windows_first=windows_first)
            )

    def remove(self, placement: Placement) -> bool:
        """Restore the bytes of a placement. Return False, and change nothing, if another jump relies on them."""
        code = self._module.around(placement.plan.start)
        assert code is not None
        if any(code.is_relied_on(write.address, len(write.data)) for write in placement.writes):
            return False
        for write in placement.writes:
            code.restore(write.address, len(write.data))
        end = placement.plan.start + placement.plan.written
        code.rely(end, placement.relied_on, -1)
        for address in (placement.plan.site, *placement.plan.boundaries):
            self._displaced.pop(address, None)
        if placement.plan.method is Method.PUN:
            self._space.release(placement.trampoline, placement.room)
        return True

    def enlarge(self, placement: Placement, room: int) -> Placement | None:
        """
        Move a placement to an address with more room; it must not be a punned jump.

        Return None if there is no such address, or if another jump relies on the placement's bytes.
        """
        plan = placement.plan
        assert plan.method is not Method.PUN, "it displaces one instruction, and has no other address"
        code = self._module.around(plan.start)
        assert code is not None
        if any(code.is_relied_on(write.address, len(write.data)) for write in placement.writes):
            return None
        (reach,) = plan.reaches
        traps, trampoline = True, self._trampoline(plan, reach, room)
        if trampoline is None:
            traps, trampoline = False, self._trampoline(plan, reach, room, traps=False)
        if trampoline is None:
            return None
        writes = writes_of(plan, reach, trampoline)
        for write in writes:
            code.write(write.address, write.data)
        return self._note(Placement(plan, trampoline, writes, placement.relied_on, room, traps))

    def _placed(self, address: int, room: int, others: Collection[int], *, windows_first: bool) -> Placement | Refusal:
        site = look_at(self._module, address)
        if isinstance(site, str):
            return Refusal(address, site)
        obstacles: list[str] = []
        crossing: list[Plan] = []
        untrapped: list[Plan] = []
        for plan in self._plans(site, others, obstacles, windows_first=windows_first):
            if plan.landings:
                untrapped.append(plan)
            if plan.crosses_page:
                crossing.append(plan)
            elif (placed := self._try(site, plan, room, others, obstacles)) is not None:
                return placed
        for plan in crossing:
            if (placed := self._try(site, plan, room, others, obstacles)) is not None:
                return placed
        for plan in untrapped:
            if (placed := self._try(site, plan, room, others, obstacles, traps=False)) is not None:
                return placed
        return Refusal(address, "; ".join(dict.fromkeys(obstacles)))

    @staticmethod
    def _plans(site: Site, others: Collection[int], obstacles: list[str], *, windows_first: bool) -> Iterator[Plan]:
        """Iterate over the plans of a site in the order in which they are tried; append the reasons against others."""
        found = site.jump()
        if isinstance(found, Plan):
            yield found
        else:
            obstacles.append(found)
        for is_window in (windows_first, not windows_first):
            found = site.window(others) if is_window else site.puns()
            if not isinstance(found, Plan):
                obstacles.append(found)
            elif found.method is not Method.WINDOW or len(found.sizes) > 1:
                yield found
        yield from site.shorts()
        for avoided in (others, ()):
            found = site.lead(avoided)
            if isinstance(found, Plan):
                yield found
            else:
                obstacles.append(found)

    def _try(
        self, site: Site, plan: Plan, room: int, others: Collection[int], obstacles: list[str], *, traps: bool = True
    ) -> Placement | None:
        """
        Reserve the bytes of a plan's jump, and an address for its trampoline of ``room`` bytes.

        Return None, and add the reason to ``obstacles``, if either is taken. The same holds if breakpoints at
        ``others`` change bytes that the jump would share. ``traps`` is as in ``Placement``.
        """
        code = site.code
        if code.is_written(plan.start, plan.written):
            obstacles.append("its bytes belong to the jump of another probe")
            return None
        if code.is_relied_on(plan.start, plan.written):
            obstacles.append("the punned jump of another probe relies on its bytes")
            return None
        end = plan.start + plan.written
        near = range(end, end + JUMP_SIZE)
        breakpoints = {place for place in near if place in others and place not in self._displaced}
        reaches = [reach for reach in plan.reaches if breakpoints.isdisjoint(range(end, plan.end(reach)))]
        if not reaches:
            obstacles.append("a breakpoint changes bytes that its jump would share")
            return None
        for reach in reaches:
            trampoline = self._trampoline(plan, reach, room, traps=traps)
            if trampoline is None:
                continue
            writes = writes_of(plan, reach, trampoline)
            for write in writes:
                code.write(write.address, write.data)
            code.rely(end, plan.end(reach))
            assert leads_to(code, plan.start) == trampoline, f"the jump at {plan.start:#x} leads elsewhere"
            return self._note(Placement(plan, trampoline, writes, plan.end(reach), room, traps))
        obstacles.append(
            "no address that punned jumps of its bytes lead to is free"
            if plan.method is Method.PUN
            else "no memory near it is free"
        )
        return None

    def _note(self, placed: Placement) -> Placement:
        for address in (placed.plan.site, *placed.plan.boundaries):
            self._displaced[address] = placed
        return placed

    def _trampoline(self, plan: Plan, reach: Reach, room: int, *, traps: bool = True) -> int | None:
        if plan.method is not Method.PUN:
            landings = plan.landings if traps else ()
            return self._space.allocate(reach.first, reach.last, room, plan.start + JUMP_SIZE, landings)
        found = self._space.claim(reach.first, reach.last, room)
        if found is None or all(displaced(plan.raw, plan.start, at) for at in (found, found + room)):
            return found
        self._space.release(found, room)
        return None
