" Programs of DProbes. Written by "make docs" from the tables of the language; do not edit.
if exists('b:current_syntax')
  finish
endif
syntax case ignore
syntax keyword dprobesRecord log exit abort remove
syntax keyword dprobesOperator add and call call_kmod callk cnvrt copy dec delete div dup eq free idiv inc jge jgt jle jlt jmp jnz jz loop lt ltu malloc match move mul neg nop or pbl pbr pop purge push pzl pzr restore ret rol ror ros rx save seg2lin setmaj setmin shl shr skip sub sx tally trace ux vfa vfyr vfyrw vsa xchg xor
syntax keyword dprobesOperand arf ars b bif bis comm commn cv d dif dis elapsed entry gv h io kstack lp lv mem mrf mrs pid plp procid pv qif r sbp st stp str strn sxf table task tid time tp tsp tv u u16 u32 u64 u8 uid usdt ustack w wid wif wis x
syntax keyword dprobesRegister acr0 acr1 acr10 acr11 acr12 acr13 acr14 acr15 acr2 acr3 acr4 acr5 acr6 acr7 acr8 acr9 arg0 arg1 arg2 arg3 arg4 arg5 ccr cpuid cr0 cr2 cr3 cr4 cr_0 cr_1 cr_10 cr_11 cr_12 cr_13 cr_14 cr_15 cr_2 cr_3 cr_4 cr_5 cr_6 cr_7 cr_8 cr_9 cs ctr dar dr0 dr1 dr2 dr3 dr6 dr7 ds dsisr eax ebp ebx ecx edi edx eflags eip es esi esp fcs fcw fdp fds fip fpc fpr0 fpr1 fpr10 fpr11 fpr12 fpr13 fpr14 fpr15 fpr16 fpr17 fpr18 fpr19 fpr2 fpr20 fpr21 fpr22 fpr23 fpr24 fpr25 fpr26 fpr27 fpr28 fpr29 fpr3 fpr30 fpr31 fpr4 fpr5 fpr6 fpr7 fpr8 fpr9 fr0 fr1 fr2 fr3 fr4 fr5 fr6 fr7 fs fs_base fsw ftw gdtr gpr0 gpr1 gpr10 gpr11 gpr12 gpr13 gpr14 gpr15 gpr2 gpr3 gpr4 gpr5 gpr6 gpr7 gpr8 gpr9 gs gs_base idtr ldtr lnk mq msr mxcsr nip pc pswaddr pswmask r0 r1 r10 r11 r12 r13 r14 r15 r16 r17 r18 r19 r2 r20 r21 r22 r23 r24 r25 r26 r27 r28 r29 r3 r30 r31 r4 r5 r6 r7 r8 r9 rax rbp rbx rcx rdi rdx retval rflags rip rsi rsp sp ss tr xer xmm0 xmm1 xmm10 xmm11 xmm12 xmm13 xmm14 xmm15 xmm2 xmm3 xmm4 xmm5 xmm6 xmm7 xmm8 xmm9 ymm0 ymm1 ymm10 ymm11 ymm12 ymm13 ymm14 ymm15 ymm2 ymm3 ymm4 ymm5 ymm6 ymm7 ymm8 ymm9
syntax match dprobesHeader /^\s*\%(autostacktrace\|log_on_fault\|logonfault\|pass_count\|watchpoint\|ex_logmax\|passcount\|exlogmax\|groupdef\|max_hits\|address\|ex_mask\|heapmax\|maxhits\|modtype\|sampler\|typedef\|exmask\|jmpmax\|logmax\|offset\|opcode\|return\|cvars\|group\|gvars\|major\|minor\|table\|tvars\|heap\|name\|type\|vars\|id\)\ze\s*=/
syntax match dprobesLabel /^\s*[A-Za-z_.$]\w*\ze:/
syntax match dprobesNumber /\<\%(0x\x\+\|\d\+\%(hz\)\?\)\>/
syntax match dprobesString /"[^"]*"/
syntax match dprobesCharacter /'\%(\\.\|[^'\\]\)'/
syntax match dprobesComment #//.*$# contains=@Spell
syntax region dprobesComment start=#/\*# end=#\*/# contains=@Spell
syntax match dprobesDirective /^\s*#.*$/
highlight default link dprobesHeader Type
highlight default link dprobesRecord Statement
highlight default link dprobesOperator Keyword
highlight default link dprobesOperand StorageClass
highlight default link dprobesRegister Identifier
highlight default link dprobesLabel Label
highlight default link dprobesNumber Number
highlight default link dprobesString String
highlight default link dprobesCharacter Character
highlight default link dprobesComment Comment
highlight default link dprobesDirective PreProc
let b:current_syntax = 'dprobes'
