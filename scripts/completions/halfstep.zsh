(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_halfstep_words='PROGRAM'
_halfstep() {
    local -a lines
    lines=("${(@f)$(sh -c "$_halfstep_words" halfstep "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2> /dev/null)}")
    [[ -n $lines ]] || { _files; return }
    compadd -S '' -- ${(M)lines:#*[/=.]}
    compadd -- ${lines:#*[/=.]}
}
compdef _halfstep halfstep
