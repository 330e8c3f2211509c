# The script of the first process. If slurmd ends, it is restarted once the file n1.off or n2.off is gone.
set -e
hostname head
mount --bind hosts /etc/hosts
ip link set lo up
ip link add cables type bridge
ip addr add 10.78.0.254/24 dev cables
ip link set cables up
munged --foreground --force --key-file=munge.key --socket=munge.socket --pid-file=munge.pid --log-file=munge.log \
    --seed-file=munge.seed &
until [ -S munge.socket ]; do sleep 0.05; done
slurmctld -D -i &> slurmctld.log &
for number in 1 2; do
    unshare --net --uts sleep infinity &
    inside="nsenter --target $! --net --uts"
    until [ "$(readlink /proc/$!/ns/uts)" != "$(readlink /proc/self/ns/uts)" ]; do sleep 0.05; done
    ip link add n$number type veth peer name eth0 netns $!
    ip link set n$number master cables up
    $inside hostname n$number
    $inside ip addr add 10.78.0.$number/24 dev eth0
    $inside ip link set eth0 up
    $inside ip link set lo up
    while sleep 0.1; do [ -e n$number.off ] || $inside slurmd -D -N n$number &>> n$number.log || true; done &
done
wait
