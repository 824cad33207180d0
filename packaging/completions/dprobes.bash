_dprobes_completion() {
    local IFS=$'\n' line=${COMP_LINE:0:COMP_POINT} word prefix= type value response
    word=${line##*[[:space:]]}
    # What stands before a ':' or '=' is a word of its own to bash, and is not to be repeated.
    [[ $COMP_WORDBREAKS == *:* && $word == *:* ]] && prefix=${word%"${word##*:}"}
    [[ $COMP_WORDBREAKS == *=* && ${word#"$prefix"} == *=* ]] && prefix=${word%"${word##*=}"}
    response=$(env COMP_WORDS="$line" COMP_CWORD=0 _DPROBES_COMPLETE=bash_complete "$1" 2>/dev/null)
    COMPREPLY=()
    for response in $response; do
        IFS=, read -r type value <<< "$response"
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                COMPREPLY+=("${value#"$prefix"}")
                [[ $value == *[/:,] ]] && compopt -o nospace ;;
        esac
    done
}

complete -o nosort -F _dprobes_completion dprobes

