autocmd BufRead,BufNewFile *.rpn setfiletype rpn
autocmd BufRead,BufNewFile *.dpc setfiletype dpc
