"""What instructions do is told by their formats; the bytes are those of the processors' assemblers."""

from __future__ import annotations

import pytest

from dprobes.target.code.foreign_instructions import NOTHING, Effect, Load, Store, Sum, effect_of

AT = 0x40_0000

KNOWN: dict[str, dict[str, Effect | None]] = {
    "aarch64": {
        "1f2003d5": NOTHING,  # nop
        "fd7bbea9": Effect(  # stp x29, x30, [sp, #-32]!
            (Sum("sp", "sp", -32),), [Store("x29", "sp", -32, 8), Store("x30", "sp", -24, 8)]
        ),
        "fd7bc2a8": Effect(  # ldp x29, x30, [sp], #32
            (Sum("sp", "sp", 32),), loads=[Load("x29", "sp", 0, 8), Load("x30", "sp", 8, 8)]
        ),
        "f35301a9": Effect((), [Store("x19", "sp", 16, 8), Store("x20", "sp", 24, 8)]),  # stp x19, x20, [sp, #16]
        "ff4300d1": Effect((Sum("sp", "sp", -16),)),  # sub sp, sp, #16
        "ff074091": Effect((Sum("sp", "sp", 4096),)),  # add sp, sp, #1, lsl #12
        "fd030091": Effect((Sum("x29", "sp", 0),)),  # mov x29, sp
        "e20300aa": Effect((Sum("x2", "x0", 0),)),  # mov x2, x0
        "00008052": Effect((Sum("x0", "", 0),)),  # mov w0, #0
        "60008092": Effect((Sum("x0", "", 0xFFFF_FFFF_FFFF_FFFC),)),  # mov x0, #-4
        "00000012": None,  # and w0, w0, #1
        "820400d0": Effect((Sum("x2", "", 0x49_2000),)),  # adrp x2, 0x492000
        "413440f9": Effect(loads=[Load("x1", "x2", 104, 8)]),  # ldr x1, [x2, #104]
        "413400f9": Effect((), [Store("x1", "x2", 104, 8)]),  # str x1, [x2, #104]
        "ff0f00b9": Effect((), [Store("", "sp", 12, 4)]),  # str wzr, [sp, #12]
        "f30f1ff8": Effect((Sum("sp", "sp", -16),), [Store("x19", "sp", -16, 8)]),  # str x19, [sp, #-16]!
        "3f2303d5": None,  # paciasp
        "00040011": None,  # add w0, w0, #1
        "000400b1": None,  # adds x0, x0, #1
        "c0035fd6": None,  # ret
        "a00300a9": Effect((), [Store("x0", "x29", 0, 8), Store("x0", "x29", 8, 8)]),  # stp x0, x0, [x29]
        "e103c0ac": None,  # ldp of vectors
        "0004c3a8": None,  # ldp x0, x1, [x0], #48: the manual leaves open what becomes of x0
    },
    "riscv64": {
        "0111": Effect((Sum("x2", "x2", -32),)),  # addi sp, sp, -32
        "3971": Effect((Sum("x2", "x2", -64),)),  # addi sp, sp, -64 (c.addi16sp)
        "06ec": Effect(stores=(Store("x1", "x2", 24, 8),)),  # sd ra, 24(sp)
        "e260": Effect(loads=(Load("x1", "x2", 24, 8),)),  # ld ra, 24(sp)
        "0010": Effect((Sum("x8", "x2", 32),)),  # addi s0, sp, 32
        "aa87": Effect((Sum("x15", "x10", 0),)),  # mv a5, a0
        "0145": Effect((Sum("x10", "", 0),)),  # li a0, 0
        "1c63": Effect(loads=(Load("x15", "x14", 0, 8),)),  # ld a5, 0(a4)
        "0505": Effect((Sum("x10", "x10", 1),)),  # addi a0, a0, 1
        "13870184": Effect((Sum("x14", "x3", -1984),)),  # addi a4, gp, -1984
        "17150000": Effect((Sum("x10", "", AT + 0x1000),)),  # auipc a0, 0x1
        "37050080": Effect((Sum("x10", "", -0x8000_0000),)),  # lui a0, 0x80000
        "2330a1fe": Effect(stores=(Store("x10", "x2", -32, 8),)),  # sd a0, -32(sp)
        "0325c1ff": Effect(loads=(Load("x10", "x2", -4, 4, is_signed=True),)),  # lw a0, -4(sp)
        "8280": None,  # ret
        "aa97": None,  # add a5, a5, a0
        "0000": None,
    },
    "s390x": {
        "c0300004737c": Effect((Sum("gpr3", "", AT + 0x8_E6F8),)),  # larl %r3
        "eb6ff0300024": Effect(  # stmg %r6, %r15, 48(%r15)
            stores=[Store(f"gpr{n}", "gpr15", 48 + 8 * (n - 6), 8) for n in range(6, 16)]
        ),
        "ebeff0700004": Effect(loads=[Load("gpr14", "gpr15", 112, 8), Load("gpr15", "gpr15", 120, 8)]),  # lmg
        "e3f0ff60ff71": Effect((Sum("gpr15", "gpr15", -160),)),  # lay %r15, -160(%r15)
        "e31030000004": Effect(loads=(Load("gpr1", "gpr3", 0, 8),)),  # lg %r1, 0(%r3)
        "e31030000024": Effect(stores=(Store("gpr1", "gpr3", 0, 8),)),  # stg %r1, 0(%r3)
        "b904001f": Effect((Sum("gpr1", "gpr15", 0),)),  # lgr %r1, %r15
        "4110f0a0": Effect((Sum("gpr1", "gpr15", 160),)),  # la %r1, 160(%r15)
        "41120004": Effect((Sum("gpr1", "gpr2", 4),)),  # la %r1, 4(%r2): as an index
        "41123004": None,  # la %r1, 4(%r2, %r3)
        "a729fffe": Effect((Sum("gpr2", "", -2),)),  # lghi %r2, -2
        "0707": NOTHING,  # nopr %r7
        "0700": None,  # nopr: it waits for what was stored
        "c00400000000": NOTHING,  # jgnop
        "c0f400000010": None,  # jg
        "a72b0001": None,  # aghi %r2, 1: it sets the condition code
        "07fe": None,  # br %r14
    },
    "ppc64": {
        "60000000": NOTHING,  # nop
        "7c0802a6": Effect((Sum("r0", "lnk", 0),)),  # mflr r0
        "7c0803a6": Effect((Sum("lnk", "r0", 0),)),  # mtlr r0
        "f8010010": Effect(stores=(Store("r0", "r1", 16, 8),)),  # std r0, 16(r1)
        "f821ff91": Effect((Sum("r1", "r1", -112),), (Store("r1", "r1", -112, 8),)),  # stdu r1, -112(r1)
        "e922a3b0": Effect(loads=(Load("r9", "r2", -23632, 8),)),  # ld r9, -23632(r2)
        "38630001": Effect((Sum("r3", "r3", 1),)),  # addi r3, r3, 1
        "38600001": Effect((Sum("r3", "", 1),)),  # li r3, 1
        "3c4c0002": Effect((Sum("r2", "r12", 0x2_0000),)),  # addis r2, r12, 2
        "7c7f1b78": Effect((Sum("r31", "r3", 0),)),  # mr r31, r3
        "7c210b78": None,  # mr r1, r1: a priority
        "7c7f1b79": None,  # mr. r31, r3
        "e9230001": None,  # ldu
        "4e800020": None,  # blr
    },
    "ppc": {
        "9421ffe0": Effect((Sum("r1", "r1", -32),), (Store("r1", "r1", -32, 4),)),  # stwu r1, -32(r1)
        "90010024": Effect(stores=(Store("r0", "r1", 36, 4),)),  # stw r0, 36(r1)
        "80010024": Effect(loads=(Load("r0", "r1", 36, 4),)),  # lwz r0, 36(r1)
        "f8010010": None,  # std: of 64-bit processors
    },
    "x86_64": {"90": None},
}


@pytest.mark.parametrize(
    ("machine", "code", "expected"),
    [(machine, code, effect) for machine, codes in KNOWN.items() for code, effect in codes.items()],
)
def test_the_effect_of(machine: str, code: str, expected: Effect | None) -> None:
    assert parts(effect_of(machine, bytes.fromhex(code), AT)) == parts(expected)


def parts(effect: Effect | None) -> list[list[object]] | None:
    return None if effect is None else [list(part) for part in effect]
