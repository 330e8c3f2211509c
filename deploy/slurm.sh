#!/usr/bin/env bash
# ViT-B/16 under Slurm, one torchrun per node:    DATA=/data/imagenet sbatch deploy/slurm.sh
# without torchrun, one srun task per GPU:        DATA=/data/imagenet LAUNCHER=srun sbatch deploy/slurm.sh
# another settings file:                          DATA=/data/imagenet CFG=my.yaml sbatch deploy/slurm.sh
# Further flags are passed on. Two minutes before the time is up, Slurm sends SIGUSR1: the run saves and ends, the job is
# queued again, and -resume auto continues the run. The job is also queued again after RUN.MAX_TIME and after lost
# processes, but not if a start saved no update or ended with exit code 2, 3 or 4 (docs/many-gpus.md).
#SBATCH --job-name=vit
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}" || exit 1
gpus=${SLURM_GPUS_ON_NODE:?no GPUs were given; see --gpus-per-node in this script}
cpus=${SLURM_CPUS_PER_TASK:-$gpus}
[ ! -e .venv/bin/activate ] || source .venv/bin/activate
flags=(-cfg "${CFG:-configs/vit_base_patch16_224.yaml}" ${DATA:+-data_path "$DATA"} -name "job$SLURM_JOB_ID" -resume auto -amp "$@")
# The run's folder according to these flags. A mistake in them, or a Python without the packages, ends the job here.
folder=$(python -c '
import sys
from configs.load import load
from utils.program import exit_code
def say_folder(arguments):
    config = load(arguments).config
    print(config.SAVE, config.NAME, sep="/")
sys.exit(exit_code(say_folder, sys.argv[1:]))' "${flags[@]}") || exit
status() { sed -n "s/^  \"$1\": \([^,]*\).*/\1/p" "$folder/status.json" 2>/dev/null; }
before=$(status step)
case ${LAUNCHER:-torchrun} in
torchrun)
    head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    srun --kill-on-bad-exit=1 --cpus-per-task "$cpus" python -m torch.distributed.run \
        --nnodes "$SLURM_NNODES" --nproc_per_node "$gpus" --rdzv_id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \
        --rdzv_backend c10d --rdzv_endpoint "$head_node:$((10000 + SLURM_JOB_ID % 20000))" \
        --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 main_multi_gpu.py "${flags[@]}"
    ;;
srun)
    srun --kill-on-bad-exit=1 --ntasks "$((SLURM_NNODES * gpus))" --ntasks-per-node "$gpus" \
        --cpus-per-task "$((cpus > gpus ? cpus / gpus : 1))" python -u main_multi_gpu.py "${flags[@]}"
    ;;
*) echo "error: LAUNCHER is $LAUNCHER; it must be torchrun or srun" >&2 && exit 2 ;;
esac
code=$?
# Launchers hide the workers' exit codes, but status.json in the run's folder has them.
case "$(status state) $(status exit_code)" in '"done" '* | *' '[234]) exit "$code" ;; esac
after=$(status step)
if [ "${after:-0}" = "${before:-0}" ]; then
    stuck="no update was saved since step ${before:-0}"
    # A killed start gets one more try: Slurm may have killed processes that a lost node was still running when it came back.
    if [ "$code" -le 128 ] || [ "$(squeue -h -j "$SLURM_JOB_ID" -o %k)" = "$stuck" ]; then
        echo "error: job $SLURM_JOB_ID is not queued again: $stuck" >&2
        exit "$code"
    fi
    scontrol update "JobId=$SLURM_JOB_ID" "Comment=$stuck"
fi
scontrol requeue "$SLURM_JOB_ID"
exit "$code"
