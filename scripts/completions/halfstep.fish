set -g __halfstep_words 'PROGRAM'
function __halfstep
    set -l typed (commandline -opc) (commandline -ct)
    set -g __halfstep_lines (sh -c $__halfstep_words halfstep $typed[2..-1] 2> /dev/null)
    test -n "$__halfstep_lines"
end
complete -c halfstep -n __halfstep -f -a '$__halfstep_lines'
