#!/usr/bin/env bash
# ViT-B/16 under Slurm, one torchrun a node:      sbatch scripts/train_slurm.sh
# without torchrun, one task of srun's a GPU:     LAUNCHER=srun sbatch scripts/train_slurm.sh
# Two minutes before the time is up Slurm sends SIGUSR1: the run saves and ends, the job is queued again, and
# -resume auto goes on from where it was (and starts anew where there is nothing yet). A run that RUN.MAX_TIME ends,
# as in `sbatch scripts/train_slurm.sh -opts RUN.MAX_TIME=23h50m`, is queued again too.
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
flags=(
    -cfg configs/vit_base_patch16_224.yaml
    -dataset imagenet2012
    -data_path "${DATA:-/dataset/imagenet}"
    -name "job$SLURM_JOB_ID"
    -resume auto
    -amp "$@"
)
case ${LAUNCHER:-torchrun} in
torchrun)
    head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    srun --kill-on-bad-exit=1 torchrun \
        --nnodes "$SLURM_NNODES" \
        --nproc_per_node "$gpus" \
        --rdzv_id "$SLURM_JOB_ID" \
        --rdzv_backend c10d \
        --rdzv_endpoint "$head_node:29500" \
        --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
        main_multi_gpu.py "${flags[@]}"
    ;;
srun)
    srun --kill-on-bad-exit=1 \
        --ntasks "$((SLURM_NNODES * gpus))" \
        --ntasks-per-node "$gpus" \
        --cpus-per-task "$((SLURM_CPUS_PER_TASK / gpus))" \
        python -u main_multi_gpu.py "${flags[@]}"
    ;;
*)
    echo "error: LAUNCHER is $LAUNCHER; it must be torchrun or srun" >&2
    exit 2
    ;;
esac
code=$?
# Launchers hide the workers' exit codes; status.json in the run's folder says what happened.
if grep -qE '"signal":|"reason": "time limit"' output/job"$SLURM_JOB_ID"/status.json 2>/dev/null; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
