" Programs of DProbes (*.rpn). Written by "make docs" from the tables of the language; do not edit.
if exists('b:current_syntax')
  finish
endif
syntax case ignore
syntax keyword rpnRecord abort exit log remove
syntax keyword rpnOperator add and call call_kmod callk cnvrt copy dec delete div dup eq free idiv inc jge jgt jle jlt jmp jnz jz lin2phys loop lt ltu malloc match move mul neg nop or pbl pbr pop purge push pzl pzr restore ret rol ror ros rx save seg2lin setmaj setmin shl shr skip sub sx tally trace ux vfa vfyr vfyrw vsa xchg xor
syntax keyword rpnOperand arf ars b bif bis comm commn cv d dif dis elapsed entry gv h io kstack lp lv mem mrf mrp mrs phys pid plp pmc procid pv qif r sbp st stp str strn sxf table task tid time tp tsp tv u u16 u32 u64 u8 uid usdt ustack w wid wif wis x
syntax keyword rpnRegister a0 a1 a2 a3 a4 a5 a6 a7 accessed acr0 acr1 acr10 acr11 acr12 acr13 acr14 acr15 acr2 acr3 acr4 acr5 acr6 acr7 acr8 acr9 arg0 arg1 arg2 arg3 arg4 arg5 ccr cpsr cpuid cr0 cr2 cr3 cr4 cr_0 cr_1 cr_10 cr_11 cr_12 cr_13 cr_14 cr_15 cr_2 cr_3 cr_4 cr_5 cr_6 cr_7 cr_8 cr_9 cs ctr dar dr0 dr1 dr2 dr3 dr6 dr7 ds dsisr eax ebp ebx ecx edi edx eflags eip es esi esp f0 f1 f10 f11 f12 f13 f14 f15 f16 f17 f18 f19 f2 f20 f21 f22 f23 f24 f25 f26 f27 f28 f29 f3 f30 f31 f4 f5 f6 f7 f8 f9 fa0 fa1 fa2 fa3 fa4 fa5 fa6 fa7 fcs fcsr fcw fdp fds fflags fip fp fpc fpcr fpr0 fpr1 fpr10 fpr11 fpr12 fpr13 fpr14 fpr15 fpr16 fpr17 fpr18 fpr19 fpr2 fpr20 fpr21 fpr22 fpr23 fpr24 fpr25 fpr26 fpr27 fpr28 fpr29 fpr3 fpr30 fpr31 fpr4 fpr5 fpr6 fpr7 fpr8 fpr9 fpsr fr0 fr1 fr2 fr3 fr4 fr5 fr6 fr7 frm fs fs0 fs1 fs10 fs11 fs2 fs3 fs4 fs5 fs6 fs7 fs8 fs9 fs_base fsw ft0 ft1 ft10 ft11 ft2 ft3 ft4 ft5 ft6 ft7 ft8 ft9 ftw gdtr gp gpr0 gpr1 gpr10 gpr11 gpr12 gpr13 gpr14 gpr15 gpr2 gpr3 gpr4 gpr5 gpr6 gpr7 gpr8 gpr9 gs gs_base idtr ldtr lnk lr mq msr mxcsr nip pc pstate pswaddr pswmask r0 r1 r10 r11 r12 r13 r14 r15 r16 r17 r18 r19 r2 r20 r21 r22 r23 r24 r25 r26 r27 r28 r29 r3 r30 r31 r4 r5 r6 r7 r8 r9 ra rax rbp rbx rcx rdi rdx retval rflags rip rsi rsp s0 s1 s10 s11 s2 s3 s4 s5 s6 s7 s8 s9 sp ss t0 t1 t2 t3 t4 t5 t6 tr v0 v1 v10 v11 v12 v13 v14 v15 v16 v17 v18 v19 v2 v20 v21 v22 v23 v24 v25 v26 v27 v28 v29 v3 v30 v31 v4 v5 v6 v7 v8 v9 x0 x1 x10 x11 x12 x13 x14 x15 x16 x17 x18 x19 x2 x20 x21 x22 x23 x24 x25 x26 x27 x28 x29 x3 x30 x31 x4 x5 x6 x7 x8 x9 xer xmm0 xmm1 xmm10 xmm11 xmm12 xmm13 xmm14 xmm15 xmm2 xmm3 xmm4 xmm5 xmm6 xmm7 xmm8 xmm9 ymm0 ymm1 ymm10 ymm11 ymm12 ymm13 ymm14 ymm15 ymm2 ymm3 ymm4 ymm5 ymm6 ymm7 ymm8 ymm9 zero
syntax match rpnHeader /^\s*\%(autostacktrace\|log_on_fault\|logonfault\|pass_count\|watchpoint\|ex_logmax\|passcount\|exlogmax\|groupdef\|max_hits\|wordsize\|address\|ex_mask\|heapmax\|maxhits\|modtype\|persist\|replace\|sampler\|typedef\|exmask\|jmpmax\|logmax\|offset\|opcode\|return\|cvars\|group\|gvars\|major\|minor\|patch\|table\|tvars\|heap\|idle\|name\|type\|vars\|id\)\ze\s*=/
syntax match rpnLabel /^\s*[A-Za-z_.$]\w*\ze:/
syntax match rpnNumber /\<\%(0x\x\+\|\d\+\%(hz\)\?\)\>/
syntax match rpnString /"[^"]*"/
syntax match rpnCharacter /'\%(\\.\|[^'\\]\)'/
syntax match rpnComment #//.*$# contains=@Spell
syntax region rpnComment start=#/\*# end=#\*/# contains=@Spell
syntax match rpnDirective /^\s*#.*$/
highlight default link rpnHeader Type
highlight default link rpnRecord Statement
highlight default link rpnOperator Keyword
highlight default link rpnOperand StorageClass
highlight default link rpnRegister Identifier
highlight default link rpnLabel Label
highlight default link rpnNumber Number
highlight default link rpnString String
highlight default link rpnCharacter Character
highlight default link rpnComment Comment
highlight default link rpnDirective PreProc
let b:current_syntax = 'rpn'
