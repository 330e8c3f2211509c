_halfstep_words='PROGRAM'
_halfstep() {
    local line current=${COMP_WORDS[COMP_CWORD]} word=${COMP_LINE:0:COMP_POINT}
    word=${word##*[[:space:]]} COMPREPLY=()
    [[ $current == [=:] ]] && current=
    [[ $word == *"$current" ]] || return  # the word has quotes
    while IFS= read -r line; do
        [[ $line == *[/=.] ]] && compopt -o nospace 2> /dev/null
        printf -v line %q "${line#"${word%"$current"}"}"  # without the part before = or :, which bash keeps
        COMPREPLY+=("$line")
    done < <(sh -c "$_halfstep_words" halfstep "${COMP_WORDS[@]:1:COMP_CWORD-1}" "$word" 2> /dev/null)
}
complete -o default -F _halfstep halfstep
