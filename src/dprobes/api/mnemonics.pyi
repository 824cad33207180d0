# One method for each instruction of the language.
# Written by ``make docs`` from ``rpn/instruction_set.py``; do not edit.
# ruff: noqa: PYI021 - editors show the documentation that is here
from abc import ABC, abstractmethod
from typing import Self

__all__ = ["Instructions"]

class Instructions(ABC):
    """
    Write instructions, one a call; every method returns the object itself, so that calls can be chained.

    A method is called as the instruction is written, with ``_`` between the words: ``push_r("arg0")`` is
    ``push r, arg0``. "Stack" says what is popped and pushed, top of stack rightmost.
    """

    @abstractmethod
    def _add(self, words: str, operand: int | str | None = None) -> Self:
        """Add an instruction with these fixed words, followed by the operand unless it is None."""

    def nop(self) -> Self:
        """
        Do nothing.

        nop: stack ``--``.
        """

    def jmp(self, label: str) -> Self:
        """
        Jump to the label.

        jmp <label>: stack ``--``; raises JMP_MAX.
        """

    def jlt(self, label: str) -> Self:
        """
        Jump if the top of the stack, as a signed number, is < 0.

        jlt <label>: stack ``x -- x``; raises JMP_MAX.
        """

    def jle(self, label: str) -> Self:
        """
        Jump if the top of the stack, as a signed number, is <= 0.

        jle <label>: stack ``x -- x``; raises JMP_MAX.
        """

    def jgt(self, label: str) -> Self:
        """
        Jump if the top of the stack, as a signed number, is > 0.

        jgt <label>: stack ``x -- x``; raises JMP_MAX.
        """

    def jge(self, label: str) -> Self:
        """
        Jump if the top of the stack, as a signed number, is >= 0.

        jge <label>: stack ``x -- x``; raises JMP_MAX.
        """

    def jz(self, label: str) -> Self:
        """
        Jump if the top of the stack is 0.

        jz <label>: stack ``x -- x``; raises JMP_MAX.
        """

    def jnz(self, label: str) -> Self:
        """
        Jump if the top of the stack is not 0.

        jnz <label>: stack ``x -- x``; raises JMP_MAX.
        """

    def loop(self, label: str) -> Self:
        """
        Decrement the top of the stack in place, and jump if the result is not 0.

        Every execution counts towards jmpmax.

        loop <label>: stack ``x -- x-1``; raises JMP_MAX.
        """

    def call(self, procedure: str) -> Self:
        """
        Call a procedure. SBP and the exception handler are saved.

        call <procname>: stack ``--``; raises CALL_MAX, JMP_MAX.
        """

    def ret(self) -> Self:
        """
        Return from a procedure. SBP is restored.

        ret: stack ``--``; raises CALL_MAX.
        """

    def abort(self) -> Self:
        """
        End the handler without a record.

        abort: stack ``--``.
        """

    def remove(self) -> Self:
        """
        End the handler with a record and remove the probepoint.

        remove: stack ``--``.
        """

    def exit(self, code: int | None = None) -> Self:
        """
        End the handler with a record, then perform the action of the code: 1 debugger, 2 crash dump, 3 core dump.

        exit <code>: stack ``--``; raises INVALID_OPERAND.

        exit: stack ``--``. End the handler with a record.
        """

    def skip(self) -> Self:
        """
        End the handler with a record.

        The function that begins at the probepoint is not executed; it returns the value.

        skip: stack ``value --``; needs ``allow_write``.
        """

    def callk(self, name: str | None = None) -> Self:
        """
        Call the registered extension of that name. INVALID_OPERAND(6, number) is raised if it fails.

        callk <name>: stack ``--``; raises INVALID_OPERAND.

        callk: stack ``--``; raises INVALID_OPERAND. Call every registered extension in order of registration.
        INVALID_OPERAND(6, number) is raised if one fails.
        """

    def setmin(self, minor: int | None = None) -> Self:
        """
        Set the minor code of this hit's record.

        setmin <minor>: stack ``--``.

        setmin: stack ``minor --``. Pop a minor code and set it for this hit's record.
        """

    def setmaj(self, major: int | None = None) -> Self:
        """
        Set the major code of this hit's record.

        setmaj <major>: stack ``--``.

        setmaj: stack ``major --``. Pop a major code and set it for this hit's record.
        """

    def log_str(self) -> Self:
        """
        Log token 1, the length, and the string at address up to its NUL (not logged) or max bytes.

        log str: stack ``max address --``; raises INVALID_ADDR, LOG_OVERFLOW.
        """

    def log_mrf(self) -> Self:
        """
        Log token 0, the length, and length bytes of memory at address.

        log mrf: stack ``length address --``; raises INVALID_ADDR, LOG_OVERFLOW.
        """

    def log_b(self, count: int) -> Self:
        """
        Pop count cells and log the low byte of each.

        log b, <count>: stack ``x*n --``; raises LOG_OVERFLOW.
        """

    def log_w(self, count: int) -> Self:
        """
        Pop count cells and log the low 2 bytes of each.

        log w, <count>: stack ``x*n --``; raises LOG_OVERFLOW.
        """

    def log_d(self, count: int) -> Self:
        """
        Pop count cells and log the low 4 bytes of each.

        log d, <count>: stack ``x*n --``; raises LOG_OVERFLOW.
        """

    def log(self, count: int | None = None) -> Self:
        """
        Pop count cells and log each as a word, without prefix.

        log <count>: stack ``x*n --``; raises LOG_OVERFLOW.

        log: stack ``x*? count --``; raises LOG_OVERFLOW. Pop a count, then that many cells. Log token 7, the count, and
        the cells.
        """

    def log_lv(self) -> Self:
        """
        Log token 5, range, and that many local variables from index start on.

        log lv: stack ``start range --``; raises INVALID_OPERAND, LOG_OVERFLOW.
        """

    def log_gv(self) -> Self:
        """
        Log token 6, range, and that many global variables from index start on.

        log gv: stack ``start range --``; raises INVALID_OPERAND, LOG_OVERFLOW.
        """

    def log_cv(self) -> Self:
        """
        Log token 8, range, and that many variables of the current CPU from index start on.

        log cv: stack ``start range --``; raises INVALID_OPERAND, LOG_OVERFLOW.
        """

    def log_tv(self) -> Self:
        """
        Log token 11, range, and that many variables of the thread from index start on.

        log tv: stack ``start range --``; raises INVALID_OPERAND, LOG_OVERFLOW.
        """

    def log_kstack(self, frames: int | None = None) -> Self:
        """
        Log token 9, the number of addresses, and up to frames addresses of the kernel's call stack.

        log kstack, <frames>: stack ``--``; raises LOG_OVERFLOW.

        log kstack: stack ``--``; raises LOG_OVERFLOW. Log the kernel's call stack, up to 127 addresses.
        """

    def log_ustack(self, frames: int | None = None) -> Self:
        """
        Log token 10, the number of addresses, and up to frames addresses of the program's call stack.

        If the stack cannot be followed to its end, a reason code below 16 follows the last address.

        log ustack, <frames>: stack ``--``; raises LOG_OVERFLOW.

        log ustack: stack ``--``; raises LOG_OVERFLOW. Log the program's call stack, up to 127 addresses.
        """

    def push_lp(self) -> Self:
        """
        Push LP, the position of the next byte in the log buffer.

        push lp: stack ``-- position``.
        """

    def push_plp(self) -> Self:
        """
        Push PLP, the value that LP had before the last log instruction if that failed.

        push plp: stack ``-- position``.
        """

    def pop_lp(self) -> Self:
        """
        Set LP to the popped position, for example to an earlier one, to discard a partial item.

        Bytes that this hit has not logged are 0.

        pop lp: stack ``position --``; raises LOG_OVERFLOW.
        """

    def push_lv(self, lv: int | None = None) -> Self:
        """
        Push a local variable.

        push lv, <lv>: stack ``-- value``.

        push lv: stack ``index -- value``; raises INVALID_OPERAND. Push a local variable. The index is popped.
        """

    def pop_lv(self, lv: int | None = None) -> Self:
        """
        Pop a value into a local variable.

        pop lv, <lv>: stack ``value --``.

        pop lv: stack ``index value --``; raises INVALID_OPERAND. Pop a value into a local variable. The index is
        popped.
        """

    def move_lv(self, lv: int | None = None) -> Self:
        """
        Copy the top of the stack into a local variable.

        move lv, <lv>: stack ``value -- value``.

        move lv: stack ``value index -- value``; raises INVALID_OPERAND. Copy the top of the stack into a local
        variable. The index is popped.
        """

    def inc_lv(self, lv: int | None = None) -> Self:
        """
        Add one to a local variable.

        inc lv, <lv>: stack ``--``.

        inc lv: stack ``index --``; raises INVALID_OPERAND. Add one to a local variable. The index is popped.
        """

    def dec_lv(self, lv: int | None = None) -> Self:
        """
        Subtract one from a local variable.

        dec lv, <lv>: stack ``--``.

        dec lv: stack ``index --``; raises INVALID_OPERAND. Subtract one from a local variable. The index is popped.
        """

    def push_gv(self, gv: int | None = None) -> Self:
        """
        Push a global variable.

        push gv, <gv>: stack ``-- value``.

        push gv: stack ``index -- value``; raises INVALID_OPERAND. Push a global variable. The index is popped.
        """

    def pop_gv(self, gv: int | None = None) -> Self:
        """
        Pop a value into a global variable.

        pop gv, <gv>: stack ``value --``.

        pop gv: stack ``index value --``; raises INVALID_OPERAND. Pop a value into a global variable. The index is
        popped.
        """

    def move_gv(self, gv: int | None = None) -> Self:
        """
        Copy the top of the stack into a global variable.

        move gv, <gv>: stack ``value -- value``.

        move gv: stack ``value index -- value``; raises INVALID_OPERAND. Copy the top of the stack into a global
        variable. The index is popped.
        """

    def inc_gv(self, gv: int | None = None) -> Self:
        """
        Add one to a global variable.

        inc gv, <gv>: stack ``--``.

        inc gv: stack ``index --``; raises INVALID_OPERAND. Add one to a global variable. The index is popped.
        """

    def dec_gv(self, gv: int | None = None) -> Self:
        """
        Subtract one from a global variable.

        dec gv, <gv>: stack ``--``.

        dec gv: stack ``index --``; raises INVALID_OPERAND. Subtract one from a global variable. The index is popped.
        """

    def push_cv(self, cv: int | None = None) -> Self:
        """
        Push a variable of the current CPU.

        push cv, <cv>: stack ``-- value``.

        push cv: stack ``index -- value``; raises INVALID_OPERAND. Push a variable of the current CPU. The index is
        popped.
        """

    def pop_cv(self, cv: int | None = None) -> Self:
        """
        Pop a value into a variable of the current CPU.

        pop cv, <cv>: stack ``value --``.

        pop cv: stack ``index value --``; raises INVALID_OPERAND. Pop a value into a variable of the current CPU. The
        index is popped.
        """

    def move_cv(self, cv: int | None = None) -> Self:
        """
        Copy the top of the stack into a variable of the current CPU.

        move cv, <cv>: stack ``value -- value``.

        move cv: stack ``value index -- value``; raises INVALID_OPERAND. Copy the top of the stack into a variable of
        the current CPU. The index is popped.
        """

    def inc_cv(self, cv: int | None = None) -> Self:
        """
        Add one to a variable of the current CPU.

        inc cv, <cv>: stack ``--``.

        inc cv: stack ``index --``; raises INVALID_OPERAND. Add one to a variable of the current CPU. The index is
        popped.
        """

    def dec_cv(self, cv: int | None = None) -> Self:
        """
        Subtract one from a variable of the current CPU.

        dec cv, <cv>: stack ``--``.

        dec cv: stack ``index --``; raises INVALID_OPERAND. Subtract one from a variable of the current CPU. The index
        is popped.
        """

    def push_tv(self, tv: int | None = None) -> Self:
        """
        Push a variable of the thread.

        push tv, <tv>: stack ``-- value``.

        push tv: stack ``index -- value``; raises INVALID_OPERAND. Push a variable of the thread. The index is popped.
        """

    def pop_tv(self, tv: int | None = None) -> Self:
        """
        Pop a value into a variable of the thread.

        pop tv, <tv>: stack ``value --``.

        pop tv: stack ``index value --``; raises INVALID_OPERAND. Pop a value into a variable of the thread. The index
        is popped.
        """

    def move_tv(self, tv: int | None = None) -> Self:
        """
        Copy the top of the stack into a variable of the thread.

        move tv, <tv>: stack ``value -- value``.

        move tv: stack ``value index -- value``; raises INVALID_OPERAND. Copy the top of the stack into a variable of
        the thread. The index is popped.
        """

    def inc_tv(self, tv: int | None = None) -> Self:
        """
        Add one to a variable of the thread.

        inc tv, <tv>: stack ``--``.

        inc tv: stack ``index --``; raises INVALID_OPERAND. Add one to a variable of the thread. The index is popped.
        """

    def dec_tv(self, tv: int | None = None) -> Self:
        """
        Subtract one from a variable of the thread.

        dec tv, <tv>: stack ``--``.

        dec tv: stack ``index --``; raises INVALID_OPERAND. Subtract one from a variable of the thread. The index is
        popped.
        """

    def tally(self, table: str) -> Self:
        """
        Add a value to the entry of the keys.

        A table of kind 'count' takes no value. A value of more than one word takes several cells, its first one on top.
        Values whose keys find no room are counted as lost.

        tally <table>: stack ``keys value --``; raises INVALID_ADDR.
        """

    def push_table(self, table: str) -> Self:
        """
        Push the value of the keys' entry, or 0 if there is none.

        For 'stats' and histograms it is the count. A value of more than one word takes several cells, its first one on
        top.

        push table, <table>: stack ``keys -- value``; raises INVALID_ADDR.
        """

    def add_table(self, table: str) -> Self:
        """
        Add a number to the entry of the keys in a table of kind 'last' with numbers as values.

        User call stacks are no keys there. A value of more than one word takes several cells, its first one on top.

        add table, <table>: stack ``keys value --``; raises INVALID_ADDR.
        """

    def delete(self, table: str) -> Self:
        """
        Delete the entry of the keys.

        delete <table>: stack ``keys --``; raises INVALID_ADDR.
        """

    def add(self) -> Self:
        """
        Add.

        add: stack ``a b -- a+b``.
        """

    def sub(self) -> Self:
        """
        Subtract the second cell from the top one.

        sub: stack ``a b -- b-a``.
        """

    def mul(self) -> Self:
        """
        Multiply; the low word is kept.

        mul: stack ``a b -- a*b``.
        """

    def div(self) -> Self:
        """
        Divide unsigned. The divisor is on top; the quotient ends on top.

        div: stack ``a b -- a%b a/b``; raises DIVIDE_BY_ZERO.
        """

    def idiv(self) -> Self:
        """
        Divide signed, rounding towards zero. The divisor is on top; the quotient ends on top.

        idiv: stack ``a b -- a%b a/b``; raises DIVIDE_BY_ZERO.
        """

    def neg(self) -> Self:
        """
        Invert all bits (one's complement).

        neg: stack ``a -- ~a``.
        """

    def and_(self) -> Self:
        """
        Take the bitwise and.

        and: stack ``a b -- a&b``.
        """

    def or_(self) -> Self:
        """
        Take the bitwise or.

        or: stack ``a b -- a|b``.
        """

    def xor(self) -> Self:
        """
        Take the bitwise exclusive or.

        xor: stack ``a b -- a^b``.
        """

    def rol(self, bits: int | None = None) -> Self:
        """
        Rotate left by that many bits.

        rol <bits>: stack ``a -- a``.

        rol: stack ``count a -- a``. Rotate the top cell left by the cell below it.
        """

    def ror(self, bits: int | None = None) -> Self:
        """
        Rotate right by that many bits.

        ror <bits>: stack ``a -- a``.

        ror: stack ``count a -- a``. Rotate the top cell right by the cell below it.
        """

    def shl(self, bits: int | None = None) -> Self:
        """
        Shift left; a count of the word's width or more gives 0.

        shl <bits>: stack ``a -- a``.

        shl: stack ``count a -- a``. Shift the top cell left by the cell below it.
        """

    def shr(self, bits: int | None = None) -> Self:
        """
        Shift right and fill with zeros; a count of the word's width or more gives 0.

        shr <bits>: stack ``a -- a``.

        shr: stack ``count a -- a``. Shift the top cell right by the cell below it, and fill with zeros.
        """

    def eq(self) -> Self:
        """
        Push 1 if the two cells are equal, else 0.

        eq: stack ``a b -- b==a``.
        """

    def lt(self) -> Self:
        """
        Push 1 if the top cell is less than the second one in a signed comparison, else 0.

        lt: stack ``a b -- b<a``.
        """

    def ltu(self) -> Self:
        """
        Push 1 if the top cell is less than the second one in an unsigned comparison, else 0.

        ltu: stack ``a b -- b<a``.
        """

    def pbl(self, bits: int | None = None) -> Self:
        """
        Copy bit n-1 into all bits to its left.

        pbl <bits>: stack ``a -- a``; raises INVALID_OPERAND.

        pbl: stack ``a n -- a``; raises INVALID_OPERAND. Copy bit n-1 into all bits to its left; n is on top.
        """

    def pbr(self, bits: int | None = None) -> Self:
        """
        Copy bit n-1 into all bits to its right.

        pbr <bits>: stack ``a -- a``; raises INVALID_OPERAND.

        pbr: stack ``a n -- a``; raises INVALID_OPERAND. Copy bit n-1 into all bits to its right; n is on top.
        """

    def pzl(self, bits: int | None = None) -> Self:
        """
        Clear all bits to the left of bit n-1.

        pzl <bits>: stack ``a -- a``; raises INVALID_OPERAND.

        pzl: stack ``a n -- a``; raises INVALID_OPERAND. Clear all bits to the left of bit n-1; n is on top.
        """

    def pzr(self, bits: int | None = None) -> Self:
        """
        Clear all bits to the right of bit n-1.

        pzr <bits>: stack ``a -- a``; raises INVALID_OPERAND.

        pzr: stack ``a n -- a``; raises INVALID_OPERAND. Clear all bits to the right of bit n-1; n is on top.
        """

    def xchg(self) -> Self:
        """
        Exchange the top two cells.

        xchg: stack ``a b -- b a``.
        """

    def dup(self, times: int | None = None) -> Self:
        """
        Push that many more copies of the top cell.

        dup <times>: stack ``x -- x x*n``.

        dup: stack ``count x -- x x*?``. Pop a value and the count below it; push the value count+1 times.
        """

    def ros(self, cells: int) -> Self:
        """
        Drop that many cells.

        ros <cells>: stack ``x*n --``.
        """

    def push_sbp(self, n: int | None = None) -> Self:
        """
        Push the cell at SBP+n.

        push sbp, <n>: stack ``-- value``.

        push sbp: stack ``n -- value``. Pop n; push the cell at SBP+n.
        """

    def pop_sbp(self, n: int | None = None) -> Self:
        """
        Pop a value into the cell at SBP+n.

        pop sbp, <n>: stack ``value --``.

        pop sbp: stack ``n value --``. Pop a value and n; store the value in the cell at SBP+n.
        """

    def push_tsp(self, n: int | None = None) -> Self:
        """
        Push the cell at TSP+n, with TSP taken before the instruction.

        push tsp, <n>: stack ``-- value``.

        push tsp: stack ``n -- value``. Pop n; push the cell at TSP+n, with TSP taken after n is popped.
        """

    def pop_tsp(self, n: int | None = None) -> Self:
        """
        Pop a value into the cell at TSP+n, with TSP taken before the instruction.

        pop tsp, <n>: stack ``value --``.

        pop tsp: stack ``n value --``. Pop a value and n; store the value in the cell at TSP+n, with TSP taken after
        both are popped.
        """

    def copy_sbp(self, n: int | None = None) -> Self:
        """
        Copy the top cell to the cell at SBP+n.

        copy sbp, <n>: stack ``value -- value``.

        copy sbp: stack ``value n -- value``. Pop n; copy the top cell to the cell at SBP+n.
        """

    def copy_tsp(self, n: int | None = None) -> Self:
        """
        Copy the top cell to the cell at TSP+n.

        copy tsp, <n>: stack ``value -- value``.

        copy tsp: stack ``value n -- value``. Pop n; copy the top cell to the cell at TSP+n, with TSP taken after n is
        popped.
        """

    def save_sbp(self) -> Self:
        """
        Push SBP.

        save sbp: stack ``-- sbp``.
        """

    def restore_sbp(self) -> Self:
        """
        Pop SBP.

        restore sbp: stack ``sbp --``.
        """

    def save_tsp(self) -> Self:
        """
        Push TSP, as it was before the push.

        save tsp: stack ``-- tsp``.
        """

    def restore_tsp(self) -> Self:
        """
        Pop TSP.

        restore tsp: stack ``tsp --``.
        """

    def push_r(self, register: int | str) -> Self:
        """
        Push a register of the current context, least significant cell on top.

        push r, <register>: stack ``-- value*cells``; raises INVALID_ADDR.
        """

    def pop_r(self, register: int | str) -> Self:
        """
        Pop a value into a register of the current context.

        SEG_FAULT is raised for a selector that a segment register cannot hold.

        pop r, <register>: stack ``value --``; raises SEG_FAULT; needs ``allow_write``.
        """

    def push_u(self, register: int | str) -> Self:
        """
        Push a register of the user context, least significant cell on top.

        push u, <register>: stack ``-- value*cells``; raises INVALID_ADDR.
        """

    def pop_u(self, register: int | str) -> Self:
        """
        Pop a value into a register of the user context. SEG_FAULT is raised as by pop r.

        pop u, <register>: stack ``value --``; raises SEG_FAULT; needs ``allow_write``.
        """

    def push(self, value: int | str) -> Self:
        """
        Push a number, or the run-time address of a symbol of the module.

        push <value>: stack ``-- value``.
        """

    def push_mem_u8(self) -> Self:
        """
        Pop an address and push the 8 bits at it, least significant cell on top.

        push mem, u8: stack ``address -- value*cells``; raises INVALID_ADDR.
        """

    def push_mem_u16(self) -> Self:
        """
        Pop an address and push the 16 bits at it, least significant cell on top.

        push mem, u16: stack ``address -- value*cells``; raises INVALID_ADDR.
        """

    def push_mem_u32(self) -> Self:
        """
        Pop an address and push the 32 bits at it, least significant cell on top.

        push mem, u32: stack ``address -- value*cells``; raises INVALID_ADDR.
        """

    def push_mem_u64(self) -> Self:
        """
        Pop an address and push the 64 bits at it, least significant cell on top.

        push mem, u64: stack ``address -- value*cells``; raises INVALID_ADDR.
        """

    def pop_mem_u8(self) -> Self:
        """
        Pop a value and the address below it; store 8 bits.

        pop mem, u8: stack ``address value*cells --``; raises INVALID_ADDR; needs ``allow_write``.
        """

    def pop_mem_u16(self) -> Self:
        """
        Pop a value and the address below it; store 16 bits.

        pop mem, u16: stack ``address value*cells --``; raises INVALID_ADDR; needs ``allow_write``.
        """

    def pop_mem_u32(self) -> Self:
        """
        Pop a value and the address below it; store 32 bits.

        pop mem, u32: stack ``address value*cells --``; raises INVALID_ADDR; needs ``allow_write``.
        """

    def pop_mem_u64(self) -> Self:
        """
        Pop a value and the address below it; store 64 bits.

        pop mem, u64: stack ``address value*cells --``; raises INVALID_ADDR; needs ``allow_write``.
        """

    def match_str(self, text: str) -> Self:
        """
        Push 0 if the string at address, up to its NUL, equals the text, else 1.

        At most one byte more than the text's length is read.

        match str, <text>: stack ``address -- differs``; raises INVALID_ADDR.
        """

    def match_strn(self, text: str) -> Self:
        """
        Push 0 if the string at address begins with the text, else 1. No more bytes than the text's length are read.

        match strn, <text>: stack ``address -- differs``; raises INVALID_ADDR.
        """

    def push_task(self) -> Self:
        """
        Push the address of the task_struct of the thread, in the kernel.

        push task: stack ``-- address``.
        """

    def push_pid(self) -> Self:
        """
        Push the process id.

        push pid: stack ``-- pid``.
        """

    def push_procid(self) -> Self:
        """
        Push the number of the CPU.

        push procid: stack ``-- cpu``.
        """

    def push_wid(self) -> Self:
        """
        Push the word's width in bits: positive for big endian, negative for little endian.

        push wid: stack ``-- bits``.
        """

    def push_tid(self) -> Self:
        """
        Push the thread id.

        push tid: stack ``-- tid``.
        """

    def push_uid(self) -> Self:
        """
        Push the real user id.

        push uid: stack ``-- uid``.
        """

    def push_tp(self, field: str) -> Self:
        """
        Push a field of the tracepoint or system call that was hit; for an array, its address.

        push tp, <field>: stack ``-- value``; raises INVALID_ADDR.
        """

    def push_comm(self) -> Self:
        """
        Push the name of the process as 16 bytes, padded with zeros, the first bytes on top.

        push comm: stack ``-- name*cells``.
        """

    def match_comm(self, text: str) -> Self:
        """
        Push 0 if the name of the process equals the text, else 1.

        match comm, <text>: stack ``-- differs``.
        """

    def match_commn(self, text: str) -> Self:
        """
        Push 0 if the name of the process begins with the text, else 1.

        match commn, <text>: stack ``-- differs``.
        """

    def push_usdt(self, argument: int) -> Self:
        """
        Push an argument of the USDT probe that was hit, counted from 1, with the size and sign in the probe's note.

        push usdt, <argument>: stack ``-- value``; raises INVALID_ADDR.
        """

    def push_elapsed(self, counter: str | None = None) -> Self:
        """
        Push the increase of a counter since the entry of the returning call, 64 bits, least significant cell on top.

        INVALID_ADDR is raised if the entry was not seen, INVALID_OPERAND(8, number) if the counter cannot be read.

        push elapsed, <counter>: stack ``-- count*cells``; raises INVALID_ADDR, INVALID_OPERAND.

        push elapsed: stack ``-- elapsed*cells``; raises INVALID_ADDR. Push the nanoseconds from the entry of the
        returning call to this hit, 64 bits, least significant cell on top. INVALID_ADDR is raised if the entry was not
        seen.
        """

    def push_entry(self, register: int | str) -> Self:
        """
        Push a general register as it was at the entry of the returning call.

        INVALID_ADDR is raised if the entry was not seen.

        push entry, <register>: stack ``-- value``; raises INVALID_ADDR.
        """

    def push_pmc(self, counter: str) -> Self:
        """
        Push a performance counter of the thread, 64 bits, least significant cell on top.

        INVALID_OPERAND(8, number) is raised if it cannot be read. Only differences of two readings have a meaning.

        push pmc, <counter>: stack ``-- value*cells``; raises INVALID_OPERAND.
        """

    def push_time(self) -> Self:
        """
        Push CLOCK_MONOTONIC in nanoseconds, 64 bits, least significant cell on top.

        push time: stack ``-- time*cells``.
        """

    def push_io_u8(self) -> Self:
        """
        Pop a port and push the 8 bits read from it.

        push io, u8: stack ``port -- value``; needs ``allow_write``.
        """

    def push_io_u16(self) -> Self:
        """
        Pop a port and push the 16 bits read from it.

        push io, u16: stack ``port -- value``; needs ``allow_write``.
        """

    def push_io_u32(self) -> Self:
        """
        Pop a port and push the 32 bits read from it.

        push io, u32: stack ``port -- value``; needs ``allow_write``.
        """

    def pop_io_u8(self) -> Self:
        """
        Pop a value and the port below it; write 8 bits.

        pop io, u8: stack ``port value --``; needs ``allow_write``.
        """

    def pop_io_u16(self) -> Self:
        """
        Pop a value and the port below it; write 16 bits.

        pop io, u16: stack ``port value --``; needs ``allow_write``.
        """

    def pop_io_u32(self) -> Self:
        """
        Pop a value and the port below it; write 32 bits.

        pop io, u32: stack ``port value --``; needs ``allow_write``.
        """

    def vfyr(self) -> Self:
        """
        Push 0 if the byte at address can be read, else 1.

        vfyr: stack ``address -- invalid``.
        """

    def vfyrw(self) -> Self:
        """
        Push 0 if the byte at address can be read and written, else 1. Nothing is written.

        vfyrw: stack ``address -- invalid``.
        """

    def seg2lin(self) -> Self:
        """
        Convert a segmented address into a flat one.

        seg2lin: stack ``selector offset -- address``; raises SEG_FAULT.
        """

    def log_mrs(self) -> Self:
        """
        Do the same as log mrf, with a segmented address.

        log mrs: stack ``length selector offset --``; raises INVALID_ADDR, SEG_FAULT, LOG_OVERFLOW.
        """

    def log_ars(self) -> Self:
        """
        Do the same as log str, with a segmented address.

        log ars: stack ``max selector offset --``; raises INVALID_ADDR, SEG_FAULT, LOG_OVERFLOW.
        """

    def push_bis(self) -> Self:
        """
        Do the same as push mem, u8, with a segmented address.

        push bis: stack ``selector offset -- value``; raises INVALID_ADDR, SEG_FAULT.
        """

    def push_wis(self) -> Self:
        """
        Do the same as push mem, u16, with a segmented address.

        push wis: stack ``selector offset -- value``; raises INVALID_ADDR, SEG_FAULT.
        """

    def push_dis(self) -> Self:
        """
        Do the same as push mem, u32, with a segmented address.

        push dis: stack ``selector offset -- value``; raises INVALID_ADDR, SEG_FAULT.
        """

    def pop_bis(self) -> Self:
        """
        Do the same as pop mem, u8, with a segmented address.

        pop bis: stack ``selector offset value --``; raises INVALID_ADDR, SEG_FAULT; needs ``allow_write``.
        """

    def pop_wis(self) -> Self:
        """
        Do the same as pop mem, u16, with a segmented address.

        pop wis: stack ``selector offset value --``; raises INVALID_ADDR, SEG_FAULT; needs ``allow_write``.
        """

    def pop_dis(self) -> Self:
        """
        Do the same as pop mem, u32, with a segmented address.

        pop dis: stack ``selector offset value --``; raises INVALID_ADDR, SEG_FAULT; needs ``allow_write``.
        """

    def vsa(self) -> Self:
        """
        Do the same as vfyr, with a segmented address.

        vsa: stack ``selector offset -- invalid``.
        """

    def push_phys_u8(self) -> Self:
        """
        Do the same as push mem, u8, with a physical address.

        push phys, u8: stack ``address -- value*cells``; raises INVALID_ADDR.
        """

    def push_phys_u16(self) -> Self:
        """
        Do the same as push mem, u16, with a physical address.

        push phys, u16: stack ``address -- value*cells``; raises INVALID_ADDR.
        """

    def push_phys_u32(self) -> Self:
        """
        Do the same as push mem, u32, with a physical address.

        push phys, u32: stack ``address -- value*cells``; raises INVALID_ADDR.
        """

    def push_phys_u64(self) -> Self:
        """
        Do the same as push mem, u64, with a physical address.

        push phys, u64: stack ``address -- value*cells``; raises INVALID_ADDR.
        """

    def pop_phys_u8(self) -> Self:
        """
        Do the same as pop mem, u8, with a physical address.

        pop phys, u8: stack ``address value*cells --``; raises INVALID_ADDR; needs ``allow_write``.
        """

    def pop_phys_u16(self) -> Self:
        """
        Do the same as pop mem, u16, with a physical address.

        pop phys, u16: stack ``address value*cells --``; raises INVALID_ADDR; needs ``allow_write``.
        """

    def pop_phys_u32(self) -> Self:
        """
        Do the same as pop mem, u32, with a physical address.

        pop phys, u32: stack ``address value*cells --``; raises INVALID_ADDR; needs ``allow_write``.
        """

    def pop_phys_u64(self) -> Self:
        """
        Do the same as pop mem, u64, with a physical address.

        pop phys, u64: stack ``address value*cells --``; raises INVALID_ADDR; needs ``allow_write``.
        """

    def log_mrp(self) -> Self:
        """
        Do the same as log mrf, with a physical address.

        log mrp: stack ``length address --``; raises INVALID_ADDR, LOG_OVERFLOW.
        """

    def lin2phys(self) -> Self:
        """
        Convert an address into the physical address of the same byte, by the page tables of the hit's processor.

        INVALID_ADDR is raised if no page is mapped there.

        lin2phys: stack ``address -- physical``; raises INVALID_ADDR.
        """

    def sx(self, label: str) -> Self:
        """
        Set the exception handler of this call frame. It is used once.

        sx <label>: stack ``--``.
        """

    def ux(self) -> Self:
        """
        Clear the exception handler of this call frame.

        ux: stack ``--``.
        """

    def rx(self) -> Self:
        """
        Raise the exception on top of the stack, regardless of ex_mask.

        rx: stack ``parm2 parm1 code -- parm2 parm1 code``; raises USER_EX.
        """

    def push_x(self) -> Self:
        """
        Push the last exception, or zeros if there was none.

        push x: stack ``-- parm2 parm1 code``.
        """

    def log_st(self) -> Self:
        """
        Write the call stack to the stack-trace buffer.

        log st: stack ``--``.
        """

    def purge_st(self) -> Self:
        """
        Empty the stack-trace buffer.

        purge st: stack ``--``.
        """

    def trace_lv(self) -> Self:
        """
        Include range local variables from index on in traces of this call frame.

        trace lv: stack ``index range --``; raises INVALID_OPERAND.
        """

    def trace_gv(self) -> Self:
        """
        Include range global variables from index on in traces of this call frame.

        trace gv: stack ``index range --``; raises INVALID_OPERAND.
        """

    def trace_pv(self) -> Self:
        """
        Include range RPN stack cells from cell index on in traces of this call frame.

        trace pv: stack ``index range --``.
        """

    def push_stp(self) -> Self:
        """
        Push STP, the position of the next byte in the stack-trace buffer.

        push stp: stack ``-- position``.
        """

    def pop_stp(self) -> Self:
        """
        Set STP to the popped position. Bytes that no trace of this hit has written are 0.

        pop stp: stack ``position --``; raises LOG_OVERFLOW.
        """

    def malloc(self) -> Self:
        """
        Allocate size bytes, filled with zeros, from this hit's heap.

        malloc: stack ``size -- handle``; raises HEAP_NOMEM.
        """

    def free(self) -> Self:
        """
        Free a block of the heap.

        free: stack ``handle --``; raises HEAP_INVALID_HANDLE.
        """

    def push_h_u8(self, values: int) -> Self:
        """
        Push that many 8-bit values of a block from offset on, the first on top.

        push h, u8, <values>: stack ``handle offset -- value*?``; raises HEAP_INVALID_HANDLE, HEAP_INVALID_OFFSET.
        """

    def push_h_u16(self, values: int) -> Self:
        """
        Push that many 16-bit values of a block from offset on, the first on top.

        push h, u16, <values>: stack ``handle offset -- value*?``; raises HEAP_INVALID_HANDLE, HEAP_INVALID_OFFSET.
        """

    def push_h_u32(self, values: int) -> Self:
        """
        Push that many 32-bit values of a block from offset on, the first on top.

        push h, u32, <values>: stack ``handle offset -- value*?``; raises HEAP_INVALID_HANDLE, HEAP_INVALID_OFFSET.
        """

    def push_h_u64(self, values: int) -> Self:
        """
        Push that many 64-bit values of a block from offset on, the first on top.

        push h, u64, <values>: stack ``handle offset -- value*?``; raises HEAP_INVALID_HANDLE, HEAP_INVALID_OFFSET.
        """

    def pop_h_u8(self, values: int) -> Self:
        """
        Pop that many 8-bit values into a block from offset on, the first from the top.

        pop h, u8, <values>: stack ``value*? handle offset --``; raises HEAP_INVALID_HANDLE, HEAP_INVALID_OFFSET.
        """

    def pop_h_u16(self, values: int) -> Self:
        """
        Pop that many 16-bit values into a block from offset on, the first from the top.

        pop h, u16, <values>: stack ``value*? handle offset --``; raises HEAP_INVALID_HANDLE, HEAP_INVALID_OFFSET.
        """

    def pop_h_u32(self, values: int) -> Self:
        """
        Pop that many 32-bit values into a block from offset on, the first from the top.

        pop h, u32, <values>: stack ``value*? handle offset --``; raises HEAP_INVALID_HANDLE, HEAP_INVALID_OFFSET.
        """

    def pop_h_u64(self, values: int) -> Self:
        """
        Pop that many 64-bit values into a block from offset on, the first from the top.

        pop h, u64, <values>: stack ``value*? handle offset --``; raises HEAP_INVALID_HANDLE, HEAP_INVALID_OFFSET.
        """
