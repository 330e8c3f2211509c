# Cuts the second node off and kills its processes, except the one that holds its namespaces.
touch n2.off
ip link set n2 down
host=$(readlink /proc/$(cat n2.pid)/ns/uts)
for each in /proc/[0-9]*; do
    [ "$(readlink $each/ns/uts)" != "$host" ] || [ "$(cat $each/comm)" = sleep ] || kill -9 ${each#/proc/}
done
