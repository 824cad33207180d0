" Programs of DProbes (*.dpc). Written by "make docs" from the tables of the language; do not edit.
if exists('b:current_syntax')
  finish
endif
syntax keyword dpcModifier const extern global percpu restrict static thread typedef volatile
syntax keyword dpcType _Bool __s16 __s32 __s64 __s8 __u16 __u32 __u64 __u8 bool char double enum float gid_t int int16_t int32_t int64_t int8_t intptr_t long off_t pid_t ptrdiff_t s16 s32 s64 s8 short signed size_t ssize_t struct u16 u32 u64 u8 uid_t uint16_t uint32_t uint64_t uint8_t uintptr_t union unsigned void
syntax keyword dpcVariable arg0 arg1 arg2 arg3 arg4 arg5 comm cpu curtask elapsed func line nsecs pc pid probe retval sp tid uid watched
syntax match dpcStatement /\<\%(continue\|return\|switch\|break\|catch\|while\|case\|else\|goto\|for\|try\|do\|if\)\>:\@!\|\<default\>/
syntax match dpcPoint /\<\%(tracepoint\|syscall\|inline\|module\|sample\|begin\|every\|watch\|kmod\|usdt\|when\|end\)\>[:(+]\@!/
syntax match dpcAttribute /,\s*\zs\%(logonfault\|max_strlen\|passcount\|maxhits\|persist\|replace\|jmpmax\|opcode\|group\|major\|minor\|patch\|idle\|type\)\>\ze\s\+[\"0-9A-Za-z_]/
syntax match dpcFunction /\<\%(startswith\|debugger\|offsetof\|per_cpu\|delete\|kstack\|printf\|remove\|sizeof\|ustack\|bswap\|clear\|count\|crash\|htonl\|htons\|lhist\|ntohl\|ntohs\|print\|stats\|core\|exit\|hist\|last\|ntop\|skip\|avg\|cat\|max\|mem\|min\|pmc\|reg\|str\|sum\|sym\)\>\ze\s*(/
syntax match dpcTable /@\w*/
syntax match dpcNumber /\<\%(0[xX]\x\+\|0[bB][01]\+\|\d\+\)\a*\>/
syntax match dpcString /"\%(\\.\|[^"\\]\)*"/
syntax match dpcCharacter /'\%(\\.\|[^'\\]\)*'/
syntax match dpcComment #//.*$# contains=@Spell
syntax region dpcComment start=#/\*# end=#\*/# contains=@Spell
syntax match dpcDirective /^\s*#.*$/
highlight default link dpcModifier StorageClass
highlight default link dpcType Type
highlight default link dpcVariable Identifier
highlight default link dpcStatement Statement
highlight default link dpcPoint Keyword
highlight default link dpcAttribute Keyword
highlight default link dpcFunction Function
highlight default link dpcTable Special
highlight default link dpcNumber Number
highlight default link dpcString String
highlight default link dpcCharacter Character
highlight default link dpcComment Comment
highlight default link dpcDirective PreProc
let b:current_syntax = 'dpc'
