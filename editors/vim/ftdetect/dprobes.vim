autocmd BufRead,BufNewFile *.rpn setfiletype dprobes
